"""`fenno loadtest` from the outside, on the stub engine: both sides in one document, and what a server's death leaves."""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub.harness import Done, Place, Run, side_by_side

from fenno.load import raw
from fenno.load.record import Record

pytestmark = pytest.mark.scenario

CLASSES = [
    {"name": "short", "share": 0.5, "prompt_tokens": [8, 32], "output_tokens": 4},
    {"name": "long", "share": 0.5, "prompt_tokens": [8, 32], "output_tokens": 20},
]


@dataclass
class Story:
    """What came of a load test, and the folder with its raw records."""

    done: Done
    folder: Path
    place: Place

    def records(self) -> list[Record]:
        return list(raw.records(self.folder))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def story(place: Place, done: Done) -> Story:
    (folder,) = (place.folder / "fenno-loadtests").glob("*")
    return Story(done, folder, place)


def both_sides(place: Place) -> Story:
    recipe = place.recipe(workload={"classes": CLASSES, "rate": 30}, env={"STUB_BASE_MS": 20})
    return story(place, place.fenno("loadtest", recipe, "--duration", "6s", "--warmup", "1s", "--gpu-price", 2))


def without_a_probe(place: Place) -> Story:
    recipe = place.recipe(workload={"classes": CLASSES, "rate": 10})
    return story(place, place.fenno("loadtest", recipe, "--duration", "2s", "--warmup", "1s", "--no-probe", "--json"))


def counted(place: Place) -> int:
    """Counted requests that have ended so far."""
    texts = (path.read_text() for path in place.folder.glob("fenno-loadtests/*/records-*.jsonl"))
    return sum(text.count('"phase":"counted"') for text in texts)


def killed_engine(place: Place) -> Story:
    """Fifty users in a closed loop when the engine is killed."""
    recipe = place.recipe(workload={"classes": CLASSES, "rate": None, "users": 50})
    run = place.start("loadtest", recipe, "--duration", "20min", "--warmup", "1s")
    run.until(lambda _: counted(place) > 100)
    place.kill("serve")
    return story(place, run.finish())


def long_run(place: Place) -> Run:
    """A load test of twenty minutes when a hundred of its requests are counted and over. None fails while a host stands still."""
    recipe = place.recipe(workload={"classes": CLASSES, "rate": 40, "timeout": "300s"})
    run = place.start("loadtest", recipe, "--duration", "20min", "--warmup", "1s")
    return run.until(lambda _: counted(place) > 100)


def interrupted(place: Place) -> Story:
    run = long_run(place)
    run.signal(signal.SIGINT)
    return story(place, run.finish())


def killed_fenno(place: Place) -> Story:
    run = long_run(place)
    run.signal(signal.SIGKILL)
    return story(place, run.finish())


def killed_client(place: Place) -> Story:
    run = long_run(place)
    place.kill("locust")
    return story(place, run.finish())


def calibrated(place: Place) -> Story:
    """For too short a time to say anything."""
    return story(place, place.fenno("loadtest", "--calibrate", "--users", 2, "--duration", "1s", "--warmup", "500ms"))


Stories = Callable[[str], Story]
STORIES = (both_sides, without_a_probe, killed_engine, calibrated, interrupted, killed_fenno, killed_client)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    jobs = {job.__name__: job for job in STORIES}
    with side_by_side(jobs, tmp_path_factory.mktemp) as results:
        yield results


def test_the_document_has_the_servers_side_within_the_window(stories: Stories) -> None:
    found = stories("both_sides")
    document = found.done.document
    server = document["server"]
    assert server["samples"] >= 4
    assert server["running"]["max"] >= server["running"]["mean"] > 0
    assert server["memory"]["max"] > 1e6
    assert 0 < server["generation_tokens"] <= sum(r.tokens for r in found.records()) + 30
    assert server["gpus"] == []
    samples = found.lines("server.jsonl")
    stamps = [line["at"] for line in samples]
    assert stamps == sorted(stamps)
    ends = [r.end for r in found.records()]
    assert stamps[0] < max(ends), "the clock is the records' own"
    assert stamps[-1] > min(ends)


def test_where_the_first_tokens_time_goes_is_told_by_the_engines_own_histograms(stories: Stories) -> None:
    found = stories("both_sides").done
    parts = found.document["time_to_first_token"]
    assert parts["first_tokens"]["client"] > 100
    assert parts["first_tokens"]["engine"] == pytest.approx(parts["first_tokens"]["client"], abs=12), "probes are counted too"
    assert parts["client"] == pytest.approx(parts["engine"] + parts["outside"], abs=0.01)
    assert parts["engine"] == pytest.approx(parts["queue"] + parts["prefill"] + parts["rest"], abs=0.01)
    assert parts["sentence"] in found.err
    assert parts["prefill"] > 10, "a step of the stub takes 20 ms"


