"""Statistics of records: exact percentiles, their intervals, summaries, and what may be concluded. Pure, standard library only.

Times are in seconds inside and in milliseconds in summaries. A failed request is infinitely late in every latency.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import NormalDist
from typing import Any, Literal

from fenno.load.record import Record
from fenno.recipe import Latency

LATENCIES: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": lambda r: r.ttft,
    "tpot": lambda r: r.tpot,
    "e2el": lambda r: r.e2el,
    "gap": lambda r: r.gap,
    "ttft_scheduled": lambda r: r.ttft_scheduled,
    "e2el_scheduled": lambda r: r.e2el_scheduled,
}


def percentile(values: Sequence[float], p: float) -> float:
    """The exact percentile by nearest rank: the least of the values that at least `p` % of them do not exceed.

    `values` must be sorted. NaN when there are none, infinity when the rank falls on a failure.
    """
    return values[rank(len(values), p)] if values else math.nan


def rank(count: int, p: float) -> int:
    """Where the `p`th percentile of so many sorted values is, from 0."""
    return max(0, math.ceil(count * p / 100 - 1e-9) - 1)


def interval(values: Sequence[float], p: float, level: float = 0.95, effective: float | None = None) -> tuple[float, float] | None:
    """A confidence interval for the `p`th percentile from order statistics: exact for independent values of any distribution.

    `values` must be sorted. `effective`: how many independent values they are worth (see `worth`), when fewer. None when there are
    too few: a two-sided 95 % interval of a P95 needs 72.
    """
    count = math.floor(min(len(values), effective if effective is not None else len(values)))
    share, tail = p / 100, (1 - level) / 2
    # The number of values below the percentile is binomial: the ranks hold it between them with at least `level`.
    below, low, high = 0.0, 0, count + 1
    for k, mass in _binomial(count, share):
        below += mass
        if below <= tail:
            low = k + 1
        if below >= 1 - tail - 1e-12:
            high = k + 1
            break
    if low < 1 or high > count:
        return None
    stretch = len(values) / count
    first, last = math.floor(low * stretch), math.ceil(high * stretch)
    return values[max(1, first) - 1], values[min(len(values), last) - 1]


def _binomial(count: int, share: float) -> Iterable[tuple[int, float]]:
    """k and P(B = k) for B binomial, in the order of k, within twelve standard deviations: what lies outside is nothing."""
    log_p, log_q, whole = math.log(share), math.log1p(-share), math.lgamma(count + 1)
    reach = 12 * math.sqrt(count * share * (1 - share)) + 12
    for k in range(max(0, math.floor(count * share - reach)), min(count, math.ceil(count * share + reach)) + 1):
        yield k, math.exp(whole - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * log_p + (count - k) * log_q)


def share(good: int, count: int, level: float = 0.95) -> tuple[float, float, float]:
    """A share with its confidence interval (Wilson 1927): value, low, high. `count` must be more than 0."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    value, weight = good / count, z * z / count
    middle = (value + weight / 2) / (1 + weight)
    half = math.sqrt(value * (1 - value) * weight + weight * weight / 4) / (1 + weight)
    return value, max(0.0, min(value, middle - half)), min(1.0, max(value, middle + half))


