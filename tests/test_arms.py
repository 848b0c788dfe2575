"""The points of the arms that a search is compared with, and whole arms on surfaces whose truth is known."""

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from fenno.tune import arms, confirm, session
from fenno.tune.arms import Arm
from fenno.tune.capacity import Maximize
from fenno.tune.run import Run
from fenno.tune.space import BUDGET, CAP, POLICY, Point, Space
from fenno.tune.study import Study, Trial
from fenno.tune.verdict import Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "tuner"))

import score
import surfaces

SPACE = Space(
    {BUDGET: (64, 512), CAP: (8, 128), POLICY: ("fcfs", "token_aware")},
    {BUDGET: 512, CAP: 128, POLICY: "fcfs", "stream-interval": 1},
    {"stream-interval": (4, 8)},
)


def test_a_grid_has_every_legal_point_once_and_the_defaults_first() -> None:
    found = list(arms.points(SPACE, "grid", seed=1))
    assert found[0] == SPACE.defaults
    assert len({str(point) for point in found}) == len(found) == (2 * 2 * 2 - 2) * 3, "64 tokens are too few for 128 sequences"
    assert {point["stream-interval"] for point in found} == {1, 4, 8}
    assert [point["stream-interval"] for point in found[1:4]] == [1, 4, 8], "the last knob's values first"
    assert all(list(point) == list(SPACE.defaults) for point in found)


def test_a_lot_draws_every_point_once_in_an_order_of_its_seed() -> None:
    grid, one, same, other = (
        [str(point) for point in arms.points(SPACE, arm, seed)]
        for arm, seed in (cast("tuple[Arm, int]", a) for a in (("grid", 1), ("random", 1), ("random", 1), ("random", 2)))
    )
    assert one == same != other and one != grid
    assert sorted(one) == sorted(grid) == sorted(other) and one[0] == other[0]


def test_the_defaults_alone_are_one_point() -> None:
    assert list(arms.points(SPACE, "defaults", seed=1)) == [SPACE.defaults]


class Counted(surfaces.Replayed):
    """A bench that notes what was started with plain flags, and refuses a wide start."""

    plainly: list[Point]

    def plain(self, point: Point) -> Any:
        self.plainly.append(point)
        return super().plain(point)

    def wide(self, restart: Point) -> Any:
        raise AssertionError("an arm has no wide engine")


def arm_on(
    seed: int, arm: Arm, folder: Path, *, maximize: Maximize | None = None, **options: Any
) -> tuple[Verdict, list[Trial], Counted]:
    of = surfaces.surface(seed)
    bench = Counted(of, random.Random(seed))
    bench.plainly = []
    where = surfaces.space(of.family)
    study = Study(folder, where, seed)
    recipe = session.aimed(surfaces.recipe(of), maximize)
    run = Run(recipe, where, study, seed, 900.0, cast(Any, score.Silent()), bench, maximize=maximize)
    return confirm.tune(run, arm=arm, **options), study.trials(), bench


def one_of(feasible: bool) -> int:
    """The first surface that can be met, or cannot, and whose defaults do not meet it."""
    for seed in range(100):
        of = surfaces.surface(seed)
        if of.feasible == feasible and of.p95(surfaces.space(of.family).defaults, of.rate) > 1.2 * of.target:
            return seed
    raise AssertionError("there is none")


@pytest.mark.scenario
@pytest.mark.parametrize("arm", ["random", "grid", "tpe"])
def test_an_arm_starts_every_point_anew_and_confirms_what_it_found(tmp_path: Path, arm: Arm) -> None:
    seed = one_of(feasible=True)
    verdict, trials, bench = arm_on(seed, arm, tmp_path)
    mine = [t for t in trials if t.origin == "control"]
    assert mine[0].point == surfaces.space(surfaces.surface(seed).family).defaults
    starts = Counter(str(point) for point in bench.plainly)
    assert sum(starts.values()) == len({str(t.point) for t in mine}) + sum(t.origin == "confirmation" for t in trials)
    if verdict.outcome == "met":
        assert verdict.trial and verdict.trial.origin == "confirmation" and "confirmed" in verdict.sentence
    assert bench.clock < 900 + 300


@pytest.mark.scenario
def test_the_defaults_arm_says_what_the_defaults_do_and_starts_once(tmp_path: Path) -> None:
    verdict, trials, bench = arm_on(one_of(feasible=True), "defaults", tmp_path, confirm="full")
    assert len(bench.plainly) == 1 and {t.origin for t in trials} == {"control"}
    assert verdict.outcome in ("infeasible", "inconclusive")
    if verdict.outcome == "infeasible":
        assert "the engine's defaults alone do not meet the targets" in verdict.sentence


@pytest.mark.scenario
@pytest.mark.parametrize("arm", ["defaults", "random"])
def test_the_largest_rate_of_an_arm_is_bracketed_on_each_start(tmp_path: Path, arm: Arm) -> None:
    seed = one_of(feasible=True)
    verdict, trials, bench = arm_on(seed, arm, tmp_path, maximize="qps", confirm="off")
    of = surfaces.surface(seed)
    assert verdict.outcome == "met" and verdict.capacity and verdict.trial
    assert verdict.capacity.held < 1.15 * of.capacity(verdict.trial.point)
    assert len(bench.plainly) == len({str(t.point) for t in trials}), "a start a point, whatever the number of its rates"
    if arm == "defaults":
        assert verdict.capacity.lost < 1.1 * verdict.capacity.held and len(trials) > 3


@pytest.mark.scenario
def test_the_goodput_of_the_defaults_alone_is_found_on_their_one_start(tmp_path: Path) -> None:
    verdict, trials, bench = arm_on(1, "defaults", tmp_path, maximize="goodput")
    of = surfaces.surface(1)
    assert verdict.most and verdict.most.of == "goodput" and verdict.trial and len(bench.plainly) == 1
    assert of.goodput(verdict.trial.point, verdict.trial.rate) > 0.8 * score.most(of, verdict.trial.point, "goodput")
    assert {t.origin for t in trials} == {"control"} and len(trials) > 3


@pytest.mark.scenario
def test_an_arm_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    seed = one_of(feasible=False)
    _, before, _ = arm_on(seed, "grid", tmp_path)
    _, after, bench = arm_on(seed, "grid", tmp_path)
    assert after[: len(before)] == before and len(after) > len(before)
    assert not {str(p) for p in bench.plainly} & {str(t.point) for t in before}
