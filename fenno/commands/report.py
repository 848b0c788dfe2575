"""`fenno report`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TextIO

import typer

from fenno import __version__, console
from fenno.commands.load import tell_load
from fenno.errors import UsageError

FORMATS = ("html", "json", "vllm", "prometheus", "csv", "parquet")


def report(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="the folder of a load test; default: the newest")] = None,
    to: Annotated[
        str | None,
        typer.Option(help="html, json, vllm (the keys of `vllm bench serve`), prometheus; a row a request: csv, parquet"),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write it there, not on standard output")] = None,
    out: Annotated[Path, typer.Option(help="where load tests are kept")] = Path("fenno-loadtests"),
) -> None:
    """Tell a stored load test again, or write it for other programs."""
    from fenno.load import loadtest, stored

    if to is not None and to not in FORMATS:
        raise UsageError(f"--to is {to!r}", f"it has to be one of {', '.join(FORMATS)}")
    if output is not None and to is None:
        raise UsageError("-o needs a format", f"give --to, one of {', '.join(FORMATS)}")
    folder = run or stored.newest(out)
    if to is None:
        raise typer.Exit(tell_load(loadtest.document(stored.read(folder)), table=True))
    write(folder, to, output)


def write(folder: Path, to: str, output: Path | None) -> None:
    """One format of the load test in `folder`, into a file or on standard output."""
    from fenno.load import export, loadtest, stored
    from fenno.report import loadtest as page

    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    if to == "parquet":
        if output is None:
            raise UsageError("Parquet is no text", "give the file: -o run.parquet")
        export.write_parquet(stored.records(folder), stored.start(folder), output)
        return
    with opened(output) as file:
        if to == "csv":
            export.write_csv(stored.records(folder), stored.start(folder), file)
            return
        kept = stored.read(folder)
        document = loadtest.document(kept)
        if to == "html":
            file.write(page.page(kept, document, __version__))
        elif to == "prometheus":
            file.write(export.prometheus(document, kept.result.plan.model))
        else:
            found = export.vllm(kept, document) if to == "vllm" else document
            file.write(json.dumps(console.finite(found)) + "\n")


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
    with path.open("w", encoding="utf-8", newline="") as file:
        yield file
