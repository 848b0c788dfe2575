"""`fenno tune`: one wide start, live trials until the targets are met or cannot be, the winner confirmed after a cold start.

This module is the method, and reads as one; deciding is in `propose`, `judge` and `verdict`, measuring behind `bench`. The largest
rate is looked for in `climb`, and both end in `confirm`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fenno import machine
from fenno.engine import catalogue
from fenno.errors import EngineError, LoadError, UsageError
from fenno.load import figures
from fenno.recipe import Latency, Recipe, Scalar
from fenno.tune import bench as benches
from fenno.tune import propose, quality, trial
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.bench import Bench, Seat
from fenno.tune.capacity import Maximize
from fenno.tune.claims import Claim
from fenno.tune.judge import Judgement
from fenno.tune.propose import Limit, Load, Proposal, Roofline, Steps
from fenno.tune.space import Point, Space
from fenno.tune.study import Study, Trial
from fenno.tune.verdict import Verdict

# So many proposals of the sampler in a row that bring nothing end the search.
PATIENCE = 3
# Where time is left then, it goes on to so many under the flags of that start before the targets are called infeasible.
MOST_DRAWN = 12
# An engine that dies in one trial is started again for the next; one that goes on dying ends the run.
MOST_DEATHS = 3
# A client that was late once, on a host that others use too, is not late for ever.
AGAIN = 3
# Seconds between two looks at what other workers have found, where there is nothing else to do.
MOMENT = 2.0


class Events(benches.Events, Protocol):
    """What a run tells whoever watches."""

    def done(self, trial: Trial) -> None:
        """A trial has ended."""


# What a step of an engine at a point takes at least; None where nothing is known of its GPUs.
Reckon = Callable[[Steps, Point], Roofline | None]


@dataclass
class Run:
    """One `fenno tune`. `deadline` is on the bench's clock; `first`: another study's point, tried before what the rules name;
    `reckon`: the roofline of this host; `maximize`: what is to be as much as can be under the targets, None where they are all."""

    recipe: Recipe
    space: Space
    study: Study
    seed: int
    deadline: float
    events: Events
    bench: Bench
    first: Point | None = None
    reckon: Reckon = lambda steps, point: None
    maximize: Maximize | None = None

    def time_left(self) -> float:
        return self.deadline - self.bench.now()

    def reserve(self, starts: int) -> float:
        """Seconds that so many cold starts take at the end of a search for the largest rate."""
        return starts * (self.bench.start_seconds + 3 * trial.seconds_needed(self.recipe))

    def time_for_a_start(self, reserve: float = 0.0) -> bool:
        return self.time_left() >= reserve + self.bench.start_seconds + trial.seconds_needed(self.recipe)

    def bide(self) -> bool:
        """Whether other workers still do something: then a moment has passed, and what they find may give this one something to do.

        For one that has nothing. Of several that have nothing, none waits.
        """
        self.study.idle(True)
        if busy := [claim for claim in self.study.others() if claim.kind == "worker" and not claim.idle]:
            self.events.watch(0.0, f"nothing to do until others have measured ({len(busy)} at work)")
            self.bench.sleep(MOMENT)
        self.study.idle(False)
        return bool(busy)


# A search on one running engine, under some restart flags: a verdict, or None when there is none and nothing is left to try on it.
Live = Callable[["Run", Seat, Point], Verdict | None]
# Of all trials, those that tell what holds the best point back.
Telling = Callable[[list[Trial]], list[Trial]]


def search(run: Run, live: Live, telling: Telling, begin: Point) -> Verdict | None:
    """`live` on one engine after the other: a new one only where what binds needs a flag of the start, or one has died.

    `begin`: the flags of the first start. None when nothing is left to try. Raises `EngineError` when no engine starts.
    """
    restart, deaths = begin, 0
    while True:
        try:
            # Several may begin alike; any other start is made by one worker alone.
            with run.study.claimed(Claim("start", restart), 0) as mine:
                found = on_engine(run, live, restart) if mine or restart == begin else None
        except EngineError as error:
            deaths += error.stage != "start"
            trials = run.study.trials()
            if not _survivable(run, restart, error) or (deaths > MOST_DEATHS and not any(t.measured for t in trials)):
                raise
            if deaths > MOST_DEATHS:
                return verdicts.inconclusive(trials, f"the engine died {deaths} times, the last time so: {error}")
            found = None
            if error.stage != "start":
                continue
        proposal = next_start(run, telling(run.study.trials()))
        if found or run.study.settled():
            return found
        if proposal is None:
            if run.time_for_a_start() and run.bide():
                continue
            return None
        if not run.time_for_a_start():
            return verdicts.cut_short(run.study.trials(), "the time budget ended before another start; give a longer --budget")
        run.events.say(proposal.why)
        restart = spaces.restart_part(proposal.point, run.space)


def on_engine(run: Run, live: Live, restart: Point) -> Verdict | None:
    """`live` on one engine."""
    with run.bench.wide(restart) as seat:
        return live(run, seat, restart)


def _survivable(run: Run, restart: Point, error: EngineError) -> bool:
    """Whether the search can go on after `error`. Flags that an engine cannot start with are a failed trial, not the end."""
    run.events.say(f"{error}")
    if error.stage == "start" and restart:
        failed_start(run, Proposal({**run.space.defaults, **restart}, "a start with other flags", "restart"), error)
        return True
    return error.stage != "start"


def failed_start(run: Run, proposal: Proposal, error: EngineError) -> None:
    """Keep a point with which no engine starts as a failed trial."""
    number, point = len(run.study.trials()), dict(proposal.point)
    run.study.add(Trial(number, point, proposal.origin, proposal.why, "failed", float("inf"), 0.0, reason=str(error)))


def live_search(run: Run, seat: Seat, restart: Point) -> Verdict | None:
    """Trials until one meets every target, the defaults first; finished trials of an earlier run count."""
    if not run.study.trials():
        too_slow = floor(run, seat)
        if too_slow:
            return verdicts.infeasible(run.study.trials(), too_slow)
    while not run.study.settled():
        trials = run.study.trials()
        winner, busy = met_live(trials, run.space), under_way(run)
        proposal = ablation(run, trials, winner, restart, busy) if winner and run.time_for_a_start() else None
        if winner and proposal is None:
            if any(point in busy for point in put_back(winner, run.space, restart)) and run.bide():
                continue
            return verdicts.met(winner, run.space, confirmed=False)
        if not winner:
            if run.time_left() < trial.seconds_needed(run.recipe):
                return verdicts.cut_short(trials, "the time budget ended first; give a longer --budget")
            proposal = next_point(run, trials, restart)
        if proposal is None:
            if next_start(run, measured_ones(trials)) is None and run.bide():
                continue
            return None
        if trials and not restart:
            remember_outputs(run, seat, "wide")
        with run.study.claimed(Claim("trial", proposal.point, trial.target_rate(run.recipe)), len(trials)) as mine:
            if mine:
                run.study.add(one_trial(run, seat, proposal, len(trials)))
    return None


def met_live(trials: Sequence[Trial], space: Space) -> Trial | None:
    """The point that met every target when it was last measured: of several, the smallest change."""
    met = [t for t in verdicts.latest(trials) if t.state == "met"]
    return min(met, key=lambda t: len(spaces.changed(t.point, space)), default=None)


def ablation(run: Run, trials: Sequence[Trial], winner: Trial, restart: Point, busy: Sequence[Point] = ()) -> Proposal | None:
    """The winner with one of its changes put back, not tried yet, nor being tried (`busy`): what brings nothing is dropped."""
    tried = [*(t.point for t in trials), *busy]
    point = next((p for p in put_back(winner, run.space, restart) if p not in tried and spaces.legal(p)), None)
    knob = next((k for k in winner.point if point and point[k] != winner.point[k]), "")
    return Proposal(point, f"the winner with {knob} put back: does it still meet the targets?", "ablation") if point else None


def put_back(winner: Trial, space: Space, restart: Point) -> list[dict[str, Scalar]]:
    """The winner with each of its changes put back that this engine can; none where one change alone brings all."""
    changed = spaces.changed(winner.point, space)
    if len(changed) < 2 or spaces.restart_part(winner.point, space) != restart:
        return []
    return [spaces.without(winner.point, knob, space) for knob in changed if knob in space.values]


def meet(run: Run) -> Verdict:
    """Search until the targets are met, or nothing is left to try."""
    trials = run.study.trials()
    if (winner := met_live(trials, run.space)) is not None:
        return verdicts.met(winner, run.space, confirmed=False)
    return search(run, live_search, measured_ones, begin={}) or exhausted(run.study.trials())


def under_way(run: Run) -> list[Point]:
    """The points that other workers measure or start now."""
    return [claim.point for claim in run.study.others() if claim.kind in ("start", "trial")]


def measured_ones(trials: list[Trial]) -> list[Trial]:
    return [t for t in trials if t.measured]


def next_start(run: Run, telling: list[Trial]) -> Proposal | None:
    """The next engine to start: for another study's point, then by what held the best of `telling` back."""
    seen = [*(t.point for t in run.study.trials()), *under_way(run)]
    flags = spaces.restart_part(run.first or {}, run.space)
    if run.first and flags and flags not in [spaces.restart_part(point, run.space) for point in seen]:
        return Proposal(dict(run.first), f"another study's best start: {spaces.show(flags)}", "restart")
    return propose.next_restart([t.tried() for t in telling], run.space, seen, not_started(run.study.trials()))


