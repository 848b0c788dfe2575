"""Holds the CPU time of a trimmed wheel against the whole release's, extrapolated from units that were built with stock flags.

usage: release.py TRIMMED.json STOCK.json OTHERS.json    (fenno on PYTHONPATH)

One line for people on standard error and one document on standard output.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fenno.fa2 import lattice, releases

RELEASE = releases.release(releases.NEWEST)


def cpu_seconds(measured: dict[str, tuple[float, int]]) -> float:
    """CPU time of the whole release for one architecture: each unit as its kernels cost in the measured units of its direction."""
    total = 0.0
    for unit in lattice.units(RELEASE.heads):
        like = [row for name, row in measured.items() if name.startswith(f"flash_{unit.direction}_hdim")] or list(measured.values())
        total += len(lattice.kernels(unit, RELEASE)) * sum(seconds for seconds, _ in like) / sum(count for _, count in like)
    return total


def main(*results: str) -> None:
    trimmed, stock, others = (json.loads(Path(path).read_text()) for path in results)
    measured = {name: (seconds, each["kernels"][name]) for each in (stock, others) for name, seconds in each["seconds"].items()}
    release = cpu_seconds(measured) + trimmed["units"]["flash_api"]
    told: dict[str, Any] = {
        "trimmed": {"seconds": trimmed["seconds"], "cpu_seconds": trimmed["cpu_seconds"], "units": trimmed["units"]},
        "stock_units": {name: {"seconds": seconds, "kernels": count} for name, (seconds, count) in measured.items()},
        "stock_release_cpu_seconds": round(release),
        "cpu_ratio": round(release / trimmed["cpu_seconds"], 1),
    }
    print(
        f"trimmed wheel: {trimmed['seconds']:.0f} s, {trimmed['cpu_seconds']:.0f} s of CPU; the release for one architecture: "
        f"{release:.0f} s of CPU, extrapolated from {len(measured)} stock units; {told['cpu_ratio']} times as much",
        file=sys.stderr,
    )
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
