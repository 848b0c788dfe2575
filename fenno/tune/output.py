"""What a study leaves for people and for production: the folder, the tuned recipe, the serve command, the final document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

import fenno
from fenno import documents, process
from fenno.engine import catalogue, command, plugin, server
from fenno.errors import DiskError
from fenno.machine import Machine
from fenno.recipe import Recipe
from fenno.tune import space as spaces
from fenno.tune.space import POLICY, Point, Space

# What is known when a study begins, and what its end leaves.
BEGUN = "study.json"
DONE = "verdict.json"
TUNED = "tuned.yaml"
CONFIG = "vllm-config.yaml"


@dataclass(frozen=True)
class Place:
    """A study's folder, and whether an interrupted study lies in it."""

    folder: Path
    resumed: bool


def key(recipe: Recipe, facts: Mapping[str, Any], goal: str = "") -> str:
    """What names of studies begin with that look for the same on the same engine."""
    return "-".join(filter(None, (recipe.name, recipe.digest(), f"vllm{facts['engine']['version']}", goal)))


def place(root: Path, recipe: Recipe, facts: Mapping[str, Any], fresh: bool, goal: str = "") -> Place:
    """The folder of an unfinished study of this very recipe on this very engine and host, the newest first, else a new one.

    `facts`: as of `facts`; `goal`: what is looked for, where it is not the targets alone.
    """
    begins = key(recipe, facts, goal)
    # Of this very goal: others have more between the key and the date.
    earlier = [folder for folder in root.glob(f"{begins}-*") if re.fullmatch(r"-\d{8}-\d{6}", folder.name.removeprefix(begins))]
    for folder in sorted(earlier, reverse=True) if not fresh else []:
        if (folder / "study.db").exists() and not (folder / DONE).exists() and comparable(folder, facts):
            return Place(folder, resumed=True)
    return Place(root / f"{begins}-{time.strftime('%Y%m%d-%H%M%S')}", resumed=False)


def comparable(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether trials of the study in `folder` can stand beside new ones: the same engine, defaults, values and hardware."""
    try:
        before = json.loads((folder / BEGUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return alike(before, documents.finite(facts))


def alike(before: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether figures under both, each as JSON has it, can stand beside each other."""
    return _weighty(before) == _weighty(facts)


def _weighty(facts: Mapping[str, Any]) -> list[Any]:
    """What of a study's facts its figures depend on most; what of a host changes by the second is left out."""
    host = facts["host"]
    gpus = [gpu["name"] for gpu in host["gpus"]]
    memory = round(host["memory"] / 2**30)
    return [facts["engine"], facts.get("space"), *(host[name] for name in ("system", "processor", "cores")), memory, gpus]


def tuned(recipe: Recipe, point: Point, space: Space) -> Recipe:
    """The recipe with the smallest change from the defaults that gives `point`."""
    flags = {**recipe.engine.flags, **spaces.plain_flags(point, space)}
    variables = spaces.plain_variables(point, space)
    unset = [name for name, value in variables.items() if value is None]
    env = {name: value for name, value in {**recipe.engine.env, **variables}.items() if name not in unset}
    scheduler = spaces.changed(point, space).get(POLICY, recipe.engine.scheduler)
    engine = recipe.engine.model_copy(update={"flags": flags, "env": env, "scheduler": scheduler})
    return recipe.model_copy(update={"engine": engine})


def recipe_yaml(recipe: Recipe, head: str) -> str:
    """A recipe as YAML under a comment."""
    return comment(head) + recipe.to_yaml()


def comment(text: str) -> str:
    """Lines of a comment."""
    return "".join(f"# {line}\n" for line in text.splitlines())


@dataclass(frozen=True)
class Without:
    """How a tuned recipe is served without fenno: one command line, or one that reads `config`, a YAML file for vLLM."""

    serve: str
    serve_config: str
    config: str


def without_fenno(recipe: Recipe, known: catalogue.Catalogue, folder: Path) -> Without:
    """Both ways, for the study in `folder`, where the plugin lies for a recipe that needs it."""
    model, port = server.model_path(recipe), command.port(recipe.engine.flags) or command.PORT
    flags = plugin.steering(recipe.engine)
    env = {"PYTHONPATH": str((folder / "plugin").resolve())} if flags or plugin.brings(model) else {}

    def line(config: str | None) -> str:
        start = {"executable": known.engine.executable, "distribution": known.engine.distribution}
        return command.serve(recipe, **start, model=model, port=port, flags=flags, env=env, config=config).shell()

    keys = command.config(recipe, model=model, port=port, flags=flags)
    return Without(line(None), line(str(folder / CONFIG)), yaml.safe_dump(keys, sort_keys=False, allow_unicode=True))


def facts(recipe: Recipe, known: catalogue.Catalogue, host: Machine, seed: int, space: Space) -> dict[str, Any]:
    """What every figure depends on: host, versions, seed, date, the recipe's hash, what may be changed."""
    return {
        "fenno": fenno.__version__,
        "recipe": recipe.name,
        "recipe_digest": recipe.digest(),
        "engine": {
            "distribution": known.engine.distribution,
            "version": known.engine.version,
            "torch": known.engine.torch,
            "python": known.engine.python,
            "platform": known.platform,
        },
        "host": host.as_dict(),
        "space": asdict(space),
        "seed": seed,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write small files, each whole. Raises `DiskError`."""
    for name, text in files.items():
        try:
            process.write(folder / name, text)
        except OSError as error:
            hint = "free some space, or choose another folder"
            raise DiskError(f"cannot write {folder / name}: {error.strerror}", hint) from error
