"""From blocks to what may be said of two arms: intervals, paired and unpaired tests, and one decision for many metrics. Pure.

A block is one load test of one arm, or one piece of a long one, and the unit of every test: requests within a block follow one
another, blocks hardly do. Values are latencies in ms, requests a second, bytes, shares.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fenno.load import stats

Document = Mapping[str, Any]
State = Literal["better", "worse", "equivalent", "not distinguishable", "not measured"]
ALPHA = 0.05
MARGIN = 0.01  # of equivalence, as a share: what nobody would act upon
LEAST = 3  # blocks of an arm, below which nothing is said
LATENCIES = (("ttft", "p95"), ("ttft", "p50"), ("tpot", "p95"), ("e2el", "p95"), ("gap", "p95"))


@dataclass(frozen=True)
class Metric:
    """One figure of a block: "qps", "memory", "availability" or a latency as a target spells it ("p95_ttft"), of a class or of all.

    `primary`: it stands in the table and decides; the others are detail, with a decision of their own.
    """

    name: str
    cls: str = ""
    primary: bool = False

    @property
    def label(self) -> str:
        return f"{self.cls}:{self.name}" if self.cls else self.name

    @property
    def more_is_better(self) -> bool:
        return self.name in ("qps", "availability")

    @property
    def by_ratio(self) -> bool:
        """Whether arms are compared by their ratio; shares are by their difference."""
        return self.name != "availability"

    def of(self, block: Document) -> float | None:
        """The block's figure in the unit of a target: a latency in seconds, infinite where it falls on a failure; None for none."""
        part = block["classes"].get(self.cls) if self.cls else block
        if part is None:
            return None
        if self.name == "memory":
            memory = (block.get("server") or {}).get("memory")
            return float(memory["max"]) if memory else None
        if self.name in ("qps", "availability"):
            return None if part[self.name] is None else float(part[self.name])
        percentile, latency = self.name.split("_")
        value = part[latency][percentile]
        late = part["completed"] < part["requests"] * float(percentile[1:]) / 100
        return math.inf if value is None and late else value and value / 1e3


TABLE = tuple(Metric(name, primary=True) for name in ("qps", "p95_ttft", "memory", "availability"))


def metrics(blocks: Sequence[Document]) -> list[Metric]:
    """Those of the table, then the other latencies, then both for each class where there are several."""
    classes = sorted({name for block in blocks for name in block["classes"]})
    names = [f"{percentile}_{latency}" for latency, percentile in LATENCIES]
    detail = [Metric(name) for name in names[1:]]
    if len(classes) > 1:
        detail += [Metric(name, cls) for cls in classes for name in (*names, "availability")]
    return [*TABLE, *detail]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; the ends are None where no interval can be given."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Finding:
    """One metric of one arm against the first. `change`: ratio, or difference of shares. `adjusted`: `p` for their number.

    `within`: the whole interval of the change lies within the margin of equivalence.
    """

    arm: str
    metric: Metric
    change: Interval | None
    p: float
    within: bool = False
    adjusted: float = 1.0
    state: State = "not distinguishable"


def own(metric: Metric, blocks: Sequence[Document]) -> Interval | None:
    """An arm's own figure: the mean of its blocks (geometric where arms are compared by ratio) and its interval.

    Of availability the wider of two: over blocks, and Wilson's over all requests, since blocks without a failure do not differ.
    """
    values = [value for block in blocks if (value := metric.of(block)) is not None]
    if not values:
        return None
    if not all(0 <= value < math.inf for value in values):
        return Interval(statistics.median_high(values))
    logs = metric.by_ratio and min(values) > 0
    middle, half = _mean([math.log(v) for v in values] if logs else values)
    ends = [middle, middle - half, middle + half]
    value, low, high = (math.exp(end) for end in ends) if logs else ends
    if metric.name == "availability" and (requests := sum(b["requests"] for b in blocks)):
        _, least, most = stats.share(sum(b["completed"] for b in blocks), requests)
        low, high = max(0.0, min(low, least)), min(1.0, max(high, most))
    return Interval(value, low, high) if len(values) >= LEAST or metric.name == "availability" else Interval(value)


