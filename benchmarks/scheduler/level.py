"""What an order does to first tokens where requests wait for a seat: arms on one running engine, switched again and again.

usage: python benchmarks/scheduler/level.py STUDY.yaml --out DIR [--seconds 1200] [--only PART …] [--capacity RATE]

One server with fenno's scheduler, as in `study.py`; a part has limits, `cap` sequences that run and `budget` tokens a step, and one
block a seed and arm, every second seed in the other order. An arm is a set of live knobs laid over first come, first served.
Traffic is one of

- `users: N`, a closed loop: N requests are there at every moment, so that N - `cap` wait, whatever the order. It is one stretch of
  traffic: after a warm-up of `warmup` seconds the blocks, of `block` seconds each, follow each other without a pause, and an arm is
  set while traffic runs;
- `phases: [[SECONDS, SHARE], …]`, an open loop: Poisson arrivals (or bursts, `burstiness` as in `study.py`) at these shares of the
  capacity. A block is one round of the phases, that of its seed, the same request for request under every arm. It begins on an idle
  engine and lasts until the last request has ended: what a host that got slower leaves waiting is the block's own, and no arm
  inherits another's queue. The capacity is what first come, first served holds in one block of the closed loop `of`, measured anew
  before the part (or `--capacity`): reckoned from what a token took with every seat taken, since which answers end is chance.

`lead`: the requests of so many seconds at a block's begin do not count. Of a closed loop those whose first token came then, so that
they were sent under another arm; of an open one those that were due then. `unset: MEAN` as in `study.py`. What ran and waited is
noted twice a second: that is how level it was. What does not fit into `--seconds` is left out, whole seeds at once.
A host is a tenth or a fifth faster in one block than in the next, and a queue feels that several times over. So the table ends with
what an arm would be against the first one at the same time per output token (TPOT). It speaks of arms that change nothing but the
order; a threshold or a budget changes the steps themselves.
DIR/study.json is written after every block, of a closed loop with those whose requests have surely ended. This Python needs fenno.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from study import BEGAN, Said, mean_answer, opened, order, triple, unlimited

from fenno import control
from fenno.compare.judge import quantile
from fenno.engine import live
from fenno.load import run as load
from fenno.load.client import rank
from fenno.load.plan import Plan, draw
from fenno.recipe import LengthClass, Recipe
from fenno.tune import bench
from fenno.tune import space as spaces

# Seconds after which the requests of a closed loop's block have surely ended, under limits as small as 256 sequences; of a closed
# loop's start and end; of those of an open loop's block.
ENDED, AROUND, AROUND_BLOCK = 25.0, 30.0, 10.0
# An answer of 512 tokens lasts a minute where 1,024 run.
TIMEOUT = 180.0
# Seconds from the start of traffic, tokens of the prompt, tokens of the answer.
Arrival = tuple[float, int, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a study; see the head of this file."""

    cap: int
    budget: int
    arms: dict[str, dict[str, Any]]
    users: int | None = None
    phases: tuple[tuple[float, float], ...] = ()
    of: str = ""
    block: float = 16.0
    lead: float = 5.0
    warmup: float = 25.0
    seeds: int = 5
    unset: float | None = None
    burstiness: float = 1.0

    @property
    def length(self) -> float:
        """Seconds of a block."""
        return sum(seconds for seconds, _ in self.phases) or self.block

    @property
    def limits(self) -> dict[str, Any]:
        return {spaces.CAP: self.cap, spaces.BUDGET: self.budget, spaces.POLICY: "fcfs"}

    def knobs(self, arm: str) -> dict[str, Any]:
        """Everything that is set under `arm`; what only other arms name is as at the start."""
        named = dict.fromkeys(name for knobs in self.arms.values() for name in knobs)
        return {**named, **self.limits, **self.arms[arm]}


@dataclasses.dataclass
class Block:
    """What was measured under one arm, in seconds of one clock; `levels`: how many ran and waited, at moments of it."""

    seed: int
    arm: str
    begin: float
    end: float
    levels: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Seen:
    """One request: its class, the moment by which it belongs to a block; seconds to its first and last token, and a token between
    them (None of one token). Without figures it failed."""

    cls: str
    moment: float
    ttft: float | None
    e2el: float | None
    tpot: float | None


