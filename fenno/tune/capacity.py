"""Capacity: the steady open-loop rate at which every target is met and that is worth most. The search for it by bracketing, as pure
functions.

What is worth most may be the rate itself, or the goodput at it. That is never more than the rate, rises with it while requests are
in time, and falls where they no longer are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# What can be looked for: requests a second, output tokens a second, requests a second that keep every latency limit.
Maximize = Literal["qps", "tokens", "goodput"]

PRECISION = 0.08  # how far apart the rate that is held and the one that is not may be in the end
MOST = 2**12  # times the first rate: beyond that something else is wrong
LEAST = 16  # the part of the first rate below which nobody would serve, and a trial takes too long


@dataclass(frozen=True)
class Bracket:
    """What is known of one point: `held` is the rate at which every target was met and that was worth most (0: none yet), `worth`
    how much that was, `lost` the smallest rate above it that was tried (infinity: none yet). An unclear trial has shown nothing, so
    its rate is lost. `least`: no rate from there down is worth more."""

    held: float = 0.0
    lost: float = math.inf
    worth: float = 0.0
    least: float = 0.0

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


def bracket(steps: Iterable[tuple[float, float]]) -> Bracket:
    """The bracket that trials of one point give: each a rate in requests a second, and what it was worth, no more than the rate;
    0 where not every target was met."""
    steps = list(steps)
    worth, held = max(((worth, rate) for rate, worth in steps if worth), default=(0.0, 0.0))
    lost = min((rate for rate, _ in steps if rate > held), default=math.inf)
    # What a rate is worth is no more than the rate itself.
    return Bracket(held, lost, worth, max([worth, *(rate for rate, _ in steps if rate < held)]))


def next_rate(found: Bracket, first: float, step: float = 2.0, precision: float = PRECISION) -> float | None:
    """The rate to try next, None when the bracket is narrow enough. `step`: by how much the rate is moved while one end is open."""
    if found.held == 0 and math.isinf(found.lost):
        return first
    if found.held == 0:
        return found.lost / step if found.lost > first / LEAST else None
    if math.isinf(found.lost):
        return found.held * step if found.held < first * MOST else None
    above, below = found.lost / found.held, found.held / found.least
    if max(above, below) <= 1 + precision:
        return None
    return math.sqrt(found.held * (found.lost if above >= below else found.least))


@dataclass(frozen=True)
class Most:
    """What was maximised, and how much of it was shown, with both ends of what it may be: of a rate, the one that was held and the
    one that was not."""

    of: Maximize
    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | str | None]:
        """For programs: an open end is None."""
        return {"of": self.of, "value": self.value, "low": self.low, "high": None if math.isinf(self.high) else self.high}

    def __str__(self) -> str:
        """ "8.2 to 8.8 requests/s", "1,640 to 1,760 output tokens/s", "a goodput of 8.1 requests/s (7.9 to 8.3)"."""
        if self.of == "qps":
            return str(Bracket(self.value, self.high))
        if self.of == "tokens":
            most = " or more" if math.isinf(self.high) else f" to {self.high:,.0f}"
            return f"{self.value:,.0f}{most} output tokens/s"
        return f"a goodput of {self.value:.3g} requests/s ({self.low:.3g} to {self.high:.3g})"


def gain(after: Most, before: Most) -> tuple[float, float, float]:
    """By how much `after` is more than `before`, as a share: from value to value, at least, at most."""
    return (
        after.value / before.value - 1 if before.value else math.inf,
        after.low / before.high - 1,
        after.high / before.low - 1 if before.low else math.inf,
    )
