"""The figures of requests: summaries by class and turn, whether their stream was steady, whether a run is a measurement. Pure.

Times are in seconds inside and in milliseconds in summaries. A failed request is infinitely late in every latency.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenno.load import stats
from fenno.load.client import rank
from fenno.load.requests import Floats, Mask, Requests
from fenno.recipe import Latency

LATENCIES = ("ttft", "tpot", "e2el", "gap", "ttft_scheduled", "e2el_scheduled")  # properties of `Record` and of `Requests`
CELLS = 2**22  # of the table in which gaps are counted
AT_ONCE = 2**22  # gaps that are counted at once


# What to do next about a run that is no measurement.
GROWING = "the load is more than is held: lower it; or give a longer --warmup, where the server was still warming up"
FALLING = "give a longer --warmup: the window began before the load had levelled"
BUSY = "leave this host's processors to the client, share the load among more --processes or --worker hosts, or lower it"
IDLE = "see the failures: users wait after each; without any, share the users among more --processes"


def counted(requests: Requests) -> Requests:
    """Those that figures are made of, by the time they were sent: of the counted window, cancelled ones left out."""
    mine = requests.where(requests.counted)
    return mine.by(mine["sent"])


def summarize(requests: Requests, window: tuple[float, float], limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Every figure of `docs/metrics.md`. `window`: the counted one; `limits`: for goodput, seconds by latency ("ttft", ...)."""
    mine, seconds = counted(requests), window[1] - window[0]
    good, offered = mine.where(mine.ok), requests.where(requests.words("phase").are("counted"))
    gaps, ends = Gaps(mine), requests["end"]
    failures = mine.where(~mine.ok)
    tokens = int(good.tokens.sum())
    return {
        **_latencies(mine, gaps),
        "requests": len(mine),
        "completed": len(good),
        "cancelled": len(offered) - len(mine),
        "failures": failures.words("outcome").counts(),
        "availability": _ratio(len(good), len(mine)),
        "seconds": round(seconds, 6),
        "qps": _share_of(seconds, len(good)),
        "completion_rate": _share_of(seconds, _number(requests.ok & (window[0] <= ends) & (ends < window[1]))),
        "output_tokens": tokens,
        "prompt_tokens": int(np.maximum(good["prompt_tokens"], 0).sum()),
        "token_throughput": _share_of(seconds, tokens),
        "prompt_mismatch": _mismatch(good),
        "goodput": _share_of(seconds, _number(within(mine, limits or {}))),
        "tokens_per_event": _ratio(tokens, int(good["token_count"].sum())),
        "lateness": figures(mine.lateness),
        "mix_p": stats.mix_p(offered.words("cls").counts(), good.words("cls").counts()),
        "classes": {name: _of_class(mine, offered, good, name, gaps) for name in sorted(offered.words("cls").counts())},
        "turns": _by_turn(mine, gaps),
    }


