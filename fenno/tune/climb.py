"""`fenno tune --maximize`: the steady rate under the targets that is worth most, and the settings that hold it.

The defaults' capacity is bracketed first. From then on every other setting has to meet the targets at the rate that the best one so
far did not hold: one trial each. One that does is the best from then on, and is bracketed in its turn. Where goodput is looked for,
that it is more than the best so far is one of the targets of every trial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fenno.recipe import Scalar
from fenno.tune import capacity, propose, trial
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.bench import Seat
from fenno.tune.capacity import Bracket
from fenno.tune.claims import Claim
from fenno.tune.propose import Proposal
from fenno.tune.run import (
    AGAIN,
    PATIENCE,
    Run,
    floor,
    from_another,
    next_start,
    one_trial,
    remember_outputs,
    search,
    start_first,
    under_way,
)
from fenno.tune.space import Point
from fenno.tune.study import Trial
from fenno.tune.verdict import Verdict

# Trials of one cold start that looks for a rate: the largest that was held live, and from there up or down.
MOST_STEPS = 4


@dataclass(frozen=True)
class Ask:
    """A trial to make: a point, the rate, and the goodput to show at it where that is looked for, both in requests a second."""

    proposal: Proposal
    rate: float
    goodput: float | None = None


def climb(run: Run, starts: int) -> Verdict:
    """Search until nothing is left that holds more, or until what is left of the time is needed for so many cold `starts`."""
    best = champion(run.study.trials())
    begin = spaces.restart_part(best[0], run.space) if best else {}
    return search(run, functools.partial(live_climb, reserve=run.reserve(starts)), frontier, begin) or crowned(run)


def live_climb(run: Run, seat: Seat, restart: Point, reserve: float) -> Verdict | None:
    """Trials on one running engine, as long as `reserve` seconds are left after them; those of an earlier run count."""
    if not run.study.trials() and (too_slow := floor(run, seat)):
        return verdicts.infeasible(run.study.trials(), too_slow)
    while not run.study.settled():
        trials = run.study.trials()
        ask = next_ask(run, trials, restart)
        if ask is None:
            if next_start(run, frontier(trials)) is None and run.time_left() > reserve and run.bide():
                continue
            return None
        # The first trial is made in any case: without one there is nothing to confirm.
        if trials and run.time_left() < reserve + trial.seconds_needed(run.recipe.with_targets(qps=ask.rate)):
            return crowned(run, cut_short=True)
        if trials and not restart:
            remember_outputs(run, seat, "wide")
        with run.study.claimed(Claim("trial", ask.proposal.point, ask.rate), len(trials)) as mine:
            if mine:
                run.study.add(one_trial(run, seat, ask.proposal, len(trials), ask.rate, ask.goodput))
    return None


def crowned(run: Run, cut_short: bool = False) -> Verdict:
    """The verdict on what has been seen: the best point at the rate that was worth most."""
    trials = run.study.trials()
    best = champion(trials)
    if best is None or best[1].held == 0:
        if cut_short:
            return verdicts.cut_short(trials, "the time budget ended before any rate was held; give a longer --budget")
        least = min((t.rate for t in trials if t.state == "missed" and t.origin != "confirmation"), default=None)
        if least is None or any(t.state in ("met", "unclear") for t in trials):
            return verdicts.inconclusive(trials, "no rate was shown to be held, and none to be too much")
        return verdicts.infeasible(trials, f"not even {least:.3g} requests/s were held")
    winner = max((t for t in live(trials) if t.point == best[0]), key=worth)
    note = "; the time budget ended the search" if cut_short else ""
    return verdicts.held(winner, run.space, best[1], run.maximize or "qps", note=note)


def brackets(trials: Sequence[Trial]) -> list[tuple[dict[str, Scalar], Bracket]]:
    """Every point that was measured live, with the bracket of its capacity, in the order of first trials."""
    points: list[dict[str, Scalar]] = []
    for t in live(trials):
        if t.point not in points:
            points.append(t.point)
    return [(p, capacity.bracket((t.rate, worth(t)) for t in live(trials) if t.point == p)) for p in points]


def worth(trial: Trial) -> float:
    """What a trial's rate is worth, in requests a second: its goodput where that is a target, else itself; 0 unless all is met."""
    if trial.state != "met":
        return 0.0
    goodput = verdicts.figure(trial, "goodput")
    return goodput.value if goodput else trial.rate


def to_show(run: Run, best: Bracket | None, rate: float) -> float | None:
    """The goodput to show at a rate where that is looked for: as much as the best so far, at first half of what is offered."""
    if run.maximize != "goodput":
        return None
    return best.worth if best and best.worth else rate / 2


