"""One trial on a running engine: traffic at the target rate, looked at while it runs, judged as soon as it is clear."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fenno.engine import command, metrics
from fenno.engine import watch as watches
from fenno.engine.metrics import Metrics
from fenno.engine.server import Server
from fenno.engine.watch import Sample, Seen, Watch
from fenno.errors import LoadError, UsageError
from fenno.load import figures, stats
from fenno.load import plan as plans
from fenno.load import run as load
from fenno.load.client import ClientState
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.load.requests import Requests
from fenno.recipe import Latency, Recipe, Targets, Workload
from fenno.tune.judge import Figure, Judgement, judge
from fenno.tune.propose import Load, Steps

# A trial is looked at after one, two and three windows. Each look gets a third of the 5 % that may be wrong, so that the three
# together stay below it; at that level a P95 needs 94 requests, and a fifth more leave room for a few that were late.
LOOKS = 3
LEVEL = 1 - 0.05 / LOOKS
LEAST_COUNTED = 24
GOODPUT = 200  # requests that tell a share of 95 % to within four hundredths at the first look, two at the last
LOOK = 0.25  # seconds between two looks at the engine
STANDSTILL = 0.5  # seconds: a busy host holds the client's loop up for a few hundredths
# vLLM warns of a kernel that its own warm-up has left out, the first time, and has Triton say when it tries out settings for one.
COMPILED = re.compile(rb"(?:JIT compilation during inference: |Triton autotuning for function )([\w.<>-]*[\w>])")

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Measured:
    """What a trial gave. `valid` is false when the client was too slow for its own numbers; `summary` is `figures.summarize`'s."""

    judgement: Judgement
    summary: dict[str, Any]
    load: Load
    valid: bool
    seconds: float


def plan_for(recipe: Recipe, server: Server, *, arm: str, seed: int) -> Plan:
    """The traffic of one trial: open loop at the target rate, long enough for the last look."""
    base = Plan(
        url=server.url,
        model=server.model,
        endpoint=recipe.workload.endpoint,
        workload=recipe.workload,
        rate=target_rate(recipe),
        duration=1.0,
        timeout=recipe.workload.timeout,
        api_key_env=command.key_variable(recipe.engine),
    )
    return at_rate(base, recipe, arm=arm, seed=seed)


