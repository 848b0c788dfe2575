"""What the command line says of itself, and what it answers to natural mistakes, without an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from fenno import cli, recipe, units
from fenno.commands import given
from fenno.errors import RecipeError, UsageError

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
    assert {*re.findall(r"\w+", recipe.TARGETS)} >= {part for key in recipe.Latencies.model_fields for part in key.split("_")}
    assert {*re.findall(r"\w+", recipe.TARGETS)} >= {*recipe.Targets.model_fields} - {*recipe.Latencies.model_fields, "classes"}


@pytest.mark.parametrize("key", recipe.Latencies.model_fields)
@pytest.mark.parametrize("where", ["targets: {%s: %s}", "targets: {classes: {short: {%s: %s}}}"])
def test_a_latency_in_a_file_is_no_whole_number_without_a_unit(key: str, where: str) -> None:
    with pytest.raises(RecipeError, match="800 has no unit: write 800ms, or 800s"):
        recipe.parse(SMALLEST + where % (key, 800), "here")
    found = recipe.parse(SMALLEST + where % (key, 0.8), "here").targets.latencies()
    assert [*found.values()] == [0.8] == [*recipe.parse(SMALLEST + where % (key, "800ms"), "here").targets.latencies().values()]


def test_a_recipe_with_seconds_is_the_same_after_it_was_written() -> None:
    mine = recipe.parse(f"{SMALLEST}targets: {{p95_ttft: 2s}}\n", "here")
    text = yaml.safe_dump(mine.model_dump(mode="json"))
    assert recipe.parse(text, "here").digest() == mine.digest()


@pytest.mark.parametrize("option", ["--duration", "--margin"])
def test_a_quantity_that_cannot_be_read_names_its_option(option: str) -> None:
    reader: Callable[[object], float] = units.duration if option == "--duration" else units.share
    with pytest.raises(UsageError, match=f"^{option}: '30' is not a"):
        given.quantity(option, reader, "30")
    assert given.parse(option, reader, None) is None