def live(trials: Sequence[Trial]) -> list[Trial]:
    """Trials on a wide engine that say something of their rate, of points that no cold start has refuted.

    A rate at which an engine died is not held, and neither is one that could not be measured in several attempts.
    """
    wide = [t for t in trials if t.origin != "confirmation" and t.rate > 0]
    given_up = [t for t in wide if t.state == "failed" or attempts(wide, t) > AGAIN]
    return [t for t in wide if (t.measured or t in given_up) and not refuted(trials, t.point)]


def attempts(trials: Sequence[Trial], like: Trial) -> int:
    return sum((t.point, t.rate) == (like.point, like.rate) for t in trials)


def refuted(trials: Sequence[Trial], point: Point) -> bool:
    """Whether cold starts of a point have held nothing: as many steps as one makes, or a start that failed."""
    cold = [t for t in trials if t.origin == "confirmation" and t.point == point]
    if any(t.state == "met" for t in cold):
        return False
    return sum(t.measured for t in cold) >= MOST_STEPS or any(t.state == "failed" for t in cold)


def champion(trials: Sequence[Trial]) -> tuple[dict[str, Scalar], Bracket] | None:
    """The point that held the rate that is worth most, the earliest of equals; None before the first measurement."""
    return max(brackets(trials), key=lambda found: found[1].worth, default=None)


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """The trials at the rate that the best point did not hold."""
    best = champion(trials)
    return [t for t in live(trials) if best and t.rate == best[1].lost]


def next_ask(run: Run, trials: list[Trial], restart: Point) -> Ask | None:
    """The defaults, then the best point's own bracket, then challengers at the rate that it lost."""
    first = trial.target_rate(run.recipe)
    busy = [(claim.point, claim.rate) for claim in run.study.others()]
    if not trials:
        point = dict(run.space.defaults)
        why = "the engine's defaults, imitated on the wide server"
        return Ask(Proposal(point, why, "defaults"), first, to_show(run, None, first)) if (point, first) not in busy else None
    here = [t for t in trials if spaces.restart_part(t.point, run.space) == restart and t.origin != "confirmation"]
    best = champion(trials)
    if (again := once_more(here, busy)) is not None:
        return replace(again, goodput=to_show(run, best[1] if best else None, again.rate))
    if best is None:
        return None
    point, found = best
    rate = capacity.next_rate(found, first) if spaces.restart_part(point, run.space) == restart else None
    if rate is not None and (point, rate) not in busy:
        why = f"it holds {found}" if found.held else "a lower rate"
        return Ask(Proposal(point, why, origin(trials, point)), rate, to_show(run, found, rate))
    challenger = next_challenger(run, trials, here, point, restart) if math.isfinite(found.lost) else None
    return Ask(challenger, found.lost, to_show(run, found, found.lost)) if challenger else None


def once_more(here: Sequence[Trial], busy: Sequence[tuple[Point, float]]) -> Ask | None:
    """A point at a rate again, whose last trial was no measurement."""
    for i, last in enumerate(here):
        done = any((t.point, t.rate) == (last.point, last.rate) for t in here[i + 1 :])
        if last.state == "invalid" and not done and attempts(here, last) <= AGAIN and (last.point, last.rate) not in busy:
            return Ask(Proposal(last.point, f"once more: {last.reason}", last.origin), last.rate)
    return None


def next_challenger(run: Run, trials: list[Trial], here: list[Trial], best: Point, restart: Point) -> Proposal | None:
    """A point that may hold what the best one did not: what the rules name, then the sampler's; None when too many did not."""
    busy = under_way(run)
    seen = [*(t.point for t in here), *busy]
    if (another := from_another(run, restart, seen)) is not None:
        return another
    if not here:
        point = {**run.space.defaults, **spaces.live_part(best, run.space), **restart}
        if point not in busy:
            return Proposal(point, "the best point, started anew", "restart")
    failed = failures_since(trials)
    lost = [t for t in frontier(trials) if t in here]
    ruled = propose.by_rule([t.tried() for t in lost], run.space, seen=seen) if failed < 2 * PATIENCE else None
    if start_first(run, min(lost, key=lambda t: t.score, default=None), frontier(trials), ruled):
        return None
    if ruled is not None:
        return ruled
    sampled = [t for t in trials[len(trials) - failed :] if t.origin == "sampler"]
    return run.study.sample(restart) if len(sampled) < PATIENCE else None


def failures_since(trials: Sequence[Trial]) -> int:
    """How many trials have ended since the best point last held a rate, the best point's own not counted as failures."""
    best = champion(trials)
    last = max((i for i, t in enumerate(trials) if best and t.point == best[0]), default=-1)
    return len(trials) - 1 - last


def origin(trials: Sequence[Trial], point: Point) -> str:
    return next(t.origin for t in trials if t.point == point)
