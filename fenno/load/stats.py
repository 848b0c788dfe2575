"""Statistics of numbers: exact percentiles, their intervals, and what may be concluded. Pure. A failure is infinitely late."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fenno.load.client import rank


def percentile(values: Sequence[float] | NDArray[np.float64], p: float) -> float:
    """The exact percentile by nearest rank: the least of the values that at least `p` % of them do not exceed.

    `values` must be sorted. NaN when there are none, infinity when the rank falls on a failure.
    """
    return float(values[rank(len(values), p)]) if len(values) else math.nan


def interval(
    values: Sequence[float] | NDArray[np.float64], p: float, level: float = 0.95, effective: float | None = None
) -> tuple[float, float] | None:
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
    return float(values[max(1, first) - 1]), float(values[min(len(values), last) - 1])


def _binomial(count: int, share: float) -> Iterable[tuple[int, float]]:
    """k and P(B = k) for B binomial, in the order of k, within twelve standard deviations: what lies outside is nothing."""
    log_p, log_q, whole = math.log(share), math.log1p(-share), math.lgamma(count + 1)
    reach = 12 * math.sqrt(count * share * (1 - share)) + 12
    for k in range(max(0, math.floor(count * share - reach)), min(count, math.ceil(count * share + reach)) + 1):
        yield k, math.exp(whole - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * log_p + (count - k) * log_q)


def share(good: float, count: float, level: float = 0.95) -> tuple[float, float, float]:
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


def worth(values: Sequence[float] | NDArray[np.float64], p: float) -> float:
    """How many independent values these are worth for their `p`th percentile, at most as many as they are.

    `values` in the order of time. Waiting times follow one another; what matters for a percentile is whether being above it does,
    so the autocorrelation is that of the exceedances, summed while its pairs stay positive (Geyer 1992, initial positive sequence).
    """
    count = len(values)
    above = np.asarray(values) > percentile(np.sort(values), p)
    share = np.count_nonzero(above) / count if count else 0.0
    variance = share * (1 - share)
    if count < 10 or variance == 0:
        return float(count)

    def together(lag: int) -> int:
        return int(np.count_nonzero(above[lag:] & above[:-lag]))

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
