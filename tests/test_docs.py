"""Pages say what is there: links lead somewhere, exit codes are the table's, commands exist, and nothing names its workshop."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fenno.errors import EXIT_CODES

ROOT = Path(__file__).resolve().parents[1]


def tracked() -> list[Path]:
    """The repository's files; outside a clone (an unpacked archive of the source), what is there and is not hidden."""
    if (ROOT / ".git").exists():
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [ROOT / name for name in names if name and (ROOT / name).is_file()]
    return [path for path in ROOT.rglob("*") if path.is_file() and not re.search(r"/[._]", f"/{path.relative_to(ROOT)}")]


FILES = tracked()
PAGES = [path for path in FILES if path.suffix == ".md"]


def anchors(page: Path) -> set[str]:
    """The anchors that a code host makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), target


def test_the_page_of_exit_codes_is_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    assert {int(code): meaning.strip() for code, meaning in rows} == EXIT_CODES


def shell_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks, prompts taken off, output and comments left out."""
    lines: list[str] = []
    for block in re.findall(r"^```(?:sh|bash|console|shell)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        prompted = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
        lines += prompted or [line for line in block.splitlines() if line and not line.startswith("#")]
    return lines


def help_of(path: tuple[str, ...]) -> str:
    code = "from fenno.cli import main; main()"
    wide = {**os.environ, "COLUMNS": "240", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code, *path, "--help"], capture_output=True, text=True, env=wide)
    assert done.returncode == 0, f"fenno {' '.join(path)}: {done.stderr}"
    return done.stdout


def check_make(words: list[str]) -> None:
    goals = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= goals, words


def check_fenno(words: list[str]) -> None:
    """The command is there, and so are its options; what follows `--` is somebody else's command line."""
    ours = words[: words.index("--")] if "--" in words else words
    path = tuple(word for word in ours[: 2 if ours[0] in ("recipe", "patch", "patch-kv") else 1] if not word.startswith("-"))
    shown = help_of(path).split()
    assert [word for word in ours if word.startswith("--") and word.partition("=")[0] not in shown] == [], words


def test_the_pages_commands_exist() -> None:
    lines = [line for name in ("README.md", "CONTRIBUTING.md") for line in shell_lines(ROOT / name)]
    commands = [words for line in lines if (words := shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", line), comments=True))]
    assert commands, "the pages show no command"
    for program, *words in commands:
        if program == "make":
            check_make(words)
        elif program.rpartition("/")[2] == "fenno":
            check_fenno(words)


# Written so that this file does not hold them itself.
PLACES = ["/wo" + "rk/", "/tm" + "p/w/", "/op" + "t/wheels", "/op" + "t/py" + "pi"]
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "deb." + "debian.org"]
WORKSHOP = [*PLACES, *HOSTS, "sand" + "box", "../sha" + "red/design"]


def test_no_file_names_the_machine_it_was_made_on_or_a_registrys_host() -> None:
    found = []
    for path in FILES:
        text = path.read_bytes().decode(errors="ignore").lower()
        found += [f"{path.relative_to(ROOT)}: {word}" for word in WORKSHOP if word in text]
    assert found == []


def test_the_readme_counts_the_failures_as_their_page_does() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/failures.md", "README.md"))
    counts = r"name (\d+) failures .*?: (\d+) made on purpose .*?, none recorded on a GPU host, (\d+) written by hand"
    found = re.search(counts, page)
    assert found
    named, made, written = found.groups()
    assert f"Its {named} failures" in readme
    assert f"{made} made on a real engine on the CPU, {written} hand-written, none from a GPU" in readme
