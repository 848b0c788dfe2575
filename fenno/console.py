"""What people see: sentences, tables and progress on standard error. Standard output is for results that programs read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fenno import documents
from fenno.errors import FennoError

_WIDTH = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else None
err = Console(stderr=True, highlight=False, width=_WIDTH, soft_wrap=True)
verbosity = 0


def say(text: str, *, style: str | None = None, level: int = 0) -> None:
    """One line for people, unless -q (or less than `level` -v) was given."""
    if verbosity >= level:
        err.print(text, style=style, markup=False)


def fail(error: FennoError) -> None:
    """An error: what happened, and what to do next. Shown with -q too."""
    err.print(f"fenno: {error}", style="bold red", markup=False)
    if error.hint:
        err.print(f"  {error.hint}", markup=False)


def result(document: Mapping[str, Any]) -> None:
    """One JSON document as the last line of standard output."""
    sys.stdout.write(documents.line(document))
    sys.stdout.flush()


def document(made: Mapping[str, Any], *, asked: bool) -> None:
    """The JSON document of a command that people read: longer than a screen, so that a terminal gets it by --json alone."""
    if asked or not sys.stdout.isatty():
        result(made)


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table for people; tab-separated lines without a terminal."""
    if verbosity < 0:
        return
    if not err.is_terminal:
        for row in (header, *rows):
            err.file.write("\t".join(row) + "\n")  # print would make spaces of tabs
        return
    err.print(_table(title, header, [*rows], err.width))


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Table:
    """A table that is `room` characters wide; where its longest words need more, they are folded and none is cut."""
    made = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    made.padding = (0, 1, 0, 0)  # with the box's space two characters between columns
    for index, width in enumerate(_widths([*zip(header, *rows, strict=True)], room)):
        made.add_column(Text(header[index]), justify="left" if index == 0 else "right", width=width, overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))  # a str would lose what is in [brackets]
    return made


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """How wide each column is: as its longest cell, the widest narrower until all fit; than its longest word only where that is not
    enough, the header's before the cells'."""
    wide = [max(map(cell_len, cells)) for cells in columns]
    for floor in (_longest(columns), _longest([cells[1:] for cells in columns]), [2] * len(wide)):
        while sum(wide) + 2 * (len(wide) - 1) > room and (over := [i for i, width in enumerate(wide) if width > floor[i]]):
            wide[max(over, key=lambda i: wide[i])] -= 1
    return wide


def _longest(columns: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column's longest word, at least 2: as much as the widest characters take."""
    return [max(2, *(cell_len(word) for cell in cells for word in cell.split())) for cells in columns]
