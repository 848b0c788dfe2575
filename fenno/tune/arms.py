"""What a search is compared with: `fenno tune --control defaults|random|grid|tpe`.

Every point gets a start of its own with plain flags, as tuners need one that cannot change a running server. Space, time, trials
and judge are the search's, and so is the confirmation of what was found.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from fenno.errors import EngineError
from fenno.recipe import Scalar
from fenno.tune import capacity, climb, trial
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.bench import Seat
from fenno.tune.capacity import Bracket
from fenno.tune.claims import Claim
from fenno.tune.propose import Proposal
from fenno.tune.run import (
    MOST_DEATHS,
    Run,
    exhausted,
    failed_start,
    met_live,
    once_more,
    one_trial,
    remember_outputs,
    under_way,
)
from fenno.tune.space import Space
from fenno.tune.study import Trial
from fenno.tune.verdict import Verdict

Arm = Literal["defaults", "random", "grid", "tpe"]
WHY = {
    "defaults": "the engine's defaults",
    "random": "drawn by lot",
    "grid": "the next of the grid",
    "tpe": "the choice of Optuna's TPE sampler",
}


def points(space: Space, arm: Arm, seed: int) -> Iterator[dict[str, Scalar]]:
    """The points of an arm in their order, each once: the defaults, then those by lot, or the last knob's values first. Those of a
    sampler follow from what was measured: `next_point`."""
    yield dict(space.defaults)
    if arm in ("defaults", "tpe"):
        return
    # What differs from the default is listed for flags of the start, every value for live knobs.
    values = space.listed
    count = math.prod(len(listed) for listed in values.values())
    for index in random.Random(seed).sample(range(count), count) if arm == "random" else range(count):
        point = dict(space.defaults)
        for knob, listed in reversed(values.items()):
            index, place = divmod(index, len(listed))
            point[knob] = listed[place]
        # Where an order is off its parameters change nothing: of such points one is enough.
        if point != space.defaults and spaces.legal(point) and spaces.canonical(point, space) == point:
            yield point


def survey(run: Run, arm: Arm, *, starts: int = 0) -> Verdict:
    """One start after the other until the targets are met or the time is over; where something is maximised, until what is left of
    the time is needed for so many more `starts`. Points of an earlier run count. Raises `EngineError` when the first engines do not
    start."""
    reserve = run.reserve(starts) if run.maximize else 0.0
    while not run.study.settled():
        trials = run.study.trials()
        if not run.maximize and met_live(trials, run.space):
            break
        point = next_point(run, arm, trials)
        if point is None:
            if run.time_for_a_start(reserve) and run.bide():
                continue
            break
        if trials and not run.time_for_a_start(reserve):
            return over(run, arm, cut_short=True)
        why = WHY["defaults" if point == run.space.defaults else arm]
        with run.study.claimed(Claim("start", point), len(trials)) as mine:
            if mine:
                measure_start(run, Proposal(point, why, "control"), reserve)
    return over(run, arm)


def next_point(run: Run, arm: Arm, trials: Sequence[Trial]) -> dict[str, Scalar] | None:
    """The next point of an arm that nobody has measured, or measures now; None when there is none."""
    gone = [*(t.point for t in trials), *under_way(run)]
    listed = next((p for p in points(run.space, arm, run.seed) if p not in gone), None)
    drawn = run.study.sample(None) if listed is None and arm == "tpe" else None
    return drawn.point if drawn else listed


def measure_start(run: Run, proposal: Proposal, reserve: float) -> None:
    """One cold start of a point, and its trials. One that fails is a failed trial; the first ones that fail are the end."""
    run.events.say(f"starting with plain flags: {spaces.show(spaces.changed(proposal.point, run.space))} ({proposal.why})")
    try:
        with run.bench.plain(proposal.point) as seat:
            if proposal.point == run.space.defaults:
                remember_outputs(run, seat, "cold")
            climbed(run, seat, proposal, reserve) if run.maximize else tried(run, seat, proposal)
    except EngineError as error:
        run.events.say(f"{error}")
        if error.stage == "start":
            failed_start(run, proposal, error)
        trials = run.study.trials()
        if len(trials) >= MOST_DEATHS and not any(t.measured for t in trials):
            raise


def tried(run: Run, seat: Seat, proposal: Proposal) -> None:
    """Trials at the target rate: one, and again where that was no measurement."""
    wanted: Proposal | None = proposal
    while wanted:
        trials = run.study.trials()
        run.study.add(one_trial(run, seat, wanted, len(trials)))
        wanted = once_more([t for t in run.study.trials() if t.point == proposal.point])
        if run.time_left() < trial.seconds_needed(run.recipe):
            return


def climbed(run: Run, seat: Seat, proposal: Proposal, reserve: float) -> None:
    """Trials around what a point holds, where it holds the rate that the best one so far did not."""
    while (rate := next_rate(run, proposal)) is not None:
        trials = run.study.trials()
        if trials and run.time_left() < reserve + trial.seconds_needed(run.recipe.with_targets(qps=rate)):
            return
        best = climb.champion(trials)
        run.study.add(one_trial(run, seat, proposal, len(trials), rate, climb.to_show(run, best[1] if best else None, rate)))


def next_rate(run: Run, proposal: Proposal) -> float | None:
    """The rate to try a point at: the one that the best point lost first, then those that narrow its own bracket."""
    trials = run.study.trials()
    first, best = trial.target_rate(run.recipe), climb.champion(trials)
    mine = next((found for point, found in climb.brackets(trials) if point == proposal.point), Bracket())
    if best is None or best[0] == proposal.point:
        return capacity.next_rate(mine, first)
    # A first trial that was no measurement is made again, as often as any.
    return best[1].lost if mine == Bracket() and math.isfinite(best[1].lost) else None


def over(run: Run, arm: Arm, cut_short: bool = False) -> Verdict:
    """The verdict on what was measured."""
    trials = run.study.trials()
    if run.maximize:
        return climb.crowned(run, cut_short)
    if (winner := met_live(trials, run.space)) is not None:
        return verdicts.met(winner, run.space, confirmed=arm == "defaults")
    if cut_short:
        return verdicts.cut_short(trials, "the time budget ended first; give a longer --budget")
    found = exhausted(trials)
    if arm == "defaults" and found.outcome == "infeasible":
        return verdicts.infeasible(trials, "the engine's defaults alone do not meet the targets")
    return found
