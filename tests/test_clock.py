"""What round trips say of two hosts' clocks is true, and as sharp as the shortest of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno.load import clock
from fenno.load.clock import Trip

WAYS = st.tuples(st.floats(0, 0.2), st.floats(0, 0.2))  # seconds there and back, however unequal


def trips(true: float, ways: list[tuple[float, float]], apart: float = 1.0, drift: float = 0.0) -> list[Trip]:
    """One trip every `apart` seconds. The other clock is `true` behind at first, and `drift` seconds a second more all along."""
    found, at = [], 1000.0
    for there, back in ways:
        told = at + there
        found.append(Trip(at, told - true - drift * (told - 1000.0), at + there + back))
        at += there + back + apart
    return found


@given(st.floats(-1e5, 1e5), st.lists(WAYS, min_size=1, max_size=30), st.floats(-1e-4, 1e-4))
def test_the_true_difference_lies_within_what_is_said(true: float, ways: list[tuple[float, float]], drift: float) -> None:
    made = trips(true, ways, drift=drift)
    found = clock.offset(made)
    now = true + drift * (made[-1].heard - 1000.0)
    assert abs(found.seconds - now) <= found.uncertainty + 1e-9


def test_one_quick_round_trip_among_slow_ones_is_enough() -> None:
    found = clock.offset(trips(5.0, [(0.1, 0.002), (0.0001, 0.0001), (0.003, 0.08)]))
    assert found.seconds == pytest.approx(5.0, abs=0.001)
    assert found.uncertainty < 0.0006, "0.1 ms, and what the clocks may run apart in two seconds"


def test_a_trip_grows_old() -> None:
    quick, slow = (0.0001, 0.0001), (0.01, 0.01)
    found = clock.offset(trips(0.0, [quick, slow], apart=60.0))
    assert found.uncertainty == pytest.approx(0.01, rel=0.01), "the slow one says more by now"


def test_a_clock_that_jumped_is_noticed() -> None:
    before, after = trips(0.0, [(0.001, 0.001)] * 5), trips(0.0, [(0.001, 0.001)])[0]
    jumped = Trip(after.asked + 10, after.told + 10 - 3.0, after.heard + 10)
    found = clock.offset([*before, jumped])
    assert found.seconds == pytest.approx(3.0)
    assert found.uncertainty > 2.9


def test_nothing_is_known_before_the_first() -> None:
    assert math.isinf(clock.offset([]).uncertainty)
