"""The requests of a run column by column: a tenth of the memory of as many records, and arithmetic on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenno.load import raw
from fenno.load.record import Record

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Places = NDArray[np.intp]

STAMPS = ("scheduled", "sent", "first", "last", "end")
COUNTS = ("asked_prompt", "prompt_tokens", "completion_tokens", "token_count", "turn")
WORDS = ("cls", "phase", "outcome")


@dataclass(frozen=True)
class Words:
    """A column of a few different words: which of `names` each request has."""

    names: Sequence[str]
    codes: NDArray[np.int16]

    def are(self, name: str) -> Mask:
        """Which requests have that word."""
        return np.equal(self.codes, self.names.index(name) if name in self.names else -1)

    def counts(self) -> dict[str, int]:
        """How many requests have each word, in the order in which the words first appear."""
        codes, first, counts = np.unique(self.codes, return_index=True, return_counts=True)
        return {self.names[codes[i]]: int(counts[i]) for i in np.argsort(first)}


@dataclass(frozen=True)
class Part:
    """Requests that lie together, in one file or in memory, and what of theirs is read when it is asked for: `gaps`, in ms, of all
    streams and how many each has; `errors`."""

    count: int
    gaps: Callable[[], tuple[NDArray[np.float32], NDArray[np.int64]]]
    errors: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class _Columns:
    """Every request of a run. NaN for a stamp that is missing, -1 for such a count; `gap`: the longest, in ms."""

    numbers: Mapping[str, NDArray[Any]]
    words: Mapping[str, Words]
    parts: Sequence[Part]


class Requests:
    """Some requests of a run in some order, with the names and units of `Record`: infinity is a failure's latency, NaN none."""

    def __init__(self, columns: _Columns, at: Places | None = None) -> None:
        self._columns, self._at = columns, at

    @staticmethod
    def of(records: Iterable[Record]) -> Requests:
        """Records as columns, in their order."""
        mine = list(records)
        numbers: dict[str, NDArray[Any]] = {
            name: np.array([getattr(r, name) for r in mine], np.float64)
            for name in STAMPS  # None becomes NaN
        }
        for name in COUNTS:
            numbers[name] = np.array([-1 if (v := getattr(r, name)) is None else v for r in mine], np.int32)
        numbers[raw.GAP] = np.array([max(r.gaps, default=np.nan) for r in mine], np.float32)
        words = {name: _words([getattr(r, name) for r in mine]) for name in WORDS}

        def gaps() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            return np.fromiter(chain.from_iterable(r.gaps for r in mine), np.float32), np.array(
                [len(r.gaps) for r in mine], np.int64
            )

        return Requests(_Columns(numbers, words, [Part(len(mine), gaps, lambda: [r.error for r in mine])]))

    @staticmethod
    def read(folder: Path) -> Requests:
        """Every whole record of a run. Raises `UsageError` for a file that is none of records."""
        files = raw.files(folder)
        lines = {path: raw.table(path) for path in files if path.suffix != ".parquet"}
        counts = [lines[path].num_rows if path in lines else raw.count(path) for path in files]
        kinds = {**dict.fromkeys(STAMPS, np.float64), **dict.fromkeys(COUNTS, np.int32), raw.GAP: np.float32}
        numbers: dict[str, NDArray[Any]] = {name: np.empty(sum(counts), kind) for name, kind in kinds.items()}
        codes = {name: np.empty(sum(counts), np.int16) for name in WORDS}
        known: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        parts: list[Part] = []
        begin = 0
        for path, count in zip(files, counts, strict=True):
            table = lines[path] if path in lines else raw.table(path, [*numbers, *codes])
            for name, column in numbers.items():
                column[begin : begin + count] = table[name].fill_null(-1 if name in COUNTS else np.nan).to_numpy()
            for name, column in codes.items():
                column[begin : begin + count] = _coded(table[name], known[name])
            begin += count
            parts.append(_part(path, count, lines.get(path)))
        return Requests(_Columns(numbers, {name: Words([*known[name]], codes[name]) for name in WORDS}, parts))

    def __len__(self) -> int:
        return len(self._columns.numbers["sent"]) if self._at is None else len(self._at)

    def where(self, mask: Mask) -> Requests:
        """Those of the mask, in the same order."""
        return Requests(self._columns, np.flatnonzero(mask) if self._at is None else self._at[mask])

    def by(self, values: Floats) -> Requests:
        """The same ones in the order of `values`, one for each."""
        order = np.argsort(values, kind="stable")
        return Requests(self._columns, order if self._at is None else self._at[order])

    def __getitem__(self, name: str) -> Any:
        """A column of stamps or counts by the record's own name."""
        column = self._columns.numbers[name]
        return column if self._at is None else column[self._at]

    def words(self, name: str) -> Words:
        """The column "cls", "phase" or "outcome"."""
        column = self._columns.words[name]
        return column if self._at is None else Words(column.names, column.codes[self._at])

    @property
    def ok(self) -> Mask:
        return self.words("outcome").are("ok")

    @property
    def counted(self) -> Mask:
        """Which ones figures are made of."""
        return self.words("phase").are("counted") & ~self.words("outcome").are("cancelled")

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of each answer, by the server's count where it gave one."""
        said = self["completion_tokens"]
        return np.where(said >= 0, said, self["token_count"])

    @property
    def ttft(self) -> Floats:
        return self._late_unless_ok(self["first"] - self["sent"])

    @property
    def e2el(self) -> Floats:
        return self._late_unless_ok(self["last"] - self["sent"])

    @property
    def ttft_scheduled(self) -> Floats:
        return self.ttft + self.lateness

    @property
    def e2el_scheduled(self) -> Floats:
        return self.e2el + self.lateness

    @property
    def tpot(self) -> Floats:
        beyond = self.tokens - 1
        each = (self["last"] - self["first"]) / np.maximum(beyond, 1)
        return np.where(beyond > 0, self._late_unless_ok(each), np.where(self.ok, np.nan, np.inf))

    @property
    def gap(self) -> Floats:
        return np.where(self.ok, self[raw.GAP].astype(np.float64) / 1e3, np.inf)

    @property
    def lateness(self) -> Floats:
        return np.asarray(self["sent"] - self["scheduled"])

    def _late_unless_ok(self, seconds: Floats) -> Floats:
        return np.where(self.ok & ~np.isnan(seconds), seconds, np.inf)

    def gaps(self) -> Iterator[tuple[Places, NDArray[np.int64], NDArray[np.float32]]]:
        """Every gap of these requests in ms, part after part: which requests, as places among these; how many gaps each has; all
        of them, one request after the other."""
        place = np.full(len(self._columns.numbers["sent"]), -1, np.intp)
        place[slice(None) if self._at is None else self._at] = np.arange(len(self))
        begin = 0
        for part in self._columns.parts:
            mine = place[begin : begin + part.count]
            begin += part.count
            wanted = mine >= 0
            if wanted.any():
                values, counts = part.gaps()
                yield mine[wanted], counts[wanted], values if wanted.all() else values[np.repeat(wanted, counts)]

    def error(self, place: int) -> str:
        """What the request at `place` said of its failure."""
        row = place if self._at is None else int(self._at[place])
        for part in self._columns.parts:
            if row < part.count:
                return part.errors()[row]
            row -= part.count
        raise IndexError(place)


def _words(values: Sequence[str]) -> Words:
    known: dict[str, int] = {}
    codes = np.array([known.setdefault(value, len(known)) for value in values], np.int16)
    return Words([*known], codes)


def _coded(column: Any, known: dict[str, int]) -> NDArray[np.int16]:
    """A column of strings as numbers; `known` grows by the new ones."""
    found = column.combine_chunks().dictionary_encode()
    codes = np.array([known.setdefault(word, len(known)) for word in found.dictionary.to_pylist()], np.int16)
    return codes[found.indices.to_numpy()] if len(codes) else codes


def _part(path: Path, count: int, lines: Any | None) -> Part:
    """A packed file is read again for what is not kept; lines are kept whole: of each process there is one file at the end."""

    def of(name: str) -> Any:
        return (raw.table(path, [name]) if lines is None else lines)[name].combine_chunks()

    def gaps() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        lists = of("gaps")
        return lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy()).astype(np.int64)

    return Part(count, gaps, lambda: of("error").to_pylist())
