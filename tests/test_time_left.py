"""What `fenno tune` does with time that is left when the search has run dry."""

from pathlib import Path
from typing import Any, cast

import optuna

from fenno.recipe import Recipe
from fenno.tune import run as method
from fenno.tune.propose import Limit
from fenno.tune.run import Run
from fenno.tune.space import BUDGET, CAP, Space
from fenno.tune.study import Study, Trial

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
