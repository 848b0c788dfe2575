"""Gathers the facts: each area in a thread of its own, so that a dead network folder or a hanging driver costs one area alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fenno.doctor import deepfacts, enginefacts, gpufacts, hostfacts, modelfacts, stackfacts
from fenno.doctor.facts import Engine, Facts, Gpus, Stack, Topology
from fenno.engine import catalogue
from fenno.errors import FennoError
from fenno.recipe import Recipe

# Cards without persistence mode take seconds to answer for the first time.
LIMIT = 15.0


@dataclass
class _Box:
    """What one thread came to."""

    value: Any = None
    reason: str = ""
    thread: threading.Thread = field(default_factory=threading.Thread)


def _begin(look: Callable[[], Any]) -> _Box:
    box = _Box()

    def work() -> None:
        try:
            box.value = look()
        except (FennoError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            box.reason = str(error) or type(error).__name__

    # A daemon: one that never comes back does not keep fenno from ending.
    box.thread = threading.Thread(target=work, daemon=True)
    box.thread.start()
    return box


def facts(
    recipe: Recipe | None, *, recorded: tuple[Topology, Gpus | None] | None = None, deep: bool = False, limit: float = LIMIT
) -> Facts:
    """Look at this host for `recipe`. `recorded` is another host's topology, judged in place of this one's; `deep`: import and
    measure too, which takes a minute."""
    variables = {**os.environ, **(recipe.engine.variables if recipe else {})}
    hub = Path(hostfacts.places(variables)["Hub cache"])
    python = catalogue.interpreter(recipe.engine.python if recipe else None)
    looks: dict[str, Callable[[], Any]] = {
        "host": lambda: hostfacts.host(variables),
        "driver": lambda: hostfacts.driver(variables),
        "installed": lambda: installed(python, variables, recipe),
        "model": lambda: modelfacts.model(recipe, hub) if recipe else None,
    }
    if recorded is None:
        looks["nvml"] = lambda: gpufacts.ask(limit)
    boxes = {area: _begin(look) for area, look in looks.items()}
    for box in boxes.values():
        box.thread.join(limit)
    found = _assembled(boxes, variables, recipe, recorded, limit)
    if deep and found.stack is not None:
        many = found.gpus is not None and len(found.gpus.cards) > 1 and recorded is None
        return replace(found, deep=deepfacts.deep(python, variables, gpus=many))
    return found


def _assembled(
    boxes: Mapping[str, _Box],
    variables: Mapping[str, str],
    recipe: Recipe | None,
    recorded: tuple[Topology, Gpus | None] | None,
    limit: float,
) -> Facts:
    found = {area: box.value for area, box in boxes.items()}
    missing = {area: box.reason or f"no answer within {limit:g} s" for area, box in boxes.items() if box.value is None}
    stack, engine = found.pop("installed") or (None, None)
    missing["stack"] = missing.pop("installed", "")
    missing["engine"] = missing["stack"] or f"no vLLM is installed under {stack.executable if stack else '?'}"
    nvml = found.pop("nvml", None) or (None, None, missing.pop("nvml", ""))
    cards, joined, why = nvml if recorded is None else (recorded[1], recorded[0], "only a topology was given")
    if recipe is None:
        missing |= {"recipe": "no recipe was given", "model": "no recipe was given"}
    elif found["model"] is None:
        missing.setdefault("model", "the engine runs already: its model is not looked at")
    if cards is None:
        missing["gpus"] = why
    if joined is None:
        missing["topology"] = why
    missing.setdefault("deep", "only with --deep")
    return Facts(
        variables=variables, recipe=recipe, gpus=cards, topology=joined, stack=stack, engine=engine, missing=missing, **found
    )


def installed(python: str, variables: Mapping[str, str], recipe: Recipe | None) -> tuple[Stack, Engine | None]:
    """The stack under the engine's interpreter, and the vLLM in it."""
    found, folders = stackfacts.stack(python, variables)
    return found, enginefacts.engine(found, recipe, folders)
