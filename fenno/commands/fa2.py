"""`fenno build-fa2`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fenno import console
from fenno.commands.given import JsonOption, RecipeArgument, choose
from fenno.errors import UsageError

if TYPE_CHECKING:
    from fenno.fa2.plan import Plan as FlashPlan


def build_fa2(
    recipe_name: RecipeArgument = None,
    model: Annotated[Path | None, typer.Option(help="a model's folder, in place of a recipe; its config.json is enough")] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="say what would be compiled, and why; compile nothing")] = False,
    arch: Annotated[str | None, typer.Option(help="sm_80 or sm_80,sm_90; default: the GPUs of this host")] = None,
    version: Annotated[str | None, typer.Option(help="of flash-attn; default: the newest that fenno knows")] = None,
    consumer: Annotated[str | None, typer.Option(help="who will import it: transformers, sglang, vllm-src")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float16; default: the model's")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="compilers side by side; default: what memory and cores allow")] = None,
    source: Annotated[Path | None, typer.Option(help="flash-attn's source: its released archive, or a folder")] = None,
    python: Annotated[str | None, typer.Option(help="the interpreter the wheel is for; default: the one fenno runs under")] = None,
    out: Annotated[Path, typer.Option(help="where sources, objects and wheels are kept")] = Path("fenno-fa2"),
    as_json: JsonOption = False,
) -> None:
    """Build FlashAttention-2 for one model and one GPU: minutes instead of hours."""
    from fenno.fa2 import need, plan, releases

    name, config, flagged = model_config(recipe_name, model)
    made = plan.make(
        need.of(config, name, dtype or flagged),
        releases.release(version or releases.NEWEST),
        plan.codes(arch) if arch else codes_here(),
        **plan.capacity(),
        jobs=jobs,
        consumer=consumer or ("transformers" if model else "vllm"),
    )
    if not as_json:
        for line in plan.lines(made):
            console.say(line)
    console.result(plan.document(made) if plan_only else built(made, python, source, out.resolve()))


def built(made: FlashPlan, python: str | None, source: Path | None, out: Path) -> dict[str, Any]:
    """Build a planned wheel; its document. What nobody would import is not built."""
    from fenno.engine import catalogue
    from fenno.fa2 import build, plan

    imports, why = plan.CONSUMERS[made.consumer]
    if not imports:
        raise UsageError(
            f"nothing would import this wheel: {why}", "for transformers: --consumer transformers; to see the plan: --plan"
        )
    if source is not None and not source.exists():
        raise UsageError(f"there is no {source}", "give flash-attn's released archive, or a folder with its source")
    started, interpreter = time.monotonic(), catalogue.interpreter(python)
    found = build.look(interpreter)
    stands = build.obstacle(found, interpreter, made.archs)
    if stands:
        raise stands
    wheel = build.build(made, found, interpreter, source and source.resolve(), out, console.say)
    console.say(f"install it: {interpreter} -m pip install --no-deps {wheel}")
    return build.document(made, found, wheel, time.monotonic() - started)


def model_config(recipe_name: str | None, folder: Path | None) -> tuple[str, Mapping[str, Any], str | None]:
    """A model's name, its config, and the dtype that its recipe gives it. Raises `UsageError` when there is no config here."""
    import os

    from fenno import recipe
    from fenno.doctor import hostfacts, modelfacts
    from fenno.doctor.facts import Model

    flagged = None
    if folder is not None:
        found: Model | None = modelfacts.read(folder.resolve().name, folder)
    else:
        chosen = recipe.load(choose(recipe_name))
        found = modelfacts.model(chosen, Path(hostfacts.places(os.environ)["Hub cache"]))
        flagged = cast(str | None, chosen.engine.flags.get("dtype"))
    if found is None or not found.config:
        raise UsageError(
            f"there is no config.json of {folder or (found.name if found else 'a server that runs already')} here",
            "give a folder that has one: fenno build-fa2 --model DIR --plan",
        )
    return found.name, found.config, flagged


def codes_here() -> tuple[str, ...]:
    """The code to compile for this host's GPUs, or for an A100 where there are none, said in one line."""
    from fenno import machine
    from fenno.fa2 import plan

    gpus, note = machine.read_gpus()
    if not gpus:
        console.say(f"planned for sm_80: there is no GPU here ({note}); --arch names another")
        return plan.codes("sm_80")
    return tuple(dict.fromkeys(plan.code(gpu.capability) for gpu in gpus))