def not_started(trials: Sequence[Trial]) -> list[Point]:
    """The points with which an engine did not come so far as to be offered any load (see `failed_start`)."""
    return [t.point for t in trials if t.state == "failed" and t.rate == 0]


def from_another(run: Run, restart: Point, seen: Sequence[Point]) -> Proposal | None:
    """Another study's point, where the engine under the flags of `restart` takes it and it is not among those `seen`."""
    if run.first is None or run.first in seen or spaces.restart_part(run.first, run.space) != restart:
        return None
    return Proposal(dict(run.first), "the best point of another study", "another study")


def next_point(run: Run, trials: list[Trial], restart: Point) -> Proposal | None:
    """The defaults, then what the rules name, then the sampler while it still finds better points; None when all is tried.

    Trials under other restart flags do not count here, except that the best of them is where this engine begins. What other workers
    measure now is as good as tried.
    """
    busy = under_way(run)
    if not trials and run.space.defaults not in busy:
        return Proposal(dict(run.space.defaults), "the engine's defaults, imitated on the wide server", "defaults")
    here = [t for t in trials if spaces.restart_part(t.point, run.space) == restart]
    seen = [*(t.point for t in here), *busy]
    if (another := from_another(run, restart, seen)) is not None:
        return another
    if not here:
        best = verdicts.nearest(trials)
        point = {**run.space.defaults, **spaces.live_part(best.point if best else {}, run.space), **restart}
        if point not in busy:
            return Proposal(point, "the best live point on a new start", "restart")
    again = once_more(here, busy)
    if again is not None:
        return again
    fruitful = propose.improving(_scores(here, "rule"), 2 * PATIENCE)
    ruled = propose.by_rule([t.tried() for t in verdicts.latest(here)], run.space, seen=seen) if fruitful else None
    if start_first(run, verdicts.nearest(here), measured_ones(trials), ruled):
        return None
    if ruled is not None:
        return ruled
    drawn = run.study.sample(restart) if propose.improving(_scores(here, "sampler"), PATIENCE) else None
    return drawn or closer_look(here, busy) or with_time_left(run, here, restart)


