"""The raw records of a run on disk: lines as they come, and Parquet of every file of lines that is full.

The client appends lines to `records-PROCESS-000001.jsonl` and goes on to the next number when that is full: whatever is killed,
what was written stays. fenno's own process, not the one that measures, packs the full ones as `.parquet`, column by column. A run
of an earlier version, one file of lines a process, is read the same way.
"""

from __future__ import annotations

import base64
import contextlib
import re
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fenno.errors import UsageError
from fenno.load import record
from fenno.load.record import Record

FULL = 16 * 2**20  # bytes of lines in a file: packing one takes a few times that of memory, for about 0.2 s
GAP = "gap"  # a column that a record has not: its longest gap in ms, so that all gaps are read for `itl` alone
# Arrow's types by the record's fields.
COLUMNS = {
    **dict.fromkeys(("id", "cls", "arm", "phase"), "string"),
    **dict.fromkeys(("scheduled", "sent", "connected", "headers", "first", "first_answer", "last", "end"), "float64"),
    **dict.fromkeys(("asked_prompt", "asked_tokens", "prompt_tokens", "completion_tokens", "token_count"), "int32"),
    **{"gaps": "string", "status": "int32", "outcome": "string", "error": "string", "turn": "int32"},
}
ALWAYS = ("id", "cls", "phase", "scheduled", "sent", "end", "gaps", "outcome")
FEW = ["cls", "arm", "phase", "outcome", "error"]  # columns of a few different strings


# Halves of characters that stand alone: JSON allows them in a server's words, and Arrow does not.
HALVES = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..")


def clear(folder: Path) -> None:
    """Remove the records of an earlier run. Raises `OSError`."""
    for old in folder.glob("records-*"):
        old.unlink()


def file(folder: Path, process: object, number: int) -> Path:
    """Where a process writes its lines, file after file from 1."""
    return folder / f"records-{process}-{number:06d}.jsonl"


def files(folder: Path) -> list[Path]:
    """The files that hold the records of a run, each record once, in the order in which each process wrote them."""
    # A packed file is whole before its lines are removed: with both there, fenno was killed in between.
    lines, packed = ({path.stem: path for path in folder.glob(f"records-*{suffix}")} for suffix in (".jsonl", ".parquet"))
    return [path for _, path in sorted({**lines, **packed}.items())]


def pack(folder: Path, read: Mapping[Path, int] | None = None) -> None:
    """Turn what is full into Parquet; with `read`, where `new` has come to its end. Where it cannot be done the lines stay, and are
    as good."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob("records-*-??????.jsonl")):
        process = path.stem.rpartition("-")[0]
        if (full := newest.get(process)) is not None:
            with contextlib.suppress(OSError, UsageError):
                if read is None or read.get(full) == full.stat().st_size:
                    _pack(full)
        newest[process] = path


def _pack(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    part, packed = path.with_suffix(".part"), path.with_suffix(".parquet")
    try:
        if not packed.exists():
            pyarrow.parquet.write_table(table(path), part, compression="zstd", use_dictionary=FEW, row_group_size=2**20)
            part.replace(packed)
    finally:
        part.unlink(missing_ok=True)
    path.unlink()
    pyarrow.default_memory_pool().release_unused()


def table(path: Path, columns: list[str] | None = None) -> Any:
    """The whole records of one file as Arrow's table: those of `COLUMNS`, `gaps` as lists of float32, and `GAP`. A file of lines
    may have been packed since it was found.

    Raises `UsageError` for what is no file of records.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".jsonl":
            with contextlib.suppress(FileNotFoundError):
                found = _table(path.read_bytes())
                return found if columns is None else found.select(columns)
            path = path.with_suffix(".parquet")
        return pyarrow.parquet.read_table(path, columns=columns, use_threads=False)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def count(path: Path) -> int:
    """How many records a packed file holds. Raises `UsageError` for another file."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _table(data: bytes) -> Any:
    """Lines as a table; the last one may be cut short."""
    import numpy
    import pyarrow
    import pyarrow.compute

    found = _parsed(data[: data.rfind(b"\n") + 1])
    if missing := [name for name in ALWAYS if found[name].null_count]:
        raise ValueError(f"no {missing[0]}")
    each = [base64.b64decode(text) for text in found["gaps"].to_pylist()]
    ends = numpy.cumsum([0, *(len(gaps) // 4 for gaps in each)], dtype=numpy.int32)
    values = numpy.frombuffer(b"".join(each), dtype="<f4")
    some = ends[1:] > ends[:-1]
    longest = numpy.full(len(each), numpy.nan, numpy.float32)
    longest[some] = numpy.maximum.reduceat(values, ends[:-1][some]) if some.any() else 0
    gaps = pyarrow.ListArray.from_arrays(ends, pyarrow.array(values, pyarrow.float32()))
    found = found.set_column(found.schema.get_field_index("gaps"), "gaps", gaps)
    turns = pyarrow.compute.fill_null(found["turn"], 1)  # records of before there were conversations
    found = found.set_column(found.schema.get_field_index("turn"), "turn", turns)
    return found.append_column(GAP, pyarrow.array(longest, from_pandas=True))


def _parsed(data: bytes) -> Any:
    import pyarrow
    import pyarrow.json

    schema = pyarrow.schema({name: getattr(pyarrow, type_)() for name, type_ in COLUMNS.items()})
    if not data:
        return schema.empty_table()
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**30))
    parsing = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def read(text: bytes) -> Any:
        return pyarrow.json.read_json(pyarrow.BufferReader(text), reading, parsing).select(list(COLUMNS))

    try:
        return read(data)
    except pyarrow.ArrowInvalid:
        return read(HALVES.sub(rb"\\ufffd", data))


def records(folder: Path) -> Iterator[Record]:
    """Every whole record, one at a time. Raises `UsageError` for a file that is none of records."""
    for path in files(folder):
        if path.suffix == ".jsonl":
            with contextlib.suppress(FileNotFoundError):  # packed since it was found
                yield from _lines(path, {})
                continue
        yield from _packed(path.with_suffix(".parquet"))


def new(folder: Path, read: dict[Path, int]) -> Iterator[Record]:
    """The records beyond the bytes already `read` of each file, which grow by them; of files that `pack` took since it was told of
    `read`, there are none."""
    for path in sorted(folder.glob("records-*.jsonl")):
        yield from _lines(path, read)


def _lines(path: Path, read: dict[Path, int]) -> Iterator[Record]:
    with path.open("rb") as opened:
        opened.seek(read.get(path, 0))
        for line in opened:
            if line.endswith(b"\n"):
                read[path] = read.get(path, 0) + len(line)
                yield _record(path, line)


def _record(path: Path, line: bytes) -> Record:
    try:
        return record.parse(line.decode())
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _packed(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    plain = [name for name in COLUMNS if name != "gaps"]
    try:
        with pyarrow.parquet.ParquetFile(path) as opened:
            for batch in opened.iter_batches(2048, columns=list(COLUMNS)):
                for row, gaps in zip(batch.select(plain).to_pylist(), batch["gaps"], strict=True):
                    yield Record(**row, gaps=array("f", gaps.values.to_numpy().tobytes()))
    except (OSError, ValueError, TypeError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> UsageError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(
        f"{path} holds something else than records: {said}", "move that file away: the load test is then told without its requests"
    )
