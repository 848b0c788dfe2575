"""How far a build is, by ninja's own log, and what went wrong first. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from fenno import process
from fenno.errors import BuildError, DiskError
from fenno.fa2.plan import JOB_MEMORY, wall
from fenno.units import show_duration

WRONG = re.compile(r"^.*(?:\berror\b\s*:|fatal error|error #|\bKilled\b|died due to signal|No space left|Error:).*$", re.MULTILINE)


def compiled(ninja_log: str) -> dict[str, float]:
    """Seconds that each unit took, by the name of its file without the ending; the last time counts."""
    rows = [line.split("\t") for line in ninja_log.splitlines() if not line.startswith("#")]
    return {PurePath(row[3]).stem: (int(row[1]) - int(row[0])) / 1000 for row in rows if len(row) >= 4}


def left(estimates: Mapping[str, float], done: Mapping[str, float], jobs: int, elapsed: float) -> float:
    """Seconds left of a build, `elapsed` seconds after its start.

    `estimates`: seconds for each unit that it has to compile. `done`: what those that are through took, by which the estimates of
    the others are corrected. One more unit counts as taking what was estimated: the first that are through are the small ones of
    the host, which alone say little of the device's.
    """
    through = {name: seconds for name, seconds in done.items() if name in estimates}
    if len(through) == len(estimates):
        return 0.0
    usual = sum(estimates.values()) / len(estimates)
    pace = (usual + sum(through.values())) / (usual + sum(estimates[name] for name in through))
    times = [through.get(name, pace * seconds) for name, seconds in estimates.items()]
    return max(0.0, wall(times, jobs) - elapsed)


def line(through: int, every: int, elapsed: float, remains: float) -> str:
    """How far a build is, for people: units that are through, of all, and seconds. No finer than a second."""
    so_far = f"{through} of {every} units after {show_duration(max(1.0, round(elapsed)))}"
    if through == every:
        return f"{so_far}: linking and packing"
    return f"{so_far}, {f'about {show_duration(round(remains))} left' if remains >= 1 else 'longer than estimated'}"


def first_error(log: str) -> BuildError | DiskError:
    """What a failed build's log says went wrong first."""
    line = next((match[0].strip() for match in WRONG.finditer(log)), None)
    if line is None:
        last = process.last_line(log)
        return BuildError(f"the build failed and named no error; its last line: {last}")
    if "No space left" in line:
        return DiskError(
            f"the disk is full: {line}", "free some space (TMPDIR too: nvcc writes there), and run it again: it goes on"
        )
    if re.search(r"\bKilled\b|died due to signal 9|signal terminated program", line):
        return BuildError(
            f"a compiler was killed, most likely for want of memory: {line}",
            f"one takes {JOB_MEMORY / 1e9:.1f} GB: run it again with fewer --jobs, and it goes on",
        )
    return BuildError(f"the build failed: {line}")