def compare(arms: Mapping[str, Sequence[Document]], *, paired: bool, margin: float = MARGIN) -> list[Finding]:
    """Every arm against the first, metric by metric. `paired`: the arms' n-th blocks belong together (same seed, side by side).
    `margin`: of equivalence, as a share; 0 calls nothing equivalent.

    "Different" is decided at 5 % for all metrics of the table and all arms together (Holm 1979), and again for all of the detail:
    of arms that are the same, one comparison in twenty at most says anything else in its table.
    """
    first, *others = arms
    found = [
        _find(metric, arms[first], arms[other], other, paired, margin)
        for other in others
        for metric in metrics([block for blocks in arms.values() for block in blocks])
    ]
    return [finding for primary in (True, False) for finding in holm([f for f in found if f.metric.primary is primary])]


def holm(findings: Sequence[Finding]) -> list[Finding]:
    """The same findings, decided together. What was not measured takes no part."""
    tested = sorted((f for f in findings if f.change is not None), key=lambda f: f.p)
    adjusted, most = {}, 0.0
    for rank, finding in enumerate(tested):
        most = max(most, min(1.0, (len(tested) - rank) * finding.p))
        adjusted[id(finding)] = most
    return [replace(f, adjusted=adjusted.get(id(f), 1.0), state=_state(f, adjusted.get(id(f), 1.0))) for f in findings]


def _state(finding: Finding, adjusted: float) -> State:
    if finding.change is None:
        return "not measured"
    if finding.within:
        return "equivalent"
    if adjusted >= ALPHA:
        return "not distinguishable"
    grew = finding.change.value > (1 if finding.metric.by_ratio else 0)
    return "better" if grew is finding.metric.more_is_better else "worse"


def _find(metric: Metric, mine: Sequence[Document], theirs: Sequence[Document], arm: str, paired: bool, margin: float) -> Finding:
    """One metric of `theirs` against `mine`, its p not yet adjusted."""
    a, b = [metric.of(block) for block in mine], [metric.of(block) for block in theirs]
    if paired:
        kept = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        a, b = [x for x, _ in kept], [y for _, y in kept]
    left, right = [x for x in a if x is not None], [y for y in b if y is not None]
    if min(len(left), len(right)) < LEAST:
        return Finding(arm, metric, None, 1.0)
    if math.inf in (*left, *right) or (metric.by_ratio and min(*left, *right) <= 0):
        return Finding(arm, metric, *_by_rank(left, right, paired))
    if metric.by_ratio:
        left, right = [math.log(x) for x in left], [math.log(y) for y in right]
    change, p = _paired(left, right) if paired else _unpaired(left, right)
    noise = _noise(metric, [*mine, *theirs])
    if abs(change.value) <= noise:
        p = 1.0
    if not metric.by_ratio:
        return Finding(arm, metric, change, p)
    ends = change.low or 0.0, change.high or 0.0
    within = max(map(abs, ends)) + noise <= math.log1p(margin)
    return Finding(arm, metric, Interval(*map(math.exp, (change.value, *ends))), p, within)


def _noise(metric: Metric, blocks: Sequence[Document]) -> float:
    """What the client's own delay comes to, as a share of a latency: a smaller difference may be the client's."""
    if metric.name.rpartition("_")[2] not in ("ttft", "e2el", "gap"):
        return 1e-9
    lags: list[float] = [((block.get("client") or {}).get("lag_ms") or {}).get("p50", 0.0) for block in blocks]
    least = min(value for block in blocks if (value := metric.of(block)))
    return max(1e-9, statistics.median(lags) / 1e3 / least)


def _paired(mine: Sequence[float], theirs: Sequence[float]) -> tuple[Interval, float]:
    """Student's paired test: the mean difference, its interval, p."""
    differences = [y - x for x, y in zip(mine, theirs, strict=True)]
    middle, half = _mean(differences)
    spread = statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(middle, middle - half, middle + half), _p(middle, spread, len(differences) - 1)


