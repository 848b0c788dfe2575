"""Live control of an engine of several data-parallel ranks: what each rank acknowledges, idle and under load.

usage: python benchmarks/scheduler/ranks.py RECIPE --out DIR    (`ranks.yaml` is a recipe for two cores)

The recipe's engine is started with fenno's scheduler, changed while nothing runs, and again under a closed loop, when requests
wait on every rank. After each change every rank's own answer is kept, and once more when no rank runs more than its cap.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from study import opened

from fenno import control
from fenno.engine import live
from fenno.load import run as load
from fenno.tune import bench
from fenno.tune import space as spaces

IDLE = {spaces.CAP: 3, spaces.POLICY: "fcfs"}
BUSY = {spaces.CAP: 2, spaces.POLICY: "token_aware"}


def answers(path: Path) -> dict[int, dict[str, Any]]:
    """By rank: what it acknowledged, and what runs and waits there."""
    kept = ("revision", "reached", "running", "waiting", "pid", "unsupported")
    return {
        rank: {**{name: getattr(a, name) for name in kept}, **{name: a.applied[name] for name in IDLE}}
        for rank, a in sorted(control.read_acknowledgements(path).items())
    }


def asked(seat: bench.Running, folder: Path) -> dict[str, Any]:
    """What the ranks answered, by when they were asked."""
    url, path = seat.engine.url, seat.engine.control
    assert path
    live.change(url, path, IDLE)
    found = {"idle": answers(path)}
    plan = dataclasses.replace(seat.fitted, rate=None, users=20, warmup=2.0, duration=60.0)
    with load.running(plan, folder) as run:
        while any(not answer["waiting"] for answer in answers(path).values()):
            assert not run.poll(), "the load was over before every rank had requests that wait"
            time.sleep(0.1)
        live.change(url, path, BUSY)
        found["busy"] = answers(path)
        live.wait_reached(path, 60)
        found["reached"] = answers(path)
        run.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with opened({"recipe": given.recipe}, (), given.out) as (_, seat, found):
        found["ranks"] = asked(seat, given.out / "load")
    del found["parts"], found["trials"]
    (given.out / "ranks.json").write_text(json.dumps(found, indent=1))
    for when, every in found["ranks"].items():
        for rank, answer in every.items():
            print(f"{when}, rank {rank}: {answer}")


if __name__ == "__main__":
    main()