def start_first(run: Run, best: Trial | None, telling: list[Trial], ruled: Proposal | None) -> bool:
    """Whether the next start comes before more points of this engine: its `best` is held back by what nothing live reaches, or
    another study's point is due. `ruled`: what would come next here. `telling` as for `next_start`."""
    coming = next_start(run, telling)
    return coming is not None and (out_of_reach(best, ruled) or coming.point == run.first)


def out_of_reach(best: Trial | None, ruled: Proposal | None) -> bool:
    """Whether the best point is held back by its memory, or by the HTTP server: of live knobs the stream interval alone relieves
    that one, and it is not what is `ruled` to come next."""
    if best is None or best.limit is None or best.limit.name not in ("memory", "front end"):
        return False
    return best.limit.name == "memory" or ruled is None or spaces.in_bunches(ruled.point) <= spaces.in_bunches(best.point)


def once_more(here: Sequence[Trial], busy: Sequence[Point] = ()) -> Proposal | None:
    """A point again whose last trial was no measurement, or where all that is unclear is whether the load is held.

    It takes longer the second time: first uses of a kernel and a slowly filling queue need it. `busy`: points that others measure.
    """
    last_ones = [t for i, t in enumerate(here) if all(t.point != later.point for later in here[i + 1 :])]
    for last in last_ones:
        attempts = sum(t.point == last.point for t in here)
        if last.origin == "confirmation" or last.point in busy:
            continue
        # An engine that died of a point would die of it again.
        if last.state == "invalid" and attempts <= AGAIN:
            return Proposal(last.point, f"once more: {last.reason}", last.origin)
        if only_unsteady(last) and attempts == 1:
            return Proposal(last.point, "once more, for longer: " + "; ".join(last.judgement["notes"]), last.origin, 2)
    return None


