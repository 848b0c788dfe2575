"""What the command line says of itself, and what it answers to natural mistakes, without an engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fenno import cli, process, recipe, units
from fenno.commands import export, given, load
from fenno.errors import RecipeError, UsageError
from fenno.load import job, words
from fenno.load.plan import Plan
from fenno.tune import session

SMALLEST = "name: a\nengine: {model: b}\n"


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command without commands below it, by what is typed."""
    below = getattr(command, "commands", {})
    for word, each in below.items():
        yield from leaves(each, f"{name} {word}")
    if not below:
        yield name, command


COMMANDS = dict(leaves(get_command(cli.app), "fenno"))


def arguments(name: str) -> list[Any]:
    """The arguments of a command that are not options."""
    return [param for param in COMMANDS[name].params if param.param_type_name == "argument"]


@pytest.mark.parametrize("name", COMMANDS)
def test_arguments_are_called_in_capitals_and_bracketed_once(name: str) -> None:
    called = [each.metavar for each in arguments(name)]
    assert all(word and word == word.upper() and not word.startswith("[") for word in called), called


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_takes_a_recipe_calls_it_so(name: str) -> None:
    taken = [each.metavar for each in arguments(name) if "recipe" in each.help]
    assert all("RECIPE" in word or name == "fenno compare" for word in taken), taken