def test_people_read_classes_availability_price_and_whether_it_is_valid(stories: Stories) -> None:
    found = stories("both_sides").done
    document = found.document
    rows = {line.split("\t")[0]: line.split("\t")[1] for line in found.err.splitlines() if "\t" in line}
    assert rows["all"] == f"{document['completed']}/{document['requests']}"
    assert set(rows) == {"ms", "short", "long", "all"}
    assert document["outage_seconds"] == 0
    assert f"no outage by {document['probes']['asked']} probes" in found.err
    assert document["probes"]["asked"] >= 5
    assert document["cost"]["dollars_per_million_tokens"] == pytest.approx(2 / 3600 / document["token_throughput"] * 1e6)
    assert "a million tokens" in found.err
    # Whether this busy host could measure is not for this test to say, but it must be said.
    assert ("\nVALID" in found.err, "INVALID" in found.err) == (document["valid"], not document["valid"])
    assert found.code == (0 if document["valid"] else 4)


def test_a_stored_run_is_told_again_word_for_word(stories: Stories) -> None:
    for name in ("both_sides", "killed_engine", "interrupted"):
        found = stories(name)
        again = found.place.fenno("report", found.folder.relative_to(found.place.folder))
        assert again.document == found.done.document
        assert again.code == found.done.code
        said = again.err.splitlines()
        assert said and found.done.err.splitlines()[-len(said) :] == said


def test_without_a_probe_nothing_but_the_load_is_sent(stories: Stories) -> None:
    found = stories("without_a_probe")
    assert (found.done.document["probes"], found.done.document["outage_seconds"]) == (None, None)
    assert not (found.folder / "probes.jsonl").exists()
    assert "\t" not in found.done.err, "--json prints no table"


def test_a_calibration_says_in_a_sentence_what_this_host_can_measure(stories: Stories) -> None:
    found = stories("calibrated")
    assert found.done.document["sentence"] in found.done.err
    assert "cannot measure TTFT to within 1 ms (P95) at your load" in found.done.document["sentence"]
    (load,) = found.done.document["loads"]
    assert load["lacks"].startswith(f"only {load['requests']} requests could be compared")
    assert (load["users"], load["exact"], found.done.document["valid"], found.done.code) == (2, True, False, 4)
    assert found.place.empty()


def test_a_killed_engine_ends_the_run_early_with_a_partial_report_and_its_own_exit_code(stories: Stories) -> None:
    found = stories("killed_engine")
    document = found.done.document
    assert found.done.code == 5
    assert document["ended"]["how"] == "gone"
    assert "the engine ended" in document["ended"]["why"]
    assert f"the server was gone before the end: {document['ended']['why']}" in found.done.err
    assert not document["valid"]
    assert document["completed"] > 0
    assert document["seconds"] < 1000, "it did not wait for the end"
    assert document["probes"]["failed"] >= 1
    assert document["outage_seconds"] > 0
    assert document["recovery_seconds"] is None
    assert found.place.empty()


def test_fifty_users_without_a_server_make_no_hot_loop(stories: Stories) -> None:
    refused = [r for r in stories("killed_engine").records() if r.outcome == "connect"]
    assert refused
    by_second = Counter(int(r.sent) for r in refused)
    # Each user waits twice as long after every failure, up to a second: at most six attempts in a second, one in the last.
    assert max(by_second.values()) <= 50 * 7
    assert by_second[max(by_second) - 1] <= 50 * 2


def test_ctrl_c_ends_a_load_test_well_and_tells_what_there_was(stories: Stories) -> None:
    found = stories("interrupted")
    document, records = found.done.document, found.records()
    assert found.done.code == 130
    assert document["ended"]["how"] == "interrupted"
    assert "interrupted: somebody ended the load test before its time" in found.done.err
    assert document["completed"] > 80 and document["seconds"] < 1000
    assert document["requests"] + document["cancelled"] == sum(r.phase == "counted" for r in records)
    assert document["availability"] == 1, "what was in flight is no failure of the server"
    assert found.place.empty()


@pytest.mark.parametrize(("name", "code"), [("killed_fenno", -9), ("killed_client", 5)])
def test_a_kill_of_fenno_or_of_its_client_leaves_what_was_recorded_and_a_report_of_it(
    stories: Stories, name: str, code: int
) -> None:
    found = stories(name)
    assert found.done.code == code
    assert found.place.empty()
    again = found.place.fenno("report", found.folder.relative_to(found.place.folder))
    document, records = again.document, found.records()
    assert again.code == 130
    assert document["ended"]["how"] == "interrupted"
    assert document["requests"] == sum(r.counted for r in records) > 100
    if name == "killed_client":
        assert f"`fenno report {found.folder.relative_to(found.place.folder)}` tells what there is" in found.done.err
