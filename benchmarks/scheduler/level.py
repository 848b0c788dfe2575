"""What an order does to first tokens at a queue that stays level: one stretch of traffic, the arm switched again and again.

usage: python benchmarks/scheduler/level.py STUDY.yaml --out DIR [--seconds 1200] [--only PART …] [--capacity RATE]

One server with fenno's scheduler, as in `study.py`; a part is one stretch of traffic under its limits, `cap` sequences that run and
`budget` tokens a step. After a warm-up its blocks follow each other without a pause, one a seed and arm, every second seed in the
other order; an arm is a set of live knobs laid over first come, first served, and is set while traffic runs. Traffic is one of

- `users: N`, a closed loop without a pause: N requests are there at every moment, so that N - `cap` wait, whatever the order. Each
  block lasts `block` seconds, the warm-up `warmup`;
- `phases: [[SECONDS, SHARE], …]`, an open loop: Poisson arrivals (or bursts, `burstiness` as in `study.py`) at these shares of the
  capacity, which is what first come, first served held in the closed loop of the part `of`, or `--capacity`; where `--only` leaves
  that part out, two blocks of its first arm come first. A block is one round of the phases, and the round of a seed, request for
  request, is played once an arm; the warm-up is one more.

`lead` is longer than anybody waits, or 0 where nobody waits when a block ends. Of a closed loop's block the requests count whose
first token came after so many seconds, so that they were sent under its own arm; of an open loop's all that were due after so many
and so many before its end, which are the same ones under every arm. `unset: MEAN` as in `study.py`. What ran and waited is noted
twice a second: that is how level it was.
A host is a tenth or a fifth faster in one block than in the next, and a queue feels that several times over. So the table ends with
what an arm would be against the first one at the same time per output token (TPOT). It speaks of arms that change nothing but the
order; a threshold or a budget changes the steps themselves.
DIR/study.json is written after every block, with those whose requests have surely ended. This Python needs fenno.
"""

from __future__ import annotations

import argparse
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
from study import BEGAN, Said, opened, order, triple, unlimited

from fenno import control
from fenno.compare.judge import quantile
from fenno.engine import live
from fenno.load import run as load
from fenno.load.client import rank
from fenno.load.plan import Plan, draw
from fenno.recipe import LengthClass, Recipe
from fenno.tune import bench
from fenno.tune import space as spaces

# Seconds after which a block's requests have surely ended, under limits as small as 256 sequences; and a part's start and end.
ENDED, AROUND = 25.0, 30.0
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
    def before(self) -> float:
        """Seconds of traffic before the first block."""
        return self.length if self.phases else self.warmup

    def knobs(self, arm: str) -> dict[str, Any]:
        """Everything that is set under `arm`; what only other arms name is as at the start."""
        named = dict.fromkeys(name for knobs in self.arms.values() for name in knobs)
        limits = {spaces.CAP: self.cap, spaces.BUDGET: self.budget, spaces.POLICY: "fcfs"}
        return {**named, **limits, **self.arms[arm]}


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
    fifth more than can be held, and leave its queue to the next arm's.
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


def stretch(part: Part, rate: float, classes: Sequence[LengthClass], blocks: int) -> list[Arrival]:
    """The arrivals of a whole part: the warm-up's round, and for every block that of its seed."""
    seeds = [0, *(seed for seed, _ in itertools.islice(order(part), blocks))]
    rounds = {seed: a_round(part, rate, classes, seed) for seed in set(seeds)}
    # A trace begins with its first request, whenever that is: one of no class makes it begin at 0.
    return [(0.0, 1, 1), *((n * part.length + at, *lengths) for n, seed in enumerate(seeds) for at, *lengths in rounds[seed])]


