"""One host's monotonic clock against another's, from round trips between them. Pure.

A round trip says for certain that the difference lies in an interval as long as the trip; several, that it lies in all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DRIFT = 200e-6  # seconds a second by which two hosts' clocks may run apart: crystals do by 100 ppm at most, each


@dataclass(frozen=True)
class Trip:
    """`asked` and `heard` by this host's clock, `told` by the other's, in between."""

    asked: float
    told: float
    heard: float


@dataclass(frozen=True)
class Offset:
    """This host's clock minus the other's, in seconds, within `uncertainty`; nothing is known before the first trip."""

    seconds: float = 0.0
    uncertainty: float = float("inf")


def offset(trips: Sequence[Trip]) -> Offset:
    """What the trips, in the order of time, say of the difference at the last one's end. An older trip's interval is wider by what
    the clocks may have run apart since."""
    if not trips:
        return Offset()
    now = trips[-1].heard
    low = max(trip.asked - trip.told - DRIFT * (now - trip.asked) for trip in trips)
    high = min(trip.heard - trip.told + DRIFT * (now - trip.asked) for trip in trips)
    if low <= high:
        return Offset((low + high) / 2, (high - low) / 2)
    # They ran apart faster than that: the last trip alone is right, and by how much the others are wrong is not known.
    last = trips[-1]
    return Offset((last.asked + last.heard) / 2 - last.told, (last.heard - last.asked) / 2 + low - high)