def _number(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _share_of(seconds: float, count: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def figures(values: Floats) -> dict[str, float | None]:
    """p50, p95, p99, mean and max in ms, of latencies in seconds. None where failures make one infinite, or nothing was there."""
    known = np.sort(values[~np.isnan(values)])
    found = {f"p{p}": stats.percentile(known, p) for p in (50, 95, 99)}
    found["mean"] = float(known.mean()) if len(known) else math.nan
    found["max"] = float(known[-1]) if len(known) else math.nan
    return {name: milliseconds(value) for name, value in found.items()}


def milliseconds(value: float) -> float | None:
    """Seconds in ms, to the microsecond; None for what is no number."""
    return round(value * 1e3, 3) if math.isfinite(value) else None


class Gaps:
    """Every gap of the good ones among `mine`, and infinity for each failure. There are a hundred times as many as requests, so
    they are counted by the microsecond, to which figures are told, and not kept: by class and turn, in one reading."""

    def __init__(self, mine: Requests) -> None:
        words, ok = mine.words("cls"), mine.ok
        key = mine["turn"].astype(np.int64) * len(words.names) + words.codes
        keys = np.flatnonzero(np.bincount(key))
        kind = np.searchsorted(keys, key).astype(np.int32)
        self._cls, self._turns = [words.names[key % len(words.names)] for key in keys], keys // max(1, len(words.names))
        self._failed = np.bincount(kind[~ok], minlength=len(keys))
        self._sums = np.zeros(len(keys))
        self._table = np.zeros((len(keys), 0), np.int64)
        self._beyond: list[Counter[int]] = [Counter() for _ in keys]
        good, kind = mine.where(ok), kind[ok]
        waiting: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for who, counts, values in good.gaps():
            waiting.append((np.repeat(kind[who], counts), values))
            if sum(len(values) for _, values in waiting) >= AT_ONCE:
                self._count(*map(np.concatenate, zip(*waiting, strict=True)))
                waiting = []
        if waiting:
            self._count(*map(np.concatenate, zip(*waiting, strict=True)))

    def _count(self, kinds: NDArray[Any], values: NDArray[Any]) -> None:
        number = len(self._sums)
        micros = np.rint(values.astype(np.float64) * 1e3).astype(np.int64)
        self._sums += np.bincount(kinds, weights=values, minlength=number)
        if not self._table.size and len(micros):
            self._table = np.zeros((number, min(CELLS // number, 1 + int(micros.max()))), np.int64)
        width = self._table.shape[1]
        short = micros < width
        cells = kinds[short] * width + micros[short]
        self._table += np.bincount(cells, minlength=self._table.size).reshape(self._table.shape)
        for kind in range(number) if not short.all() else ():
            found, counts = np.unique(micros[~short & (kinds == kind)], return_counts=True)
            self._beyond[kind].update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def of(self, cls: str | None = None, turn: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64], int, float]:
        """Different gaps in microseconds, ascending, how often each was there, how many requests failed, and the sum of all gaps in
        ms: of one class or turn, or of all."""
        mine = np.ones(len(self._sums), bool)
        if cls is not None:
            mine &= np.array([name == cls for name in self._cls], bool)
        if turn is not None:
            mine &= self._turns == turn
        row = self._table[mine].sum(axis=0)
        micros = np.flatnonzero(row)
        beyond = sum((self._beyond[kind] for kind in np.flatnonzero(mine)), Counter[int]())
        longer = sorted(beyond)
        values = np.concatenate([micros, np.array(longer, np.int64)])
        counts = np.concatenate([row[micros], np.array([beyond[value] for value in longer], np.int64)])
        return values, counts, int(self._failed[mine].sum()), float(self._sums[mine].sum())


def itl(values: NDArray[np.int64], counts: NDArray[np.int64], failed: int, total: float) -> dict[str, float | None]:
    """As `figures`, of what `Gaps.of` gives."""
    upto = np.cumsum(counts)
    number = (int(upto[-1]) if len(upto) else 0) + failed

    def at(place: int) -> float:
        index = int(np.searchsorted(upto, place, side="right"))
        return float(values[index]) / 1e6 if index < len(values) else math.inf

    found = {f"p{p}": at(rank(number, p)) if number else math.nan for p in (50, 95, 99)}
    found["mean"] = total / number / 1e3 if number and not failed else math.inf
    found["max"] = at(number - 1) if number else math.nan
    return {name: milliseconds(value) for name, value in found.items()}


def _by_turn(mine: Requests, gaps: Gaps) -> dict[str, Any]:
    """The latencies of each turn of conversations; empty where every request stands alone."""
    turns = np.unique(mine["turn"]).tolist()
    one = {turn: mine.where(mine["turn"] == turn) for turn in turns if turns[-1] > 1}
    return {str(turn): _latencies(part, gaps, turn=turn) for turn, part in one.items()}


def _mismatch(good: Requests) -> float | None:
    """The share of prompts that were of another length, by the server's count, than asked for; None where none is known."""
    asked, said = good["asked_prompt"], good["prompt_tokens"]
    known = (asked >= 0) & (said >= 0)
    return _ratio(_number(known & (asked != said)), _number(known))


def _latencies(mine: Requests, gaps: Gaps, **kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: figures(getattr(mine, name)) for name in LATENCIES}
    found["ttft"]["interval95"] = p95_interval(mine.ttft)
    found["itl"] = itl(*gaps.of(**kind))
    return found


def p95_interval(values: Floats) -> tuple[float | None, float | None] | None:
    """The 95 % interval of the P95 in ms, of seconds in the order of time; an end that lies among failures is None."""
    found = stats.interval(np.sort(values), 95, effective=stats.worth(values, 95))
    return None if found is None else (milliseconds(found[0]), milliseconds(found[1]))


def _of_class(mine: Requests, offered: Requests, good: Requests, name: str, gaps: Gaps) -> dict[str, Any]:
    part = mine.where(mine.words("cls").are(name))
    completed = _number(part.ok)
    sent = _number(offered.words("cls").are(name))
    return {
        **_latencies(part, gaps, cls=name),
        "requests": len(part),
        "completed": completed,
        "availability": _ratio(completed, len(part)),
        "offered_share": sent / len(offered),
        "counted_share": _ratio(completed, len(good)),
        "dropped_share": 1 - completed / sent,
    }


def within(mine: Requests, limits: Mapping[str, float]) -> Mask:
    """Which requests were answered and kept every limit that concerns them: `limits` as of `goodput_limits`."""
    kept = mine.ok
    for label, limit in limits.items():
        cls, _, latency = label.rpartition(":")
        if latency in LATENCIES:
            late = getattr(mine, latency) > limit
            kept &= ~(late & mine.words("cls").are(cls)) if cls else ~late
    return kept


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
    step: str = ""  # what to do next


def steady(requests: Requests, window: tuple[float, float]) -> Steady:
    """Whether the requests in flight had levelled: the two halves agree within chance. Give requests of every phase: what was sent
    in the warm-up is in flight too.

    In flight wanders by itself: over a time T its mean has a variance of L E[S^2] / (E[S] T), as in a queue that never waits.
    """
    start, end = window
    middle = (start + end) / 2
    first, second = in_flight(requests, start, middle), in_flight(requests, middle, end)
    stays = (requests["end"] - requests["sent"])[(requests["end"] > start) & (requests["sent"] < end)]
    if not len(stays) or end <= start or stays.sum() <= 0:
        return Steady(False, first, second, "no request was in flight", "give a longer --duration")
    mean = (first + second) / 2
    variance = mean * float((stays * stays).sum() / stays.sum()) / (middle - start)
    allowed = max(0.1 * mean, 3 * math.sqrt(2 * variance))
    if second - first > allowed:
        return Steady(False, first, second, f"requests in flight grew from {first:.3g} to {second:.3g} within the window", GROWING)
    if first - second > allowed:
        return Steady(False, first, second, f"requests in flight fell from {first:.3g} to {second:.3g} within the window", FALLING)
    grew = _grew(counted(requests).ttft)
    return Steady(False, first, second, grew, GROWING) if grew else Steady(True, first, second)


def _grew(values: Floats) -> str:
    """A sentence when first tokens come clearly later in the second half: by rank sum, and by a quarter of the median or more."""
    half = len(values) // 2
    if half < 10:
        return ""
    before, after = (stats.percentile(np.sort(part), 50) for part in (values[:half], values[half:]))
    total = int(np.flatnonzero(np.argsort(values, kind="stable") >= half).sum())
    others = len(values) - half
    expected, spread = others * (len(values) - 1) / 2, math.sqrt(half * others * (len(values) + 1) / 12)
    # A queue that wanders so slowly that this is chance has not been watched for long enough either.
    if math.isinf(before) or total - expected < 3 * spread or after < 1.25 * before:
        return ""
    then = f"{after * 1e3:.3g} ms in the second" if math.isfinite(after) else "and half of the second half failed"
    return f"first tokens came later and later: P50 {before * 1e3:.3g} ms in the first half, {then}"


def in_flight(requests: Requests, start: float, end: float) -> float:
    """Requests in flight, averaged over [start, end)."""
    if end <= start:
        return 0.0
    return float(np.maximum(0.0, np.minimum(requests["end"], end) - np.maximum(requests["sent"], start)).sum()) / (end - start)


@dataclass(frozen=True)
class Validity:
    """Whether a run is a measurement, every reason why it is not, and what to do about each."""

    valid: bool
    reasons: tuple[str, ...] = field(default_factory=tuple)
    steps: tuple[str, ...] = field(default_factory=tuple)  # what to do next, for each of them


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
    found = []
    if phase not in ("done", "stopped"):
        found.append((f"the run did not end well: {phase}", "see what became of the server, and run it again"))
    if lag_p95 > bound:
        found.append((f"the client's event loop was late: lag P95 {lag_p95:.3g} ms, at most {bound:.3g} ms allowed", BUSY))
    if users is None and lateness_p95 > bound:
        found.append((f"requests were sent late: lateness P95 {lateness_p95:.3g} ms, at most {bound:.3g} ms allowed", BUSY))
    if users is not None and think_time == 0 and in_flight_mean < 0.99 * users:
        found.append((f"{in_flight_mean:.4g} requests in flight of {users} users, at least 99 % needed", IDLE))
    if levelled is not None and not levelled.steady:
        found.append((levelled.reason, levelled.step))
    return Validity(not found, tuple(reason for reason, _ in found), tuple(step for _, step in found))
