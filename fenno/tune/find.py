"""`fenno loadtest --find-capacity`: the largest steady rate at which one engine, as it runs, meets its targets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno import errors
from fenno.engine import live
from fenno.engine.server import Server
from fenno.errors import EngineError, LoadError
from fenno.load.plan import Plan
from fenno.recipe import Recipe
from fenno.tune import capacity, trial
from fenno.tune.capacity import Bracket
from fenno.tune.trial import Measured

Glance = Callable[[float, str], None]

# A rate at which the client was too slow for its own numbers is tried so many times.
ATTEMPTS = 3


@dataclass(frozen=True)
class Step:
    """One rate in requests a second, and what was measured at it."""

    rate: float
    measured: Measured


@dataclass(frozen=True)
class Found:
    """The bracket that the steps give, and why it is no narrower, if it is not."""

    bracket: Bracket
    steps: list[Step]
    reason: str = ""

    @property
    def exit_code(self) -> int:
        if self.reason:
            return errors.INCONCLUSIVE
        if self.bracket.held:
            return errors.OK
        missed = any(step.measured.judgement.state == "missed" for step in self.steps)
        return errors.INFEASIBLE if missed else errors.INCONCLUSIVE


def find(
    recipe: Recipe,
    server: Server,
    base: Plan,
    folder: Path,
    *,
    first: float,
    step: float,
    deadline: float,
    say: Callable[[str], None],
    watch: Glance,
) -> Found:
    """Bracket the capacity of `server`: from `first` up or down by a factor of `step`, then halving the gap.

    `base`: the traffic, but for its rate and length; `deadline` on the monotonic clock. Raises as `trial.measure` does.
    """
    steps: list[Step] = []
    while (rate := capacity.next_rate(bracket(steps), first, step=step)) is not None:
        at = recipe.with_targets(qps=rate)
        if time.monotonic() + trial.seconds_needed(at) > deadline:
            return Found(bracket(steps), steps, "the time budget ended first; give a longer --budget")
        attempts = 1 + sum(step.rate == rate for step in steps)
        if attempts > ATTEMPTS:
            return Found(
                bracket(steps), steps, f"no valid measurement at {rate:.3g} requests/s: {steps[-1].measured.judgement.notes[-1]}"
            )
        number = len(steps)
        # What a rate that was too high has left in the queue would be the next one's.
        live.drain(server.url)
        arm = f"{base.arm}-{number}"
        plan = trial.at_rate(base, at, arm=arm, seed=base.seed + number)
        try:
            found = trial.measure(at, server, plan, folder / f"rate-{number}", watch)
        except (EngineError, LoadError) as error:
            return Found(bracket(steps), steps, f"at {rate:.3g} requests/s: {error}")
        steps.append(Step(rate, found))
        say(f"{rate:.3g} requests/s: {found.judgement.state if found.valid else 'invalid'}: {told(found)}")
    return Found(bracket(steps), steps)


def bracket(steps: list[Step]) -> Bracket:
    """Of the valid steps alone."""
    return capacity.bracket((s.rate, s.rate * (s.measured.judgement.state == "met")) for s in steps if s.measured.valid)


def told(found: Measured) -> str:
    """A step's findings, and its notes."""
    return "; ".join([*(finding.sentence() for finding in found.judgement.findings), *found.judgement.notes])


def document(found: Found, recipe: Recipe) -> dict[str, Any]:
    """The result for standard output. An open end is None."""
    return {
        "capacity": found.bracket.as_dict(),
        "sentence": f"holds {found.bracket}" + (f"; inconclusive: {found.reason}" if found.reason else ""),
        "exit_code": found.exit_code,
        "targets": recipe.targets.latencies(),
        "steps": [
            {"rate": step.rate, "valid": step.measured.valid, **step.measured.judgement.as_dict(), "load": step.measured.summary}
            for step in found.steps
        ],
    }
