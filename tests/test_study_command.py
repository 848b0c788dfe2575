"""`fenno study` and `fenno tune --watch` from the outside, as child processes on the stub engine."""

from __future__ import annotations

import csv
import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from stub.harness import Done, Place, side_by_side

pytestmark = pytest.mark.scenario

# Generous, so that a client on a busy host is in time for its own figures.
TARGETS = {"p95_ttft": "8s", "qps": 40}


@dataclass
class Story:
    """A study that was met, and what its commands said."""

    place: Place
    tuned: Done
    runs: dict[str, Done] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    @property
    def study(self) -> Path:
        return self.place.folder / self.tuned.document["study"]

    @property
    def name(self) -> str:
        return self.study.name


def studied(place: Place, **env: str) -> Story:
    chosen = place.recipe(targets=TARGETS, workload={"timeout": "4s"}, env=env)
    return Story(place, place.fenno("tune", "--confirm", "off", chosen))


def slower(story: Story) -> None:
    """From now on the tuned engine takes three seconds a step."""
    path = story.study / "tuned.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["engine"]["env"] = {"STUB_BASE_MS": "3000"}
    path.write_text(yaml.safe_dump(recipe))


def looked_at(place: Place) -> Story:
    story = studied(place)
    asked: dict[str, tuple[str, ...]] = {
        "list": ("list",),
        "show": ("show", story.name),
        "newest": ("show", "--json"),
        "csv": ("export",),
        "json": ("export", "--to", "json", story.name[:4]),
        "xml": ("export", "--to", "xml"),
        "none": ("reproduce", "nothing"),
    }
    story.runs = {name: place.fenno("study", *words) for name, words in asked.items()}
    return story


def reproduced(place: Place) -> Story:
    story = studied(place, FENNO_TEST_TOKEN="not-to-be-seen")
    story.runs["no token"] = place.fenno("study", "reproduce", story.name)
    story.runs["held"] = place.fenno("study", "reproduce", story.name, FENNO_TEST_TOKEN="not-to-be-seen")
    slower(story)
    story.runs["lost"] = place.fenno("study", "reproduce", story.study)
    story.runs["list"] = place.fenno("study", "list")
    story.left = place.left()
    return story


def watched(place: Place) -> Story:
    story = studied(place)
    run = place.start("tune", "--watch", "--every", "1s", story.study).until(lambda said: said.count("it still holds") >= 2)
    run.signal(signal.SIGINT)
    story.runs["held"] = run.finish()
    slower(story)
    run = place.start("tune", story.study / "tuned.yaml", "--watch").until(lambda said: "it no longer holds" in said)
    run.signal(signal.SIGTERM)
    story.runs["lost"] = run.finish()
    run = place.start("tune", story.study / "tuned.yaml", "--watch").until(
        lambda said: "reading the model" in said or "study:" in said
    )
    run.signal(signal.SIGINT)
    story.runs["soon"] = run.finish()
    story.runs["fresh"] = place.fenno("tune", "--watch", "--fresh", story.study)
    place.empty()
    story.left = place.left()
    return story


SCENARIOS: dict[str, Callable[[Place], Story]] = {"looked": looked_at, "reproduced": reproduced, "watched": watched}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Story]]:
    with side_by_side(SCENARIOS, tmp_path_factory.mktemp, workers=3) as tell:
        yield tell


def test_a_study_is_listed_shown_and_exported(told: Callable[[str], Story]) -> None:
    story = told("looked")
    assert story.tuned.code == 0, story.tuned.err
    (line,) = story.runs["list"].document["studies"]
    assert (line["study"], line["verdict"], line["trials"]) == (story.name, "met", 1)
    assert f"{story.name}\tmet\tstub" in story.runs["list"].err
    shown = story.runs["show"]
    assert story.tuned.document["sentence"] in shown.err and "settings: the engine's defaults" in shown.err
    assert shown.document["trials"][0]["state"] == "met" and shown.document["refused"] == []
    newest = story.runs["newest"]
    assert (newest.document, newest.err) == (shown.document, "")
    (trial,) = csv.DictReader(io.StringIO(story.runs["csv"].out))
    assert (trial["state"], trial["knob.max_num_active_seqs"], trial["target.p95_ttft.limit"]) == ("met", "64", "8.0")
    exported = story.runs["json"].document
    assert exported["trials"] == shown.document["trials"]
    assert list(exported["trials"][0]) == list(trial)


def test_what_a_study_command_cannot_do_is_a_sentence(told: Callable[[str], Story]) -> None:
    runs = told("looked").runs
    assert (runs["xml"].code, runs["none"].code) == (2, 2)
    assert "--to is 'xml'" in runs["xml"].err and "there is no study 'nothing'" in runs["none"].err


def test_a_secret_of_the_recipe_is_in_no_file_of_its_studies_and_is_asked_for_again(told: Callable[[str], Story]) -> None:
    story = told("reproduced")
    written = {path: path.read_bytes() for path in (story.place.folder / "fenno-studies").rglob("*") if path.is_file()}
    assert len({path.parent for path in written if path.name == "recipe.yaml"}) == 3
    assert not [path for path, text in written.items() if b"not-to-be-seen" in text]
    refused = story.runs["no token"]
    assert refused.code == 2 and "FENNO_TEST_TOKEN is not set" in refused.err


def test_a_study_that_still_holds_is_reproduced_and_one_that_no_longer_does_is_told(told: Callable[[str], Story]) -> None:
    story = told("reproduced")
    held, lost = story.runs["held"], story.runs["lost"]
    assert (held.code, held.document["verdict"], held.document["trials"]) == (0, "met", 1), held.err
    assert held.document["sentence"].startswith("it still holds: p95_ttft ")
    assert held.document["then"] == story.tuned.document["figures"]
    assert (held.document["of"], held.document["differences"]) == (f"fenno-studies/{story.name}", [])
    assert (lost.code, lost.document["verdict"], lost.document["exit_code"]) == (3, "infeasible", 3), lost.err
    assert lost.document["sentence"].startswith("it no longer holds: p95_ttft ")
    starts = story.place.starts()
    assert len(starts) == 3 and all("--max-num-seqs 64" in start for start in starts), "one search, two cold starts"
    assert ["--scheduler-cls" in start for start in starts] == [True, False, False], "plain flags"
    assert [line["verdict"] for line in story.runs["list"].document["studies"]] == ["infeasible", "met", "met"]
    assert story.left == []


def test_a_watch_tells_until_ctrl_c_and_ends_with_what_it_saw(told: Callable[[str], Story]) -> None:
    story = told("watched")
    held, lost = story.runs["held"], story.runs["lost"]
    assert (held.code, held.document["verdict"]) == (0, "met"), held.err
    assert held.document["trials"] >= 2 and " held; it still holds: " in held.document["sentence"]
    assert (lost.code, lost.document["trials"]) == (3, 1), lost.err
    assert lost.document["sentence"].startswith("of 1 look 1 did not; it no longer holds: ")
    assert story.left == []


def test_a_watch_that_saw_nothing_was_interrupted_and_takes_no_options_of_a_search(told: Callable[[str], Story]) -> None:
    runs = told("watched").runs
    assert (runs["soon"].code, runs["soon"].out) == (130, ""), runs["soon"].err
    assert runs["fresh"].code == 2 and "--fresh does not go with it" in runs["fresh"].err
