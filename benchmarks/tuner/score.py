"""Score the method of `fenno tune` on surfaces.

python benchmarks/tuner/score.py [--surfaces 200] [--maximize [qps|goodput]] [--control random|grid|tpe|defaults] [--minutes 15]

Prints one JSON document. What it says is about the search alone; no engine runs, and no latency in it is a measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import optuna
from surfaces import Replayed, Surface, points, recipe, space, surface

from fenno.tune import confirm, session
from fenno.tune.arms import Arm
from fenno.tune.capacity import Maximize
from fenno.tune.run import Run
from fenno.tune.space import Point
from fenno.tune.study import Study, Trial

BUDGET_SECONDS = 15 * 60.0


class Silent:
    def say(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def watch(self, share: float, text: str) -> None: ...
    def done(self, trial: Trial) -> None: ...


@dataclass(frozen=True)
class Score:
    """One surface: the verdict, whether it is right, the chosen point's true capacity as a share of the best point's."""

    seed: int
    feasible: bool
    verdict: str
    right: bool
    false_met: bool
    capacity: float  # what was maximised: of goodput, at the rate that was chosen
    trials: int
    seconds: float


def score(
    of: Surface, maximize: Maximize | None, arm: Arm | None = None, verbose: bool = False, budget: float = BUDGET_SECONDS
) -> Score:
    """Run one whole study on a surface; `budget` in seconds of the model's clock."""
    where, bench = space(of.family), Replayed(of, random.Random(f"replay/{of.seed}"))
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder), where, of.seed, storage=cast(Any, optuna.storages.InMemoryStorage()))
        events = cast(Any, Loud() if verbose else Silent())
        run = Run(session.aimed(recipe(of), maximize), where, study, of.seed, budget, events, bench, maximize=maximize)
        verdict = confirm.tune(run, arm=arm)
    chosen = verdict.trial.point if verdict.trial else where.defaults
    met = verdict.outcome == "met"
    best = max(most(of, p, maximize) for p in points(where)) if maximize else 0.0
    # When the largest rate is asked for, a surface is infeasible where nothing worth the name is held.
    possible = best > of.rate / 16 if maximize else of.feasible
    lied = met and (of.p95(chosen, of.rate) > of.target if not maximize else False)
    found = of.goodput(chosen, verdict.trial.rate) if maximize == "goodput" and verdict.trial else of.capacity(chosen)
    share = found / best if maximize and best else 0.0
    expected = "met" if possible else "infeasible"
    return Score(
        of.seed, of.feasible, verdict.outcome, verdict.outcome == expected and not lied, lied, share, bench.trials, bench.clock
    )


def most(of: Surface, point: Point, maximize: Maximize) -> float:
    """The most that a point truly gives of what is maximised."""
    if maximize != "goodput":
        return of.capacity(point)
    return max(of.goodput(point, of.held(point) * share / 200) for share in range(1, 200))


class Loud(Silent):
    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def done(self, trial: Trial) -> None:
        print(
            "   ",
            trial.state,
            trial.judgement.get("notes"),
            [f["figure"] for f in trial.judgement["findings"]][:1],
            file=sys.stderr,
        )


def summary(scores: list[Score]) -> dict[str, Any]:
    return {
        "surfaces": len(scores),
        "feasible": sum(s.feasible for s in scores),
        "right": sum(s.right for s in scores) / len(scores),
        "false_met": sum(s.false_met for s in scores) / len(scores),
        "capacity_median": statistics.median([s.capacity for s in scores if s.verdict == "met"] or [0.0]),
        "capacity_least": min([s.capacity for s in scores if s.verdict == "met"] or [0.0]),
        "trials_median": statistics.median(s.trials for s in scores),
        "minutes_median": statistics.median(s.seconds for s in scores) / 60,
        "wrong": [{"seed": s.seed, "feasible": s.feasible, "verdict": s.verdict} for s in scores if not s.right],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--surfaces", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--maximize", nargs="?", const="qps", choices=("qps", "goodput"))
    parser.add_argument("--control", choices=("defaults", "random", "grid", "tpe"))
    parser.add_argument("--minutes", type=float, default=BUDGET_SECONDS / 60, help="the budget of each study, of the model's clock")
    parser.add_argument("-v", dest="verbose", action="store_true")
    asked = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seeds = range(asked.first, asked.first + asked.surfaces)
    options = {"arm": asked.control, "verbose": asked.verbose, "budget": 60 * asked.minutes}
    print(json.dumps(summary([score(surface(s), asked.maximize, **options) for s in seeds]), indent=1))


if __name__ == "__main__":
    main()
