"""Failures: every recorded log is named rightly, healthy ones never, and the page is made from the table."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno.engine.failures import FAILURES, again, explain, markdown, render

ROOT = Path(__file__).parents[1]
LOGS = sorted((ROOT / "tests" / "engine_logs").glob("*/*.log"))
HEALTHY = [
    *sorted((ROOT / "tests" / "engine_logs").glob("healthy*.log")),
    *sorted((ROOT.parent / "shared/fixtures/engine_logs").glob("*.log")),
]
# The first line of a recorded log says what it is: # NAME exit=CODE: how it was made
HEADER = re.compile(r"# (?P<name>[\w-]+) exit=(?P<exit>-?\d+|-): (?P<done>.+)")


def read(path: Path) -> tuple[str, int | None, str]:
    header, _, log = path.read_text(encoding="utf-8").partition("\n")
    match = HEADER.fullmatch(header)
    assert match, f"{path} has no header"
    return match["name"], None if match["exit"] == "-" else int(match["exit"]), log


@pytest.mark.parametrize("path", LOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recorded_failure_is_named(path: Path) -> None:
    name, code, log = read(path)
    found = explain(log, code)
    assert found.name == name, render(found)
    if found.number:
        assert found.line in re.sub(r"\x1b\[[0-9;]*m", "", log.split("\n")[found.number - 1])
    assert "{" not in found.remedy and found.remedy


@pytest.mark.parametrize("path", LOGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recorded_log_names_no_host_and_no_home(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 40_000
    assert not re.search(r"/root/|/home/(?!user/)", text)


@pytest.mark.skipif(not HEALTHY, reason="no healthy logs here")
@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
@pytest.mark.parametrize("code", [None, 0, 143, -15])
def test_a_healthy_log_is_never_called_failed(path: Path, code: int | None) -> None:
    assert explain(path.read_text(encoding="utf-8"), code).name == "none"


@pytest.mark.skipif(not HEALTHY, reason="no healthy logs here")
@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_log_is_healthy_at_every_line(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    failed = {end: found for end in range(len(lines)) if (found := explain("\n".join(lines[:end])).name) != "none"}
    assert not failed


def test_a_plugin_that_vllm_skipped_is_not_the_cause_of_a_start_that_goes_on() -> None:
    _, _, log = read(ROOT / "tests" / "engine_logs" / "cpu" / "plugin-import.log")
    lines = log.split("\n")
    # From the end of the first traceback on; before that nobody can know that vLLM caught it.
    names = {explain("\n".join(lines[:end])).name for end in range(20, len(lines))}
    assert names == {"plugin"}
    assert explain("\n".join(lines[:20]) + "\nvllm: error: unrecognized arguments: --x", 2).name == "bad-flag"


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
def test_what_the_engine_itself_calls_less_than_an_error_is_no_cause(level: str) -> None:
    noise = f"{level} 11-30 17:38:35 [platforms/cuda.py:45] Failed to import: ModuleNotFoundError(\"No module named 'vllm._x'\")\n"
    end = "Traceback (most recent call last):\n  File \"x.py\", line 1, in main\nFileNotFoundError: a.json not found"
    for found in (explain(noise + end, 1), explain(noise, 1)):
        assert found.name == "unknown"
    assert explain(noise + end, 1).first_error == "FileNotFoundError: a.json not found"
    assert explain(noise).name == "none"


def test_a_grok_without_its_published_tokenizer_is_told_the_flag() -> None:
    _, code, log = read(ROOT / "tests" / "engine_logs" / "gpu" / "tokenizer-grok2.log")
    assert "--tokenizer-mode hf" in explain(log, code).remedy and again("tokenizer-grok2") == "no"


def test_the_rows_have_unique_names_and_sound_patterns() -> None:
    names = [failure.name for failure in FAILURES]
    assert len(names) == len(set(names))
    for failure in FAILURES:
        words = (*failure.patterns, *failure.staged, *failure.weak)
        assert words or failure.exits, failure.name
        groups = {group for pattern in words for group in re.compile(pattern).groupindex}
        assert set(re.findall(r"\{(\w+)\}", failure.meaning + failure.remedy)) <= groups, failure.name
        assert bool(failure.staged) == bool(failure.stage), failure.name


def test_what_cannot_heal_is_not_started_again() -> None:
    assert {again(name) for name in ("bad-flag", "weights-missing", "no-kernel-image", "architecture-removed")} == {"no"}
    assert {again(name) for name in ("memory-taken", "device-busy")} == {"yes"}
    assert {again(name) for name in ("oom-serving", "hang", "cuda-launch-failure", "unknown", "none")} == {"perhaps"}
    assert again("bad-flag", "possible") == "perhaps"


def test_a_log_that_was_rotated_is_one_of_a_server_that_was_ready() -> None:
    log = "fenno: this log goes on from engine.log.1\nValueError: a request that was not understood\n"
    assert explain(log).name == "none"
    assert explain(f"{log}EngineCore encountered a fatal error\nCUDA out of memory. Tried to allocate", 1).name == "oom-serving"


def test_an_exit_code_alone_is_only_possible() -> None:
    assert (explain("", 137).name, explain("", 137).confidence) == ("oom-host", "possible")
    assert explain("", -9).name == "oom-host"
    assert explain("", 132).name == "illegal-instruction"
    assert explain("", 1).name == "unknown"
    assert explain("", 0).name == "none"


def test_words_beat_the_exit_code() -> None:
    log = "(EngineCore pid=7) ERROR 11-29 20:00:00 [core.py:1] RuntimeError: No CUDA GPUs are available"
    found = explain(log, 137)
    assert (found.name, found.confidence, found.number) == ("no-gpu", "certain", 1)


def test_the_flag_that_was_wrong_is_named() -> None:
    found = explain("usage: vllm [-h]\nvllm: error: unrecognized arguments: --max-sequences 64", 2)
    assert found.name == "bad-flag"
    assert "--max-sequences" in found.remedy


def test_an_unknown_failure_shows_the_first_real_error() -> None:
    _, code, log = read(ROOT / "tests" / "engine_logs" / "written" / "unknown.log")
    found = explain(log, code)
    assert found.first_error == "KeyError: 'layers.17.mlp.experts.w2_scale_inv'"
    assert found.first_error in render(found)


def test_a_diagnosis_shows_no_key() -> None:
    for secret, log in (
        ("hf_abcdefghijklmnop", "OSError: You are trying to access a gated repo with hf_abcdefghijklmnop"),
        ("letmein", "vllm: error: unrecognized arguments: --api-key letmein"),
        ("letmein", "ValueError: url?token=letmein&x"),
        ("sk-0123456789", "vllm: error: unrecognized arguments: sk-0123456789"),
    ):
        found = explain(log, 2)
        assert secret not in str(found) and "***" in str(found)


def test_the_page_is_made_from_the_table() -> None:
    counts = {kind: sum(path.parent.name == kind for path in LOGS) for kind in ("cpu", "gpu", "written")}
    page = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    assert page == markdown(counts)
    assert f"{len(LOGS)} failures" in page


WORDS = [pattern.replace("\\", "") for failure in FAILURES for pattern in (*failure.patterns, *failure.weak)]
NOISE = [
    "(EngineCore pid=7) ERROR 11-29 20:00:00 [core.py:1] ",
    "Traceback (most recent call last):",
    '  File "x.py", line 1, in load_model',
    "(APIServer pid=1) INFO:     Application startup complete.",
    "usage: vllm",
    "EngineDeadError",
    "\r",
    "\x1b[1;36m",
    "\u2028",
    "version 0.24.0",
]


@given(
    st.lists(st.one_of(st.text(), st.sampled_from(WORDS), st.sampled_from(NOISE))),
    st.sampled_from(["", "\n", " "]),
    st.one_of(st.none(), st.integers(-300, 300)),
)
def test_explain_takes_any_text(parts: list[str], between: str, code: int | None) -> None:
    found = explain(between.join(parts), code)
    assert found.name in {"none", "unknown", *(failure.name for failure in FAILURES)}
    assert render(found)


def test_a_server_that_has_run_for_long_is_still_known_to_have_been_ready() -> None:
    request = 'INFO:     127.0.0.1:41822 - "POST /v1/completions HTTP/1.1" 200 OK\n' * 70_000
    log = f"INFO:     Application startup complete.\n{request}ValueError: a request that was not understood\n"
    assert explain(log).name == "none"
    found = explain(f"{log}EngineCore encountered a fatal error\nRuntimeError: unspecified launch failure", 1)
    assert (found.name, found.number) == ("cuda-launch-failure", 70_004)


LONG = {
    "requests": '(APIServer pid=1) INFO:     127.0.0.1:41822 - "POST /v1/completions HTTP/1.1" 200 OK\n' * 60_000,
    "errors": "".join(f"(EngineCore pid=1) ERROR 11-29 21:45:27 [core.py:402] ValueError: number {i}\n" for i in range(65_000)),
    "tracebacks": 'Traceback (most recent call last):\n  File "x", line 1, in load_model\nCUDA out of memory. Tried to allocate\n'
    * 50_000,
    "one long line": "GiB KV cache is needed, " * 220_000,
    "one long word": "a" * 5_000_000,
    "dots": "a." * 2_500_000,
    "empty lines": "\n" * 5_000_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_five_megabytes_take_less_than_a_second(kind: str) -> None:
    assert len(LONG[kind]) > 4_900_000

    def seconds() -> float:
        started = time.process_time()
        explain(LONG[kind], 1)
        return time.process_time() - started

    assert any(seconds() < 1 for _ in range(3))