def _unpaired(mine: Sequence[float], theirs: Sequence[float]) -> tuple[Interval, float]:
    """Welch's test: as `_paired`, for blocks that do not belong together."""
    parts = [statistics.variance(values) / len(values) for values in (mine, theirs)]
    middle, spread = statistics.fmean(theirs) - statistics.fmean(mine), math.sqrt(sum(parts))
    weights = sum(part * part / (len(values) - 1) for part, values in zip(parts, (mine, theirs), strict=True))
    freedom = max(1, math.floor(sum(parts) ** 2 / weights)) if weights > 0 else min(len(mine), len(theirs)) - 1
    half = quantile(1 - ALPHA / 2, freedom) * spread
    return Interval(middle, middle - half, middle + half), _p(middle, spread, freedom)


def _by_rank(mine: Sequence[float], theirs: Sequence[float], paired: bool) -> tuple[Interval, float]:
    """For figures that are infinite, or 0: a sign test of pairs, a rank-sum test of others, both exact. No interval."""
    pairs = list(zip(mine, theirs, strict=True)) if paired else [(x, y) for x in mine for y in theirs]
    up, down = sum(y > x for x, y in pairs), sum(y < x for x, y in pairs)
    change = Interval(math.inf if up > down else 0.0 if down > up else 1.0)
    if paired:
        return change, min(1.0, 2 * sum(math.comb(up + down, k) for k in range(min(up, down) + 1)) / 2 ** (up + down))
    return change, _rank_sum_p(len(mine), len(theirs), min(up, down) + (len(pairs) - up - down) / 2)


def _rank_sum_p(n: int, m: int, smaller: float) -> float:
    """Two-sided p of Mann and Whitney's U at most `smaller`, from all orders of n and m values."""
    ways = [1]  # ways[u]: of the orders of i and m values, those with U = u, as coefficients of a Gaussian binomial
    for i in range(1, n + 1):
        longer = [0] * (len(ways) + m)
        for u, count in enumerate(ways):
            longer[u] += count
        for u in range(len(longer)):
            longer[u] -= ways[u - m - i] if 0 <= u - m - i < len(ways) else 0
        for u in range(i, len(longer)):
            longer[u] += longer[u - i]
        ways = longer[: i * m + 1]
    return min(1.0, 2 * sum(ways[: math.floor(smaller) + 1]) / math.comb(n + m, n))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval; 0 for a single value."""
    if len(values) < 2:
        return values[0], 0.0
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), quantile(1 - ALPHA / 2, len(values) - 1) * spread


def _p(middle: float, spread: float, freedom: int) -> float:
    """Two-sided p of Student's t."""
    if spread == 0:
        return 1.0 if middle == 0 else 0.0
    return max(0.0, 2 * (1 - student(abs(middle) / spread, freedom)))


def student(t: float, freedom: int) -> float:
    """P(T <= t) of Student's distribution by its finite series (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    odd = freedom % 2
    power = cosine if odd else 1.0
    for k in range(1, (freedom - odd) // 2 + 1):
        total += term * power
        term *= 2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k)
        power *= cosine * cosine
    inner = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inner / 2


@functools.lru_cache(maxsize=256)
def quantile(share: float, freedom: int) -> float:
    """The t that Student's distribution does not exceed with the chance `share`, which must be 0.5 or more."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < share else (low, middle)
    return low


def verdict(findings: Sequence[Finding]) -> str:
    """What the table says of one arm: "better", "worse", "mixed", "equivalent", "not distinguishable"; "not measured" without a
    figure. Equivalent is what is so in every figure that has a margin, and no different in the others."""
    table = [f for f in findings if f.metric.primary]
    states = {f.state for f in table}
    if {"better", "worse"} <= states:
        return "mixed"
    if {f.state for f in table if f.metric.by_ratio} - {"not measured"} == {"equivalent"}:
        states.discard("not distinguishable")
    return next((s for s in ("better", "worse", "not distinguishable", "equivalent") if s in states), "not measured")


def reaches(figure: Mapping[str, Any] | None, target: float) -> str:
    """Whether an availability is at `target`: "met" or "missed" when its whole interval is, else "unclear"."""
    if figure is None:
        return "unclear"
    return "met" if figure["low"] >= target else "missed" if figure["high"] < target else "unclear"
