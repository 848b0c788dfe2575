"""`fenno report`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer

from fenno import __version__, console, documents, errors
from fenno.commands.load import tell_load
from fenno.errors import DiskError, UsageError

# What each is called in a folder.
FORMATS = {name: name for name in ("html", "json", "csv", "parquet")} | {"vllm": "vllm.json", "prometheus": "prom"}


def report(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", help="folders of load tests; default: the newest")] = None,
    to: Annotated[
        str | None,
        typer.Option(help="html, json, vllm (the keys of `vllm bench serve`), prometheus; a row a request: csv, parquet"),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="write it there, not on standard output; a folder: a file each")
    ] = None,
    out: Annotated[Path, typer.Option(help="where load tests are kept")] = Path("fenno-loadtests"),
) -> None:
    """Tell stored load tests again, or write them for other programs."""
    from fenno.load import stored

    if to is not None and to not in FORMATS:
        raise UsageError(f"--to is {to!r}", f"it has to be one of {', '.join(FORMATS)}")
    if output is not None and to is None:
        raise UsageError("-o needs a format", f"give --to, one of {', '.join(FORMATS)}")
    folders = runs or [stored.newest(out)]
    if to is None:
        raise typer.Exit(tell_all(folders))
    for folder, path in zip(folders, paths(folders, to, output), strict=True):
        write(folder, to, path)
        if path:
            console.say(f"written: {path}")


def tell_all(folders: Sequence[Path]) -> int:
    """Each load test as it was told when it was over, several under their names. Returns the first exit code that is not 0, and
    says which others have one."""
    from fenno.load import loadtest, stored

    codes = {}
    for folder in folders:
        if len(folders) > 1:
            console.say(f"{folder}:", style="bold")
        codes[folder] = tell_load(loadtest.document(stored.read(folder)), table=True)
    failed = [f"{folder} ({code})" for folder, code in codes.items() if code]
    if failed and len(folders) > 1:
        console.say(f"{len(failed)} of {len(folders)} have an exit code of their own: {', '.join(failed)}", style="bold red")
    return next(filter(None, codes.values()), errors.OK)


def paths(folders: Sequence[Path], to: str, output: str | None) -> list[Path | None]:
    """Where each load test is written; None: on standard output. Into a folder where there are several, where `output` is one or
    ends like one. Raises `UsageError` where they cannot be told apart."""
    if output is None:
        if len(folders) > 1:
            raise UsageError(f"{len(folders)} load tests are as many files", "give the folder for them: -o reports")
        return [None]
    if len(folders) == 1 and not output.endswith("/") and not Path(output).is_dir():
        return [Path(output)]
    found = [Path(output) / f"{folder.resolve().name}.{FORMATS[to]}" for folder in folders]
    if len(set(found)) < len(found):
        raise UsageError("several of these load tests have the same name", "write them into folders of their own")
    return [*found]


def write(folder: Path, to: str, output: Path | None) -> None:
    """One format of the load test in `folder`, into a file or on standard output. Raises `DiskError` for a file that cannot be
    written; one that is there stays as it is until there is something to write."""
    from fenno.load import export, stored

    records, start = stored.records(folder), stored.start(folder)
    if to == "parquet":
        if output is None:
            raise UsageError("Parquet is no text", "give the file: -o run.parquet")
        with writing(output):
            export.write_parquet(records, start, output)
    elif to == "csv":
        with opened(output) as file:
            export.write_csv(records, start, file)
    else:
        text = told(folder, to)
        with opened(output) as file:
            file.write(text)


def told(folder: Path, to: str) -> str:
    """The load test as one text."""
    from fenno.load import export, loadtest, stored
    from fenno.report import loadtest as page

    kept = stored.read(folder)
    document = loadtest.document(kept)
    if to == "html":
        return page.page(kept, document, __version__)
    if to == "prometheus":
        return export.prometheus(document, kept.result.plan.model)
    if to == "vllm":
        return json.dumps(documents.finite(export.vllm(kept, document))) + "\n"
    return documents.line(document)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """The folder of `path` is there while the block writes the file. Raises `DiskError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}", "choose another -o, or free some space") from error


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """The file at `path`, or standard output."""
    if path is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has seen enough, as `head` has
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with writing(path), path.open("w", encoding="utf-8", newline="") as file:
        yield file