def closer_look(here: Sequence[Trial], busy: Sequence[Point] = ()) -> Proposal | None:
    """The nearest point once more and for longer, of those that were too close to call, or met the targets live and not cold."""
    met = [t.point for t in here if t.state == "met"]
    doubtful = [t for t in verdicts.latest(here) if t.state == "unclear" or (t.point in met and not t.other_outputs)]
    tries = [sum(t.point == doubt.point and t.origin != "confirmation" for t in here) for doubt in doubtful]
    open_ones = [(t, count) for t, count in zip(doubtful, tries, strict=True) if count <= AGAIN and t.point not in busy]
    if not open_ones:
        return None
    best, count = min(open_ones, key=lambda one: (one[0].state != "unclear", one[0].score))
    return Proposal(best.point, "once more, for longer: it was too close to call", "closer look", 2**count)


def with_time_left(run: Run, here: Sequence[Trial], restart: Point) -> Proposal | None:
    """More points of the sampler's, where nothing else is left and no start may help: what is called infeasible rests on them too.

    Only while there is time for one, however long it takes, and for the cold start that would have to follow.
    """
    drawn = sum(t.origin == "sampler" for t in here)
    if drawn >= MOST_DRAWN or not run.time_for_a_start(reserve=trial.LOOKS * trial.seconds_needed(run.recipe)):
        return None
    if next_start(run, measured_ones(run.study.trials())):
        return None
    return run.study.sample(restart)


def only_unsteady(trial_: Trial) -> bool:
    """Whether all that is open is if the load is held: the queue had not levelled, and no latency was late."""
    return trial_.state == "unclear" and [f.target for f in verdicts.findings(trial_) if f.state != "met"] == ["qps"]


def _scores(trials: list[Trial], origin: str) -> list[float]:
    """Scores in the order of time, those of other origins merged into the first: what one origin has to beat."""
    others = [t.score for t in trials if t.measured and t.origin != origin]
    return [min(others, default=float("inf")), *(t.score for t in trials if t.measured and t.origin == origin)]


def exhausted(trials: list[Trial]) -> Verdict:
    """Nothing is left to try: infeasible when every point was plainly missed, else inconclusive."""
    if not any(t.measured for t in trials):
        return verdicts.inconclusive(trials, f"no trial could be measured: {trials[-1].reason if trials else 'none ran'}")
    last = verdicts.latest(trials)
    if any(t.origin == "confirmation" for t in last):
        return verdicts.inconclusive(trials, "the targets were met live but not after a cold start")
    unclear = [t for t in last if t.state == "unclear"]
    if unclear:
        return verdicts.inconclusive(trials, f"{len(unclear)} of {len(trials)} settings were too close to call")
    return verdicts.infeasible(trials, f"none of {len(trials)} settings met the targets, and the last ones brought nothing")


def one_trial(
    run: Run, seat: Seat, proposal: Proposal, number: int, rate: float | None = None, goodput: float | None = None
) -> Trial:
    """Set a point on the running engine and measure it. A failed trial is a value; the engine's death is told on as well.

    `rate` and `goodput`: requests a second, the recipe's targets unless given.
    """
    asked = trial.target_rate(run.recipe) if rate is None else rate
    at = "" if rate is None else f" at {rate:.3g} requests/s"
    run.events.say(f"trial {number}: {spaces.show(proposal.point)}{at} ({proposal.why})")
    started = run.bench.now()
    blank = Trial(number, dict(proposal.point), proposal.origin, proposal.why, "failed", float("inf"), 0.0, rate=asked)
    try:
        seat.move(spaces.live_part(proposal.point, run.space))
        finished = measured(run, seat, blank, arm=f"trial-{number}", patience=proposal.patience, goodput=goodput)
    except LoadError as error:
        finished = replace(blank, reason=str(error), seconds=run.bench.now() - started)
    except EngineError as error:
        finished = replace(blank, reason=f"{error.stage}: {error}", seconds=run.bench.now() - started)
        run.study.add(finished)
        run.events.done(finished)
        raise
    run.events.done(finished)
    return finished


