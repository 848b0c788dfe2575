"""`fenno compare` as a whole: two recipes with a cold start for each block, and stored runs."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from stub.harness import Done, Place

pytestmark = pytest.mark.scenario

TIMES = ("--rate", 30, "--duration", "1s", "--warmup", "300ms")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def compared(place: Place) -> Done:
    """An engine and one that takes five times as long."""
    arms = [place.recipe(name=name, env={"STUB_BASE_MS": ms}) for name, ms in (("quick", 40), ("slow", 200))]
    return place.fenno("compare", *arms, *TIMES, "--rounds", 3, "--junit", "compare.xml", timeout=200)


def findings(done: Done) -> dict[str, str]:
    return {each["metric"]: each["state"] for each in done.document["findings"]}


def test_a_slower_recipe_is_worse_and_the_exit_code_says_so(compared: Done) -> None:
    assert compared.code == 1, compared.err
    assert findings(compared)["p95_ttft"] == "worse"
    assert findings(compared)["availability"] == "not distinguishable"
    assert "B is worse than A" in compared.err


def test_every_block_has_a_cold_start_and_nothing_is_left(place: Place, compared: Done) -> None:
    assert len(place.starts()) >= 6, compared.err
    assert place.empty(60)


def test_a_pipeline_reads_it(place: Place, compared: Done) -> None:
    suite = ElementTree.parse(place.folder / "compare.xml").getroot()
    assert "B: p95_ttft" in [case.get("name") for case in suite if case.find("failure") is not None]


def test_its_blocks_are_stored_runs_that_can_be_compared_again(place: Place, compared: Done) -> None:
    blocks = sorted(path.parent for path in (place.folder / "fenno-comparisons").rglob("asked.json"))
    assert len(blocks) >= 6
    again = place.fenno("compare", blocks[0], blocks[0], "--json")
    assert again.code == (0 if again.document["valid"] else 4), again.err  # this host may have been too busy to measure
    assert set(findings(again).values()) <= {"not distinguishable", "equivalent", "not measured"}
