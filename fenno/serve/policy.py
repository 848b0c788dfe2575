"""What to do after a death, as arithmetic: wait and start again, or stop and say why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fenno import units
from fenno.machine import Gpu
from fenno.recipe import Serve

FIRST, LONGEST = 1.0, 60.0  # seconds of the first wait and of the longest
HEAD_LOST = "head-lost"  # the death of another host's engine, with which this one's ranks had to end
SLACK = 2**30  # bytes by which the memory of a GPU may differ and still be called the same


@dataclass(frozen=True)
class Death:
    """One life's end. `at`: seconds since the epoch; `lived`: seconds it was ready, 0 for a start that failed; `cause`, `again`: as
    of `EngineError`; `said` and `hint`: its words."""

    at: float
    lived: float
    cause: str
    again: str
    said: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Step:
    """`wait`: seconds until the next start; None: there is none. `why`: in a few words."""

    wait: float | None
    why: str


def step(deaths: Sequence[Death], limits: Serve) -> Step:
    """What to do after the last of `deaths`."""
    last = deaths[-1]
    if last.cause == HEAD_LOST:
        return Step(FIRST, "it was the head's death, and the head decides how often it starts")
    if last.again == "no":
        return Step(None, "starting it again cannot help")
    if last.again != "yes" and not any(death.lived for death in deaths):
        return Step(None, "it has never been ready")
    row = in_a_row(deaths, limits.stable)
    if len(row) >= limits.deaths:
        causes = ", ".join(f"{cause} ×{count}" for cause, count in Counter(death.cause for death in row).most_common())
        stable = units.show_duration(limits.stable)
        return Step(None, f"a crash loop: {len(row)} deaths in a row, none after {stable} of service ({causes})")
    return Step(min(FIRST * 2 ** (len(row) - 1), LONGEST), f"death {len(row)} of {limits.deaths} in a row")


def in_a_row(deaths: Sequence[Death], stable: float) -> list[Death]:
    """The last deaths of its own since one that came after `stable` seconds of service, that one included."""
    row: list[Death] = []
    for death in (each for each in reversed(deaths) if each.cause != HEAD_LOST):
        row.insert(0, death)
        if death.lived >= stable:
            break
    return row


def held_back(before: Sequence[Gpu], ready: Sequence[Gpu], now: Sequence[Gpu]) -> str | None:
    """Which GPU still holds memory of the engine that has ended, in a sentence; None when all of it is back.

    `before` its start, while it was `ready` (empty: it never was) and `now`. Only GPUs that it used are looked at: on the others
    somebody else may have begun.
    """
    first, used = {gpu.index: gpu.used for gpu in before}, {gpu.index: gpu.used for gpu in ready}
    for gpu in now:
        start = first.get(gpu.index, 0)
        ours = not ready or used.get(gpu.index, 0) > start + SLACK
        if ours and gpu.used > start + SLACK:
            return f"GPU {gpu.index} holds {units.show_memory(gpu.used)}, before the start it was {units.show_memory(start)}"
    return None
