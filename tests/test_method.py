"""The method of `fenno tune` on surfaces whose truth is known; benchmarks/tuner/score.py scores it on hundreds of them."""

import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fenno.errors import EngineError
from fenno.recipe import Recipe
from fenno.tune import again, arms, climb, confirm, session
from fenno.tune import verdict as telling
from fenno.tune.capacity import Maximize
from fenno.tune.judge import Figure, Finding, Judgement
from fenno.tune.propose import Limit, Load
from fenno.tune.run import Run, ablation, met_live, next_point, next_start, put_back
from fenno.tune.space import AGING, BUDGET, CAP, POLICY, STREAM, Point, Space
from fenno.tune.study import State, Study, Trial
from fenno.tune.trial import Measured
from fenno.tune.verdict import Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "tuner"))

import score
import surfaces

pytestmark = pytest.mark.scenario


@pytest.fixture(scope="module")
def verdicts() -> list[score.Score]:
    return [score.score(surfaces.surface(seed), None) for seed in range(12)]


def test_what_is_said_to_be_met_is_met(verdicts: list[score.Score]) -> None:
    assert [s.seed for s in verdicts if s.false_met] == []


def test_most_verdicts_are_right_and_none_is_the_opposite_of_the_truth(verdicts: list[score.Score]) -> None:
    assert sum(s.right for s in verdicts) >= 11
    assert [s.seed for s in verdicts if s.verdict == ("infeasible" if s.feasible else "met")] == []
    assert {s.feasible for s in verdicts} == {True, False}, "a test of one answer would be none"


@pytest.mark.parametrize(("seed", "maximize"), [(1, "qps"), (7, "qps"), (1, "goodput"), (6, "goodput")])
def test_the_most_is_found_near_the_best_point(seed: int, maximize: Maximize) -> None:
    found = score.score(surfaces.surface(seed), maximize)
    assert found.verdict == "met"
    assert found.capacity > 0.9
    assert found.seconds < score.BUDGET_SECONDS + 60


def test_the_goodput_of_a_study_is_told_confirmed_and_measured_again_as_its_recipe_says(tmp_path: Path) -> None:
    verdict, trials = study_on(7, tmp_path / "found", maximize="goodput", full=True)
    best, most = verdict.trial, verdict.most
    assert verdict.outcome == "met" and best and most and best.origin == "confirmation"
    assert most.of == "goodput" and 0 < most.low <= most.value <= most.high <= best.rate
    assert verdict.sentence.startswith(f"holds {most} of {best.rate:.3g} that are sent with ")
    assert "; the defaults, cold as well, hold a goodput of " in verdict.sentence
    assert verdict.sentence.count("goodput") == 2, "what a trial had to show is the search's own affair"
    assert telling.loads(json.loads(json.dumps(telling.dumps(verdict)))).most == most
    shown = [figure.value for t in trials if t.state == "met" and not t.cold and (figure := telling.figure(t, "goodput"))]
    assert shown == sorted(shown), "each has to show more than the best so far"
    of = surfaces.surface(7)
    recipe = surfaces.recipe(of).with_targets(**telling.held_again(verdict))
    bench, where = surfaces.Replayed(of, random.Random(7)), surfaces.space(of.family)
    where = replace(where, defaults=best.point)
    study = Study(tmp_path / "again", where, 7)
    seen = again.once(Run(recipe, where, study, 7, 900.0, cast(Any, score.Silent()), bench), held=True)
    assert seen.sentence.startswith("it still holds: goodput ") and "p95_ttft" not in seen.sentence


def test_the_most_tokens_are_those_of_the_largest_rate(tmp_path: Path) -> None:
    rate, of_rate = study_on(1, tmp_path / "rate", maximize="qps")
    tokens, of_tokens = study_on(1, tmp_path / "tokens", maximize="tokens")
    assert [(t.point, t.rate, t.state) for t in of_rate] == [(t.point, t.rate, t.state) for t in of_tokens]
    assert rate.most and tokens.most and tokens.trial and tokens.capacity
    each = tokens.trial.summary["output_tokens"] / tokens.trial.summary["requests"]
    assert (tokens.most.value, tokens.most.high) == (rate.most.value * each, rate.most.high * each)
    assert tokens.sentence.startswith(f"holds {tokens.most} ({tokens.capacity}) with ") and " output tokens/s (" in tokens.sentence


