"""How long earlier starts of the same recipe took, stage by stage, and so how long this one will."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from fenno import process

Start = Sequence[tuple[str, float]]
READY = "ready"
_KEPT = 5


def left(earlier: Sequence[Start], stage: str) -> float | None:
    """Seconds from the beginning of `stage` to ready: the median of the starts that had this stage; None without one."""
    lasted = [dict(start)[READY] - dict(start)[stage] for start in earlier if {stage, READY} <= dict(start).keys()]
    return statistics.median(lasted) if lasted else None


def read(path: Path) -> list[Start]:
    """The starts in a file, each a list of (stage, seconds since the start); none when there is no usable file."""
    try:
        return [[(str(stage), float(at)) for stage, at in start] for start in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def add(path: Path, start: Start) -> None:
    """Keep a start that has ended with `READY`. Without a disk the next start has no estimate, nothing else."""
    with contextlib.suppress(OSError):
        process.write(path, json.dumps([*read(path), list(start)][-_KEPT:]))
