"""The end of a search: the winner after cold starts with plain flags and fresh prompts, and the defaults beside it if asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from fenno.errors import EngineError, LoadError
from fenno.tune import arms, capacity, climb, propose, quality, trial
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.arms import Arm
from fenno.tune.bench import Seat
from fenno.tune.capacity import Bracket, Maximize, Most
from fenno.tune.claims import Claim
from fenno.tune.quality import Comparison
from fenno.tune.run import AGAIN, Run, measured, meet
from fenno.tune.space import Point, Space
from fenno.tune.study import Trial
from fenno.tune.verdict import Verdict

Of = TypeVar("Of")
Confirm = Literal["quick", "full", "off"]
# How many cold starts each of them makes.
STARTS: dict[Confirm, int] = {"off": 0, "quick": 1, "full": 4}

BETWEEN = "the time budget ended between the cold starts; the same command goes on with them"


def tune(run: Run, *, confirm: Confirm = "quick", arm: Arm | None = None) -> Verdict:
    """Search until there is a verdict, then confirm it. `arm`: what the search is compared with, in its place. The verdict of one
    worker ends the search of all. Raises `EngineError` when no engine starts."""
    with run.study.present():
        verdict = concluded(run, confirm, arm)
        # Where nothing can be said, others may come further.
        if verdict.over and (verdict.outcome != "inconclusive" or not run.study.others()):
            run.study.settle(verdicts.dumps(verdict))
        told = run.study.settled()
    return verdicts.loads(told) if told else verdict


def concluded(run: Run, confirm: Confirm, arm: Arm | None) -> Verdict:
    """The verdict of this worker's search, and of the cold starts that it made; of no worth where another has settled it."""
    refuted, full = False, confirm == "full"
    while True:
        done = [] if refuted else unfinished(run.study.trials())
        found = begun(run, full, done) if run.maximize and done else None
        found = found or look(run, STARTS[confirm], arm)
        to_confirm = found.outcome == "met" and confirm != "off" and arm != "defaults"
        if not to_confirm or found.trial is None or run.study.settled():
            return found
        if run.time_left() < run.bench.start_seconds:
            return verdicts.cut_short(run.study.trials(), "the targets were met live, and no time was left for a cold start")
        with run.study.claimed(Claim("confirmation"), 0) as mine:
            if mine:
                # Under `full` the time is for the four cold starts; a search for the most climbs again for every point.
                winner = found.trial if full or run.maximize else spared(run, found.trial)
                verify = confirmed_rate if run.maximize else confirmed
                verdict = verify(run, winner, full=full, done=done if winner is found.trial else [winner])
                if verdict.outcome == "met":
                    # Before anybody else can think of a cold start.
                    run.study.settle(verdicts.dumps(verdict))
        if not mine:
            run.bide()
            continue
        if verdict.outcome == "met" or not run.time_for_a_start():
            return verdict
        # A cold start that does not bear out what was seen live sends the search on while there is time.
        refuted = True
        run.events.say(f"{verdict.sentence.partition(';')[0]}; the search goes on")


def spared(run: Run, winner: Trial) -> Trial:
    """The winner without those flags of the start that bring nothing. Each that no two trials show to bring something is put back
    once, where time is left for the winner's cold start after it: by a cold start, which is the confirmation where it meets the
    targets at its first look."""
    for knob in spaces.restart_part(winner.point, run.space):
        trials, point = run.study.trials(), spaces.without(winner.point, knob, run.space)
        known = any(t.point == point for t in trials) or brings(winner, knob, trials, run.space)
        if known or not run.time_for_a_start(run.reserve(1)):
            continue
        run.events.say(f"{knob} has not been seen to bring anything: the cold start begins without it")
        ended = cold_trial(run, replace(winner, point=point), again=0)
        winner = ended if ended.state == "met" else winner
    return winner


def brings(winner: Trial, knob: str, trials: Sequence[Trial], space: Space) -> bool:
    """Whether two trials, alike but for the winner's change of `knob`, show that it is for the better."""
    last = verdicts.latest(trials)
    changed = [t for t in last if t.point.get(knob) == winner.point[knob]]
    pairs = [(a, b) for b in changed for a in last if a.point == spaces.without(b.point, knob, space)]
    return any(propose.improving([a.score, b.score], patience=1) or (b.state == "met" and a.state != "met") for a, b in pairs)


