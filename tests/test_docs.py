"""Pages say what is there: links lead somewhere, command lines parse, claims have findings, and nothing names its workshop."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from fenno import cli, recipe
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


BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def shell_lines(text: str) -> list[str]:
    """The lines of a page's shell blocks, prompts taken off, output and comments left out."""
    lines: list[str] = []
    for kind, block in BLOCK.findall(text):
        inside = [line.strip() for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
        prompted = [line.removeprefix("$ ") for line in inside if line.startswith("$ ")]
        lines += prompted or (inside if kind in ("sh", "bash", "console", "shell") else [])
    return [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in lines]


def spoken(text: str) -> Iterator[str]:
    """The command lines that stand in a sentence. `fenno study list|show` are two of them; in a table the bar is escaped."""
    for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        line = " ".join(span.replace("\\|", "|").split())
        names = re.match(r"fenno (\S+ )?([a-z]+(?:\|[a-z]+)+)", line)
        yield from (line.replace(names[2], each) for each in names[2].split("|")) if names else [line]


# What typer raises, whichever click it brings.
USAGE: Any = (typer.BadParameter.__base__, typer.Exit)


def refusal(command: Any, words: list[str], parent: Any = None) -> str:
    """Why the command line's own parser refuses these words; empty where it does not. Nothing is run."""
    try:
        context = command.make_context(command.name, list(words), parent=parent)
        if not hasattr(command, "resolve_command"):
            return ""
        # Those of typer's own click, and of click.
        rest = [*getattr(context, "_protected_args", []), *context.args]
        _, below, after = command.resolve_command(context, rest)
    except USAGE as error:
        kind = type(error).__name__
        # Named and not written out: `fenno recipe`, `fenno explain`.
        named = kind in ("MissingParameter", "NoArgsIsHelpError") and not words
        return "" if named or kind == "Exit" else f"{kind} {error}"
    return refusal(below, after, context)


def said(line: str) -> list[str]:
    """The words of one command line up to a pipe or a redirection, with a number where the page has N."""
    words = shlex.split(line, comments=True)
    end = next((place for place, word in enumerate(words) if word in ("|", ">", ">>", "2>&1")), len(words))
    return ["1" if word == "N" else word for word in words[:end]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_fennos_own_parser_takes_every_command_line_of_a_page(page: Path) -> None:
    text = page.read_text()
    lines = [line for line in (*shell_lines(text), *spoken(text)) if re.match(r"(\.venv/bin/)?fenno ", line)]
    command = get_command(cli.app)
    assert {line: why for line in lines if (why := refusal(command, said(line)[1:]))} == {}


def test_the_pages_have_command_lines_and_the_parser_refuses_wrong_ones() -> None:
    assert sum(line.startswith("fenno ") for page in PAGES for line in shell_lines(page.read_text())) > 40
    command = get_command(cli.app)
    for wrong in ("tunes", "tune --target-p96 1s", "export cpu-small", "loadtest --users many", "study shows"):
        assert refusal(command, wrong.split()), wrong


def test_the_pages_goals_of_make_exist() -> None:
    goals = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [said(line) for page in PAGES for line in (*shell_lines(page.read_text()), *spoken(page.read_text()))
             if line.startswith("make ")]  # fmt: skip
    assert lines
    assert {word for _, *words in lines for word in words if "=" not in word} <= goals


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_of_the_benchmarks_is_there(page: Path) -> None:
    named = re.findall(r"(?<![\w/])benchmarks/[\w./-]*\w", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def article() -> dict[int, list[str]]:
    """The rows of the page on the article: number -> what it says, what was found, by which command, what to do instead."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs/article.md").read_text(), re.MULTILINE)
    return {int(number): re.split(r" \| ", rest) for number, rest in rows}


CLAIMS = [
    *("2.5.8", "speed up vLLM", "DP4A", "line 217", "BLOCK_M", "12 to 18 ms", "--cuda_version", "sm_90 on an A100", "autograd"),
    *("12.2", "Python 3.11", "CUDA_HOME", "HazyResearch", "AWQ", "17 copies", "kv_cache_contiguous", "torch.cat", "nested_tensor"),
    *("ncclGroupStart", "layer 37", "217 lines", "--scheduler-policy", "1024", "16 to 8", "utilisation to 0.9", "prefix caching"),
    *("api_server", "id lookup", "5000", "checkpointing", "compute mode 3", "Nsight", "200 users", "92.1 %", "42.7", "+35 to 62 %"),
    *("Qwen2-72B", "sm_86", "dense", "cu121", "do not change", "Windows"),
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_claim_of_the_article_has_a_finding_a_command_and_what_to_do_instead(claim: str) -> None:
    (row,) = [row for row in article().values() if claim in row[0]]
    assert len(row) == 4
    assert all(cell.strip() for cell in row)
    assert "`" in row[2] or re.search(r"\*(sources|doctor|not checked)\*", row[2]), "no command"


def test_the_articles_claims_are_numbered_and_what_was_looked_up_is_among_them() -> None:
    rows = article()
    assert list(rows) == list(range(1, len(CLAIMS) + 1))
    looked = json.loads((ROOT / "benchmarks/article/results/sources.json").read_text())["found"]
    assert {number for number, row in rows.items() if "*sources*" in row[2]} >= {look["claim"] for look in looked}


def test_the_page_of_recipes_says_of_each_what_it_says_of_itself() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (.*) \| (.*) \|$", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    found = [(name, recipe.load(path)) for name, path in sorted(recipe.embedded().items())]
    wanted = [(name, each.summary, each.tested) for name, each in found]
    assert rows[-len(wanted) :] == wanted


def test_of_every_recipe_the_page_of_patches_says_why_it_needs_none() -> None:
    rows = re.findall(r"^\| (.*) \| .* \| .+ \|$", (ROOT / "patches/README.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)} >= set(recipe.embedded())


MOVED = {
    "128 copies by torch, nothing waited for": "128 copies",
    "128 `cudaMemcpyAsync` on one stream": "128 cudaMemcpyAsync",
    "one copy by torch, from block to block": "copy, block to block",
    "one copy by torch, of one tensor": "copy, one tensor",
    "one `cudaMemcpyAsync`, of one tensor": "cudaMemcpyAsync, one tensor",
    "`transfer`, from block to block": "NCCL, block to block",
    "`transfer`, one tensor, in a group of one (as it was then)": "NCCL, one tensor",
    "`transfer`, one tensor": "NCCL, one tensor",
    "the same without the group (as it is now)": "NCCL, one tensor, isend",
    "`transfer`, 128 tensors in one group": "NCCL, 128 tensors, one group",
    "`transfer`, 128 tensors one by one": "NCCL, 128 tensors, one by one",
    "all-gather of one tensor": "NCCL, all-gather, one tensor",
}


def rows_of(page: str, after: str) -> list[list[str]]:
    """The rows of the first table behind these words, without its head."""
    table = re.search(r"(?:^\|.*\n)+", page[page.index(after) :], re.MULTILINE)
    assert table
    return [re.split(r" *\| *", line.strip("| ")) for line in table[0].splitlines()[2:]]


def test_what_a_step_took_between_two_gpus_is_what_the_results_say() -> None:
    found = json.loads((ROOT / "benchmarks/kv/results/2026-11-30-two-h200.json").read_text())["us"]
    alone, row = ({name: each[0] for what in found if what.startswith("step") for name, each in found[what][how].items()}
                  for how in ("alone", "10 in a row"))  # fmt: skip
    others = [row[name] for name in ("128 copies", "128 copies, CUDA graph", "128 cudaMemcpyAsync, CUDA graph")]
    rows = rows_of((ROOT / "docs/kv.md").read_text(), "one decode step of 2 MiB")
    assert len(rows) == len(row)
    before = ""
    for way, *said in rows:
        graph = way.endswith(", in a CUDA graph") or way == "the same 128 in a CUDA graph"
        name = before if way == "the same 128 in a CUDA graph" else MOVED[way.removesuffix(", in a CUDA graph")]
        before, name = name, f"{name}{', CUDA graph' * graph}"
        times = [f"{other / row[name]:.2g}" if other < 99.5 * row[name] else f"{other / row[name]:.0f}" for other in others]
        assert said == [f"{alone[name]:,.0f} µs", f"{row[name]:,.0f} µs", *times], way


def test_what_a_cache_took_between_two_gpus_is_what_the_results_say() -> None:
    found = json.loads((ROOT / "benchmarks/kv/results/2026-11-30-two-h200.json").read_text())["us"]
    taken = [{name: each[0] for name, each in found[what]["alone"].items()} for what in ("cache", "cache with room")]
    plain = taken[0]["cudaMemcpyAsync, one tensor"]
    names = {**MOVED, "128 copies by torch": "128 copies", "128 `cudaMemcpyAsync`": "128 cudaMemcpyAsync"}
    rows = rows_of((ROOT / "docs/kv.md").read_text(), "The whole cache of 256 tokens")
    assert len(rows) == len(taken[0])
    for way, *said in rows:
        name = names[way.removesuffix(", in a group of one")]
        assert said == [f"{each[name]:,.0f} µs ({plain / each[name]:.0%})".replace("%", " %") for each in taken], way


def test_the_guide_says_of_the_contiguous_cache_what_its_page_and_the_results_say() -> None:
    rows = json.loads((ROOT / "benchmarks/kv/results/2026-12-01-cpu.json").read_text())["rows"]
    steps = {(row["batch"], row["tokens"]): {name: each["median"] for name, each in row["step_ms"].items()} for row in rows}
    shorter = {size: 100 * (1 - step["contiguous"] / step["dynamic"]) for size, step in steps.items()}
    page, guide = ((ROOT / "docs" / name).read_text() for name in ("kv.md", "guide.md"))
    eight = [f"{shorter[8, tokens]:.0f} %" for tokens in (1024, 2048, 4096)]
    one = [f"{shorter[1, tokens]:.1f}" for tokens in (1024, 2048, 4096)]
    assert f"{eight[0]} shorter than with the dynamic cache at 1,024 tokens, {eight[1]} at 2,048 and {eight[2]} at 4,096" in page
    assert f"{one[0]} %, {one[1]} % and {one[2]} %" in page
    assert f"{eight[0]} shorter at 1,024 tokens, {eight[2]} at 4,096; {one[0]} to {one[2]} % with one sequence" in guide
    for row, said in zip(rows, rows_of(page, "decode step of the whole model"), strict=True):
        figures = [f"{row['step_ms'][name]['median']:.1f} ms" for name in ("dynamic", "static", "contiguous")]
        figures += [f"{row['memory_mib'][name]:.0f} MiB" for name in ("dynamic", "static", "contiguous")]
        assert said == [str(row["batch"]), f"{row['tokens']:,}", *figures]


def test_what_a_step_took_on_a_gpu_with_each_cache_is_what_the_results_say() -> None:
    rows = json.loads((ROOT / "benchmarks/kv/results/2026-12-01-h200-cache.json").read_text())["rows"]
    for row, said in zip(rows, rows_of((ROOT / "docs/kv.md").read_text(), "Without it, as a program waits"), strict=True):
        caches = ("dynamic", "static", "contiguous")
        figures = [f"{row[key][name]['median']:.2f} ms" for key in ("step_ms", "gpu_ms") for name in caches]
        assert said == [str(row["batch"]), f"{row['tokens']:,}", *figures]


def navigation(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for below in part.values() if isinstance(part, dict) else part:
            yield from navigation(below)


def test_every_page_is_in_the_sites_navigation() -> None:
    named = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    docs = ROOT / "docs"
    there = sorted(path.relative_to(docs).as_posix() for path in PAGES if path.is_relative_to(docs))
    assert sorted(named) == there, "a new page has its line in mkdocs.yml"


MKDOCS = shutil.which("mkdocs") or shutil.which("mkdocs", path=ROOT / ".venv-docs/bin")


@pytest.mark.skipif(not MKDOCS, reason="no mkdocs on this host: `make docs` brings it")
def test_the_site_is_built_without_a_warning_and_finds_words(tmp_path: Path) -> None:
    done = subprocess.run([str(MKDOCS), "build", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    assert any("quarter of today" in entry["text"] for entry in index["docs"])
    assert [path.name for path in tmp_path.rglob("*.html") if "```" in path.read_text()] == [], "a block that was not read as one"
    assert (tmp_path / "repository/benchmarks/tuner/README.md.txt").exists()


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
    counts = r"name (\d+) failures .*?: (\d+) made on purpose .*?, (\d+) recorded on a GPU host, (\d+) written by hand"
    found = re.search(counts, page)
    assert found
    named, made, recorded, written = found.groups()
    assert f"Its {named} failures" in readme
    assert f"{made} made on a real engine on the CPU, {written} hand-written, {recorded} from a GPU" in readme