def test_a_change_that_brings_nothing_is_put_back() -> None:
    where = Space({BUDGET: (512, 2048), CAP: (8, 64), POLICY: ("fcfs",)}, {BUDGET: 2048, CAP: 64, POLICY: "fcfs"})
    tried = [
        told({BUDGET: 2048, CAP: 64, POLICY: "fcfs"}, "missed"),
        told({BUDGET: 512, CAP: 8, POLICY: "fcfs"}, "met"),
    ]
    run = Run(surfaces.recipe(surfaces.surface(1)), where, cast(Any, None), 1, 0.0, cast(Any, None), cast(Any, None))
    asked = ablation(run, tried, tried[1], {})
    assert asked and asked.point == {BUDGET: 2048, CAP: 8, POLICY: "fcfs"} and "with max_num_scheduled_tokens put back" in asked.why
    tried.append(told(asked.point, "met"))
    winner = met_live(tried, where)
    assert winner and winner.point == asked.point
    assert ablation(run, tried, winner, {}) is None, "one change alone brings all"
    assert ablation(run, tried[:2], tried[1], {"block-size": 64}) is None, "under other flags of the start"


def test_an_order_is_put_back_with_its_parameters_and_is_drawn_without_them_where_it_is_off(tmp_path: Path) -> None:
    where = Space({POLICY: ("fcfs", "token_aware"), AGING: (1.0, 5.0)}, {POLICY: "fcfs", AGING: 5.0})
    winner = told({POLICY: "token_aware", AGING: 1.0}, "met")
    assert put_back(winner, where, {}) == [where.defaults, {POLICY: "token_aware", AGING: 5.0}]
    study = Study(tmp_path, where, 1)
    drawn = []
    while (proposal := study.sample({})) is not None:
        study.add(told(proposal.point, "missed"))
        drawn.append(proposal.point)
    assert len(drawn) == 3 and {POLICY: "fcfs", AGING: 1.0} not in drawn, "of four points two are one"
    assert len([*arms.points(where, "grid", 1)]) == 3


def test_where_the_http_server_binds_no_live_knob_is_tried_before_the_start_that_may_help(tmp_path: Path) -> None:
    live, flag = {CAP: (8, 64), POLICY: ("fcfs", "token_aware")}, "api-server-count"
    where = Space(live, {CAP: 64, POLICY: "fcfs", flag: 1}, {flag: (4,)})
    study = Study(tmp_path, where, 1)
    run = Run(surfaces.recipe(surfaces.surface(1)), where, study, 1, 900.0, cast(Any, None), cast(Any, None))
    study.add(replace(told(dict(where.defaults), "met"), rate=60.0))
    study.add(replace(told(dict(where.defaults), "missed"), number=1, rate=64.0, limit=Limit("compute", "steps take long")))
    assert (asked := climb.next_ask(run, study.trials(), {})) and asked.proposal.point[CAP] == 8
    study.add(replace(told(dict(where.defaults), "missed"), number=2, rate=63.0, score=9.0, limit=Limit("front end", "")))
    assert climb.next_ask(run, study.trials(), {}) is None
    assert (start := next_start(run, climb.frontier(study.trials()))) and start.point[flag] == 4
    asked = climb.next_ask(run, study.trials(), {flag: 4})
    assert asked and asked.rate == 63.0 and asked.proposal.point == {**where.defaults, flag: 4}


@pytest.mark.parametrize("maximize", [None, "qps"])
def test_where_the_http_server_binds_a_larger_stream_interval_comes_before_the_start_that_may_help(
    tmp_path: Path, maximize: Maximize | None
) -> None:
    live, flag = {CAP: (8, 64), STREAM: (1, 8)}, "api-server-count"
    where = Space(live, {CAP: 64, STREAM: 1, flag: 1}, {flag: (4,)})
    study = Study(tmp_path, where, 1)
    run = Run(surfaces.recipe(surfaces.surface(1)), where, study, 1, 900.0, cast(Any, None), cast(Any, None))
    study.add(replace(told(dict(where.defaults), "met"), rate=60.0))
    study.add(replace(told(dict(where.defaults), "missed"), number=1, rate=63.0, limit=Limit("front end", "")))

    def asked() -> dict[str, Any] | None:
        trials = study.trials()
        found = climb.next_ask(run, trials, {}) if maximize else next_point(run, trials, {})
        return dict((found.proposal if isinstance(found, climb.Ask) else found).point) if found else None

    assert asked() == {**where.defaults, STREAM: 8}
    study.add(replace(told({**where.defaults, STREAM: 8}, "missed"), number=2, rate=63.0, limit=Limit("front end", "")))
    assert asked() is None, "fewer requests come after the start"