def look(run: Run, starts: int, arm: Arm | None) -> Verdict:
    """The verdict before cold `starts`: of the search, or of an arm."""
    if arm:
        # The defaults are measured after a cold start as it is.
        return arms.survey(run, arm, starts=0 if arm == "defaults" else starts)
    return climb.climb(run, starts) if run.maximize else meet(run)


def blocks(run: Run, winner: Trial, full: bool, defaults_rate: float | None = None) -> list[Trial]:
    """The cold starts to make. `full`: defaults, winner, winner, defaults, so that drift favours neither."""
    defaults = replace(winner, point=dict(run.space.defaults), rate=defaults_rate or winner.rate)
    return [defaults, winner, winner, defaults] if full and winner.point != run.space.defaults else [winner]


def begun(run: Run, full: bool, done: Sequence[Trial]) -> Verdict | None:
    """The verdict of a search for the largest rate that was over when the run was interrupted, in its cold starts `done`."""
    found = climb.crowned(run)
    if found.outcome != "met" or found.trial is None:
        return None
    return found if kept(blocks(run, found.trial, full, defaults_rate(run, found.trial)), done) else None


def kept(wanted: Sequence[Trial], done: Sequence[Trial]) -> list[list[Trial]]:
    """The cold starts among `done` that need not be made again, each with its trials: all, if they are those that come first."""
    starts = [list(trials) for _, trials in itertools.groupby(done, key=lambda t: t.cold)]
    same = [trials[0].point for trials in starts] == [block.point for block in wanted[: len(starts)]]
    return starts if same and all(t.measured for t in done) else []


def unfinished(trials: Sequence[Trial]) -> list[Trial]:
    """The cold starts with which an interrupted run ended, in their order."""
    return [*itertools.takewhile(lambda t: t.origin == "confirmation", reversed(trials))][::-1]


def confirmed(run: Run, winner: Trial, *, full: bool, done: Sequence[Trial] = ()) -> Verdict:
    """The winner at the target rate: the verdict that counts. `full`: beside it the defaults, cold too.

    `done`: cold starts that were made already; those of these points count if they are those that come first.
    """
    wanted = blocks(run, winner, full)
    # Among them may be cold starts that were to spare a flag.
    of_these = [t for t in done if t.point in [block.point for block in wanted]]
    made = [trial for start in kept(wanted, of_these) for trial in start]
    ended = [*made, *cold_starts(run, wanted[len(made) :], cold_trial)]
    if len(ended) < len(wanted):
        return verdicts.cut_short(run.study.trials(), BETWEEN)
    mine = [t for t in ended if t.point == winner.point]
    failed = next((t for t in mine if t.state != "met"), None)
    if failed is not None:
        reason = failed.reason or "; ".join(f.sentence() for f in verdicts.findings(failed) if f.state != "met")
        return verdicts.inconclusive(run.study.trials(), f"the targets were met live but not after a cold start ({reason})")
    found = verdicts.met(mine[-1], run.space, confirmed=True)
    against = [f.sentence() for t in ended if t.point != winner.point for f in verdicts.findings(t)[:1]]
    return replace(found, sentence=found.sentence + (f"; the defaults, cold as well: {'; '.join(against)}" if against else ""))


def cold_starts(run: Run, wanted: Sequence[Trial], start: Callable[[Run, Trial], Of]) -> list[Of]:
    """What came of each cold start of `wanted`; of all but the first only as far as the time allows."""
    ended: list[Of] = []
    for block in wanted:
        if ended and run.time_left() < run.bench.start_seconds:
            break
        ended.append(start(run, block))
    return ended


def cold_trial(run: Run, which: Trial, again: int = AGAIN) -> Trial:
    """One cold start of a point with plain flags, measured at its rate; `again` as of `settled`."""
    run.events.say(f"confirming after a cold start: {spaces.show(spaces.changed(which.point, run.space))}")
    which = replace(which, cold=next_cold(run))
    try:
        with run.bench.plain(which.point) as seat:
            outputs = compared_outputs(run, seat, which.point)
            return other_outputs(run, which, outputs) or settled(run, seat, which, outputs, again=again)
    except (EngineError, LoadError) as error:
        return failed_cold(run, which, error)