@pytest.mark.parametrize(
    ("files", "words", "says", "hint"),
    [
        ([], "folder", "folder is a folder, not a recipe", "give a recipe's file"),
        (["tuned.yaml"], "folder", "is a folder", "folder/tuned.yaml"),
        (["config.json"], "folder", "is a folder", "fenno init -- vllm serve folder > fenno.yaml"),
        ([], "localhost:8000", "no recipe 'localhost:8000'", "http://localhost:8000"),
        ([], "10.0.0.1:8000/v1", "no recipe", "http://10.0.0.1:8000/v1"),
        ([], "http://localhost:8000", "no recipe", "`fenno loadtest`"),
        ([], "org/model-7B", "no recipe", "fenno init -- vllm serve org/model-7B > fenno.yaml"),
        ([], "recipes/mine.yaml", "no recipe", "fenno recipe list"),
        ([], "../mine", "no recipe", "fenno recipe list"),
        ([], "cpu-smal", "did you mean cpu-small?", "fenno recipe list"),
    ],
)
def test_what_is_no_recipe_is_answered_by_what_it_is(
    files: list[str], words: str, says: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in files:
        Path("folder", name).touch()
    with pytest.raises(RecipeError) as caught:
        recipe.find(words)
    assert says in str(caught.value) and hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("p95", "there is no target `p95`; did you mean `p95_ttft`?"),
        ("ttft", "there is no target `ttft`; did you mean `p95_ttft`?"),
        ("e2el", "there is no target `e2el`; did you mean `p95_e2el`?"),
        ("short:p99", "there is no target `p99`; did you mean `p99_ttft`?"),
        ("qsp", "there is no target `qsp`; did you mean `qps`?"),
        ("latency", "there is no target `latency`"),
    ],
)
def test_a_target_that_there_is_not_is_answered_with_those_there_are(name: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        recipe.parse(SMALLEST, "here").with_targets(**{name: "800ms"})
    assert str(caught.value) == says
    assert {*re.findall(r"\w+", recipe.TARGETS)} >= {*recipe.METRICS, *recipe.Targets.model_fields} - {"classes"}


def test_a_target_that_is_given_twice_is_a_question() -> None:
    assert given.named(["p95_ttft=1s", " qps = 2"]) == {"p95_ttft": "1s", "qps": "2"}
    with pytest.raises(UsageError, match="--target p95_ttft is given twice: 1s and 2s"):
        given.named(["p95_ttft=1s", "qps=2", "p95_ttft = 2s"])


@pytest.mark.parametrize("key", [*recipe.USUAL, "p99.9_gap", "p1_ttft", "p99.99_e2el"])
@pytest.mark.parametrize("where", ["targets: {%s: %s}", "targets: {classes: {short: {%s: %s}}}"])
def test_a_latency_in_a_file_is_no_number_without_a_unit(key: str, where: str) -> None:
    for number in (800, 800.0, 0.8):
        with pytest.raises(RecipeError, match=f"{number:g} has no unit: write {number:g}ms or {number:g}s"):
            recipe.parse(SMALLEST + where % (key, number), "here")
    assert [*recipe.parse(SMALLEST + where % (key, "800ms"), "here").targets.latencies().values()] == [0.8]


NO_PERCENTILE = ["p0_ttft", "p0.5_ttft", "p100_ttft", "p99.999_ttft", "p95.0_ttft", "p99.90_gap", "p_ttft", "95_ttft", "p95_"]


@pytest.mark.parametrize("key", NO_PERCENTILE)
@pytest.mark.parametrize("where", ["targets: {%s: 1s}", "targets: {%s: }", "targets: {classes: {short: {%s: 1s}}}"])
def test_what_is_no_percentile_is_an_unknown_key(key: str, where: str) -> None:
    with pytest.raises(RecipeError, match=f"unknown key `targets.*{re.escape(key)}`"):
        recipe.parse(SMALLEST + where % key, "here")


@pytest.mark.parametrize("where", ["targets: {%s: }", "targets: {classes: {short: {%s: }}}"])
def test_a_latency_that_is_written_as_none_is_no_target(where: str) -> None:
    assert recipe.parse(SMALLEST + where % "p95_ttft", "here").targets.latencies() == {}
    # As records of runs had every percentile that there was.
    assert recipe.Targets.model_validate({"qps": None, "p95_ttft": None, "p99_ttft": 0.8}).latencies() == {"p99_ttft": 0.8}


def test_latency_targets_stand_metric_by_metric_with_the_lowest_percentile_first() -> None:
    text = "targets: {p99.9_gap: 1s, p99_ttft: 1s, p9_ttft: 1s, p75_tpot: 1s, classes: {short: {p80_e2el: 1s}}}"
    found = recipe.parse(SMALLEST + text, "here")
    assert [*found.targets.latencies()] == ["p9_ttft", "p99_ttft", "p75_tpot", "p99.9_gap", "short:p80_e2el"]
    assert recipe.parse(found.to_yaml(), "there").targets.latencies() == found.targets.latencies()


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("targets: {memory: 85}", "`targets.memory`: 85 has no unit: write 85% or 85GiB"),
        ("targets: {memory: 85.5}", "write 85.5% or 85.5GiB"),
        ("host: {memory: 6}", "`host.memory`: 6 has no unit: write 6GiB"),
        ("host: {gpu_memory: 80}", "`host.gpu_memory`: 80 has no unit: write 80GiB"),
        ("host: {memory: '16'}", "`host.memory`: 16 has no unit: write 16GiB"),
        ("host: {memory: 16.5}", "`host.memory`: 16.5 has no unit: write 16.5GiB"),
        ("host: {memory: 16KiB}", "`host.memory`: 16KiB is less than 1 MiB"),
        ("targets: {memory: 16KiB}", "`targets.memory`: 16KiB is less than 1 MiB"),
        ("targets: {memory: '85'}", "is not a share such as 85% or a size such as 40GiB"),
    ],
)
def test_a_size_in_a_file_is_no_handful_of_bytes(part: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(SMALLEST + part, "here")
    assert says in str(caught.value)


@pytest.mark.parametrize("limit", ["40GiB", "85%", 0.85, 1, 42949672960])
def test_a_memory_target_is_the_same_after_it_was_written(limit: object) -> None:
    mine = recipe.parse(SMALLEST, "here").with_targets(memory=limit)
    assert recipe.parse(mine.to_yaml(), "here").targets.memory == mine.targets.memory


@pytest.mark.parametrize("limit", ["2s", "0.057s", "57ms", "90m", "0.1ms"])
def test_a_recipe_with_quantities_is_the_same_after_it_was_written_and_with_other_targets(limit: str) -> None:
    targets = f"{{p95_ttft: {limit}, memory: 40GiB, classes: {{short: {{p99_gap: {limit}}}}}}}"
    mine = recipe.parse(f"{SMALLEST}host: {{memory: 1MiB, gpu_memory: '80000000000'}}\ntargets: {targets}\n", "here")
    assert recipe.parse(mine.to_yaml(), "here").digest() == mine.digest() == mine.with_targets(qps=None).digest()
    assert mine.with_targets(qps=3).targets.latencies() == mine.targets.latencies()
    assert all(isinstance(limit, float) for limit in mine.model_dump(mode="json")["targets"]["classes"]["short"].values() if limit)


@pytest.mark.parametrize("option", ["--duration", "--margin"])
def test_a_quantity_that_cannot_be_read_names_its_option(option: str) -> None:
    reader: Callable[[object], float] = units.duration if option == "--duration" else units.share
    with pytest.raises(UsageError, match=f"^{option}: '30' is not a"):
        given.quantity(option, reader, "30")
    assert given.parse(option, reader, None) is None


@pytest.mark.parametrize(
    ("output", "file"),
    [
        (None, None),
        ("deploy", "deploy/a.yaml"),
        ("conf.d/", "conf.d/a.yaml"),
        ("there.d", "there.d/a.yaml"),
        ("qwen2.5-7b", "qwen2.5-7b/a.yaml"),
        ("deploy/b.yaml", "deploy/b.yaml"),
    ],
)
def test_an_export_goes_into_what_is_a_folder_or_written_like_one(
    output: str | None, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.d").mkdir()
    assert export.target(output, "a.yaml") == (Path(file) if file else None)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"users": 1, "duration": 30.0, "warmup": 5.0}, "closed loop, 1 user, 30 s after 5 s of warm-up"),
        ({"users": 8, "requests": 200}, "closed loop, 8 users, 200 requests"),
        ({"rate": 4.0, "duration": 90.0}, "open loop, 4 requests/s, poisson arrivals, 1 min 30 s"),
        ({"ramp": (2.0, 40.0), "duration": 60.0}, "open loop, 2 to 40 requests/s, 1 min"),
    ],
)
def test_what_will_be_sent_is_said_before_it_is(asked: dict[str, Any], says: str) -> None:
    assert words.asked(Plan(url="http://127.0.0.1", model="m", workload=recipe.Workload(), **asked)) == says