def a_round(part: Part, rate: float, classes: Sequence[LengthClass], seed: int) -> list[Arrival]:
    """One round of the phases; `rate`: requests a second at a share of 1.

    A phase holds as many requests of each class as its share says, to the rounding: by chance alone a round of bursts would be a
    fifth more than was meant.
    """
    dice, found, start = random.Random(f"round/{seed}"), [], 0.0
    total = sum(c.share for c in classes)
    for seconds, share in part.phases:
        kinds = [c for c in classes for _ in range(round(c.share / total * share * rate * seconds))]
        dice.shuffle(kinds)
        upto = list(itertools.accumulate(dice.gammavariate(part.burstiness, 1.0) for _ in range(len(kinds) + 1)))
        for kind, at in zip(kinds, upto, strict=False):
            found.append((start + seconds * at / upto[-1], draw(kind.prompt_tokens, dice), draw(kind.output_tokens, dice)))
        start += seconds
    return found


def write(trace: Path, arrivals: Sequence[Arrival]) -> None:
    # A trace begins with its first request, whenever that is: one of no class makes it begin at 0.
    rows = [{"timestamp": 1e3 * at, "input_length": p, "output_length": o} for at, p, o in [(0.0, 1, 1), *arrivals]]
    trace.write_text("\n".join(json.dumps(row) for row in rows))


def trial(name: str, part: Part, block: Block, requests: Sequence[Seen]) -> dict[str, Any]:
    """What is kept of a block."""
    begin, end = block.begin + part.lead, block.end
    mine = [r for r in requests if begin <= r.moment < end and r.cls]
    ms = {
        what: {
            cls: [None if (t := getattr(r, what)) is None else round(1e3 * t, 1) for r in mine if r.cls == cls]
            for cls in sorted({r.cls for r in mine})
        }
        for what in ("ttft", "e2el")
    }
    rate = len(mine) / (end - begin)
    tpots = [1e3 * r.tpot for r in mine if r.tpot is not None]
    about = {"part": name, "arm": block.arm, "seed": block.seed, "qps": round(rate, 2), "levels": block.levels}
    about["tpot_ms"] = round(statistics.fmean(tpots), 2) if tpots else None
    return {**about, "ttfts_ms": ms["ttft"], "e2els_ms": ms["e2el"]}


def table(trials: Sequence[dict[str, Any]]) -> str:
    """Over the requests of all blocks of an arm; in brackets against the part's first arm, then the least and the most of the
    seeds' own ratios of P95. `waiting`, `running` and `TPOT` are means. The last two: `evened`."""
    heads = "part,arm,blocks,qps,running,waiting,TPOT (ms),class,failed,TTFT P50/P95/P99 (ms),P95,P99,E2EL P50 (ms)".split(",")
    heads += ["P95 at one TPOT", "P99 at one TPOT"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for part, arm in dict.fromkeys((t["part"], t["arm"]) for t in trials):
        blocks = [t for t in trials if t["part"] == part]
        mine, first = ([t for t in blocks if t["arm"] == name] for name in (arm, blocks[0]["arm"]))
        levels = [level for t in mine for level in t["levels"]] or [(0, 0)]
        mean = [statistics.fmean(column) for column in zip(*levels, strict=True)]
        tpot = statistics.fmean(t["tpot_ms"] or math.nan for t in mine)
        about = f"| {part} | {arm} | {len(mine)} | {statistics.fmean(t['qps'] for t in mine):.1f} | {mean[0]:.0f} | {mean[1]:.0f} "
        about += f"| {tpot:.1f} "
        for cls in sorted({c for t in mine for c in t["ttfts_ms"]}):
            ttfts, e2el = pooled(mine, cls, "ttfts_ms"), at(pooled(mine, cls, "e2els_ms"), 50)
            p95, p99 = (change(mine, first, cls, p) for p in (95, 99))
            failed = ttfts.count(None) / len(ttfts)
            told = f"{failed:.1%} | {triple(ttfts)} | {p95} {seeds(mine, first, cls)} | {p99} | {e2el:.0f}"
            lines.append(f"{about}| {cls} | {told} | {evened(blocks, arm, cls, 95)} | {evened(blocks, arm, cls, 99)} |")
    return "\n".join(lines)


def pooled(trials: Sequence[dict[str, Any]], cls: str, what: str) -> list[float | None]:
    return [x for t in trials for x in t[what].get(cls, [])]


def at(times: Sequence[float | None], p: float) -> float:
    """A percentile by nearest rank; a request that failed took for ever."""
    known = sorted(float("inf") if t is None else t for t in times)
    return known[rank(len(known), p)] if known else float("nan")


def change(mine: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], cls: str, p: float) -> str:
    ratio = at(pooled(mine, cls, "ttfts_ms"), p) / at(pooled(first, cls, "ttfts_ms"), p)
    return "–" if math.isnan(ratio) else f"{ratio - 1:+.0%}"  # of two that fall on failed requests there is none


