"""A tuned recipe measured again, as the confirmation of a study does it: `fenno study reproduce` once, `fenno tune --watch` every
so often.

What comes of it is a study too, without a search: every trial in it is a cold start of the recipe as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fenno.errors import EngineError, LoadError
from fenno.recipe import Recipe
from fenno.tune import confirm, session, trial
from fenno.tune import verdict as verdicts
from fenno.tune.run import Events, Run
from fenno.tune.session import Session
from fenno.tune.studies import Kept
from fenno.tune.study import Trial
from fenno.tune.verdict import Outcome, Verdict

GOAL = "again"
# Of what is known about a study, what says nothing about its figures.
_APART = ("date", "seed", "recipe", "recipe_digest", "host.gpu_note", "space")


def begin(recipe: Recipe, of: Kept | None, *, out: Path, budget: float, seed: int, events: Events) -> Session:
    """Open a study that measures `recipe` as it is. `of`: the study that made it, told of in the document as `of` and `then`,
    with what is different now as `differences`. Raises as `session.begin` does."""
    ready = session.ready(recipe, budget=budget, say=events.say)
    opened = session.begin(ready, out=out, seed=seed, fresh=True, events=events, goal=GOAL)
    if of is None:
        return opened
    then = {"of": str(of.folder), "then": of.document.get("figures"), "differences": differences(of.document, opened.document)}
    return replace(opened, document={**opened.document, **then})


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the host, the engine and fenno is not as it was: "engine.version was 0.24.0 and is 0.32.0"."""
    known, old = _flat(now), _flat(then)
    return [f"{name} was {old[name]} and is {value}" for name, value in known.items() if name in old and old[name] != value]


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a study's facts by their dotted names; of GPUs the names and drivers: the rest changes by the second."""
    found: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if name in _APART:
            continue
        if name == "host.gpus":
            found[name] = ", ".join(f"{gpu['name']} (driver {gpu['driver']})" for gpu in value) or "none"
        else:
            found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def once(run: Run, *, held: bool) -> Verdict:
    """One look; `held`: it is known to have held. Raises `EngineError` and `LoadError` when there is nothing to measure."""
    run.events.say("measuring the recipe as it is, after a cold start")
    return judged(confirm.started(run, as_it_is(run)), held)


def looks(run: Run, *, held: bool, every: float, budget: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[Verdict]:
    """A look every so many seconds from the beginning of one to that of the next, without end; each may take `budget` seconds.

    An engine that does not start the first time is the end (`EngineError`); later it is a look that saw nothing.
    """
    began = run.deadline - budget
    yield (seen := once(run, held=held))
    while True:
        held = held or seen.outcome == "met"
        sleep(max(0.0, began + every - run.bench.now()))
        began = run.bench.now()
        run.deadline = began + budget
        try:
            seen = once(run, held=held)
        except (EngineError, LoadError) as error:
            seen = judged(confirm.failed_cold(run, as_it_is(run), error), held)
        yield seen


def as_it_is(run: Run) -> Trial:
    """What to measure: the recipe's own settings at its target rate."""
    point, rate = dict(run.space.defaults), trial.target_rate(run.recipe)
    return Trial(0, point, "confirmation", "", "failed", float("inf"), 0.0, rate=rate)


_OUTCOMES: dict[str, tuple[Outcome, str, str]] = {
    "met": ("met", "it holds", "it still holds"),
    "missed": ("infeasible", "it does not hold", "it no longer holds"),
}


def judged(seen: Trial, held: bool) -> Verdict:
    """What one look says: the targets are met, or missed by these settings (infeasible, as they are), or neither is sure."""
    outcome, *said = _OUTCOMES.get(seen.state, ("inconclusive", "inconclusive", "inconclusive"))
    why = "; ".join(f.sentence() for f in verdicts.findings(seen)) if seen.measured else seen.reason
    return Verdict(outcome, f"{said[held]}: {why}", seen)


def summed(seen: Sequence[Verdict]) -> Verdict:
    """What a watch says in the end. One look at which it did not hold outweighs those at which it did, and those that saw nothing
    weigh nothing."""
    outcomes = [look.outcome for look in seen]
    order: tuple[Outcome, ...] = ("infeasible", "met", "inconclusive")
    weighty = min(outcomes, key=order.index)
    last = next(look for look in reversed(seen) if look.outcome == weighty)
    counts = {
        "held": outcomes.count("met"),
        "did not": outcomes.count("infeasible"),
        "said nothing": outcomes.count("inconclusive"),
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return replace(last, sentence=f"of {len(seen)} {'look' if len(seen) == 1 else 'looks'} {told}; {last.sentence}")
