"""The control file between fenno and a running engine: what is wanted, and what each rank answers. Standard library only.

fenno writes its whole wish into one small JSON file, whose path the engine has in FENNO_CONTROL; the scheduler of every
data-parallel rank answers in a file of its own beside it. Both are written to a temporary file and renamed, mode 0600, so that a
reader sees all of a message or none of it. This module also runs inside the engine, under another interpreter.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "FENNO_CONTROL"
SCHEMA = 1
# How often an engine that makes steps looks: a `stat` gives up Python's lock, and its other threads may keep it for a tenth of a
# millisecond.
LOOK_SECONDS = 0.05

Value = int | float | str | None

POLICIES = ("fcfs", "priority", "token_aware")
COUNTS = ("max_num_scheduled_tokens", "max_num_active_seqs", "long_prefill_token_threshold", "prefill_schedule_interval")
# Names are vLLM's own, from its scheduler configuration; the last two belong to the token-aware order.
KNOBS = (*COUNTS, "policy", "class_edges", "aging_seconds")
# By which variables an engine is started with these two: no flag of vLLM's says them.
VARIABLES = {"class_edges": "FENNO_CLASS_EDGES", "aging_seconds": "FENNO_AGING_SECONDS"}


@dataclass(frozen=True)
class Wanted:
    """The whole wish. A knob that is None or missing has the value of the engine's start."""

    revision: int
    knobs: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Acknowledgement:
    """One rank's answer to `revision`.

    `applied`: every live knob with the value now in force, which may be nearer to the start's than what was wanted.
    `reached`: no more requests run than the caps allow; lowering a cap drains only as requests finish.
    `unsupported`: wanted knobs that this engine cannot change while it runs. `problem`: why the wish could not be read.
    `counters`: what the scheduler counts, by name. `pid` is the engine process's, `engine` its vLLM version.
    """

    revision: int
    rank: int
    applied: dict[str, Value]
    reached: bool
    unsupported: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    pid: int = 0
    engine: str = ""


def edges(text: object) -> tuple[int, ...]:
    """Class edges in tokens from "32,128": one class more than edges. Raises `ValueError`."""
    try:
        numbers = tuple(int(part) for part in str(text).split(","))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1 or sorted(set(numbers)) != list(numbers):
        raise ValueError(f"class_edges is {text!r}: it has to be rising whole numbers such as 32,128")
    return numbers


def at_start(environment: Mapping[str, str]) -> dict[str, Value]:
    """The parameters of the token-aware order that an environment gives an engine. Raises `ValueError` for an impossible one."""
    given = {knob: environment[name] for knob, name in VARIABLES.items() if environment.get(name)}
    try:
        found: dict[str, Value] = {knob: float(text) if knob == "aging_seconds" else text for knob, text in given.items()}
    except ValueError:
        raise ValueError(f"{VARIABLES['aging_seconds']} is {given['aging_seconds']!r}: it has to be a number of seconds") from None
    check(found)
    return found


def check(knobs: Mapping[str, Value]) -> None:
    """Raise `ValueError`, saying what was expected, for a value that no engine could take. Unknown names pass."""
    for name, value in knobs.items():
        if value is None:
            continue
        if name in COUNTS:
            least = 0 if name == "long_prefill_token_threshold" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: it has to be a whole number of at least {least}")
        elif name == "policy" and value not in POLICIES:
            raise ValueError(f"policy is {value!r}: it has to be one of {', '.join(POLICIES)}")
        elif name == "class_edges":
            edges(value)
        elif name == "aging_seconds" and (isinstance(value, bool | str) or not 0 < value < 1e6):
            raise ValueError(f"aging_seconds is {value!r}: it has to be a positive number of seconds")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # mkstemp makes the file 0600; a name in the same folder makes the rename atomic.
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"schema": SCHEMA, **content}, file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path, keys: Iterable[str]) -> dict[str, Any]:
    """The content, less its schema number. Raises `OSError` or `ValueError`."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not in schema {SCHEMA} of this fenno")
    missing = [key for key in keys if key not in content]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return {key: value for key, value in content.items() if key != "schema"}


def write_wanted(path: Path, wanted: Wanted) -> None:
    """Put the wish in place. Raises `ValueError` for an impossible value, `OSError` when it cannot be written."""
    check(wanted.knobs)
    _write(path, asdict(wanted))


def read_wanted(path: Path) -> Wanted:
    """The wish now in place. Raises `FileNotFoundError` without one, `OSError` or `ValueError` for one that makes no sense."""
    content = _read(path, ("revision", "knobs"))
    revision, knobs = content["revision"], content["knobs"]
    if not isinstance(revision, int) or not isinstance(knobs, dict):
        raise ValueError(f"{path} needs a whole revision and a table of knobs")
    check(knobs)
    return Wanted(revision, knobs)


def acknowledgement_path(path: Path, rank: int) -> Path:
    """Where `rank` answers to the control file at `path`."""
    return path.with_name(f"{path.name}.rank{rank}")


def write_acknowledgement(path: Path, answer: Acknowledgement) -> None:
    """Put `answer` beside the control file at `path`. Raises `OSError`."""
    _write(acknowledgement_path(path, answer.rank), asdict(answer))


def read_acknowledgements(path: Path) -> dict[int, Acknowledgement]:
    """Every rank's answer, by rank. A rank writes its first when its scheduler starts, so that a running engine has all of them.

    Raises `OSError` or `ValueError`.
    """
    answers = {}
    for file in sorted(path.parent.glob(f"{path.name}.rank*")):
        content = _read(file, ("revision", "rank", "applied", "reached"))
        content["unsupported"] = tuple(content.get("unsupported", ()))
        known = {key: content[key] for key in Acknowledgement.__dataclass_fields__ if key in content}
        answers[int(known["rank"])] = Acknowledgement(**known)
    return answers


def clear(path: Path) -> None:
    """Remove the wish, every answer and every mark of an engine that has ended, before another one starts there."""
    for file in (path, *path.parent.glob(f"{path.name}.rank*"), *path.parent.glob(f"{path.name}.loaded*")):
        file.unlink(missing_ok=True)


def write_mark(path: Path, version: str) -> None:
    """Record that the plugin of fenno `version` was really loaded in this process. Raises `OSError`."""
    _write(path.with_name(f"{path.name}.loaded{os.getpid()}"), {"version": version, "pid": os.getpid()})


def read_marks(path: Path) -> dict[int, str]:
    """Process id -> fenno version, of every process that loaded the plugin. Raises `OSError` or `ValueError`."""
    marks = [_read(file, ("version", "pid")) for file in path.parent.glob(f"{path.name}.loaded*")]
    return {int(mark["pid"]): str(mark["version"]) for mark in marks}
