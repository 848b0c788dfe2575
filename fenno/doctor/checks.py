"""All checks in the order in which they are run and shown: a cause stands before what it causes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fenno.doctor import driver, engine, environment, gpus, host, model, recipe, stack, topology
from fenno.doctor.check import Check, Finding, fail, skip
from fenno.doctor.facts import Facts
from fenno.errors import UsageError

CHECKS: tuple[Check, ...] = (
    *host.CHECKS,
    *driver.CHECKS,
    *gpus.CHECKS,
    *topology.CHECKS,
    *stack.CHECKS,
    *engine.CHECKS,
    *model.CHECKS,
    *recipe.CHECKS,
    *environment.CHECKS,
)


def select(only: Sequence[str], without: Sequence[str]) -> tuple[Check, ...]:
    """The checks that are asked for; an area's name ("gpu") means all of its checks. Raises `UsageError` for an unknown name."""
    for name in (*only, *without):
        known(name)
    return tuple(c for c in CHECKS if (not only or _named(c, only)) and not _named(c, without))


def known(name: str) -> tuple[Check, ...]:
    """The checks that a name stands for. Raises `UsageError` for none."""
    found = tuple(check for check in CHECKS if _named(check, [name]))
    if not found:
        near = difflib.get_close_matches(name, [check.id for check in CHECKS], n=1)
        raise UsageError(
            f"there is no check {name!r}" + (f"; did you mean {near[0]}?" if near else ""), "see `fenno doctor --list`"
        )
    return found


def _named(check: Check, names: Sequence[str]) -> bool:
    return any(name in (check.id, check.area) for name in names)


def run(chosen: Sequence[Check], facts: Facts) -> list[tuple[Check, Finding]]:
    """Judge each check on the facts. One that lacks a fact is skipped with the reason; one that breaks is a failure of its own."""
    return [(check, _judge(check, facts)) for check in chosen]


def _judge(check: Check, facts: Facts) -> Finding:
    for area in check.needs:
        if getattr(facts, area) is None:
            return skip(facts.missing.get(area, f"nothing is known of the {area}"))
    try:
        return check.judge(facts)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        return fail(
            f"the check itself broke: {type(error).__name__}: {error}", "tell us, with the output of `fenno doctor --report`"
        )
