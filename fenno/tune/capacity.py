"""Capacity: the largest steady open-loop rate at which every target is met. The search for it by bracketing, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

PRECISION = 0.08  # how far apart the rate that is held and the one that is not may be in the end
MOST = 2**12  # times the first rate: beyond that something else is wrong
LEAST = 16  # the part of the first rate below which nobody would serve, and a trial takes too long


@dataclass(frozen=True)
class Bracket:
    """What is known of one point: `held` is the largest rate at which every target was met (0: none yet), `lost` the smallest above
    it at which that was not shown (infinity: none yet). An unclear trial has shown nothing, so its rate is lost."""

    held: float = 0.0
    lost: float = math.inf

    def as_dict(self) -> dict[str, float | None]:
        """For programs: an open end is None."""
        return {"held": self.held or None, "lost": None if math.isinf(self.lost) else self.lost}

    def __str__(self) -> str:
        """ "8.2 to 8.8 requests/s"."""
        if self.held == 0 and math.isinf(self.lost):
            return "no rate that was tried"
        if self.held == 0:
            return f"less than {self.lost:.3g} requests/s"
        return f"{self.held:.3g} requests/s or more" if math.isinf(self.lost) else f"{self.held:.3g} to {self.lost:.3g} requests/s"


def bracket(steps: Iterable[tuple[float, bool]]) -> Bracket:
    """The bracket that trials of one point give: each a rate in requests a second, and whether every target was met at it."""
    steps = list(steps)
    held = max((rate for rate, met in steps if met), default=0.0)
    return Bracket(held, min((rate for rate, met in steps if not met and rate > held), default=math.inf))


def next_rate(found: Bracket, first: float, step: float = 2.0, precision: float = PRECISION) -> float | None:
    """The rate to try next, None when the bracket is narrow enough. `step`: by how much the rate is moved while one end is open."""
    if found.held == 0 and math.isinf(found.lost):
        return first
    if found.held == 0:
        return found.lost / step if found.lost > first / LEAST else None
    if math.isinf(found.lost):
        return found.held * step if found.held < first * MOST else None
    return None if found.lost <= found.held * (1 + precision) else math.sqrt(found.held * found.lost)


def gain(after: Bracket, before: Bracket) -> tuple[float, float, float]:
    """By how much `after` holds more than `before`, as a share: from rate to rate, at least, at most."""
    return (
        after.held / before.held - 1 if before.held else math.inf,
        after.held / before.lost - 1,
        after.lost / before.held - 1 if before.held else math.inf,
    )