def seeds(mine: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]], cls: str) -> str:
    other = {t["seed"]: t for t in first}
    pairs = [(t["ttfts_ms"].get(cls, []), other[t["seed"]]["ttfts_ms"].get(cls, [])) for t in mine if t["seed"] in other]
    ratios = [ratio - 1 for ours, theirs in pairs if not math.isnan(ratio := at(ours, 95) / at(theirs, 95))]
    return f"({min(ratios):+.0%}..{max(ratios):+.0%})" if ratios else ""


def evened(blocks: Sequence[dict[str, Any]], arm: str, cls: str, p: float) -> str:
    """What a percentile is under `arm` against a part's first arm, had both had the same TPOT, with its 95 % interval.

    Least squares over all blocks, in logarithms: a level for every seed, one for every other arm, and how it goes with TPOT.
    """
    figures = [(t, ms) for t in blocks if t["tpot_ms"] and 0 < (ms := at(t["ttfts_ms"].get(cls, []), p)) < math.inf]
    known, every = [t for t, _ in figures], list(dict.fromkeys(t["seed"] for t in blocks))
    others = [name for name in dict.fromkeys(t["arm"] for t in blocks) if name != blocks[0]["arm"]]
    if arm not in others:
        return "–"
    rows = [[*(t["seed"] == s for s in every), *(t["arm"] == a for a in others), math.log(t["tpot_ms"])] for t in known]
    x, y = np.array(rows, float).reshape(-1, len(every) + len(others) + 1), np.log([ms for _, ms in figures])
    found, _, rank_, _ = np.linalg.lstsq(x, y, rcond=None)
    if rank_ < x.shape[1] or rank_ == len(y):
        return "–"
    freedom, which = len(y) - int(rank_), len(every) + others.index(arm)
    spread = math.sqrt(float(np.sum((y - x @ found) ** 2)) / freedom * np.linalg.inv(x.T @ x)[which, which])
    half = quantile(0.975, freedom) * spread
    low, high = (math.expm1(found[which] + sign * half) for sign in (-1, 1))
    return f"{math.expm1(found[which]):+.0%} ({low:+.0%}..{high:+.0%})"


