"""The results in lines for people: causes with their fixes first to last, what is well in short, what was skipped by its reason."""

from __future__ import annotations

from collections.abc import Sequence

from fenno.doctor import topology
from fenno.doctor.check import Check, Finding
from fenno.doctor.document import Document, result
from fenno.doctor.facts import Facts

MARKS = {"pass": "ok  ", "warn": "warn", "fail": "FAIL"}


# What is said of a host even where all is well.
ALWAYS = ("host.system", "driver.nvml", "gpu.count", "topology.all-reduce", "python.torch-build", "engine.installed")


def lines(results: Sequence[tuple[Check, Finding]], facts: Facts, *, full: bool) -> list[str]:
    """One line a check, a warning or failure with what was expected and the fix; then the matrix and the skipped.

    `full`: also each check that is well.
    """
    told = [pair for pair in results if pair[1].status != "skip" and (full or pair[1].status != "pass" or pair[0].id in ALWAYS)]
    width = max((len(check.id) for check, _ in told), default=0)
    shown: list[str] = []
    for check, finding in told:
        shown.append(f"{MARKS[finding.status]}  {check.id:<{width}}  {finding.found}")
        if finding.status != "pass":
            words = result(check, finding)
            shown += [f"      {word:>8}: {text}" for word, text in (("expected", words.expected), ("fix", words.fix)) if text]
    if facts.topology and len(facts.topology.gpus) > 1 and any(check.area == "topology" for check, _ in results):
        shown += [f"      {line}" for line in (f"from {facts.topology.source}:", *topology.draw(facts.topology))]
    return shown + skipped(results)


def skipped(results: Sequence[tuple[Check, Finding]]) -> list[str]:
    """One line for each reason, with the checks that it kept from running."""
    reasons: dict[str, list[Check]] = {}
    for check, finding in results:
        if finding.status == "skip":
            reasons.setdefault(finding.found, []).append(check)
    return [f"skip  {_short(checks)}: {reason}" for reason, checks in reasons.items()]


def _short(checks: Sequence[Check]) -> str:
    """The ids, or the areas with their numbers where there are many."""
    if len(checks) <= 3:
        return ", ".join(check.id for check in checks)
    areas = dict.fromkeys(check.area for check in checks)
    return f"{len(checks)} checks of " + ", ".join(areas)


def summary(document: Document) -> str:
    """The last line."""
    n = document.summary
    return f"{n['fail']} failed, {n['warn']} warnings, {n['pass']} well, {n['skip']} skipped ({document.seconds:.1f} s)"


def explain(check: Check) -> str:
    """One check as a page of its own."""
    return f"{check.id}: {check.title}\n\nExpected: {check.expected}.\n\nWhy: {check.why}\n\nFix: {check.fix}\n\nPage: {check.page}"