@pytest.mark.parametrize("maximize", [None, "qps"])
def test_another_studys_best_point_comes_after_the_defaults_also_where_it_needs_a_start(
    tmp_path: Path, maximize: Maximize | None
) -> None:
    flag = "api-server-count"
    where = Space({CAP: (8, 32, 64)}, {CAP: 64, flag: 1}, {flag: (2, 4)})
    study = Study(tmp_path, where, 1)
    first = {CAP: 32, flag: 4}
    run = Run(surfaces.recipe(surfaces.surface(1)), where, study, 1, 900.0, cast(Any, None), cast(Any, None), first)
    study.add(replace(told(dict(where.defaults), "met"), rate=32.0))
    study.add(replace(told(dict(where.defaults), "missed"), number=1, rate=34.0, limit=Limit("compute", "steps take long")))

    def asked(restart: dict[str, Any]) -> dict[str, Any] | None:
        trials = study.trials()
        found = climb.next_ask(run, trials, restart) if maximize else next_point(run, trials, restart)
        return dict((found.proposal if isinstance(found, climb.Ask) else found).point) if found else None

    assert asked({}) is None, "it needs another start"
    assert (start := next_start(run, study.trials())) and start.point == first
    assert asked({flag: 4}) == first
    study.add(replace(told(first, "missed"), number=2, rate=34.0, limit=Limit("compute", "")))
    assert (start := next_start(run, study.trials())) and start.point[flag] == 2
    run.first = {CAP: 8, flag: 1}
    assert asked({}) == run.first


def told(point: dict[str, Any], state: State) -> Trial:
    return Trial(0, point, "rule", "", state, 1.0, 1.0)


def test_a_surface_is_as_its_arithmetic_says() -> None:
    of = surfaces.surface(1)
    point = surfaces.points(surfaces.space(of.family))[0]
    held, capacity = of.held(point), of.capacity(point)
    assert 0 < capacity < held
    assert of.p95(point, 0.98 * capacity) < of.target < of.p95(point, 1.02 * capacity)
    assert of.p95(point, 1.01 * held) == float("inf")


class Faulty(surfaces.Replayed):
    """A bench on which something goes wrong: at a point, at a cold start, or with every measurement."""

    deadly: object = None
    cold_fails = cold_misses = blind = False
    cold_takes = 0.0
    cold_starts, most_cold_starts = 0, 100

    @contextlib.contextmanager
    def wide(self, restart: Point) -> Iterator[surfaces.Seat]:
        self.clock += self.start_seconds
        yield FaultySeat(self)

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[surfaces.Seat]:
        if self.cold_fails:
            raise EngineError("it did not start", "see the log", stage="start")
        if self.cold_starts == self.most_cold_starts:
            raise KeyboardInterrupt
        self.cold_starts += 1
        self.clock += self.start_seconds + self.cold_takes
        yield FaultySeat(self, dict(point))


class FaultySeat(surfaces.Seat):
    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        bench = cast(Faulty, self.bench)
        if bench.deadly is not None and self.point[CAP] == bench.deadly:
            bench.clock += 5.0
            raise EngineError("the engine ended", "see the log", stage="load")
        found = super().measure(recipe, arm=arm, seed=seed, patience=patience)
        missed = bench.cold_misses and arm.startswith("confirmation")
        judgement = replace(found.judgement, state="missed") if missed else found.judgement
        return replace(found, judgement=judgement, valid=not bench.blind)