@dataclasses.dataclass
class Study:
    """A study that runs. `found` is what is written."""

    chosen: Recipe
    seat: bench.Running
    parts: dict[str, Part]
    out: Path
    seconds: float
    capacity: float | None
    found: dict[str, Any]

    def run(self, names: Sequence[str]) -> None:
        for name in names:
            part = self.parts[name]
            (self.closed if part.users else self.open)(name, part)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - BEGAN)

    def closed(self, name: str, part: Part) -> None:
        """One stretch of traffic, its blocks one after the other."""
        seeds = min(part.seeds, int((self.left - part.warmup - AROUND) / (part.length * len(part.arms))))
        if seeds < 1:
            Said().say(f"{name}: no time is left for it")
            return
        blocks = list(order(dataclasses.replace(part, seeds=seeds)))
        self.seat.move(part.limits)
        self.set(part, blocks[0][1])
        done: list[Block] = []
        plan = self.plan(name, part, users=part.users, warmup=part.warmup, duration=len(blocks) * part.length)
        with self.running(name, plan) as run:
            began = self.traffic(run) + part.warmup
            for number, (seed, arm) in enumerate(blocks):
                self.watch(began + number * part.length, [])
                self.set(part, arm)
                done.append(Block(seed, arm, time.monotonic(), began + (number + 1) * part.length))
                self.watch(done[-1].end, done[-1].levels)
                self.keep(name, part, [b for b in done if b.end < time.monotonic() - ENDED], run)
            self.ended(name, run)
            self.keep(name, part, done, run)

    def open(self, name: str, part: Part) -> None:
        """Blocks that each begin on an idle engine, a seed's all with the same arrivals."""
        rate = self.rate(name, part)
        for seed, blocks in itertools.groupby(order(part), lambda block: block[0]):
            if not rate or self.left < len(part.arms) * (part.length + AROUND_BLOCK):
                Said().say(f"{name}: no time is left for seed {seed}")
                return
            trace = self.out / f"{name}-{seed}.jsonl".replace(" ", "-")
            write(trace, a_round(part, rate, self.chosen.workload.classes, seed))
            for _, arm in blocks:
                self.round(name, part, trace, seed, arm)

    def round(self, name: str, part: Part, trace: Path, seed: int, arm: str) -> None:
        self.seat.move(part.limits)
        self.set(part, arm)
        workload = self.seat.fitted.workload.model_copy(update={"rate": None, "trace": str(trace.resolve())})
        plan = self.plan(name, part, workload=workload, duration=part.length)
        with self.running(name, plan, f"-{seed}-{arm}") as run:
            began = self.traffic(run)
            block = Block(seed, arm, began, began + part.length)
            self.watch(block.end, block.levels)
            self.ended(name, run)
            self.keep(name, part, [block], run)

    def rate(self, name: str, part: Part) -> float:
        """Requests a second that are a share of 1; 0 where no time is left to measure it."""
        if self.capacity is None:
            assert part.of in self.parts, f"{name}: give --capacity"
            told = self.parts[part.of]
            before = f"{part.of}, before {name}"
            self.closed(before, dataclasses.replace(told, arms=dict(list(told.arms.items())[:1]), seeds=1))
            tpots = [t["tpot_ms"] for t in self.found["trials"] if t["part"] == before]
            rate = told.cap / (tpots[0] / 1e3) / mean_answer(self.chosen) if tpots and tpots[0] else 0.0
        else:
            rate = self.capacity
        self.found["parts"].setdefault(name, {})["rate"] = rate
        Said().say(f"{name}: a share of 1 is {rate:.1f}/s")
        return rate

    def plan(self, name: str, part: Part, **traffic: Any) -> Plan:
        fitted = self.seat.fitted if part.unset is None else unlimited(self.seat.fitted, part.unset)
        return dataclasses.replace(fitted, **{"rate": None, "timeout": TIMEOUT, "arm": name, "seed": 1, **traffic})

    def running(self, name: str, plan: Plan, which: str = "") -> contextlib.AbstractContextManager[load.LoadRun]:
        return load.running(plan, self.out / "trials" / f"{name}{which}".replace(" ", "-"))

    def ended(self, name: str, run: load.LoadRun) -> None:
        while not run.poll():
            self.seat.engine.check("load")
            time.sleep(0.2)
        clients = self.found["parts"].setdefault(name, {}).setdefault("clients", [])
        clients.append(dataclasses.asdict(run.result().state))

    def traffic(self, run: load.LoadRun) -> float:
        """When traffic began, on the monotonic clock."""
        while (began := run.client().traffic) is None:
            if run.poll():
                run.result()
            time.sleep(0.05)
        return began

    def set(self, part: Part, arm: str) -> None:
        assert self.seat.engine.control
        answer = live.change(self.seat.engine.url, self.seat.engine.control, part.knobs(arm))
        assert not answer.unsupported, f"this engine cannot change {', '.join(answer.unsupported)} while it runs"

    def watch(self, until: float, levels: list[tuple[int, int]]) -> None:
        assert self.seat.engine.control
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(0.5, left))
            self.seat.engine.check("load")
            now = live.merge(control.read_acknowledgements(self.seat.engine.control))
            levels.append((now.running, now.waiting))

    def keep(self, name: str, part: Part, blocks: Sequence[Block], run: load.LoadRun) -> None:
        """Write what was found in `blocks` of this part."""
        names = {c.output_tokens: c.name for c in self.chosen.workload.classes}
        requests = [
            Seen(
                ("all" if part.unset else names.get(r.asked_tokens, "")) if r.asked_tokens > 1 else "",
                r.scheduled if part.phases else r.first if r.ok and r.first else r.end,
                r.ttft if r.ok else None,
                r.e2el if r.ok else None,
                r.tpot if r.ok else None,
            )
            for r in run.records()
            if r.outcome != "cancelled"
        ]
        mine, known = {(name, b.arm, b.seed) for b in blocks}, {key(t) for t in self.found["trials"]}
        now = [trial(name, part, block, requests) for block in blocks]
        self.found["trials"] = [t for t in self.found["trials"] if key(t) not in mine] + now
        for one in (t for t in now if key(t) not in known):
            waiting = statistics.fmean(w for _, w in one["levels"] or [(0, 0)])
            told = ", ".join(f"{cls} {triple(ttfts)}" for cls, ttfts in one["ttfts_ms"].items())
            Said().say(f"{name}, {one['arm']}, seed {one['seed']}: {one['qps']:.1f}/s, {waiting:.0f} waiting, {told}")
        self.save()

    def save(self) -> None:
        (self.out / "study.json").write_text(json.dumps(self.found))


def key(one: dict[str, Any]) -> tuple[str, str, int]:
    return one["part"], one["arm"], one["seed"]


def start(asked: argparse.Namespace) -> None:
    told = yaml.safe_load(asked.study.read_text())
    parts = {name: Part(**part) for name, part in told["parts"].items()}
    with opened(told, [], asked.out) as (chosen, seat, found):
        Study(chosen, seat, parts, asked.out, asked.seconds, asked.capacity, found).run(asked.only or list(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="these parts alone, in this order")
    parser.add_argument("--capacity", type=float, help="requests/s of a share of 1, in place of what `of` would tell")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    start(asked)
    print(table(json.loads((asked.out / "study.json").read_text())["trials"]))


if __name__ == "__main__":
    sys.exit(main())
