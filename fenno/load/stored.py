"""A load test on disk: what was asked for and how it ended, so that everything said of it can be made again from its raw records.

A run that was interrupted has no ending: its figures are then of what there is, and say so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenno import process
from fenno.engine import watch
from fenno.engine.watch import Seen
from fenno.errors import DiskError, UsageError
from fenno.load import plan, probe, raw, run
from fenno.load.plan import Plan
from fenno.load.probe import Probe
from fenno.load.record import Record
from fenno.load.run import Result
from fenno.recipe import Targets


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a load test was asked to account for. `at`: when, in seconds of Unix time; `visible`: the GPUs the server might use."""

    at: float | None = None
    targets: Targets = field(default_factory=Targets)
    gpu_price: float | None = None
    probed: bool = False
    visible: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a load test ended. `over`: when, on the monotonic clock; `notes`: what of the server could not be seen."""

    over: float
    ended: Mapping[str, str]
    notes: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A load test as its folder has it. `probes`: None when none were sent."""

    asked: Asked
    result: Result
    seen: Seen
    probes: Sequence[Probe] | None
    ending: Ending


def begin(folder: Path, asked: Asked) -> None:
    """Keep what was asked for. Raises `DiskError`."""
    (folder / "ended.json").unlink(missing_ok=True)
    _write(folder / "asked.json", {**vars(asked), "targets": asked.targets.model_dump(mode="json")})


def end(folder: Path, ending: Ending) -> None:
    """Keep how it ended. Raises `DiskError`."""
    _write(folder / "ended.json", vars(ending))


def read(folder: Path) -> Stored:
    """The load test that lies in `folder`, each of its files read once. Raises `UsageError` when there is none."""
    asked, result, ending = _asked(folder), _result(folder), _read(folder / "ended.json")
    ended = Ending(
        over=ending.get("over", result.state.end or 0.0),
        ended=ending.get("ended", {"how": "interrupted", "why": "the load test was ended before its time"}),
        notes=tuple(ending.get("notes", ())),
    )
    probes = probe.read(folder) if asked.probed else None
    return Stored(asked=asked, result=result, seen=_seen(folder, asked.visible, ended.notes), probes=probes, ending=ended)


def newest(out: Path) -> Path:
    """The load test in `out` that was begun last. Raises `UsageError` when there is none."""
    found = max(out.glob("*/plan.json"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise UsageError(f"there is no load test in {out}", "make one with `fenno loadtest`, or name its folder")
    return found.parent


def records(folder: Path) -> Iterator[Record]:
    """The records of the load test in `folder`, one at a time. Raises `UsageError` when there is none."""
    _plan(folder)
    return raw.records(folder)


def start(folder: Path) -> float:
    """When its window began, on the clock of the records' stamps; 0 when it never did."""
    return run.state(folder).start or 0.0


def _asked(folder: Path) -> Asked:
    """What was asked for; nothing where that was not kept."""
    data = _read(folder / "asked.json")
    return Asked(**{**data, "targets": Targets.model_validate(data["targets"])}) if data else Asked()


def _plan(folder: Path) -> Plan:
    try:
        return plan.parse((folder / "plan.json").read_text(encoding="utf-8"), {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        inside = next(iter(sorted(folder.glob("*/plan.json"))), None)
        hint = f"those in it are folders of their own: {inside.parent}" if inside else "give a folder that `fenno loadtest` wrote"
        raise UsageError(f"{folder} holds no load test", hint) from error


def _result(folder: Path) -> Result:
    plan_ = _plan(folder)
    result = Result(plan_, folder, run.state(folder))
    if result.state.end is not None:
        return result
    ends = result.requests["end"]
    end = float(ends.max()) if len(ends) else result.state.start
    return dataclasses.replace(result, state=dataclasses.replace(result.state, end=end))


def _seen(folder: Path, visible: str | None, notes: tuple[str, ...]) -> Seen:
    gpus, _ = watch.read_gpus(folder / "gpus.jsonl", visible)
    return Seen(watch.read_samples(folder / "server.jsonl"), gpus, notes)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    try:
        process.write(path, json.dumps(data))
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}", "free some space, or choose another folder") from error