def trial(name: str, part: Part, block: Block, requests: Sequence[Seen]) -> dict[str, Any]:
    """What is kept of a block."""
    begin, end = block.begin + part.lead, block.end - (part.lead if part.phases else 0)
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
    out: Path
    seconds: float
    capacity: float | None
    found: dict[str, Any]

    def run(self, parts: dict[str, Part]) -> None:
        for name, part in parts.items():
            room = int((self.seconds - (time.monotonic() - BEGAN) - part.before - AROUND) / part.length)
            blocks = min(part.seeds * len(part.arms), room)
            if blocks < 1:
                Said().say(f"{name}: no time is left for it")
                continue
            self.part(name, part, blocks)

    def rate(self, part: Part) -> float:
        """Requests a second that are a share of 1."""
        if self.capacity is None:
            held = [t["qps"] for t in self.found["trials"] if t["part"] == part.of and t["arm"] == "fcfs"]
            assert held, f"{part.of!r} was not measured: give --capacity"
            return statistics.fmean(held)
        return self.capacity

    def plan(self, name: str, part: Part, blocks: int) -> Plan:
        fitted = self.seat.fitted if part.unset is None else unlimited(self.seat.fitted, part.unset)
        same = {"rate": None, "timeout": TIMEOUT, "warmup": part.before, "duration": blocks * part.length, "arm": name, "seed": 1}
        if part.users:
            return dataclasses.replace(fitted, users=part.users, **same)
        rate = self.found["parts"][name]["rate"] = self.rate(part)
        path = self.out / f"{name}.jsonl".replace(" ", "-")
        rows = stretch(part, rate, self.chosen.workload.classes, blocks)
        path.write_text("\n".join(json.dumps({"timestamp": 1e3 * t, "input_length": p, "output_length": o}) for t, p, o in rows))
        workload = fitted.workload.model_copy(update={"rate": None, "trace": str(path.resolve())})
        return dataclasses.replace(fitted, workload=workload, **same)

    def part(self, name: str, part: Part, blocks: int) -> None:
        self.seat.move({knob: value for knob, value in part.knobs(next(iter(part.arms))).items() if value is not None})
        done: list[Block] = []
        with load.running(self.plan(name, part, blocks), self.out / "trials" / name.replace(" ", "-")) as run:
            began = self.traffic(run)
            for number, (seed, arm) in enumerate(itertools.islice(order(part), blocks)):
                begin = began + part.before + number * part.length
                self.watch(begin, [])
                self.set(part, arm)
                done.append(Block(seed, arm, time.monotonic() if part.users else begin, begin + part.length))
                self.watch(done[-1].end, done[-1].levels)
                self.keep(name, part, [b for b in done if b.end < time.monotonic() - ENDED], run)
            while not run.poll():
                self.seat.engine.check("load")
                time.sleep(0.2)
            self.keep(name, part, done, run)
            self.found["parts"][name]["client"] = dataclasses.asdict(run.result().state)
        self.save()

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
        before = len(self.found["trials"])
        self.found["trials"] = [t for t in self.found["trials"] if t["part"] != name]
        self.found["trials"] += [trial(name, part, block, requests) for block in blocks]
        for one in self.found["trials"][before:]:
            waiting = statistics.fmean(w for _, w in one["levels"] or [(0, 0)])
            told = ", ".join(f"{cls} {triple(ttfts)}" for cls, ttfts in one["ttfts_ms"].items())
            Said().say(f"{name}, {one['arm']}, seed {one['seed']}: {one['qps']:.1f}/s, {waiting:.0f} waiting, {told}")
        self.save()

    def save(self) -> None:
        (self.out / "study.json").write_text(json.dumps(self.found))


def parts_of(told: dict[str, Any], only: Sequence[str], capacity: float | None) -> dict[str, Part]:
    """The parts to run. One that only tells another's capacity runs its first arm, twice."""
    every = {name: Part(**part) for name, part in told["parts"].items()}
    parts = {name: part for name, part in every.items() if not only or name in only}
    telling = [] if capacity else [part.of for part in parts.values() if part.of and part.of not in parts]
    short = {name: dataclasses.replace(every[name], arms=dict(list(every[name].arms.items())[:1]), seeds=2) for name in telling}
    return {**short, **parts}


def start(asked: argparse.Namespace) -> None:
    told = yaml.safe_load(asked.study.read_text())
    parts = parts_of(told, asked.only, asked.capacity)
    with opened(told, parts, asked.out) as (chosen, seat, found):
        Study(chosen, seat, asked.out, asked.seconds, asked.capacity, found).run(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="these parts alone")
    parser.add_argument("--capacity", type=float, help="requests/s of a share of 1, in place of what the part `of` would tell")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    start(asked)
    print(table(json.loads((asked.out / "study.json").read_text())["trials"]))


if __name__ == "__main__":
    sys.exit(main())