def compared_outputs(run: Run, seat: Seat, point: Point) -> Comparison | None:
    """The outputs of an engine after a cold start against those of the defaults; None where they cannot be compared."""
    defaults, folder = point == run.space.defaults, run.study.folder
    reference = quality.kept(folder)
    if not reference and not defaults:
        return None
    try:
        mine = seat.answers()
    except LoadError as error:
        run.events.say(f"outputs are not compared: {error}")
        return None
    if defaults:
        quality.keep(folder, "cold", mine)
        return quality.UNCHANGED
    named = sorted(quality.CHANGES_OUTPUTS.intersection(spaces.changed(point, run.space)))
    found = quality.compare(reference, mine, named)
    run.events.say(found.sentence)
    return found


def other_outputs(run: Run, which: Trial, outputs: Comparison | None) -> Trial | None:
    """A failed trial for settings that change what the model says, and that nobody asked for by name: however fast, no winner."""
    return failed(run, which, f"outputs: {outputs.sentence}", outputs) if outputs and outputs.state == "moved" else None


def started(run: Run, which: Trial) -> Trial:
    """The same, outputs not compared. Raises `EngineError` and `LoadError` for an engine that does not start, or dies."""
    with run.bench.plain(which.point) as seat:
        return settled(run, seat, which)


def confirmed_rate(run: Run, winner: Trial, *, full: bool, done: Sequence[Trial] = ()) -> Verdict:
    """The winner's capacity, each cold start from the largest rate held live up or down. `full`: and the defaults' capacity.

    `done` as of `confirmed`; the last of them is made again if it had not come to its end.
    """
    wanted = blocks(run, winner, full, defaults_rate(run, winner))
    made = kept(wanted, done)
    if made and next_cold_rate(made[-1], made[-1][0].rate) is not None:
        made.pop()
    ended = [*made, *cold_starts(run, wanted[len(made) :], cold_climb)]
    if len(ended) < len(wanted):
        return verdicts.cut_short(run.study.trials(), BETWEEN)
    paired = [*zip(wanted, ended, strict=True)]
    mine, theirs = ([found for block, found in paired if (block.point == winner.point) is ours] for ours in (True, False))
    held = within(mine)
    best = min((t for found in mine for t in found if t.state == "met" and t.rate == held.held), key=climb.worth, default=None)
    if best is None:
        why = next((f" ({t.reason})" for found in mine for t in found if t.reason), "")
        said = f"{winner.rate:.3g} requests/s were held live but not after a cold start{why}"
        return verdicts.inconclusive(run.study.trials(), said)
    note = f"; {against(shown(run, mine), shown(run, theirs))}" if theirs else ""
    return verdicts.held(best, run.space, held, run.maximize or "qps", confirmed=True, note=note)


def defaults_rate(run: Run, winner: Trial) -> float:
    """The largest rate that the defaults held live, else the one they lost, else the winner's."""
    found = next((b for point, b in climb.brackets(run.study.trials()) if point == run.space.defaults), Bracket())
    return found.held or min(found.lost, winner.rate)


def cold_climb(run: Run, which: Trial) -> list[Trial]:
    """The trials of one cold start, around the rate that `which` held live."""
    run.events.say(
        f"confirming after a cold start, from {which.rate:.3g} requests/s: {spaces.show(spaces.changed(which.point, run.space))}"
    )
    ended: list[Trial] = []
    which = replace(which, cold=next_cold(run))
    try:
        with run.bench.plain(which.point) as seat:
            outputs = compared_outputs(run, seat, which.point)
            if (failed := other_outputs(run, which, outputs)) is not None:
                return [failed]
            while (rate := next_cold_rate(ended, which.rate)) is not None:
                if run.time_left() < trial.seconds_needed(run.recipe.with_targets(qps=rate)):
                    break
                ended.append(settled(run, seat, replace(which, rate=rate), outputs, climb.to_show(run, steps(ended), rate)))
    except (EngineError, LoadError) as error:
        ended.append(failed_cold(run, which, error))
    return ended


