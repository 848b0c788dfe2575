"""Quantities and addresses as people write them: 800ms, 0.8s, 15m, 85%, 40GiB, 2k, 10.0.0.1:8000.

Pure parsing; every function raises `UsageError` naming what was expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fenno.errors import UsageError

_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%µ]*)\s*$")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    **{"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_COUNT = {"": 1, "k": 1000, "ki": 1024, "m": 1_000_000, "mi": 2**20}
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _split(text: object, expected: str) -> tuple[float, str]:
    match = _NUMBER.match(str(text))
    if not match or len(match[1]) > 30:
        raise UsageError(f"{str(text)!r} is not {expected}")
    return float(match[1]), match[2]


def duration(text: object) -> float:
    """Seconds from "800ms", "0.8s", "15m", "2h" or a number of seconds; text needs its unit: "800" is rarely meant as seconds."""
    expected = "a duration such as 800ms, 0.8s, 15m or 2h"
    number, unit = _split(text, expected)
    if unit == "" and (number == 0 or not isinstance(text, str)):
        return number
    if unit.lower() not in _SECONDS:
        raise UsageError(f"{str(text)!r} is not {expected}")
    return number * _SECONDS[unit.lower()]


def share(text: object, *, or_zero: bool = False) -> float:
    """A fraction in (0, 1] from "85%" or "0.85"; also 0 where that is a meaning."""
    expected = "a share such as 85% or 0.85"
    number, unit = _split(text, expected)
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not (0 < value <= 1 or (or_zero and value == 0)):
        raise UsageError(f"{str(text)!r} is not {expected}")
    return value


def size(text: object) -> int:
    """Bytes from "40GiB", "512MiB", "80GB" or a bare number of bytes."""
    expected = "a size such as 40GiB or 512MiB"
    number, unit = _split(text, expected)
    factor = _BYTES.get(unit.lower() or "b")
    if factor is None:
        raise UsageError(f"{str(text)!r} is not {expected}")
    return int(number * factor)


def count(text: object) -> int:
    """A whole number from "2048", "2k" (2000) or "2Ki" (2048)."""
    expected = "a count such as 2048, 2k or 2Ki"
    number, unit = _split(text, expected)
    factor = _COUNT.get(unit.lower())
    if factor is None or number * factor != int(number * factor):
        raise UsageError(f"{str(text)!r} is not {expected}")
    return int(number * factor)


def tokens(text: object) -> int:
    """A whole number as `vllm serve` reads those of tokens and bytes: 8192, "8k" (8000), "8K" (8192) or "25.6k"."""
    expected = "a whole number such as 8192, 8k (8000) or 8K (8192)"
    number, unit = _split(text, expected)
    factor = _TOKENS.get(unit)
    if factor is None or (number != int(number) and not unit.islower()):
        raise UsageError(f"{str(text)!r} is not {expected}")
    return int(number * factor)


def memory(text: object) -> float:
    """A memory limit: a share in (0, 1] from "85%" or "0.85", or bytes (over 1) from "40GiB"."""
    raw = str(text).strip()
    if raw.endswith("%") or (re.fullmatch(r"[0-9]*\.?[0-9]+", raw) and float(raw) <= 1):
        return share(raw)
    try:
        if isinstance(text, str) and re.fullmatch(r"[0-9.]+", raw):
            raise UsageError("bytes as text need a unit: 85 is rarely meant as bytes")
        return float(size(raw))
    except UsageError:
        raise UsageError(f"{raw!r} is not a share such as 85% or a size such as 40GiB") from None


def show_duration(seconds: float) -> str:
    """The shortest exact-enough spelling: 0.8 -> "800 ms", 75 -> "1 min 15 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def show_memory(limit: float) -> str:
    """A limit as `memory` reads it: 0.85 -> "85 %", 42949672960 -> "40.0 GiB"."""
    return f"{limit * 100:.0f} %" if limit <= 1 else f"{limit / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Address:
    """Where somebody listens. `host` of an IPv6 address has its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def bare(self) -> str:
        """`host` as a socket takes it: without brackets."""
        return self.host.strip("[]")


def address(text: str, port: int | None = None) -> Address:
    """HOST:PORT, or HOST where `port` is known; a port alone is neither. Raises `UsageError`."""
    found = re.fullmatch(r"([a-z0-9][a-z0-9._-]*|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?", text, re.IGNORECASE | re.ASCII)
    number = int(found[2]) if found and found[2] else port or 0
    if not found or found[1].isdecimal() or not 0 < number < 1 << 16:
        raise UsageError(f"{text!r} is no address", "HOST:PORT, such as 10.0.0.1:8000 or [fd00::1]:8000")
    return Address(found[1], number)