def block_interval(
    values: Sequence[float], p: float, level: float = 0.95, draws: int = 500, seed: int = 0
) -> tuple[float, float] | None:
    """A confidence interval for the `p`th percentile of values that follow one another: a moving-block bootstrap (Künsch 1989).

    `values` in the order of time. Blocks are as long as the values' correlation, at least the cube root of their number, at most an
    eighth of it. For where too few independent values are left for `interval`; None where even independent ones would be too few.
    """
    count = len(values)
    if interval(sorted(values), p, level) is None:
        return None
    length = min(max(math.ceil(count / worth(values, p)), round(count ** (1 / 3))), count // 8)
    rng = random.Random(seed)
    found = []
    for _ in range(draws):
        starts = (rng.randrange(count - length + 1) for _ in range(math.ceil(count / length)))
        drawn = [value for start in starts for value in values[start : start + length]][:count]
        found.append(percentile(sorted(drawn), p))
    found.sort()
    tail = 100 * (1 - level) / 2
    return percentile(found, tail), percentile(found, 100 - tail)


def worth(values: Sequence[float], p: float) -> float:
    """How many independent values these are worth for their `p`th percentile, at most as many as they are.

    `values` in the order of time. Waiting times follow one another; what matters for a percentile is whether being above it does,
    so the autocorrelation is that of the exceedances, summed while its pairs stay positive (Geyer 1992, initial positive sequence).
    """
    count = len(values)
    limit = percentile(sorted(values), p)
    above = {i for i, value in enumerate(values) if value > limit}
    share = len(above) / count if count else 0.0
    variance = share * (1 - share)
    if count < 10 or variance == 0:
        return float(count)

    def together(lag: int) -> int:
        return sum(1 for i in above if i + lag in above)

    # With five exceedances two are neighbours now and then: that alone is no sign of anything.
    by_chance = 2 * count * share * share
    if _poisson_tail(together(1) + together(2), by_chance) > 0.05:
        return float(count)
    total = 0.0
    for lag in range(1, min(count // 2, 500), 2):
        pair = sum((together(k) / (count - k) - share * share) / variance for k in (lag, lag + 1))
        if pair <= 0:
            break
        total += pair
    return min(float(count), count / (1 + 2 * total))


def _poisson_tail(least: int, mean: float) -> float:
    """P(N >= least) for N Poisson."""
    below = math.fsum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(least))
    return max(0.0, 1 - below)


Decision = Literal["met", "missed"]


class Sequential:
    """Decides whether the `p`th percentile meets `target`, and may be asked after every request.

    Two mixtures of likelihood ratios bet against "the share of late requests is at least 1 - p" and "at most 1 - p". Neither grows
    beyond 1/alpha with a chance above alpha while its hypothesis holds, however often one looks (Ville's inequality; Waudby-Smith
    and Ramdas 2023). It holds for independent requests; where they follow one another, give `weight` < 1: values are then worth
    that share of an independent one each. `only`: the one decision that is looked for.
    """

    def __init__(self, target: float, p: float, alpha: float = 0.05, weight: float = 1.0, only: Decision | None = None) -> None:
        self.target, self.alpha, self.weight, self.only = target, alpha, weight, only
        self.count = self.late = 0
        self.decision: Decision | None = None
        late = 1 - p / 100
        self._met = _Bets(late, [late * f for f in (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85)])
        self._missed = _Bets(late, [late + (1 - late) * f for f in (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)])

    def update(self, values: Iterable[float]) -> Decision | None:
        """Take more latencies, failures as infinity. Once made, a decision stays."""
        limit = math.log(1 / self.alpha)
        for value in values:
            if self.decision:
                break
            late = value > self.target
            self.count += 1
            self.late += late
            bets: tuple[_Bets, Decision] = (self._missed, "missed") if late else (self._met, "met")
            # A late request only ever raises the wealth of one side, a good one that of the other.
            if (
                self.only in (None, bets[1])
                and bets[0].wealth(self.late * self.weight, (self.count - self.late) * self.weight) >= limit
            ):
                self.decision = bets[1]
        return self.decision


class _Bets:
    """A mixture of likelihood ratios of some shares against one."""

    def __init__(self, null: float, shares: Sequence[float]) -> None:
        self._late = [math.log(s / null) if s else -math.inf for s in shares]
        self._good = [math.log((1 - s) / (1 - null)) for s in shares]

    def wealth(self, late: float, good: float) -> float:
        """The logarithm of the mixture after so many late and good requests."""
        terms = [(late * a if late else 0.0) + good * b for a, b in zip(self._late, self._good, strict=True)]
        most = max(terms)
        return most + math.log(sum(math.exp(t - most) for t in terms) / len(terms)) if most > -math.inf else most


def figures(values: Iterable[float | None]) -> dict[str, float | None]:
    """p50, p95, p99, mean and max in ms, of latencies in seconds. None where failures make one infinite, or nothing was there."""
    known = sorted(value for value in values if value is not None)
    found = {f"p{p}": percentile(known, p) for p in (50, 95, 99)}
    found["mean"] = math.fsum(known) / len(known) if known else math.nan
    found["max"] = known[-1] if known else math.nan
    return {name: milliseconds(value) for name, value in found.items()}


def itl(mine: Sequence[Record]) -> dict[str, float | None]:
    """As `figures`, of every gap of every stream, and infinity for each failure. There are a hundred times as many of them as
    requests, so they are counted by the microsecond, to which figures are told, and not kept."""
    counts: Counter[float] = Counter(round(gap * 1e3) for r in mine if r.ok for gap in r.gaps)
    if failed := sum(not r.ok for r in mine):
        counts[math.inf] = failed
    values = sorted(counts)
    upto = list(accumulate(counts[value] for value in values))
    found = {f"p{p}": values[bisect_right(upto, rank(upto[-1], p))] / 1e6 if values else math.nan for p in (50, 95, 99)}
    found["mean"] = math.fsum(gap for r in mine if r.ok for gap in r.gaps) / upto[-1] / 1e3 if values and not failed else math.inf
    found["max"] = values[-1] / 1e6 if values else math.nan
    return {name: milliseconds(value) for name, value in found.items()}


def milliseconds(value: float) -> float | None:
    """Seconds in ms, to the microsecond; None for what is no number."""
    return round(value * 1e3, 3) if math.isfinite(value) else None


def counted(records: Iterable[Record]) -> list[Record]:
    """The records that figures are made of, by the time they were sent: of the counted window, cancelled ones left out."""
    return sorted((r for r in records if r.phase == "counted" and r.outcome != "cancelled"), key=lambda r: r.sent)


def summarize(records: Sequence[Record], window: tuple[float, float], limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Every figure of `docs/metrics.md`. `window`: the counted one; `limits`: for goodput, seconds by latency ("ttft", ...)."""
    mine = counted(records)
    seconds = window[1] - window[0]
    good = [r for r in mine if r.ok]
    offered = [r for r in records if r.phase == "counted"]
    return {
        **_latencies(mine),
        "requests": len(mine),
        "completed": len(good),
        "cancelled": len(offered) - len(mine),
        "failures": dict(Counter(r.outcome for r in mine if not r.ok)),
        "availability": len(good) / len(mine) if mine else None,
        "seconds": round(seconds, 6),
        "qps": len(good) / seconds if seconds > 0 else None,
        "completion_rate": _share_of(seconds, sum(r.ok and window[0] <= r.end < window[1] for r in records)),
        "output_tokens": sum(r.tokens for r in good),
        "prompt_tokens": sum(r.prompt_tokens or 0 for r in good),
        "token_throughput": _share_of(seconds, sum(r.tokens for r in good)),
        "prompt_mismatch": _mismatch(good),
        "goodput": _share_of(seconds, sum(_within(r, limits or {}) for r in mine)),
        "tokens_per_event": _ratio(sum(r.tokens for r in good), sum(r.token_count for r in good)),
        "lateness": figures([r.lateness for r in mine]),
        "mix_p": mix_p(Counter(r.cls for r in offered), Counter(r.cls for r in good)),
        "classes": {
            name: _of_class([r for r in offered if r.cls == name], len(offered), len(good))
            for name in sorted({r.cls for r in offered})
        },
        "turns": _by_turn(mine),
    }


def _share_of(seconds: float, count: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _by_turn(mine: Sequence[Record]) -> dict[str, Any]:
    """The latencies of each turn of conversations; empty where every request stands alone."""
    turns = sorted({r.turn for r in mine})
    return {str(turn): _latencies([r for r in mine if r.turn == turn]) for turn in turns if turns[-1] > 1}


def _mismatch(good: Sequence[Record]) -> float | None:
    """The share of prompts that were of another length, by the server's count, than asked for; None where none is known."""
    known = [r for r in good if r.asked_prompt is not None and r.prompt_tokens is not None]
    return _ratio(sum(r.prompt_tokens != r.asked_prompt for r in known), len(known))


def _latencies(mine: Sequence[Record]) -> dict[str, Any]:
    found: dict[str, Any] = {name: figures(of(r) for r in mine) for name, of in LATENCIES.items()}
    found["ttft"]["interval95"] = p95_interval([r.ttft for r in mine])
    found["itl"] = itl(mine)
    return found


def p95_interval(values: Sequence[float]) -> tuple[float | None, float | None] | None:
    """The 95 % interval of the P95 in ms, of seconds in the order of time; an end that lies among failures is None."""
    found = interval(sorted(values), 95, effective=worth(values, 95))
    return None if found is None else (milliseconds(found[0]), milliseconds(found[1]))


def _of_class(offered: Sequence[Record], all_offered: int, all_good: int) -> dict[str, Any]:
    mine = counted(offered)
    good = sum(r.ok for r in mine)
    return {
        **_latencies(mine),
        "requests": len(mine),
        "completed": good,
        "availability": _ratio(good, len(mine)),
        "offered_share": len(offered) / all_offered,
        "counted_share": _ratio(good, all_good),
        "dropped_share": 1 - good / len(offered),
    }


def mix_p(offered: Mapping[str, int], completed: Mapping[str, int]) -> float | None:
    """How likely a mix as far from the offered one as the completed one is by chance: chi-square. None without any."""
    sent, good = sum(offered.values()), sum(completed.values())
    if not good:
        return None
    expected = {name: good * count / sent for name, count in offered.items()}
    chi = math.fsum((completed.get(name, 0) - mean) ** 2 / mean for name, mean in expected.items())
    return chi_square_p(chi, len(expected) - 1)


def chi_square_p(chi: float, freedom: int) -> float:
    """P(X >= chi) for X of the chi-square distribution, by the recurrence of the incomplete gamma function."""
    if freedom < 1 or chi <= 0:
        return 1.0
    half, shape = chi / 2, 0.5 if freedom % 2 else 1.0
    found = math.erfc(math.sqrt(half)) if freedom % 2 else math.exp(-half)
    while shape < freedom / 2:
        found += math.exp(shape * math.log(half) - half - math.lgamma(shape + 1))
        shape += 1
    return found


def _within(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether one request kept every limit that concerns it."""
    mine = {name.removeprefix(f"{record.cls}:"): limit for name, limit in limits.items()}
    return record.ok and all((LATENCIES[name](record) or 0.0) <= limit for name, limit in mine.items() if name in LATENCIES)


def goodput_limits(targets: Mapping[str, float]) -> dict[str, float]:
    """Limits by latency ("ttft", "short:ttft") from `Targets.latencies()`; of several percentiles of one latency, the loosest."""
    limits: dict[str, float] = {}
    for name, value in targets.items():
        wanted = Latency.of(name)
        latency = f"{wanted.cls}:{wanted.metric}" if wanted.cls else wanted.metric
        limits[latency] = max(value, limits.get(latency, 0.0))
    return limits


@dataclass(frozen=True)
class Steady:
    """Whether the window was steady: in flight, time-averaged, in its two halves, and why not."""

    steady: bool
    first: float
    second: float
    reason: str = ""


def steady(records: Sequence[Record], window: tuple[float, float]) -> Steady:
    """Whether the requests in flight had levelled: the two halves agree within chance. Give records of every phase: what was sent
    in the warm-up is in flight too.

    In flight wanders by itself: over a time T its mean has a variance of L E[S^2] / (E[S] T), as in a queue that never waits.
    """
    start, end = window
    middle = (start + end) / 2
    first, second = in_flight(records, start, middle), in_flight(records, middle, end)
    stays = [r.end - r.sent for r in records if r.end > start and r.sent < end]
    if not stays or end <= start or sum(stays) <= 0:
        return Steady(False, first, second, "no request was in flight")
    mean = (first + second) / 2
    variance = mean * (sum(s * s for s in stays) / sum(stays)) / (middle - start)
    allowed = max(0.1 * mean, 3 * math.sqrt(2 * variance))
    if second - first > allowed:
        return Steady(False, first, second, f"requests in flight grew from {first:.3g} to {second:.3g} within the window")
    if first - second > allowed:
        return Steady(False, first, second, f"requests in flight fell from {first:.3g} to {second:.3g} within the window")
    return Steady(True, first, second, "") if not (grew := _grew(counted(records))) else Steady(False, first, second, grew)


def _grew(mine: Sequence[Record]) -> str:
    """A sentence when first tokens come clearly later in the second half: by rank sum, and by a quarter of the median or more."""
    values = [r.ttft for r in mine]
    half = len(values) // 2
    if half < 10:
        return ""
    before, after = (percentile(sorted(part), 50) for part in (values[:half], values[half:]))
    ranks = sorted(range(len(values)), key=values.__getitem__)
    total = sum(rank for rank, i in enumerate(ranks) if i >= half)
    others = len(values) - half
    expected, spread = others * (len(values) - 1) / 2, math.sqrt(half * others * (len(values) + 1) / 12)
    # A queue that wanders so slowly that this is chance has not been watched for long enough either.
    if math.isinf(before) or total - expected < 3 * spread or after < 1.25 * before:
        return ""
    return f"first tokens came later and later: P50 {before * 1e3:.3g} ms in the first half, {after * 1e3:.3g} ms in the second"


def in_flight(records: Iterable[Record], start: float, end: float) -> float:
    """Requests in flight, averaged over [start, end)."""
    return sum(max(0.0, min(r.end, end) - max(r.sent, start)) for r in records) / (end - start) if end > start else 0.0


@dataclass(frozen=True)
class Validity:
    """Whether a run is a measurement, and every reason why it is not."""

    valid: bool
    reasons: tuple[str, ...] = field(default_factory=tuple)


def client_bound(target: float | None) -> float:
    """Milliseconds that the client's own delays may come to: 1, or 1 % of the latency in seconds that is judged."""
    return max(1.0, 10.0 * target if target else 0.0)


def validity(
    *,
    lag_p95: float,
    lateness_p95: float,
    in_flight_mean: float,
    users: int | None,
    target: float | None = None,
    think_time: float = 0.0,
    levelled: Steady | None = None,
    phase: str = "done",
) -> Validity:
    """The rule of a valid measurement. Delays in ms, `target` (the latency that is judged) in seconds; `users`: closed loop."""
    bound = client_bound(target)
    reasons = []
    if phase not in ("done", "stopped"):
        reasons.append(f"the run did not end well: {phase}")
    if lag_p95 > bound:
        reasons.append(f"the client's event loop was late: lag P95 {lag_p95:.3g} ms, at most {bound:.3g} ms allowed")
    if users is None and lateness_p95 > bound:
        reasons.append(f"requests were sent late: lateness P95 {lateness_p95:.3g} ms, at most {bound:.3g} ms allowed")
    if users is not None and think_time == 0 and in_flight_mean < 0.99 * users:
        reasons.append(f"{in_flight_mean:.4g} requests in flight of {users} users, at least 99 % needed")
    if levelled is not None and not levelled.steady:
        reasons.append(levelled.reason)
    return Validity(not reasons, tuple(reasons))