def study_on(
    seed: int, folder: Path, *, maximize: Maximize | None = None, full: bool = False, **faults: Any
) -> tuple[Verdict, list[Trial]]:
    of = surfaces.surface(seed)
    bench = Faulty(of, random.Random(seed))
    for name, value in faults.items():
        setattr(bench, name, value)
    where = surfaces.space(of.family)
    study = Study(folder, where, seed)
    recipe, budget = session.aimed(surfaces.recipe(of), maximize), 1800.0 if full else 900.0
    run = Run(recipe, where, study, seed, budget, cast(Any, score.Silent()), bench, maximize=maximize)
    return confirm.tune(run, confirm="full" if full else "quick"), study.trials()


# A surface on which the defaults are not enough, so that there is a search.
SEARCHED = 4


class Flagged(surfaces.Replayed):
    """A bench without anything to turn live: an engine's score is told by the flags of the start that it has, and by the rate."""

    scores: dict[str, float]

    @contextlib.contextmanager
    def wide(self, restart: Point) -> Iterator[surfaces.Seat]:
        yield FlaggedSeat(self, dict(restart))

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[surfaces.Seat]:
        yield FlaggedSeat(self, dict(point))


class FlaggedSeat(surfaces.Seat):
    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        bench = cast(Flagged, self.bench)
        bench.clock += 40.0 * patience
        score_ = bench.scores[flags_of(self.point)] * (recipe.targets.qps or 0) / bench.surface.rate
        state: Any = "met" if score_ <= 1 else "unclear" if score_ < 1.1 else "missed"
        finding = Finding("p95_ttft", 0.8, Figure(0.8 * score_), state, score_)
        return Measured(Judgement(state, (finding,)), {}, Load(), True, 40.0 * patience)


class NothingToDraw(Study):
    """A study that knows at once what its sampler finds out by many attempts: its space has one live point."""

    def sample(self, restart: Point | None, attempts: int = 0) -> None:
        return None


def flags_of(point: Point) -> str:
    """The flags of the start that a point has, by their first letters."""
    return "".join(flag[0] for flag in ("one", "two") if point.get(flag))


def flagged(folder: Path, scores: dict[str, float], budget: float, maximize: Maximize | None = None) -> Run:
    of = surfaces.surface(1)
    bench = Flagged(of, random.Random(1))
    bench.scores = scores
    where = Space({CAP: (64,)}, {CAP: 64, "one": None, "two": None}, {"one": (1,), "two": (1,)})
    study, silent = NothingToDraw(folder, where, 1), cast(Any, score.Silent())
    return Run(surfaces.recipe(of), where, study, 1, budget, silent, bench, maximize=maximize)


def cold_flags(run: Run) -> list[str]:
    """The flags of every cold trial, in their order."""
    return [flags_of(t.point) for t in run.study.trials() if t.origin == "confirmation"]


@pytest.mark.parametrize(
    ("scores", "cold", "budget"),
    [
        # By flags of the start: the score without, with the one, the other, both. What is cold in its order, the last the winner.
        ({"": 2.0, "o": 1.98, "t": 0.9, "ot": 0.9}, ["t"], 900.0),
        ({"": 2.0, "o": 1.98, "t": 1.5, "ot": 0.9}, ["t", "ot"], 900.0),
        ({"": 2.0, "o": 1.5, "t": 0.9, "ot": 0.9}, ["ot"], 900.0),
        ({"": 2.0, "o": 1.98, "t": 0.9, "ot": 0.9}, ["ot"], 200.0),
        ({"": 2.0, "o": 0.9, "t": 0.9, "ot": 0.9}, ["o"], 900.0),
    ],
)
def test_a_flag_of_the_start_that_brought_nothing_is_put_back_by_the_cold_start_that_confirms(
    tmp_path: Path, scores: dict[str, float], cold: list[str], budget: float
) -> None:
    run = flagged(tmp_path, scores, budget)
    verdict, trials = confirm.tune(run), run.study.trials()
    assert cold_flags(run) == cold and verdict.outcome == "met" and verdict.trial == trials[-1]
    assert verdict.sentence.endswith("confirmed after a cold start with plain flags")
    assert confirm.tune(run).sentence == verdict.sentence and run.study.trials() == trials, "nothing is made again"


