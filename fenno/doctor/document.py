"""The document that `fenno doctor --json` prints, and its JSON Schema (`schema.json` beside this file; a test keeps it current)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fenno import __version__
from fenno.doctor.check import STATUSES, Check, Finding
from fenno.doctor.facts import Facts
from fenno.documents import SCHEMA


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Result(Model):
    """One check."""

    id: str = Field(pattern=r"^[a-z0-9]+\.[a-z0-9-]+$", description="stable: a check keeps its id, or is gone")
    title: str
    status: Literal["pass", "warn", "fail", "skip"]
    found: str = Field(description="what is there; of a skipped check, why it was skipped")
    expected: str
    why: str = Field(description="what goes wrong otherwise")
    fix: str = Field(description="what to do; empty where there is nothing to do")
    page: str


class Pair(Model):
    """Two GPUs and what connects them, in the words of `nvidia-smi topo -m`."""

    a: int
    b: int
    link: str
    nvlink: bool


class Document(Model):
    """What `fenno doctor` found. Keys may be added; a document that changes or drops some has another `schema`."""

    schema_: Literal[1] = Field(alias="schema")
    fenno: str
    recipe: str | None
    seconds: float = Field(ge=0)
    summary: dict[Literal["pass", "warn", "fail", "skip"], int]
    checks: list[Result]
    topology: list[Pair]


def make(results: Sequence[tuple[Check, Finding]], facts: Facts, seconds: float) -> Document:
    """The document of these results."""
    counted = Counter(finding.status for _, finding in results)
    joined = facts.topology
    return Document(
        schema=SCHEMA,
        fenno=__version__,
        recipe=facts.recipe.name if facts.recipe else None,
        seconds=round(seconds, 3),
        summary={status: counted[status] for status in STATUSES},
        checks=[result(check, finding) for check, finding in results],
        topology=[Pair(a=a, b=b, link=cell, nvlink=joined.nvlink[a, b]) for (a, b), cell in joined.cells.items()] if joined else [],
    )


def result(check: Check, finding: Finding) -> Result:
    """One check with the words that are missing in its finding filled in."""
    wrong = finding.status in ("warn", "fail")
    return Result(
        id=check.id,
        title=check.title,
        status=finding.status,
        found=finding.found,
        expected=finding.expected or check.expected,
        why=check.why,
        fix=(finding.fix or check.fix) if wrong else "",
        page=check.page,
    )


def described(check: Check) -> dict[str, str]:
    """What a check is, before it is made."""
    return {name: str(getattr(check, name)) for name in ("id", "title", "expected", "why", "fix", "page")}


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    made = Document.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"fenno-doctor-{SCHEMA}", **made}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
