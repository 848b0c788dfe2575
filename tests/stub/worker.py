"""One worker of a study on a replayed engine, as a process: `python worker.py '{"folder": ..., "seed": 4, "storage": ...}'`.

Every finished trial is noted in `folder`/noted once it is kept, and the verdict is printed. With `company` the first trial begins
only when another worker is there and claims something of that kind, so that none is over before the other has begun.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "tuner"))

import score
import surfaces
from stub.waiting import until

from fenno.recipe import Recipe
from fenno.tune import confirm
from fenno.tune.capacity import Maximize
from fenno.tune.run import Run
from fenno.tune.space import Point
from fenno.tune.study import Study, Trial
from fenno.tune.trial import Measured
from fenno.tune.verdict import Verdict


class Slow(surfaces.Replayed):
    """A replayed engine whose trials take some real time, too."""

    study: Study
    company: str | None = None

    @contextlib.contextmanager
    def wide(self, restart: Point) -> Iterator[surfaces.Seat]:
        self.clock += surfaces.START
        yield SlowSeat(self)

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[surfaces.Seat]:
        self.clock += surfaces.START
        yield SlowSeat(self, dict(point))

    def sleep(self, seconds: float) -> None:
        time.sleep(0.02)

    def met(self) -> bool:
        there = [claim.kind for claim in self.study.others()]
        return self.company in there or any(t.worker != self.study.worker for t in self.study.trials())


@dataclass
class SlowSeat(surfaces.Seat):
    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        bench = cast(Slow, self.bench)
        if bench.company:
            until(bench.met, 120)
            bench.company = None
        time.sleep(0.02)
        return super().measure(recipe, arm=arm, seed=seed, patience=patience)


class Noting(Study):
    """A study that notes what it has kept."""

    def add(self, trial: Trial) -> None:
        super().add(trial)
        with (self.folder / "noted").open("a") as file:
            print(json.dumps([trial.point, trial.rate, trial.score]), file=file, flush=True)


def work(
    folder: str,
    seed: int,
    storage: str | None = None,
    company: str | None = None,
    budget: float = 3600.0,
    ease: float = 1.0,
    beat: float = 10.0,
    maximize: Maximize | None = None,
    **options: Any,
) -> tuple[Verdict, Study]:
    """A whole search on a surface, its target multiplied by `ease`; `options` as for `confirm.tune`."""
    of = surfaces.surface(seed)
    of = replace(of, target=ease * of.target)
    where = surfaces.space(of.family)
    study = Noting(Path(folder), where, seed, storage, "shared" if storage else None, beat)
    bench = Slow(of, random.Random(f"{seed}/{Path(folder).name}"))
    bench.study, bench.company = study, company
    run = Run(surfaces.recipe(of), where, study, seed, budget, cast(Any, score.Silent()), bench, maximize=maximize)
    return confirm.tune(run, **options), study


def noted(folder: Path) -> list[list[Any]]:
    """What a worker has noted; a line that its death cut off is none."""
    path = folder / "noted"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    found, mine = work(**json.loads(sys.argv[1]))
    print(json.dumps({"outcome": found.outcome, "sentence": found.sentence, "worker": mine.worker}))
