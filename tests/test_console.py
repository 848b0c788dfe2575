"""What people see on a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from fenno import console
from fenno.kv import words as kv
from fenno.load import words as load
from fenno.plan import words as plan
from fenno.serve import status
from fenno.tune import studies

# A line of each table, as long as is usual.
TABLES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "loadtest": (load.HEADER, ("medium", "1200/1200", "12841.3", "13114.9", "14114.9", "144.4", "43114.9", "12848.3")),
    "status": (
        status.HEADER,
        ("llama3-70b-h100x4", "not healthy for 9 min 30 s", "128", "1024", "100 %", "12345", "79.0 GiB", "12"),
    ),
    "plan": (plan.HEADER, ("weights: shared experts", "139.85 GiB")),
    "studies": (studies.HEADER, ("cpu-small", "inconclusive", "cpu-small", "2026-11-30T17:30:58+0000", "12")),
    "patch-kv": (kv.HEADER, ("CPU_ATTN *", "LBHNC", "128", "1 KiB", "1 MiB", "63.5 KiB", "32 KiB", "32 KiB", "4 pieces of 32 KiB")),
    "compare": (("95 % intervals", "A", "B", "B against A"), ("availability", "99.99 %", "99.98 %", "not distinguishable")),
}


@pytest.mark.parametrize("name", TABLES)
def test_on_a_terminal_of_eighty_characters_no_word_of_a_table_is_cut(name: str) -> None:
    header, row = TABLES[name]
    assert len(header) == len(row)
    shown = Console(file=io.StringIO(), width=80)
    shown.print(console._table("", header, [row], 80))
    assert isinstance(shown.file, io.StringIO)
    seen = shown.file.getvalue().split()
    assert {word for cell in (*header, *row) for word in cell.split()} <= {*seen}
    assert max(map(len, shown.file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("terminal", "asked", "printed"), [(True, False, ""), (True, True, '{"a":1}\n'), (False, False, '{"a":1}\n')]
)
def test_a_terminal_gets_the_document_when_it_asks(
    terminal: bool, asked: bool, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    console.document({"a": 1}, asked=asked)
    assert capsys.readouterr().out == printed