def next_cold_rate(ended: Sequence[Trial], first: float) -> float | None:
    """The rate to try next after one cold start; None when it has said what it can of the point's capacity."""
    if len(ended) >= climb.MOST_STEPS:
        return None
    return capacity.next_rate(steps(ended), first, step=1 + capacity.PRECISION)


def steps(ended: Sequence[Trial]) -> Bracket:
    """What one cold start says of a point's capacity; what was no measurement says nothing."""
    return capacity.bracket((t.rate, climb.worth(t)) for t in ended if t.state != "invalid")


def failed_cold(run: Run, which: Trial, error: EngineError | LoadError) -> Trial:
    """A cold start that ended in an error, kept as what it is."""
    return failed(run, which, f"{getattr(error, 'stage', 'load')}: {error}")


def failed(run: Run, which: Trial, reason: str, outputs: Comparison | None = None) -> Trial:
    """A cold start without a measurement, kept with its reason."""
    ended = replace(cold(run, which), state="failed", score=float("inf"), reason=reason, judgement={}, summary={}, limit=None)
    ended = with_outputs(ended, outputs)
    run.study.add(ended)
    run.events.done(ended)
    return ended


def next_cold(run: Run) -> int:
    return 1 + max((t.cold for t in run.study.trials()), default=0)


def cold(run: Run, which: Trial) -> Trial:
    """`which` as the next trial of the study, after a cold start."""
    return replace(which, number=len(run.study.trials()), origin="confirmation", why="cold start, plain flags, fresh prompts")


def with_outputs(trial: Trial, outputs: Comparison | None) -> Trial:
    """`trial` with the comparison of its outputs in its summary."""
    return replace(trial, summary={**trial.summary, "outputs": outputs.as_dict()}) if outputs else trial


def settled(
    run: Run, seat: Seat, which: Trial, outputs: Comparison | None = None, goodput: float | None = None, again: int = AGAIN
) -> Trial:
    """`which` measured on a plain engine: again while it was no measurement, and for longer while it was too close to call.

    `goodput`: what is to be shown in a search for the largest: close to the best so far is no more than that. `again`: how many
    times at most.
    """
    blank = cold(run, which)
    seat.move({})
    finished = measured(run, seat, blank, f"confirmation-{blank.number}", goodput=goodput)
    patience, needed = 1, trial.seconds_needed(run.recipe.with_targets(qps=which.rate or None))
    for attempt in range(again):
        # What is too close to call takes longer; what was no measurement only has to be repeated.
        patience *= 2 if finished.state == "unclear" else 1
        open_ = [f.target for f in verdicts.findings(finished) if finished.state == "unclear" and f.state != "met"]
        decided = finished.state in ("met", "missed") or (goodput is not None and "goodput" in open_)
        if decided or run.time_left() < patience * needed:
            break
        run.events.say(f"once more: {finished.reason or 'too close to call'}")
        finished = measured(run, seat, blank, f"confirmation-{blank.number}-again-{attempt}", patience, goodput)
    finished = with_outputs(finished, outputs)
    run.study.add(finished)
    run.events.done(finished)
    return finished


def within(starts: Sequence[Sequence[Trial]]) -> Bracket:
    """What every cold start held, and what none did."""
    found = [steps(ended) for ended in starts if ended]
    return Bracket(min((b.held for b in found), default=0.0), max((b.lost for b in found), default=float("inf")))


def shown(run: Run, starts: Sequence[Sequence[Trial]]) -> Most:
    """What was maximised, as every cold start has shown it: the least of it, from the least end to the greatest. Tokens are as many
    as the rate gives, so a gain in one is a gain in the other."""
    of: Maximize = "goodput" if run.maximize == "goodput" else "qps"
    best = [(steps(ended), max(ended, key=climb.worth)) for ended in starts if ended]
    each = [verdicts.most(of, found, trial if found.worth else None) for found, trial in best]
    return Most(of, min(m.value for m in each), min(m.low for m in each), max(m.high for m in each))


def against(mine: Most, defaults: Most) -> str:
    """The gain over the defaults in words."""
    if not defaults.value:
        return f"the defaults, cold as well, hold {defaults}"
    rate, least, most = (f"{100 * share:+.0f} %" for share in capacity.gain(mine, defaults))
    return f"the defaults, cold as well, hold {defaults}: {rate} ({least} to {most})"