def test_a_full_confirmation_has_the_time_for_itself_and_spares_no_flag(tmp_path: Path) -> None:
    run = flagged(tmp_path, {"": 2.0, "o": 1.98, "t": 1.5, "ot": 0.9}, 300.0)
    verdict = confirm.tune(run, confirm="full")
    assert cold_flags(run) == ["", "ot", "ot", ""] and verdict.outcome == "met"


def test_a_search_for_the_largest_rate_spares_no_flag_of_its_winner_by_a_cold_start(tmp_path: Path) -> None:
    run = flagged(tmp_path, {"": 2.0, "o": 1.98, "t": 0.9, "ot": 0.9}, 9000.0, maximize="qps")
    verdict = confirm.tune(run)
    assert {*cold_flags(run)} == {"ot"} and verdict.outcome == "met"
    assert run.time_for_a_start(run.reserve(1)), "there was time for it"


def test_a_flag_stays_whose_cold_start_without_it_is_unclear_at_its_only_look(tmp_path: Path) -> None:
    run = flagged(tmp_path, {"": 2.0, "o": 1.98, "t": 1.05, "ot": 0.9}, 600.0)
    verdict = confirm.tune(run)
    assert cold_flags(run) == ["t", "ot"] and verdict.outcome == "met"
    assert [t.seconds for t in run.study.trials() if t.origin == "confirmation"] == [40.0, 40.0]
    assert run.time_left() > 0


def test_a_flag_is_not_spared_by_a_start_that_was_tried_already(tmp_path: Path) -> None:
    run = flagged(tmp_path, {"": 2.0, "o": 0.9, "t": 0.9, "ot": 0.9}, 900.0)
    tried: list[Point] = [{CAP: 64, "one": 1, "two": None}, {CAP: 64, "one": None, "two": 1}]
    for number, point in enumerate(tried):
        run.study.add(replace(told(point, "failed"), number=number))
    winner = told({CAP: 64, "one": 1, "two": 1}, "met")
    assert confirm.spared(run, winner) is winner and cold_flags(run) == []


def test_a_confirmed_winner_is_not_started_again_after_a_flag_that_could_not_be_spared(tmp_path: Path) -> None:
    """Killed before its verdict: the cold start that confirmed comes before one that missed."""
    run = flagged(tmp_path, {"": 2.0, "o": 0.9, "t": 0.9, "ot": 0.9}, 900.0)
    live = replace(told({CAP: 64, "one": 1, "two": 1}, "met"), rate=1.0)
    met, missed = (replace(live, origin="confirmation", cold=n) for n in (1, 2))
    winner = replace(met, point={**live.point, "two": None})
    other = replace(missed, point={**live.point, "one": None}, state="missed")
    verdict = confirm.confirmed(run, winner, full=False, done=[winner, other])
    assert verdict.outcome == "met" and cold_flags(run) == []


@pytest.mark.parametrize("maximize", [None, "qps", "goodput"])
def test_a_setting_that_kills_the_engine_is_tried_once_and_the_search_goes_on(tmp_path: Path, maximize: Maximize | None) -> None:
    verdict, trials = study_on(SEARCHED, tmp_path, maximize=maximize, deadly=64)
    killed = [t for t in trials if t.point[CAP] == 64]
    assert killed and all(t.state == "failed" for t in killed)
    assert len({str(t.point) for t in killed}) == len(killed), "none of them twice"
    assert any(t.measured for t in trials)
    assert verdict.trial is None or verdict.trial.point[CAP] != 64


@pytest.mark.parametrize("maximize", [None, "qps", "goodput"])
def test_a_cold_start_that_fails_is_a_trial_and_no_end(tmp_path: Path, maximize: Maximize | None) -> None:
    verdict, trials = study_on(1, tmp_path, maximize=maximize, cold_fails=True)
    assert verdict.outcome == "inconclusive"
    failed = Counter(str(t.point) for t in trials if t.origin == "confirmation" and t.state == "failed")
    assert failed and max(failed.values()) <= 4, "nor is it tried for ever"


def test_cold_starts_that_refute_what_was_seen_live_send_the_search_on_while_there_is_time(tmp_path: Path) -> None:
    """Not for ever: no point is looked at live more than a few times."""
    runs = [study_on(1, tmp_path / str(number), cold_misses=True, cold_takes=takes) for number, takes in enumerate((0.0, 300.0))]
    starts = [sum(t.origin == "confirmation" for t in trials) for _, trials in runs]
    assert starts[0] > 3 > starts[1] > 0
    assert {verdict.outcome for verdict, _ in runs} == {"inconclusive"}


