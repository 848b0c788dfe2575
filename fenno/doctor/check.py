"""What a check is: a pure function of facts with a stable id, and the finding it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fenno.doctor.facts import Facts

Status = Literal["pass", "warn", "fail", "skip"]
STATUSES: tuple[Status, ...] = ("pass", "warn", "fail", "skip")


@dataclass(frozen=True)
class Finding:
    """What one check came to. `expected` and `fix` are empty where the check's own words say it."""

    status: Status
    found: str
    expected: str = ""
    fix: str = ""


def ok(found: str) -> Finding:
    return Finding("pass", found)


def warn(found: str, fix: str = "", expected: str = "") -> Finding:
    return Finding("warn", found, expected, fix)


def fail(found: str, fix: str = "", expected: str = "") -> Finding:
    return Finding("fail", found, expected, fix)


def skip(reason: str) -> Finding:
    return Finding("skip", reason)


@dataclass(frozen=True)
class Check:
    """One check. `needs`: the areas of `Facts` without which it is skipped; `judge` may rely on them being there."""

    id: str
    title: str
    expected: str
    why: str
    fix: str
    needs: tuple[str, ...]
    judge: Callable[[Facts], Finding]

    @property
    def area(self) -> str:
        return self.id.partition(".")[0]

    @property
    def page(self) -> str:
        """Where the check is described, as a link inside the repository."""
        return f"docs/doctor/{self.area}.md#{self.id.replace('.', '')}"


def check(
    id: str, title: str, *, expected: str, why: str, fix: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Facts], Finding]], Check]:
    """A decorator that makes a `Check` of the function that judges it."""
    return lambda judge: Check(id, title, expected, why, fix, needs, judge)