@pytest.mark.parametrize(
    ("targets", "goodput", "says"),
    [
        ({}, 4.0, ""),
        ({"p95_ttft": 0.8, "a:p99_gap": 2.0}, 3.5, "3.50 requests/s kept every latency target (p95_ttft 800 ms, a:p99_gap 2 s)"),
        ({"p95_ttft": 0.001}, 0.0, "0.00 requests/s kept every latency target (p95_ttft 1 ms)"),
        ({"p95_ttft": 1.0}, None, ""),
    ],
)
def test_a_load_test_says_how_much_of_it_kept_its_targets(targets: dict[str, float], goodput: float | None, says: str) -> None:
    assert words.goodput({"targets": targets, "goodput": goodput}) == says


def test_a_study_says_its_targets_as_people_write_them() -> None:
    mine = recipe.parse(f"{SMALLEST}targets: {{p95_ttft: 800ms, qps: 40, memory: 85%, availability: 99.5%}}\n", "here")
    assert session.show(mine.targets) == "p95_ttft 800 ms, qps 40, memory 85 %, availability 99.5 %"
    assert session.show(recipe.Targets()) == "none"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models/"])
def test_the_address_of_an_endpoint_is_answered_with_the_servers(path: str) -> None:
    with pytest.raises(UsageError, match="below the server's") as caught:
        job.of_url(f"http://10.0.0.1:8000{path}", None, "completions", None)
    assert "give http://10.0.0.1:8000," in caught.value.hint


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_a_servers_address_is_taken_with_and_without_its_version(path: str) -> None:
    assert job.of_url(f"http://10.0.0.1:8000{path}", None, "completions", None).engine.url == "http://10.0.0.1:8000"


def test_what_to_do_is_said_once_for_all_reasons_that_it_mends(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"reasons": ["late", "held up", "short"], "next_steps": ["lower it", "lower it", "longer"], "valid": False}
    load.tell_load({**document, "flags": [], "ended": {"how": "done", "why": ""}}, table=False)
    said = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert said == ["INVALID: late", "INVALID: held up", "next: lower it", "INVALID: short", "next: longer"]


def test_on_windows_it_says_that_it_does_not_run_there_before_anything_is_loaded() -> None:
    # `fcntl` stands for the modules that there are not.
    there = "import sys; sys.platform, sys.modules['fcntl'] = 'win32', None; from fenno.__main__ import main; main()"
    done = process.run([sys.executable, "-c", there], timeout=300.0)
    assert done.returncode == 1 and "on Windows, WSL 2" in done.stderr and "Traceback" not in done.stderr