@pytest.mark.parametrize("maximize", [None, "qps", "goodput"])
def test_a_client_that_is_always_too_slow_ends_the_search_soon(tmp_path: Path, maximize: Maximize | None) -> None:
    verdict, trials = study_on(1, tmp_path, maximize=maximize, blind=True)
    assert verdict.outcome == "inconclusive"
    assert max(Counter((str(t.point), t.rate) for t in trials).values()) <= 4


@pytest.mark.parametrize("maximize", [None, "qps", "goodput"])
def test_a_full_confirmation_ends_with_its_time_and_the_next_run_makes_what_is_left(
    tmp_path: Path, maximize: Maximize | None
) -> None:
    verdict, trials = study_on(7, tmp_path, maximize=maximize, full=True, cold_takes=700.0)
    assert not verdict.over and "between the cold starts" in verdict.sentence
    made = max(t.cold for t in trials)
    assert 1 <= made < 4
    again, after = study_on(7, tmp_path, maximize=maximize, full=True)
    assert again.over and max(t.cold for t in after) >= 4 and after[: len(trials)] == trials


@pytest.mark.parametrize("made", [0, 1, 2, 3])
def test_a_full_confirmation_that_was_interrupted_is_gone_on_with(tmp_path: Path, made: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        study_on(7, tmp_path, full=True, most_cold_starts=made)
    verdict, trials = study_on(7, tmp_path, full=True, most_cold_starts=4 - made)
    assert verdict.outcome == "met" and "the defaults, cold as well: " in verdict.sentence
    cold = [t.point for t in trials if t.origin == "confirmation"]
    defaults, winner = trials[0].point, trials[1].point
    assert cold == [defaults, winner, winner, defaults] and defaults != winner


@pytest.mark.parametrize("made", [0, 1, 2, 3])
def test_a_full_confirmation_of_the_largest_rate_is_gone_on_with_where_it_was(tmp_path: Path, made: int) -> None:
    whole, _ = study_on(7, tmp_path / "whole", maximize="qps", full=True)
    with pytest.raises(KeyboardInterrupt):
        study_on(7, tmp_path / "cut", maximize="qps", full=True, most_cold_starts=made)
    verdict, trials = study_on(7, tmp_path / "cut", maximize="qps", full=True, most_cold_starts=4 - made)
    cold = [t for t in trials if t.origin == "confirmation"]
    assert [*dict.fromkeys(t.cold for t in cold)] == [1, 2, 3, 4]
    points = [next(t.point for t in cold if t.cold == start) for start in (1, 2, 3, 4)]
    assert points[0] == points[3] == trials[0].point and points[1] == points[2] == whole.trial.point  # type: ignore[union-attr]
    assert verdict.outcome == "met" and "the defaults, cold as well, hold " in verdict.sentence


def test_a_confirmation_that_only_lacked_its_verdict_is_not_made_again(tmp_path: Path) -> None:
    first, trials = study_on(1, tmp_path)
    again, after = study_on(1, tmp_path, most_cold_starts=0)
    assert (again.outcome, again.sentence, after) == ("met", first.sentence, trials)


def test_cold_starts_of_another_winner_are_no_part_of_a_confirmation(tmp_path: Path) -> None:
    _, trials = study_on(7, tmp_path, full=True)
    kept = confirm.unfinished(trials)
    assert [t.number for t in kept] == [2, 3, 4, 5]
    assert confirm.unfinished([*trials, replace(trials[0], number=6)]) == []
    of = surfaces.surface(7)
    bench, where = Faulty(of, random.Random(7)), surfaces.space(of.family)
    run = Run(surfaces.recipe(of), where, Study(tmp_path, where, 7), 7, 1800.0, cast(Any, score.Silent()), bench)
    other = replace(trials[1], point={**trials[1].point, POLICY: "token_aware"})
    assert other.point != trials[1].point
    confirm.confirmed(run, other, full=True, done=kept)
    assert bench.cold_starts == 4
