"""Waiting for a state instead of for a while: a shared host may stand still for a minute, and no verdict may hang on that."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(there: Callable[[], object], seconds: float = 120.0, told: Callable[[], object] = str) -> float:
    """Seconds until `there` was true. After `seconds` the test fails, with what is `told` then: the limit ends a hang, it
    measures nothing."""
    began = time.monotonic()
    while not there():
        assert time.monotonic() - began < seconds, f"it never came so far in {seconds:g} s: {told()}"
        time.sleep(0.02)
    return time.monotonic() - began
