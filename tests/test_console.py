"""What people see on a terminal."""

from __future__ import annotations

import ast
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from fenno import console, documents
from fenno.compare import words as compare
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
    "compare": (compare.header({"arms": {"A": {}, "B": {}}}), ("availability", "99.99 %", "99.98 %", "not distinguishable")),
}


def shown(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a table as a terminal of that width has them."""
    file = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=file, width=width, soft_wrap=True, force_terminal=True, no_color=True))
    console.table("", header, rows)
    return re.sub("\x1b[^m]*m", "", file.getvalue()).splitlines()


@pytest.mark.parametrize("name", TABLES)
def test_on_a_terminal_of_eighty_characters_no_word_of_a_table_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    header, row = TABLES[name]
    assert len(header) == len(row)
    lines = shown(header, [row], 80, monkeypatch)
    assert {word for cell in (*header, *row) for word in cell.split()} <= {*" ".join(lines).split()}
    assert max(map(cell_len, lines)) <= 80


def test_where_words_of_a_table_have_to_be_cut_they_are_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    header, row = TABLES["status"]
    lines = shown(header, [row], 60, monkeypatch)
    assert {word for cell in row for word in cell.split()} <= {*" ".join(lines).split()}


WIDE = (
    ("a model", "推論サーバの待ち時間", "notes"),
    ("grok/" + "a-name-" * 9 + "end", "第一トークンまで八百ミリ秒", "[bold]800[/] ms [x]"),
)


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize("name", [*TABLES, "wide"])
def test_on_a_narrow_terminal_a_table_keeps_every_character(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    header, row = {**TABLES, "wide": WIDE}[name]
    lines = shown(header, [row], width, monkeypatch)
    assert sorted("".join(lines).replace("─", "").replace(" ", "")) == sorted("".join([*header, *row]).replace(" ", ""))
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize(
    ("terminal", "asked", "printed"),
    [(True, False, ""), (True, True, '{"schema":1,"a":1}\n'), (False, False, '{"schema":1,"a":1}\n')],
)
def test_a_terminal_gets_the_document_when_it_asks(
    terminal: bool, asked: bool, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    console.document({"a": 1}, asked=asked)
    assert capsys.readouterr().out == printed


def test_a_document_begins_with_its_schema_and_has_no_number_that_json_lacks() -> None:
    made = {"a": (1, math.inf), "b": {2: math.nan}, "c": -0.5}
    for text in (documents.line(made), documents.lines(made)):
        assert text.startswith("{") and text.endswith("}\n")
        read = json.loads(text, parse_constant=pytest.fail)
        assert [*read.items()] == [("schema", 1), ("a", [1, None]), ("b", {"2": None}), ("c", -0.5)]
    assert documents.line({"a": 1, "schema": 2}) == '{"schema":2,"a":1}\n', "one that is told again keeps its own"


def test_commands_print_json_by_the_console_alone_which_names_the_schema() -> None:
    folder = Path(console.__file__).with_name("commands")
    others = {path.name for path in folder.glob("*.py") if "json.dumps" in path.read_text()}
    assert others == {"recipes.py", "report.py"}, "a recipe's JSON Schema, and the keys of vLLM's own benchmark"


# The files without a schema, which only fenno reads again: what it keeps of a load test, a block, an engine's start and answers.
OWN = {"load/stored.py", "compare/block.py", "serve/starts.py", "serve/state.py", "engine/catalogue.py", "tune/quality.py"}


def test_a_file_of_json_is_a_document_or_only_fenno_reads_it() -> None:
    package = Path(console.__file__).parent
    writes = {
        (path.relative_to(package).as_posix(), maker)
        for path in package.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("process.write", "output.write")
        for maker in {ast.unparse(made.func) for made in ast.walk(call) if isinstance(made, ast.Call)}
    }
    assert {name for name, maker in writes if maker == "json.dumps"} == OWN
    assert {name for name, maker in writes if maker.startswith("documents.")} >= {"tune/session.py", "compare/soak.py"}
