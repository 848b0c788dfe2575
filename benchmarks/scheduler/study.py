"""What an order and its limits do to first tokens: arms on one running engine, interleaved, the same arrivals for each.

usage: python benchmarks/scheduler/study.py RECIPE [--flag 'api-server-count: 4'] [--cap 256] [--budget 2048] [--share 0.85]
           [--arm NAME=KNOB:VALUE,...]... [--seeds 5] [--warmup 12] [--window 15] [--seconds 480] --out DIR

One server with fenno's scheduler. What it can do under `--cap` sequences and `--budget` tokens a step is measured first, by a
closed loop of twice as many users; `--share` of that rate is the load, an open loop with Poisson arrivals (0.95 was too much for
a level queue on an H200). Arms are sets of live
knobs, laid over first come, first served under that cap and budget; each is measured once a seed, every second seed in the other
order. TTFT percentiles in ms by class, over every request that was due in the window. DIR/study.json is written after every trial,
so that what was measured before the `--seconds` ended is kept. This Python needs fenno; the recipe's engine may have another.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from fenno import machine, recipe
from fenno.load import job
from fenno.load import run as load
from fenno.load.plan import Plan
from fenno.recipe import Recipe
from fenno.tune import bench
from fenno.tune import run as runs
from fenno.tune import space as spaces

# Short first under one client's priority, and what vLLM has of its own against long prompts.
ARMS = ("fcfs=policy:fcfs", "token-aware=policy:token_aware")


class Said:
    """Events as lines on standard error."""

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)

    def stage(self, text: str) -> None:
        self.say(text)

    def watch(self, share: float, text: str) -> None: ...


def arm(text: str) -> tuple[str, dict[str, Any]]:
    name, _, knobs = text.partition("=")
    pairs = (knob.partition(":") for knob in knobs.split(","))
    return name, {knob: yaml.safe_load(value) for knob, _, value in pairs}


def with_flags(chosen: Recipe, flags: list[str]) -> Recipe:
    more = dict(pair for flag in flags for pair in yaml.safe_load(flag).items())
    return chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"flags": {**chosen.engine.flags, **more}})})


def measured(running: bench.Running, chosen: Recipe, plan: Plan, folder: Path) -> dict[str, Any]:
    """`fenno loadtest`'s document of one run, less what every run of the study shares."""
    document = job.document(load.run(plan, folder), chosen.targets)
    return {
        name: document[name]
        for name in ("valid", "reasons", "flags", "qps", "ttft", "e2el", "completed", "requests", "classes", "client")
    }


def study(asked: argparse.Namespace, out: Path) -> None:
    chosen = with_flags(recipe.load(recipe.find(asked.recipe)), asked.flag)
    known, space = runs.known_space(chosen)
    limits = {**spaces.live_part(space.defaults, space), spaces.CAP: asked.cap, spaces.BUDGET: asked.budget}
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": dataclasses.asdict(machine.probe()),
        "vllm": known.engine.version,
        "recipe": asked.recipe,
        "flags": asked.flag,
        "limits": limits,
        "share": asked.share,
        "trials": [],
    }
    with bench.Engines(chosen, out / "study", space, Said()).wide({}) as seat:
        seat.move({**limits, spaces.POLICY: "fcfs"})
        closed = dataclasses.replace(
            seat.fitted, rate=None, users=2 * asked.cap, warmup=asked.warmup, duration=asked.window, arm="closed", seed=99
        )
        found["closed_loop"] = measured(seat, chosen, closed, out / "closed")
        rate = found["rate"] = asked.share * found["closed_loop"]["qps"]
        Said().say(f"closed loop: {found['closed_loop']['qps']:.1f} requests/s; load: {rate:.1f}")
        for seed in range(1, asked.seeds + 1):
            for name, knobs in asked.arms if seed % 2 else asked.arms[::-1]:
                began = time.monotonic()
                if began - BEGAN + asked.warmup + asked.window + 15 > asked.seconds:
                    return
                seat.move({**limits, **knobs})
                plan = dataclasses.replace(
                    seat.fitted, rate=rate, warmup=asked.warmup, duration=asked.window, arm=f"{name}-{seed}", seed=seed
                )
                one = measured(seat, chosen, plan, out / "trials" / f"{name}-{seed}")
                found["trials"].append({"arm": name, "knobs": knobs, "seed": seed, **one})
                (out / "study.json").write_text(json.dumps(found, indent=1))
                Said().say(f"{name} seed {seed} ({time.monotonic() - began:.0f} s): {shown(one)} {'; '.join(one['reasons'])}")


def shown(one: dict[str, Any]) -> str:
    return ", ".join(f"{name} {triple(figures['ttft'])}" for name, figures in one["classes"].items())


def triple(ttft: dict[str, Any]) -> str:
    return "/".join("late" if ttft[p] is None else f"{ttft[p]:.0f}" for p in ("p50", "p95", "p99"))


def table(trials: list[dict[str, Any]]) -> str:
    """Medians over the seeds, by arm and class; a figure that lies among failures counts as infinite."""
    lines = ["| arm | seeds | class | TTFT P50/P95/P99, ms | E2EL P95, ms |", "| --- | --- | --- | --- | --- |"]
    for name in dict.fromkeys(t["arm"] for t in trials):
        mine = [t for t in trials if t["arm"] == name]
        for cls in mine[0]["classes"]:
            rows = [t["classes"][cls] for t in mine]
            first = {p: median(row["ttft"][p] for row in rows) for p in ("p50", "p95", "p99")}
            lines.append(f"| {name} | {len(mine)} | {cls} | {triple(first)} | {median(row['e2el']['p95'] for row in rows):.0f} |")
    return "\n".join(lines)


def median(values: Iterable[float | None]) -> float:
    return statistics.median(math.inf if value is None else value for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--flag", action="append", default=[])
    parser.add_argument("--cap", type=int, default=256)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.85)
    parser.add_argument("--arm", action="append", type=arm, dest="arms")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--warmup", type=float, default=12.0)
    parser.add_argument("--window", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.arms = asked.arms or [arm(text) for text in ARMS]
    asked.out.mkdir(parents=True, exist_ok=True)
    study(asked, asked.out)
    print(table(json.loads((asked.out / "study.json").read_text())["trials"]))


BEGAN = time.monotonic()
if __name__ == "__main__":
    main()
