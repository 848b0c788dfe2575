"""Recorded traffic: Azure's CSV (times and lengths) and Mooncake's JSONL (those, and hashes of the blocks of a prompt)."""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fenno.errors import UsageError

BLOCK = 512  # tokens behind one of Mooncake's hashes
_HINT = (
    "expected CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens, or JSONL with timestamp (ms), input_length, "
    "output_length and hash_ids"
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


class Entry(NamedTuple):
    """One recorded request. `at`: seconds after the first one; `blocks`: equal leading numbers mean equal beginnings."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1)
def load(path: Path) -> tuple[Entry, ...]:
    """Every request of the file by time, the first at 0; a length of 0 is taken as 1. Raises `UsageError` naming file and line."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            beginning = lines.read(1)
            lines.seek(0)
            found = sorted(_mooncake(path, lines) if beginning == "{" else _azure(path, lines))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a readable trace") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}", _HINT) from error
    if not found:
        raise UsageError(f"{path}: no request in it", _HINT)
    return tuple(entry._replace(at=entry.at - found[0].at) for entry in found)


def seconds(entries: tuple[Entry, ...], scale: float) -> float:
    """How long a trace lasts at `scale` times its speed: up to its last arrival and one mean gap more."""
    last, gaps = entries[-1].at, max(1, len(entries) - 1)
    return max(last * (1 + 1 / gaps) / scale, 1.0 if last == 0 else 0.0)


def _azure(path: Path, lines: Iterable[str]) -> Iterable[Entry]:
    rows = csv.DictReader(lines)
    try:
        for row in rows:
            yield _entry(_moment(row["TIMESTAMP"]), row["ContextTokens"], row["GeneratedTokens"])
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UsageError(f"{path}:{rows.line_num}: {_words(error)}", _HINT) from error


def _mooncake(path: Path, lines: Iterable[str]) -> Iterable[Entry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            blocks = tuple(map(int, data.get("hash_ids") or ()))
            yield _entry(float(data["timestamp"]) / 1e3, data["input_length"], data["output_length"], blocks)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}:{number}: {_words(error)}", _HINT) from error


def _entry(at: float, prompt: Any, output: Any, blocks: tuple[int, ...] = ()) -> Entry:
    lengths = int(prompt), int(output)
    if min(lengths) < 0:
        raise ValueError(f"{min(lengths)} tokens")
    return Entry(at, max(1, lengths[0]), max(1, lengths[1]), blocks)


def _moment(text: str) -> float:
    """Seconds of a time of day with any number of decimals (`fromisoformat` takes three or six)."""
    found = _STAMP.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no time such as 2023-11-16 18:17:03.9799600")
    day, clock, part, zone = found.groups()
    offset = "+00:00" if zone in (None, "Z") else zone
    return datetime.fromisoformat(f"{day}T{clock}{offset}").timestamp() + float(part or 0)


def _words(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
