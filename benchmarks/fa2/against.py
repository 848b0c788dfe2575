"""Holds a trimmed wheel against the same units built with stock flags and torch's own attention, and its CPU time against the
release's.

usage: against.py MODEL_DIR TRIMMED.json STOCK.json OTHERS.json    (the interpreter has torch and sees the GPU; fenno on PYTHONPATH)

Prints lines for people on standard error and one document on standard output.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fenno.errors import FennoError
from fenno.fa2 import lattice, need, plan, releases, verify

RELEASE = releases.release(releases.NEWEST)
NOTABLE = 50.0  # microseconds: what is shorter is measured and not judged


def cpu_seconds(measured: dict[str, tuple[float, int]]) -> float:
    """CPU time of the whole release for one architecture: each unit as its kernels cost in the measured units of its direction."""
    total = 0.0
    for unit in lattice.units(RELEASE.heads):
        like = [row for name, row in measured.items() if name.startswith(f"flash_{unit.direction}_hdim")] or list(measured.values())
        total += len(lattice.kernels(unit, RELEASE)) * sum(seconds for seconds, _ in like) / sum(count for _, count in like)
    return total


def times(config: dict[str, Any], wheels: dict[str, Path]) -> list[dict[str, Any]]:
    """Interleaved replays, with and without the soft cap."""
    made = plan.make(need.of(config, "the model"), RELEASE, ("90",), **plan.capacity(), consumer="transformers")
    shapes = [dataclasses.replace(case, softcap=cap) for cap in (0.0, verify.CAP) for case in verify.shapes(made)]
    with tempfile.TemporaryDirectory() as folder:
        libraries = {name: verify.unpack(wheel, Path(folder, name)) for name, wheel in wheels.items()}
        return verify.time_shapes(sys.executable, libraries, shapes)


def main(model: str, *results: str) -> None:
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
    wheels = {"trimmed": Path(trimmed["wheel"])} | ({"stock": Path(stock["wheel"])} if stock["wheel"] else {})
    try:
        told["times"] = times(json.loads(Path(model, "config.json").read_text()), wheels)
    except FennoError as error:
        told |= {"times": [], "failed": str(error)}
        print(error, file=sys.stderr)
    for row in told["times"]:
        print(*verify.timing_lines(row), sep="\n", file=sys.stderr)
    pairs = [row["times"] for row in told["times"] if "stock" in row.get("times", ())]
    ratios = [pair["trimmed"]["median"] / pair["stock"]["median"] for pair in pairs if pair["stock"]["median"] >= NOTABLE]
    if ratios:
        told["worst_ratio"] = max(ratios)
        print(
            f"trimmed over stock, {len(ratios)} shapes of {NOTABLE:g} us and more: {min(ratios):.3f} to {max(ratios):.3f}",
            file=sys.stderr,
        )
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
