"""What an order and its limits do to first tokens: arms on one running engine, interleaved, the same arrivals for each.

usage: python benchmarks/scheduler/study.py STUDY.yaml --out DIR [--seconds 900]

One server with fenno's scheduler. A study has parts, and each part limits: `cap` sequences that run and `budget` tokens a step.
What the server can do under them is measured first, by a closed loop of twice as many users as `cap`; the part's load is `share`
of that, in tokens, or of what was measured for the part `of`, or `rate` requests a second. It is an open loop, with Poisson
arrivals or with bursts (`burstiness`: the shape of a gamma distribution, 1 is Poisson). Arms are sets of live knobs, laid over
first come, first served under the part's limits; each is measured once a seed, every second seed in the other order. `unset: MEAN`:
chat clients set no limit to their answers, whose lengths are geometric with that mean (a bias on the end token of a model whose
tokens are equally likely). TTFT percentiles in ms by class, over every request that was due in the windows of all seeds.
DIR/study.json is written after every trial: what was measured before the `--seconds` ended is kept. This Python needs fenno; the
recipe's engine may have another.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from fenno import control, machine, recipe
from fenno.engine import dummy, live
from fenno.load import endpoint, job
from fenno.load import run as load
from fenno.load.client import rank
from fenno.load.plan import Plan
from fenno.recipe import Recipe
from fenno.tune import bench
from fenno.tune import run as runs
from fenno.tune import space as spaces

# The dummy models' vocabulary as the engine pads it, and the token that ends an answer.
VOCABULARY, END = 320, dummy.VOCABULARY + dummy.SPECIAL.index("<|endoftext|>")
CLOSED_WARMUP, CLOSED_WINDOW = 15.0, 12.0
KEPT = "valid reasons flags qps ttft e2el completed requests classes client output_tokens token_throughput".split()


class Said:
    """Events as lines on standard error."""

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)

    def stage(self, text: str) -> None:
        self.say(text)

    def watch(self, share: float, text: str) -> None: ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a study; see the head of this file."""

    cap: int
    budget: int
    arms: dict[str, dict[str, Any]]
    seeds: int = 5
    share: float | None = None
    of: str | None = None
    rate: float | None = None
    burstiness: float | None = None
    warmup: float = 12.0
    window: float = 15.0
    unset: float | None = None

    @property
    def limits(self) -> dict[str, Any]:
        return {spaces.CAP: self.cap, spaces.BUDGET: self.budget, spaces.POLICY: "fcfs"}

    def traffic(self, fitted: Plan) -> Plan:
        """`fitted` with this part's arrivals and answers."""
        arrivals = {"arrival": "gamma", "burstiness": self.burstiness} if self.burstiness else {}
        fitted = dataclasses.replace(fitted, workload=fitted.workload.model_copy(update=arrivals))
        return fitted if self.unset is None else unlimited(fitted, self.unset)


@dataclasses.dataclass
class Study:
    """A study that runs. `found` is what is written."""

    chosen: Recipe
    seat: bench.Running
    parts: dict[str, Part]
    out: Path
    seconds: float
    found: dict[str, Any]

    def run(self) -> None:
        for name, part in self.parts.items():
            rate = self.found["parts"][name]["rate"] = self.load(name, part)
            self.save()
            for seed, arm in order(part):
                if time.monotonic() - BEGAN + part.warmup + part.window + 15 > self.seconds:
                    return
                self.trial(name, part, rate, seed, arm)

    def load(self, name: str, part: Part) -> float:
        """Requests a second of `part`."""
        if part.rate:
            return part.rate
        assert part.share
        if part.of:
            return part.share * float(self.found["parts"][part.of]["capacity"])
        self.seat.move(part.limits)
        plan = dataclasses.replace(
            part.traffic(self.seat.fitted),
            rate=None,
            users=2 * part.cap,
            warmup=CLOSED_WARMUP,
            duration=CLOSED_WINDOW,
            arm=f"{name}-closed",
            seed=99,
        )
        closed = self.found["parts"][name]["closed_loop"] = self.measured(plan)
        # By tokens: after a closed loop's start short answers end first, and requests a second look like more than can be held.
        capacity = closed["token_throughput"] / (part.unset or mean_answer(self.chosen))
        self.found["parts"][name]["capacity"] = capacity
        Said().say(f"{name}: {closed['token_throughput']:.0f} tokens/s, {closed['qps']:.1f} requests/s; capacity {capacity:.1f}")
        return part.share * float(capacity)

    def trial(self, name: str, part: Part, rate: float, seed: int, arm: str) -> None:
        began = time.monotonic()
        self.seat.move({**part.limits, **part.arms[arm]})
        before = self.counters()
        plan = dataclasses.replace(
            part.traffic(self.seat.fitted),
            rate=rate,
            warmup=part.warmup,
            duration=part.window,
            arm=f"{name}-{arm}-{seed}".replace(" ", "-"),
            seed=seed,
        )
        one = self.measured(plan)
        live.settle(self.seat.engine.url)
        one["scheduler"] = {name: value - before.get(name, 0) for name, value in self.counters().items()}
        self.found["trials"].append({"part": name, "arm": arm, "seed": seed, **one})
        self.save()
        Said().say(f"{name}, {arm}, seed {seed} ({time.monotonic() - began:.0f} s): {shown(one)} {'; '.join(one['reasons'])}")

    def counters(self) -> dict[str, float]:
        """What the scheduler has counted so far; of an engine that has just been settled."""
        assert self.seat.engine.control
        counted = live.merge(control.read_acknowledgements(self.seat.engine.control)).counters
        return {name: value for name, value in counted.items() if not name.startswith("cap_")}

    def measured(self, plan: Plan) -> dict[str, Any]:
        """`fenno loadtest`'s document of one run, less what every run of the study shares, and every TTFT."""
        result = load.run(plan, self.out / "trials" / str(plan.arm))
        document = job.document(result, self.chosen.targets)
        counted = [r for r in result.records if r.phase == "counted"]
        ttfts = {c: [round(r.ttft * 1e3, 1) if r.ok else None for r in counted if r.cls == c] for c in {r.cls for r in counted}}
        return {**{name: document[name] for name in KEPT if name in document}, "ttfts_ms": ttfts}

    def save(self) -> None:
        (self.out / "study.json").write_text(json.dumps(self.found))


