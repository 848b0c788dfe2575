"""`fenno compare` as a whole: two recipes with a cold start for each block, stored runs, and one that does not come to its end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from stub.harness import Done, Place, side_by_side

from fenno.compare import run
from fenno.compare.block import Arm, Making
from fenno.load import calibration, job, raw
from fenno.load.calibration import Timing
from fenno.load.plan import parse, requests

pytestmark = pytest.mark.scenario

TIMES = ("--rate", 30, "--duration", "1s", "--warmup", "300ms")


class Ran(NamedTuple):
    done: Done
    place: Place


def sound_and_failing(place: Place) -> list[Path]:
    """Two recipes, the second of an engine that fails every other request: a difference that no hiccup of this host hides. Of
    latencies as long as these no client is too late."""
    late = {"p95_ttft": "1000s"}
    arms = {"sound": {"STUB_ARM": "sound"}, "failing": {"STUB_ARM": "failing", "STUB_FAIL": 2}}
    return [place.recipe(name=name, env=env, targets=late) for name, env in arms.items()]


def in_turn(place: Place) -> Ran:
    how = (*TIMES, "--rounds", 3, "--junit", "compare.xml")
    return Ran(place.fenno("compare", *sound_and_failing(place), *how), place)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ran]]:
    with side_by_side({"in_turn": in_turn}, tmp_path_factory.mktemp) as tell:
        yield tell


@pytest.fixture
def compared(alone: Callable[[str], Ran]) -> Done:
    return alone("in_turn").done


@pytest.fixture
def place(alone: Callable[[str], Ran]) -> Place:
    return alone("in_turn").place


def findings(done: Done) -> dict[str, str]:
    return {each["metric"]: each["state"] for each in done.document["findings"]}


def test_a_recipe_that_fails_is_worse_and_the_exit_code_says_so(compared: Done) -> None:
    assert compared.code == 1, compared.err
    assert findings(compared)["availability"] == "worse"
    assert compared.document["arms"]["A"]["figures"]["availability"]["value"] > 0.9


def test_every_block_has_a_cold_start_and_nothing_is_left(place: Place, compared: Done) -> None:
    assert len(place.starts()) >= 6, compared.err
    assert place.empty()


def test_a_pipeline_reads_it(place: Place, compared: Done) -> None:
    suite = ElementTree.parse(place.folder / "compare.xml").getroot()
    assert "B: availability" in [case.get("name") for case in suite if case.find("failure") is not None]


def test_its_blocks_are_stored_runs_that_can_be_compared_again(place: Place, compared: Done) -> None:
    blocks = sorted(path.parent for path in (place.folder / "fenno-comparisons").rglob("asked.json"))
    assert len(blocks) >= 6
    again = place.fenno("compare", blocks[0], blocks[0], "--json")
    assert again.code == (0 if again.document["valid"] else 4), again.err  # this host may have been too busy to measure
    assert set(findings(again).values()) <= {"not distinguishable", "equivalent", "not measured"}


def interrupted(place: Place) -> Done:
    """By Ctrl-C while the last block of the second round is measured."""
    run = place.start("compare", place.recipe(), place.recipe(name="other"), *TIMES[:2], "--duration", "5s", "--rounds", 9)
    folder = place.folder / "fenno-comparisons"
    run.until(lambda said: "round 2: A" in said and any(path.stat().st_size for path in folder.glob("*/002-A/records-*")))
    run.signal(signal.SIGINT)
    return run.finish()


def gone(place: Place) -> Done:
    """The engine is killed while the first block is measured."""
    run = place.start("compare", place.recipe(), place.recipe(name="other"), *TIMES[:2], "--duration", "60s")
    run.until(lambda _: any(path.stat().st_size for path in place.folder.glob("fenno-comparisons/*/001-A/records-*")))
    place.kill("serve")
    return run.finish()


def beside(place: Place) -> Ran:
    """Two recipes on two GPUs; each engine notes which it was given."""
    place.python.write_text(place.python.read_text().replace('"$*"', '"$* for $STUB_ARM on $CUDA_VISIBLE_DEVICES"'))
    how = (*TIMES[:2], "--duration", "3s", *TIMES[4:], "--rounds", 3, "--devices", 0, "--devices", 1)
    return Ran(place.fenno("compare", *sound_and_failing(place), *how), place)


def one_dies(place: Place) -> Ran:
    """Of two side by side, over days."""
    arms = [place.recipe(), place.recipe(name="deadly", env={"STUB_DIE": 20})]
    each = ("--each", "3s", "--blocks", 3, *TIMES[:2], *TIMES[4:])
    return Ran(place.fenno("soak", *arms, *each, "--devices", 0, "--devices", 1), place)


def beside_interrupted(place: Place) -> Ran:
    """By Ctrl-C while both are measured."""
    gpus = ("--devices", 0, "--devices", 1)
    run = place.start("compare", place.recipe(), place.recipe(name="other"), *TIMES[:2], "--duration", "60s", *gpus)
    arms = [f"fenno-comparisons/*/001-{name}/records-*" for name in "AB"]
    run.until(lambda _: all(any(path.stat().st_size for path in place.folder.glob(arm)) for arm in arms))
    run.signal(signal.SIGINT)
    return Ran(run.finish(), place)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ran]]:
    with side_by_side({job.__name__: job for job in (beside, one_dies, beside_interrupted)}, tmp_path_factory.mktemp) as tell:
        yield tell


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Done]]:
    with side_by_side({job.__name__: job for job in (interrupted, gone)}, tmp_path_factory.mktemp) as tell:
        yield tell


def test_ctrl_c_keeps_a_comparison_as_far_as_it_came(cut: Callable[[str], Done]) -> None:
    found = cut("interrupted")
    document = found.document
    assert found.code == 130, found.err
    rounds = document["arms"]["A"]["blocks"]
    assert document["arms"]["B"]["blocks"] == rounds < 9, "the round that was cut short is left out"
    assert document["interrupted"] == f"after {rounds} of 9 rounds"
    records = f"all records: {document['records']}"
    assert f"interrupted after {rounds} of 9 rounds: what is told is of those; {records}" in found.err and document["records"]


def test_a_server_that_dies_ends_a_comparison_with_the_engines_exit_code(cut: Callable[[str], Done]) -> None:
    found = cut("gone")
    assert found.code == 5, found.err
    assert found.document["gone"].startswith("A: the engine ended")
    assert "round 1: B" not in found.err, "the round is lost whatever B does"


def test_recipes_on_gpus_of_their_own_run_side_by_side_and_change_places(both: Callable[[str], Ran]) -> None:
    done, place = both("beside")
    assert done.code == 1, done.err
    assert findings(done)["availability"] == "worse"
    assert done.document["gpus"] == ["0", "1"]
    assert "side by side, in turn on the GPUs 0 and 1" in done.err
    started = [line.rpartition(" for ")[2] for line in place.starts()]
    rounds = [set(pair) for pair in zip(started[::2], started[1::2], strict=True)]  # which of both is the first is nobody's promise
    here, there = {"sound on 0", "failing on 1"}, {"sound on 1", "failing on 0"}
    assert rounds[0] == here and there in rounds and all(places in (here, there) for places in rounds)
    (folder,) = (place.folder / "fenno-comparisons").glob("*")
    for number in ("001", "002", "003"):
        begun = [(folder / f"{number}-{arm}" / "plan.json").stat().st_mtime_ns for arm in "AB"]
        ended = [(folder / f"{number}-{arm}" / "ended.json").stat().st_mtime_ns for arm in "AB"]
        assert max(begun) <= min(ended), "the traffic of both had begun before that of either was over"


def test_of_two_side_by_side_one_may_die_and_the_other_is_measured_to_its_end(both: Callable[[str], Ran]) -> None:
    done, place = both("one_dies")
    assert done.code == 5, done.err
    deaths = done.document["deaths"]
    assert list(deaths) == ["B"]
    assert len(place.starts()) >= 2 * len(deaths["B"]), "each block has a start, and one that fails another"
    told = [json.loads(path.read_text()) for path in (place.folder / "fenno-soaks").glob("*/???-A/block.json")]
    assert {each["ended"]["how"] for each in told} == {"done"}
    assert len(told) == len(deaths["B"])


def test_ctrl_c_ends_both_that_run_side_by_side_and_keeps_the_records(both: Callable[[str], Ran]) -> None:
    done, place = both("beside_interrupted")
    assert (done.code, done.document["interrupted"]) == (130, "after 0 of 6 rounds"), done.err
    ended = [json.loads(path.read_text())["ended"]["how"] for path in place.folder.glob("fenno-comparisons/*/001-?/ended.json")]
    assert ended == ["interrupted"] * 2
    assert place.empty()


def test_two_urls_take_turns_with_the_same_traffic_and_prompts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fast = Timing(ttft=0.02, itl=0.005)
    with calibration.serving(tmp_path / "a", fast) as one, calibration.serving(tmp_path / "b", fast) as two:
        recipes = [job.of_url(server.url, None, "completions", None) for server in (one, two)]
        arms = [Arm(letter, recipe.name, recipe) for letter, recipe in zip("AB", recipes, strict=True)]
        run.live(arms, Making(job.plan(recipes[0], rate=40, duration=1.0, warmup=0.2), tmp_path / "blocks"), 2, print)
    blocks = sorted((tmp_path / "blocks").glob("*/plan.json"), key=lambda path: path.stat().st_mtime_ns)[:4]
    assert [path.parent.name for path in blocks] == ["001-A", "001-B", "002-B", "002-A"]
    plans = {path.parent.name: parse(path.read_text(), {}) for path in blocks}
    assert [plans[name].seed for name in ("001-A", "001-B", "002-A", "002-B")] == [1, 1, 2, 2]
    assert [plans[name].url for name in ("001-A", "001-B")] == [one.url, two.url]
    prompts = {str(request.body["prompt"]) for plan in plans.values() for request in islice(requests(plan), 10)}
    assert len(prompts) == 40
    sent = [
        {r.id.rpartition("-")[2]: (r.cls, r.asked_prompt, r.asked_tokens) for r in raw.records(path.parent) if r.phase == "counted"}
        for path in blocks
    ]
    assert sent[0] == sent[1] != sent[2] == sent[3]