def at_rate(base: Plan, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Plan:
    """`base` at the target rate of `recipe`, long enough for the last look; `patience`: so many times the usual length."""
    rate = target_rate(recipe)
    length = patience * LOOKS * window_seconds(recipe, rate)
    one_rate = replace(base, rate=rate, users=None, ramp=None, requests=None, duration=length)
    return replace(one_rate, warmup=patience * warmup_seconds(recipe, rate), arm=arm, seed=seed)


def check_workload(load: Workload) -> None:
    """Raise `UsageError` for traffic that has no one rate of single requests."""
    other = "trace" if load.trace else "ramp" if load.ramp else "turns" if load.turns != 1 else ""
    if other:
        raise UsageError(f"this workload has `{other}`: a search holds one rate of single requests", "use `fenno loadtest` alone")


def target_rate(recipe: Recipe) -> float:
    """Requests a second: the target where there is one, else the workload's own rate."""
    return recipe.targets.qps or recipe.workload.rate or 1.0


def warmup_seconds(recipe: Recipe, rate: float) -> float:
    """How long traffic runs before it counts."""
    return max(recipe.search.warmup, 16 / rate)


def window_seconds(recipe: Recipe, rate: float) -> float:
    """How long one window must be for an interval of every percentile that is a target: longest for the rarest class."""
    total = sum(cls.share for cls in recipe.workload.classes) or 1.0
    shares = {cls.name: cls.share / total for cls in recipe.workload.classes}
    wanted = [Latency.of(name) for name in recipe.targets.latencies()] or [Latency(None, 95, "ttft")]
    needed = max(counted(w.percentile) / shares.get(w.cls or "", 1.0) for w in wanted)
    if recipe.targets.goodput is not None:
        needed = GOODPUT
    return max(recipe.search.window, needed / rate)


def counted(percentile: float) -> int:
    """How many requests a window must have for an interval of their percentile: 112 for the 95th, 572 for the 99th."""
    beyond = 1 - max(percentile, 100 - percentile) / 100
    return max(LEAST_COUNTED, round(1.2 * math.log((1 - LEVEL) / 2) / math.log1p(-beyond)))


def seconds_needed(recipe: Recipe) -> float:
    """About how long a trial takes when its first look is clear: client start, warm-up, one window, the last answers."""
    rate = target_rate(recipe)
    return 5.0 + warmup_seconds(recipe, rate) + window_seconds(recipe, rate) + 5.0


def measure(recipe: Recipe, server: Server, plan: Plan, folder: Path, progress: Progress = lambda share, text: None) -> Measured:
    """Run `plan` against `server` until its judgement is clear or its last look is over.

    `progress` is told the share of the longest time that has passed, and what is seen. Raises `EngineError` (stage `load`) when the
    engine dies, `LoadError` when there was no traffic.
    """
    started = time.monotonic()
    overdue = started + load.START + plan.warmup + (plan.duration or 0.0) + plan.timeout
    observed, counted = _Observed(recipe, plan, server.graphs), None
    with watches.watching(server, folder, LOOK) as watch, load.running(plan, folder) as running:
        while not running.poll():
            server.check("load")
            records, client = running.records(), running.client()
            if counted is None and client.start is not None and time.monotonic() >= client.start:
                counted = _logged(server.log)
            share = min(1.0, (time.monotonic() - started) / (plan.warmup + (plan.duration or 0) + 8))
            progress(share, glance(records, watch.last))
            if (judgement := observed.look(records, client, watch)) is not None:
                break
            if time.monotonic() > overdue:
                raise LoadError("the load client went silent", f"see {folder / 'client.log'}; is there space on the disk?")
            time.sleep(0.25)
        else:
            ended = running.result()
            judgement = observed.final(ended.records, ended.state, watch)
        if not running.poll():
            running.stop()
        server.check("load")
    found = observed.measured(judgement, watch.seen(), time.monotonic() - started)
    if counted is None:
        return found
    return unspoilt(found, compiled(server.log, counted), standstill(running.client().lag.max / 1e3, recipe))


def _logged(log: Path) -> int:
    """The bytes that an engine has logged; 0 for one whose log is elsewhere."""
    return log.stat().st_size if log.exists() else 0


def compiled(log: Path, since: int) -> list[str]:
    """The kernels that an engine says it has compiled for a request, each once, in what it logged after its first `since` bytes."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(since)
        return list(dict.fromkeys(name.decode() for name in COMPILED.findall(file.read())))


def standstill(longest: float, recipe: Recipe) -> float:
    """`longest`, the most seconds that the client's own loop was held up, where that alone makes first tokens late; else 0."""
    return longest if longest > max(STANDSTILL, min(recipe.targets.latencies().values(), default=0.0) / 2) else 0.0


def unspoilt(found: Measured, kernels: Sequence[str], still: float = 0.0) -> Measured:
    """`found`; unless all targets were met no measurement where, while its requests were counted, the engine compiled `kernels` or
    this host stood still for `still` seconds, the engine most likely with it."""
    notes = [f"the engine compiled kernels while requests were counted ({', '.join(kernels)})"] if kernels else []
    notes += [f"this host stood still for {still:.2g} s while requests were counted"] if still else []
    if not notes or found.judgement.state == "met":
        return found
    return replace(found, valid=False, judgement=replace(found.judgement, notes=(*found.judgement.notes, *notes)))


class _Observed:
    """The looks at one trial. A look counts the requests that were due in the first windows, once every one of them has ended:
    so nothing is censored, and the load stays up meanwhile."""

    def __init__(self, recipe: Recipe, plan: Plan, graphs: int | None = None) -> None:
        self.recipe, self.plan, self.graphs = recipe, plan, graphs
        self.limits = figures.goodput_limits(recipe.targets.latencies())
        self.seconds = (plan.duration or 0.0) / LOOKS
        self.looks = 0
        self.window = (0.0, 0.0)
        self.records: list[Record] = []
        self.client = ClientState()

    def look(self, records: Sequence[Record], client: ClientState, watch: Watch) -> Judgement | None:
        """A judgement when the next look is due and clear, or when a latency target is missed beyond doubt."""
        if client.start is None:
            return None
        self.client = client
        hopeless, now = self._hopeless(records, client), time.monotonic() - client.start
        # Those that were late beyond doubt may have been due after this look's windows.
        length = (self.looks + 1) * self.seconds if hopeless is None else now
        inside = [r for r in records if client.start <= r.scheduled < client.start + length]
        if hopeless is None and (len(inside) < due_between(self.plan, client, length) or now < length):
            return None
        if hopeless is not None and len(inside) < 8:
            return None
        self.looks += 1
        self._take([r for r in inside if r.outcome != "cancelled"], (client.start, client.start + length))
        judgement = self._judge(records, watch.seen())
        if hopeless is not None:
            return plainly_missed(judgement, *hopeless)
        return judgement if judgement.state != "unclear" or self.looks == LOOKS else None

    def final(self, records: Sequence[Record], client: ClientState, watch: Watch) -> Judgement:
        """The judgement of a run that ended by itself."""
        self.client = client
        start = client.start or 0.0
        self._take([r for r in records if r.counted], (start, client.end or start + (self.plan.duration or 0.0)))
        return self._judge(records, watch.seen())

    def measured(self, judgement: Judgement, seen: Seen, seconds: float) -> Measured:
        """The trial's result, with the client's own fitness."""
        fit = figures.validity(
            lag_p95=self.client.lag.p95,
            lateness_p95=self.client.lateness.p95,
            in_flight_mean=self.client.in_flight_mean,
            users=None,
            target=min(self.recipe.targets.latencies().values(), default=None),
            phase="done" if self.records else self.client.phase,
        )
        inside = seen.between(*self.window).samples
        judgement = replace(judgement, notes=(*judgement.notes, *fit.reasons))
        requests = Requests.of(self.records)
        summary = figures.summarize(requests, self.window, self.limits)
        load = replace(engine_load(inside, self.records, self.client.in_flight_mean), graphs=self.graphs)
        return Measured(judgement, summary, load, fit.valid, seconds)

    def _take(self, records: Sequence[Record], window: tuple[float, float]) -> None:
        self.records = [replace(r, phase="counted") for r in sorted(records, key=lambda r: r.scheduled)]
        self.window = window

    def _hopeless(self, records: Sequence[Record], client: ClientState) -> tuple[str, str] | None:
        """Which target is missed, and why no more requests are needed: a bound that holds however often one looks."""
        mine = [r for r in records if client.start is not None and r.scheduled >= client.start and r.outcome != "cancelled"]
        if (wanted := self.recipe.targets.goodput) is not None:
            return hopeless_goodput(mine, self.limits, wanted / (self.plan.rate or 1.0))
        for name, limit in self.recipe.targets.latencies().items():
            bound = stats.Sequential(limit, Latency.of(name).percentile, alpha=0.01, weight=0.5, only="missed")
            if bound.update(v for v in values(mine, name) if v is not None) == "missed":
                return name, f"stopped early: {bound.late} of {bound.count} requests were later than {name}"
        return None

    def _judge(self, records: Sequence[Record], seen: Seen) -> Judgement:
        # Of every phase: what was sent during warm-up is still in flight when the window begins.
        level = figures.steady(Requests.of(r for r in records if r.sent < self.window[1]), self.window)
        found = {**latency_figures(self.records, self.recipe.targets), **rate_figures(self.records, self.plan.rate or 0.0)}
        if self.recipe.targets.goodput is not None:
            found.update(goodput_figure(self.records, self.limits, self.plan.rate or 0.0))
        found.update(memory_figures(seen))
        return judge(self.recipe.targets, found, steady=level.steady, notes=[] if level.steady else [level.reason])


def plainly_missed(judgement: Judgement, target: str, why: str) -> Judgement:
    """The judgement of a trial that was stopped early: `target` is missed, by a bound instead of an interval.

    Requests still in flight then have no record yet, so nothing can be said of how level the queue was.
    """
    findings = [replace(f, state="missed", ratio=max(f.ratio, 1.0)) if f.target == target else f for f in judgement.findings]
    return Judgement("missed", tuple(findings), (why,))


def due_between(plan: Plan, client: ClientState, length: float) -> int:
    """How many requests were due in the first `length` seconds of the counted window."""
    offset = (client.start or 0.0) - (client.traffic or client.start or 0.0)
    times = itertools.takewhile(lambda at: at < offset + length, plans.arrivals(plan))
    return sum(at >= offset for at in times)


def values(records: Iterable[Record], name: str) -> list[float | None]:
    """One latency of every record it concerns, by a target's name ("p95_ttft"): seconds, infinite for a failure."""
    wanted = Latency.of(name)
    return [getattr(r, wanted.metric) for r in records if wanted.cls in (None, r.cls)]


def latency_figures(records: Sequence[Record], targets: Targets) -> dict[str, Figure]:
    """The figure of every latency target, in seconds. Without enough requests for an interval nothing is excluded."""
    found = {}
    for name in targets.latencies():
        in_time_order = [v for v in values(records, name) if v is not None]
        p, ordered = Latency.of(name).percentile, sorted(in_time_order)
        if ordered:
            exact = stats.interval(ordered, p, LEVEL, stats.worth(in_time_order, p))
            low, high = exact or stats.block_interval(in_time_order, p, LEVEL) or (0.0, float("inf"))
            found[name] = Figure(stats.percentile(ordered, p), low, high)
    return found


def rate_figures(records: Sequence[Record], rate: float) -> dict[str, Figure]:
    """The rate that is held, of an offered `rate` in requests a second, with its 95 % interval; the share that succeeded.

    How many requests happen to arrive in a window is chance, and not the engine's: what counts is the share that is answered.
    """
    if not records:
        return {}
    share = stats.share(sum(r.ok for r in records), len(records))
    return {"qps": Figure(*(rate * part for part in share)), "availability": Figure(*share)}


def goodput_figure(records: Sequence[Record], limits: Mapping[str, float], rate: float) -> dict[str, Figure]:
    """The goodput under an offered `rate` in requests a second: the share that kept every one of `limits`, times the rate.

    `records` in the order of time: late requests follow one another, and are worth fewer independent ones.
    """
    if not records:
        return {}
    late = ~figures.within(Requests.of(records), limits)
    part = stats.worth(late.astype(float), 0) / len(late)
    share = stats.share(part * (len(late) - int(late.sum())), part * len(late), LEVEL)
    return {"goodput": Figure(*(float(rate * portion) for portion in share))}


def hopeless_goodput(records: Sequence[Record], limits: Mapping[str, float], share: float) -> tuple[str, str] | None:
    """That fewer than a `share` of the requests keep their limits, by a bound that holds however often one looks."""
    bound = stats.Sequential(0.5, 100 * min(share, 0.999), alpha=0.01, weight=0.5, only="missed")
    if not records or bound.update((~figures.within(Requests.of(records), limits)).astype(float)) != "missed":
        return None
    return "goodput", f"stopped early: {bound.late} of {bound.count} requests did not keep every latency limit"


def memory_figures(seen: Seen) -> dict[str, Figure]:
    """The engine's largest memory while there was load: bytes, and as a share of what there is. None for a server elsewhere."""
    peak = max(seen.memory(), default=0)
    return {"memory": Figure(peak), "memory_share": Figure(peak / seen.memory_total())} if peak else {}


def engine_load(samples: Sequence[Sample], records: Sequence[Record], in_flight: float) -> Load:
    """What the engine said of itself during the window, in means; `in_flight`: the clients' requests, in the mean too."""
    samples = [s for s in samples if s.metrics.running is not None]
    if len(samples) < 2:
        return Load()
    grown = metrics.delta(samples[0].metrics, samples[-1].metrics)
    good = [r.ttft for r in records if r.ok]
    seconds = samples[-1].at - samples[0].at
    return Load(
        running=_mean(s.metrics.running for s in samples),
        waiting=_mean(s.metrics.waiting for s in samples),
        kv_usage=_mean(s.metrics.kv_cache_usage for s in samples),
        preemptions=grown.preemptions,
        step_tokens=grown.iteration_tokens_total.quantile(0.9) if grown.iteration_tokens_total else None,
        engine_ttft=grown.time_to_first_token_seconds.mean if grown.time_to_first_token_seconds else None,
        client_ttft=statistics.fmean(good) if good else None,
        in_flight=in_flight,
        server_cpu=grown.process_cpu_seconds / seconds if grown.process_cpu_seconds is not None and seconds > 0 else None,
        steps=steps(grown, _mean(s.metrics.running for s in samples), seconds, records),
    )


def steps(grown: Metrics, running: float | None, seconds: float, records: Sequence[Record]) -> Steps | None:
    """What the steps of some `seconds` were in the mean; None where the engine does not say, or made no tokens.

    Every step makes one token for each sequence in it: so many steps that is. The engine's own histogram of them counts one step
    several times where there are several HTTP processes. Speculative decoding makes more, and the steps look shorter than they are.
    """
    made, prompts = grown.generation_tokens, grown.prompt_tokens
    answered = [r for r in records if r.ok and r.tokens]
    if not running or not made or prompts is None or not answered:
        return None
    taken = max(0.0, prompts - (grown.prefix_cache_hits or 0.0)) + made
    # A long answer is in more steps than a short one; on average it is half written.
    lengths = math.fsum(r.tokens * ((r.prompt_tokens or r.asked_prompt or 0) + r.tokens / 2) for r in answered)
    return Steps(seconds * running / made, running * taken / made, running, lengths / sum(r.tokens for r in answered))


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [n for n in numbers if n is not None]
    return statistics.fmean(known) if known else None


def glance(records: Sequence[Record], sample: Sample | None) -> str:
    """The trial in a few words, for the progress line."""
    late = sorted(r.ttft for r in records[-100:])
    p95 = f"p95 TTFT {stats.percentile(late, 95) * 1e3:.0f} ms" if late else "warming up"
    now = sample.metrics if sample else Metrics()
    return f"{len(records)} requests, {p95}, {now.running or 0:.0f} running, {now.waiting or 0:.0f} waiting"
