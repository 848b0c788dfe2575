"""What `fenno tune` does with time that is left when the search has run dry."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest

from fenno.recipe import Recipe
from fenno.tune import confirm
from fenno.tune import run as method
from fenno.tune.judge import Figure, judge
from fenno.tune.propose import Limit, Load
from fenno.tune.run import Run
from fenno.tune.space import BUDGET, CAP, Space
from fenno.tune.study import Study, Trial
from fenno.tune.trial import Measured

SPACE = Space({BUDGET: (256, 512, 1024, 2048), CAP: (8, 16, 32, 64)}, {BUDGET: 2048, CAP: 64})
RECIPE = Recipe.model_validate(
    {"name": "r", "engine": {"url": "http://127.0.0.1:1"}, "workload": {"rate": 20}, "targets": {"p95_ttft": "1s", "qps": 20}}
)


class Clock:
    """A bench on which time stands still."""

    start_seconds = 30.0

    def now(self) -> float:
        return 0.0


def run_on(folder: Path, seconds: float, space: Space = SPACE) -> Run:
    study = Study(folder, space, 1, storage=cast(Any, optuna.storages.InMemoryStorage()))
    return Run(RECIPE, space, study, 1, seconds, cast(Any, None), cast(Any, Clock()))


def tried(budget: int, cap: int, origin: str) -> Trial:
    return Trial(0, {BUDGET: budget, CAP: cap}, origin, "", "missed", 2.0, 1.0, limit=Limit("compute", ""))


def dry(count: int) -> list[Trial]:
    """The defaults, and so many points of the sampler that brought nothing."""
    points = [(b, c) for b in (256, 512, 1024, 2048) for c in (8, 16, 32, 64)][:count]
    return [tried(2048, 64, "defaults"), *(tried(*point, "sampler") for point in points)]


def test_a_search_that_has_run_dry_goes_on_to_points_not_seen_while_there_is_time(tmp_path: Path) -> None:
    run, here = run_on(tmp_path, 1800.0), dry(method.PATIENCE)
    for trial in here:
        run.study.add(trial)
    proposal = method.with_time_left(run, here, {})
    assert proposal and proposal.origin == "sampler" and proposal.point not in [t.point for t in here]
    assert method.with_time_left(run, dry(method.MOST_DRAWN), {}) is None, "as many as an infeasible rests on"


def test_it_does_not_where_no_cold_start_could_follow(tmp_path: Path) -> None:
    longest = method.trial.LOOKS * method.trial.seconds_needed(RECIPE)
    needed = longest + Clock.start_seconds + method.trial.seconds_needed(RECIPE)
    run = run_on(tmp_path, needed)
    assert method.with_time_left(run, dry(3), {})
    run.deadline = needed - 1
    assert method.with_time_left(run, dry(3), {}) is None


def test_a_start_with_other_flags_comes_first(tmp_path: Path) -> None:
    flag = "api-server-count"
    space = Space(SPACE.values, {**SPACE.defaults, flag: 1}, {flag: (4,)})
    run = run_on(tmp_path, 1800.0, space)
    run.study.add(Trial(0, {**SPACE.defaults, flag: 1}, "defaults", "", "missed", 2.0, 1.0, limit=Limit("compute", "")))
    assert method.with_time_left(run, run.study.trials(), {}) is None
    run.study.add(Trial(1, {**SPACE.defaults, flag: 4}, "restart", "", "missed", 2.0, 1.0, limit=Limit("compute", "")))
    assert method.with_time_left(run, run.study.trials()[1:], {flag: 4})


@pytest.mark.parametrize(("open_target", "measured"), [("availability", 2), ("memory_share", 2), ("goodput", 1)])
def test_a_cold_trial_that_is_too_close_to_call_is_repeated_unless_it_shows_no_more_goodput(
    tmp_path: Path, open_target: str, measured: int
) -> None:
    targets = RECIPE.with_targets(goodput=15, availability=0.99, memory="85%").targets
    clear = {"goodput": Figure(18.0, 17.0, 19.0), "availability": Figure(1.0), "memory_share": Figure(0.5), "qps": Figure(20.0)}
    unclear = {
        "goodput": Figure(15.0, 14.0, 16.0), "availability": Figure(0.98, 0.9, 1.0), "memory_share": Figure(0.85, 0.8, 0.9)
    }  # fmt: skip
    found = [judge(targets, {**clear, open_target: unclear[open_target]}, steady=True), judge(targets, clear, steady=True)]
    assert [each.state for each in found] == ["unclear", "met"]
    left = [Measured(each, {}, Load(), True, 1.0) for each in found]
    seat = SimpleNamespace(move=lambda point: None, measure=lambda *_, **__: left.pop(0))
    run = replace(run_on(tmp_path, 1e6), maximize="goodput")
    run.events = cast(Any, SimpleNamespace(say=lambda text: None, done=lambda trial: None))
    confirm.settled(run, cast(Any, seat), replace(tried(256, 8, "rule"), rate=20.0), goodput=15.0)
    assert 2 - len(left) == measured
