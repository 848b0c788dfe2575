"""`fenno plan`: will it fit, before anything is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, errors
from fenno.commands.given import JsonOption, choose, pairs
from fenno.errors import UsageError

if TYPE_CHECKING:
    from fenno.doctor.facts import Model
    from fenno.plan.gpus import Device
    from fenno.recipe import Recipe

Flags = Annotated[
    list[str] | None,
    typer.Option(
        "--flag", metavar="NAME=VALUE", help="a `vllm serve` flag over the recipe's: quantization=fp8; as often as needed"
    ),
]


def plan(
    what: Annotated[
        str | None, typer.Argument(metavar="RECIPE|DIR|HUB_ID", help="a recipe, a folder with a config.json, a model")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="how many; 0: a CPU; default: what recipe and flags say")] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(help="H100, H200, B200, A100-80G, L40S, RTX4090, ... or CPU; default: this host's, else the recipe's memory"),
    ] = None,
    flag: Flags = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model fits on so many GPUs, how many sequences beside it, and how fast it can be at best."""
    from fenno.plan import make, words

    chosen = flagged(wanted(what), flag)
    config, files = model_config(chosen)
    device, count = hardware(chosen, gpus, gpu_type)
    made = make.make(chosen, config, device, count, files, version(chosen) if count else None)
    if not as_json:
        console.say(words.title(made))
        console.table("memory", words.HEADER, words.rows(made))
        for line in words.lines(made):
            console.say(line)
    console.document(made, asked=as_json)
    raise typer.Exit(errors.OK if made["fits"] else errors.INFEASIBLE)


def wanted(what: str | None) -> Recipe:
    """The recipe that was named, or one of a model alone: a folder, its config.json, `dummy:NAME`, a Hub id."""
    from fenno import recipe

    if what and Path(what).name == "config.json" and Path(what).is_file():
        what = str(Path(what).parent)
    if what is None or what in recipe.embedded() or Path(what).is_file():
        return recipe.load(choose(what))
    if Path(what).is_dir() or ("/" in what and "://" not in what) or what.startswith("dummy:"):
        return recipe.Recipe.model_validate({"name": "plan", "engine": {"model": what}})
    return recipe.load(recipe.find(what))  # says what there is


def flagged(chosen: Recipe, flags: list[str] | None) -> Recipe:
    """The recipe with flags laid over its own. Raises `UsageError` for what is no NAME=VALUE, and for what changes no plan."""
    import difflib

    from fenno.plan import fit

    parts = (text.partition("=") for text in flags or ())
    spelt = [f"{name.removeprefix('--').replace('_', '-')}{sign}{value}" for name, sign, value in parts]
    more = pairs("--flag", spelt, "quantization=fp8")
    useless = next((name for name in more if name not in fit.FLAGS), None)
    if useless is not None:
        near = difflib.get_close_matches(useless, fit.FLAGS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"a plan depends on {', '.join(fit.FLAGS)}"
        raise UsageError(f"--flag {useless}: no plan depends on that", hint)
    return chosen.with_flags(**{name: as_yaml(name, value) for name, value in more.items()})


def as_yaml(flag: str, text: str) -> object:
    """A flag's value as a recipe's file has it. Raises `UsageError` for text that YAML reads as the beginning of something else."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--flag {flag}={text}: not YAML", f"text stands in quotes: --flag '{flag}=\"{text}\"'") from error


def model_config(chosen: Recipe) -> tuple[dict[str, Any], int | None]:
    """The config of the recipe's model, and the bytes of its weights where they are here. Raises as `known_model`."""
    found = known_model(chosen)
    return dict(found.config), found.weights if found.local and not found.dummy else None


def known_model(chosen: Recipe) -> Model:
    """The recipe's model as far as this host knows it, its config at least. Nothing is downloaded. Raises `UsageError`."""
    import os

    from fenno.doctor import hostfacts, modelfacts
    from fenno.engine import server

    try:
        found = modelfacts.model(chosen, Path(hostfacts.places(os.environ)["Hub cache"]))
    except ValueError as error:
        raise UsageError(f"the config.json of {chosen.engine.model} is no JSON: {error}", "get it anew, it is a few kB") from error
    if found is None:
        raise UsageError("this recipe names a server that runs already: what it serves is not known", "give a model")
    if not found.config:
        if found.fault:
            raise UsageError(found.fault, server.MODEL)
        hint = f"get the config alone, a few kB: hf download {found.name} config.json"
        raise UsageError(f"there is no config.json of {found.name} on this host", hint)
    return found


def version(chosen: Recipe) -> str | None:
    """The version of the recipe's vLLM, by its metadata (0.1 s); None where there is none on this host."""
    from fenno.engine import catalogue

    try:
        return catalogue.identify(catalogue.interpreter(chosen.engine.python)).version
    except errors.EngineError:
        return None


def hardware(chosen: Recipe, gpus: int | None, kind: str | None) -> tuple[Device, int]:
    """What it is to run on, and how many of these (0: a CPU). Raises `UsageError` where that is not said and not here."""
    from fenno import machine
    from fenno.plan.gpus import Device, like, named

    nothing_said, cpu = gpus is None and kind is None, (kind or "").upper() == "CPU"
    if (cpu and gpus) or (kind and not cpu and gpus == 0):
        raise UsageError(f"--gpus {gpus} of --gpu-type {kind} is nothing", "a CPU is --gpu-type CPU or --gpus 0, each alone")
    if gpus == 0 or cpu or (nothing_said and chosen.gpus == 0):
        return Device("CPU", machine.memory_limit()), 0
    count = gpus or chosen.gpus or chosen.engine.ranks
    if kind:
        return named(kind), count
    here, note = machine.read_gpus()
    if here:
        return like(here[0].name, here[0].memory), count
    if size := chosen.host.gpu_memory:
        return Device(f"GPU of {size / 2**30:.0f} GiB", size), count
    raise UsageError(f"there is no GPU here ({note})", "name one: --gpu-type H100, or --gpu-type CPU")
