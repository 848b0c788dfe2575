"""`fenno build-fa2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fenno import console
from fenno.commands.given import JsonOption, RecipeArgument, choose
from fenno.commands.plan import known_model
from fenno.errors import BuildError, UsageError

if TYPE_CHECKING:
    from fenno.fa2.plan import Plan as FlashPlan
    from fenno.fa2.source import Given
    from fenno.fa2.toolchain import Toolchain
    from fenno.fa2.trial import Tried


def build_fa2(
    recipe_name: RecipeArgument = None,
    model: Annotated[Path | None, typer.Option(help="a model's folder, in place of a recipe; its config.json is enough")] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="say what would be compiled, and why; compile nothing")] = False,
    arch: Annotated[str | None, typer.Option(help="sm_80 or sm_80,sm_90; default: the GPUs of this host")] = None,
    version: Annotated[str | None, typer.Option(help="of flash-attn; default: the newest that fenno knows")] = None,
    consumer: Annotated[
        str | None,
        typer.Option(help="who imports it: transformers, sglang, vllm, vllm-src; default: vllm, with --model transformers"),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16; default: the model's")] = None,
    jobs: Annotated[str, typer.Option(help="compilers side by side; auto: what memory and cores allow")] = "auto",
    source_path: Annotated[Path | None, typer.Option("--source", help="flash-attn's source: its archive, or a folder")] = None,
    git: Annotated[str | None, typer.Option(help="URL@TAG: the source from a git tag")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="on a GPU: outputs against float64, times beside torch's")] = False,
    stock: Annotated[bool, typer.Option("--stock", help="--verify that also times the same units with stock flags")] = False,
    try_tiles: Annotated[bool, typer.Option("--tiles", help="on a GPU: try other tile sizes, keep what is faster")] = False,
    python: Annotated[str | None, typer.Option(help="the interpreter the wheel is for; default: the one fenno runs under")] = None,
    out: Annotated[Path, typer.Option(help="where sources, objects and wheels are kept")] = Path("fenno-fa2"),
    as_json: JsonOption = False,
) -> None:
    """Build FlashAttention-2 for one model and one GPU: minutes instead of hours."""
    from fenno.fa2 import need, plan, releases, source

    if recipe_name and model:
        raise UsageError(f"the recipe {recipe_name} and --model {model} name two models", "give one of them")
    name, config, flagged = model_config(recipe_name, model)
    side_by_side = compilers(jobs)
    given = source.given(source_path, git)
    made = plan.make(
        need.of(config, name, dtype or flagged),
        releases.release(version or given.release or releases.NEWEST),
        plan.codes(arch) if arch else codes_here(),
        **plan.capacity(),
        jobs=side_by_side,
        consumer=consumer or ("transformers" if model else "vllm"),
    )
    if not as_json:
        for line in plan.lines(made):
            console.say(line)
    if plan_only:
        return console.document(plan.document(made), asked=as_json)
    told = built(made, python, given, out.resolve(), side_by_side, verify=verify or stock, stock=stock, try_tiles=try_tiles)
    return console.document(told, asked=as_json)


def compilers(text: str) -> int | None:
    """--jobs as a number, None for auto. Raises `UsageError`."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--jobs is {text!r}", "it has to be auto, or 1 and more")
    return int(text)


def built(
    made: FlashPlan, python: str | None, given: Given, out: Path, jobs: int | None, *, verify: bool, stock: bool, try_tiles: bool
) -> dict[str, Any]:
    """Build a planned wheel; its document. What nobody would import is not built."""
    from fenno.engine import catalogue
    from fenno.fa2 import build, plan, trial

    imports, why = plan.CONSUMERS[made.consumer]
    if not imports:
        raise UsageError(
            f"nothing would import this wheel: {why}", "for transformers: --consumer transformers; to see the plan: --plan"
        )
    for option in ["--tiles"] * try_tiles + ["--stock"] * stock:
        need_gpu(option)
    interpreter = catalogue.interpreter(python)
    found = tools(interpreter, made.archs, out)
    tried = tried_tiles(made, found, interpreter, given, out, jobs) if try_tiles else []
    made = trial.keep(made, tried)
    done = build.build(made, found, interpreter, given, out, console.say)
    told = build.document(found, done) | ({"tiles": trial.document(tried)} if tried else {})
    if verify or made.tiles:
        other = partial(stock_wheel, made, found, interpreter, given, out) if stock else None
        told["verified"] = verified(made, done.wheel, interpreter, other)
    console.say(f"install it: {interpreter} -m pip install --no-deps {done.wheel}")
    return told