def unlimited(fitted: Plan, mean: float) -> Plan:
    """`fitted` as chat clients send it who set no limit to answers, whose lengths are geometric with that mean."""
    # Of V tokens as likely as each other, one that is e to the bias times as likely ends an answer with probability 1 / mean.
    bias = math.log((VOCABULARY - 1) / (mean - 1))
    free = {"max_tokens": None, "temperature": 1.0, "logit_bias": {str(END): bias}}
    workload = fitted.workload.model_copy(update={"ignore_eos": False})
    # Only a chat goes on without a limit: the completions endpoint's own is 16.
    return endpoint.fitted(dataclasses.replace(fitted, endpoint="chat", workload=workload, extra_body=free))


def order(part: Part) -> Iterator[tuple[int, str]]:
    """Seed and arm of every trial."""
    for seed in range(1, part.seeds + 1):
        for arm in list(part.arms)[:: 1 if seed % 2 else -1]:
            yield seed, arm


def mean_answer(chosen: Recipe) -> float:
    """Tokens of an answer, over the workload's classes."""
    classes = chosen.workload.classes
    answers = [c.output_tokens for c in classes]
    assert all(isinstance(a, int) for a in answers), "classes of one length each are what this study reckons with"
    return sum(c.share * a for c, a in zip(classes, answers, strict=True) if isinstance(a, int)) / sum(c.share for c in classes)


def shown(one: dict[str, Any]) -> str:
    return ", ".join(f"{name} {triple(figures)}" for name, figures in sorted(one["ttfts_ms"].items()))


def triple(ttfts: list[float | None]) -> str:
    """P50/P95/P99 by nearest rank; a request that failed took for ever."""
    times = sorted(math.inf if t is None else t for t in ttfts)
    return "/".join(f"{times[rank(len(times), p)]:.0f}" for p in (50, 95, 99))


def table(trials: list[dict[str, Any]]) -> str:
    """Percentiles over the requests of all seeds, by part, arm and class."""
    lines = ["| part | arm | seeds | class | TTFT P50/P95/P99, ms |", "| --- | --- | --- | --- | --- |"]
    for part, arm in dict.fromkeys((t["part"], t["arm"]) for t in trials):
        mine = [t["ttfts_ms"] for t in trials if (t["part"], t["arm"]) == (part, arm)]
        for cls in sorted({c for t in mine for c in t}):
            pooled = [x for t in mine for x in t.get(cls, [])]
            lines.append(f"| {part} | {arm} | {len(mine)} | {cls} | {triple(pooled)} |")
    return "\n".join(lines)


@contextlib.contextmanager
def opened(told: dict[str, Any], parts: Collection[str], out: Path) -> Iterator[tuple[Recipe, bench.Running, dict[str, Any]]]:
    """The recipe of a study as its file tells it, that recipe's engine, running, and what is known before the first trial."""
    chosen = recipe.load(recipe.find(told["recipe"]))
    engine = chosen.engine.model_copy(update={"flags": {**chosen.engine.flags, **told.get("flags", {})}})
    chosen = chosen.model_copy(update={"engine": engine})
    known, space = runs.known_space(chosen)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": dataclasses.asdict(machine.probe()),
        "vllm": known.engine.version,
        "study": told,
        "parts": {name: {} for name in parts},
        "trials": [],
    }
    with bench.Engines(chosen, out / "study", space, Said()).wide({}) as seat:
        yield chosen, seat, found


def start(asked: argparse.Namespace) -> None:
    told = yaml.safe_load(asked.study.read_text())
    parts = {name: Part(**part) for name, part in told["parts"].items()}
    with opened(told, parts, asked.out) as (chosen, seat, found):
        Study(chosen, seat, parts, asked.out, asked.seconds, found).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    start(asked)
    print(table(json.loads((asked.out / "study.json").read_text())["trials"]))


BEGAN = time.monotonic()
if __name__ == "__main__":
    main()
