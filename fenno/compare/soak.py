"""A comparison over days: rounds of long blocks, each kept once it is over: a command that was ended goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fenno import documents, process
from fenno.compare import run
from fenno.compare.block import Arm, Making, writing
from fenno.compare.run import Blocks
from fenno.errors import UsageError
from fenno.load import plan as plans
from fenno.load.plan import Plan


def folder_of(arms: Sequence[Arm], plan: Plan, rounds: int, out: Path, gpus: Sequence[str] = ()) -> Path:
    """Where the blocks of just this soak lie: the same recipes, traffic, rounds and places have the same folder, whatever their
    secrets are."""
    recipes = [arm.recipe.without_secrets().model_dump(mode="json") for arm in arms if arm.recipe is not None]
    asked = json.dumps([recipes, plans.dump(plan), rounds, *gpus], sort_keys=True)
    names = "-".join(arm.recipe.name for arm in arms if arm.recipe is not None)
    return out / f"{names}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


def soak(
    arms: Sequence[Arm],
    making: Making,
    rounds: int,
    say: Callable[[str], None],
    told: Callable[[Blocks], dict[str, Any]],
) -> Blocks:
    """Make what is missing of so many rounds. `told`: the document of what there is, written as soak.json after each.

    Raises `UsageError` while another process does, `DiskError`, and as `run.live`.
    """
    folder = making.folder

    def after(found: Blocks) -> None:
        document = told(found)
        with writing(folder):
            process.write(folder / "soak.json", documents.lines(document))
        say(f"{len(found.arms[arms[0].name])} of {rounds} rounds are measured; so far in {folder / 'soak.json'}")

    with _alone(folder):
        if begun := len(list(folder.glob("???-?/block.json"))):
            say(f"going on after {begun} blocks in {folder}")
        return run.live(arms, making, rounds, say, after)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A folder while nobody else measures into it; the lock ends with the process. Raises `DiskError`, `UsageError`."""
    with writing(folder):
        lock = process.locked(folder / "running.lock")
    if lock is None:
        raise UsageError(f"another fenno measures into {folder}", "wait for its end, or choose another --seed")
    with lock:
        yield