def measured(run: Run, seat: Seat, blank: Trial, arm: str, patience: int = 1, goodput: float | None = None) -> Trial:
    """`blank` with what traffic at its rate gave, where `goodput` is to be shown, unless it is the recipe's own."""
    at = run.recipe.with_targets(qps=blank.rate, goodput=goodput) if run.recipe.targets.qps else run.recipe
    result = seat.measure(at, arm=arm, seed=run.seed + blank.number, patience=patience)
    return replace(
        blank,
        state=result.judgement.state if result.valid else "invalid",
        score=result.judgement.score,
        seconds=result.seconds,
        judgement=result.judgement.as_dict(),
        summary=result.summary,
        limit=out_of_memory(result.judgement) or diagnosed(run, result.load, blank.point),
        reason="" if result.valid else "; ".join(result.judgement.notes),
    )


def diagnosed(run: Run, load: Load, point: Point) -> Limit:
    """What holds a point back, by what this host's GPUs need for steps as they were seen."""
    return propose.diagnose(load, point, run.reckon(load.steps, point) if load.steps else None)


def out_of_memory(judgement: Judgement) -> Limit | None:
    """A memory target that is missed: whatever else holds a point back, no scheduler reaches that."""
    over = [f for f in judgement.findings if f.target in ("memory", "memory_share") and f.state == "missed"]
    return Limit("memory", over[0].sentence()) if over else None


def floor(run: Run, seat: Seat) -> str | None:
    """Why the latency targets cannot be met by anything: requests that have the engine to themselves are already too late."""
    wanted = allowances(run.recipe, run.maximize)
    if not wanted:
        return None
    alone = seat.alone()
    run.events.say(f"alone on the engine, a first token takes {1e3 * min(alone, default=0.0):.1f} ms at best")
    for name, limit, share in wanted:
        late = sum(seconds > limit for seconds in alone)
        if hopeless(late, len(alone), share):
            said = f"{late} of {len(alone)} requests were later, the median after {1e3 * statistics.median(alone):.1f} ms"
            return f"{name} is {1e3 * limit:g} ms, and alone on the engine {said}"
    return None


def allowances(recipe: Recipe, maximize: Maximize | None) -> list[tuple[str, float, float]]:
    """Every limit on first tokens: its name, seconds, and the share of all requests that may be later."""
    targets = recipe.targets
    limits = {name: limit for name, limit in targets.limits().items() if Latency.of(name).metric == "ttft"}
    if targets.goodput is None:
        return [(name, limit, 1 - Latency.of(name).percentile / 100) for name, limit in limits.items()]
    # A goodput of less than half of what is offered is none that is looked for.
    share = 0.5 if maximize == "goodput" else max(0.0, 1 - targets.goodput / trial.target_rate(recipe))
    return [(name, limit, share) for name, limit in figures.goodput_limits(limits).items()]


def hopeless(late: int, count: int, share: float) -> bool:
    """Whether `late` of `count` requests, eight or more, are too many for a target that lets a `share` of all be late: half of them
    at least, and so many only once in a hundred times by chance. The first uses of a kernel are fewer."""
    chance = sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(late, count + 1))
    return count >= 8 and 2 * late >= count and chance < 0.01


def remember_outputs(run: Run, seat: Seat, start: Literal["wide", "cold"]) -> None:
    """Keep what the defaults answer to fixed texts, for the comparison with the winner; once a study."""
    if quality.kept(run.study.folder):
        return
    try:
        seat.move(spaces.live_part(run.space.defaults, run.space))
        quality.keep(run.study.folder, start, seat.answers())
    except LoadError as error:
        run.events.say(f"outputs will not be compared: {error}")


def known_space(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> tuple[catalogue.Catalogue, Space]:
    """What the installed engine has, and the space on it; the recipe's flags are checked on the way."""
    if recipe.engine.url is not None:
        raise UsageError(
            "this recipe's engine is a URL: fenno cannot change it", "use `fenno loadtest`, or give the engine a `model`"
        )
    trial.check_workload(recipe.workload)
    known = catalogue.read(catalogue.interpreter(recipe.engine.python), say)
    known.check(recipe.engine.flags, recipe.name)
    return known, spaces.build(recipe, known, machine.available_cores())
