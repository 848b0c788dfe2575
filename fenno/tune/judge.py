"""Whether a trial met the targets: pure functions from figures to a judgement, and from judgements to a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fenno import units
from fenno.recipe import Targets

State = Literal["met", "missed", "unclear"]


@dataclass(frozen=True)
class Figure:
    """One measured value with its 95 % interval; a latency is in seconds, memory in bytes, a missing bound is None."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Finding:
    """One target against its figure. `ratio` is value / limit where less is better, else limit / value: over 1 is a miss."""

    target: str
    limit: float
    figure: Figure | None
    state: State
    ratio: float

    def sentence(self) -> str:
        """ "p95_ttft 412 ms (398 to 441), target 800 ms: met"."""
        if self.figure is None:
            return f"{self.target}: not measured"
        bounds = [b for b in (self.figure.low, self.figure.high) if b is not None]
        # From nothing to never is no interval: there were too few requests for one.
        bounds = [] if bounds == [0.0, float("inf")] else bounds
        interval = f" ({spell(self.target, bounds[0])} to {spell(self.target, bounds[1])})" if len(bounds) == 2 else ""
        said = f"{self.target} {spell(self.target, self.figure.value)}{interval}"
        return f"{said}, target {spell(self.target, self.limit)}: {self.state}"


@dataclass(frozen=True)
class Judgement:
    """All targets of one trial. `score` is the worst ratio: what a search makes small."""

    state: State
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        return max((f.ratio for f in self.findings), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        return {"state": self.state, "score": self.score, "findings": [asdict(f) for f in self.findings], "notes": list(self.notes)}


def judge(targets: Targets, figures: Mapping[str, Figure], *, steady: bool, notes: Sequence[str] = ()) -> Judgement:
    """Judge `figures` (by target name; memory also as "memory_share") against `targets`.

    A target is met when its whole interval is on the right side, missed when the whole interval is on the wrong side, unclear
    else. `steady` is false while the queue still grows: then no rate is being held, and the QPS target is unclear. With a goodput
    target the latencies are the limits of single requests, and none of their percentiles is judged.
    """
    findings = [_at_most(name, limit, figures.get(name)) for name, limit in targets.percentiles().items()]
    if targets.goodput is not None:
        findings.append(_at_least("goodput", targets.goodput, figures.get("goodput")))
    if targets.qps is not None:
        findings.append(_rate(targets.qps, figures.get("qps"), steady))
    if targets.memory is not None:
        name = "memory_share" if targets.memory <= 1 else "memory"
        findings.append(_at_most(name, targets.memory, figures.get(name)))
    if targets.availability is not None:
        findings.append(_answered("availability", targets.availability, figures.get("availability"), targets.availability))
    states = {finding.state for finding in findings}
    state: State = "missed" if "missed" in states else "unclear" if "unclear" in states else "met"
    return Judgement(state, tuple(findings), tuple(notes))


def _at_most(name: str, limit: float, figure: Figure | None) -> Finding:
    if figure is None:
        return Finding(name, limit, None, "unclear", 1.0)
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    state: State = "met" if high <= limit else "missed" if low > limit else "unclear"
    return Finding(name, limit, figure, state, figure.value / limit)


def _at_least(name: str, limit: float, figure: Figure | None) -> Finding:
    if figure is None:
        return Finding(name, limit, None, "unclear", 1.0)
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    state: State = "met" if low >= limit else "missed" if high < limit else "unclear"
    return Finding(name, limit, figure, state, limit / max(figure.value, 1e-9))


# A rate is held when of what arrives no more than this share goes unanswered.
LOST = 0.01


def _rate(limit: float, figure: Figure | None, steady: bool) -> Finding:
    """The offered rate is the target, so it is held when the engine keeps up: what arrives is answered, and the queue is level."""
    found = _answered("qps", limit, figure, limit * (1 - LOST))
    return replace(found, state="unclear") if found.state == "met" and not steady else found


def _answered(name: str, limit: float, figure: Figure | None, least: float) -> Finding:
    """A share of answers, or what follows from one: met by the figure itself, since of a hundred requests that were all answered
    the interval still leaves one in thirty; missed by the whole interval, since one that was not is no proof either."""
    if figure is None:
        return Finding(name, limit, None, "unclear", 1.0)
    high = figure.value if figure.high is None else figure.high
    state: State = "met" if figure.value >= least else "missed" if high < least else "unclear"
    return Finding(name, limit, figure, state, 1.0 if state == "met" else limit / max(figure.value, 1e-9))


def spell(target: str, value: float) -> str:
    """A figure in the unit people use for it."""
    if target in ("qps", "goodput"):
        return f"{value:.2f} requests/s"
    if target == "memory":
        return units.show_memory(value)
    if target in ("memory_share", "availability"):
        return f"{value * 100:.1f} %"
    return "never" if value == float("inf") else units.show_duration(value)