def need_gpu(option: str) -> None:
    """Raise `UsageError` where there is no GPU for an option that measures on one."""
    from fenno import machine

    gpus, note = machine.read_gpus()
    if not gpus:
        raise UsageError(f"{option} measures on a GPU, and there is none here ({note})", "leave it out")


def tried_tiles(made: FlashPlan, found: Toolchain, interpreter: str, given: Given, out: Path, jobs: int | None) -> list[Tried]:
    """Try other tile sizes and show the table."""
    import tempfile

    from fenno.fa2 import trial

    with tempfile.TemporaryDirectory(prefix="fenno-tiles-") as folder:
        tried = trial.run(made, found, interpreter, given, out, Path(folder), console.say, jobs)
    for line in trial.lines(tried):
        console.say(line)
    return tried


def stock_wheel(made: FlashPlan, found: Toolchain, interpreter: str, given: Given, out: Path) -> Path:
    """A wheel of the same units with stock flags, built or found built before."""
    from fenno.fa2 import build, plan
    from fenno.units import show_duration

    other = plan.with_stock_flags(made)
    console.say(f"the same units with stock flags, to time against: about {show_duration(round(other.wall))}")
    return build.build(other, found, interpreter, given, out, console.say).wheel


def verified(made: FlashPlan, wheel: Path, interpreter: str, stock: Callable[[], Path] | None) -> dict[str, Any]:
    """Verify a wheel and say what came of it. Raises `BuildError` when an answer is wrong."""
    import tempfile

    from fenno.fa2 import verify

    with tempfile.TemporaryDirectory(prefix="fenno-verify-") as folder:
        found = verify.run(made, wheel, interpreter, Path(folder), stock)
    for line in verify.lines(found):
        console.say(line)
    if found["faults"]:
        raise BuildError(f"the wheel is wrong: {found['faults'][0]}", f"do not install {wheel}; tell us")
    return found


def tools(interpreter: str, archs: tuple[str, ...], out: Path) -> Toolchain:
    """What the interpreter builds with; the CUDA compiler is fetched where that alone lacks. Raises `BuildError`."""
    from fenno.fa2 import build, toolchain

    found = toolchain.look(interpreter)
    if toolchain.borrowable(found):
        console.say(f"there is no CUDA compiler: NVIDIA's packages of CUDA {found.torch_cuda} are put into {out}, and nowhere else")
        with build.alone(out):
            home = toolchain.borrow(found, interpreter, out)
        found = toolchain.look(interpreter, home)
    stands = toolchain.obstacle(found, interpreter, archs)
    if stands:
        raise stands
    return found


def model_config(recipe_name: str | None, folder: Path | None) -> tuple[str, Mapping[str, Any], str | None]:
    """A model's name, its config, and the dtype that its recipe gives it. Raises `UsageError` when there is no config here."""
    from fenno import recipe
    from fenno.doctor import modelfacts

    if folder is None:
        chosen = recipe.load(choose(recipe_name))
        found = known_model(chosen)
        return found.name, found.config, cast(str | None, chosen.engine.flags.get("dtype"))
    try:
        found = modelfacts.read(folder.resolve().name, folder)
    except ValueError as error:
        raise UsageError(f"the config.json in {folder} is no JSON: {error}", "get it anew, it is a few kB") from error
    if not found.config:
        raise UsageError(f"there is no config.json in {folder}", "give a folder that has one")
    return found.name, found.config, None


def codes_here() -> tuple[str, ...]:
    """The code to compile for this host's GPUs, or for an A100 where there are none, said in one line."""
    from fenno import machine
    from fenno.fa2 import plan

    gpus, note = machine.read_gpus()
    if not gpus:
        console.say(f"planned for sm_80: there is no GPU here ({note}); --arch names another")
        return plan.codes("sm_80")
    return tuple(dict.fromkeys(plan.code(gpu.capability) for gpu in gpus))
