"""`fenno loadtest` as a whole command on the stub engine: a trace, and a ramp in conversations."""

import itertools
import json
from collections.abc import Callable, Iterator

import pytest
from stub.harness import Done, Place, side_by_side

from fenno.load import plan as plans
from fenno.load.plan import Plan
from fenno.recipe import Workload

pytestmark = pytest.mark.scenario


def traced(place: Place) -> Done:
    lines = [{"timestamp": 100 * i, "input_length": 8, "output_length": 2 + i % 3, "hash_ids": [1]} for i in range(30)]
    (place.folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place.fenno("loadtest", place.recipe(), "--trace", "trace.jsonl", "--scale", 2, "--warmup", 0, "--processes", 2)


def ramped(place: Place) -> Done:
    workload = {"endpoint": "chat", "turns": 2, "rate": None, "ramp": [2, 40]}
    return place.fenno("loadtest", place.recipe(workload=workload), "--duration", "2s", "--warmup", 0, "--json")


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Done]]:
    with side_by_side({"traced": traced, "ramped": ramped}, tmp_path_factory.mktemp) as tell:
        yield tell


def check(done: Done) -> dict:
    assert done.code == (0 if done.document["valid"] else 4), done.err
    assert "Traceback" not in done.err
    return done.document


def test_a_trace_is_replayed_to_its_end(came: Callable[[str], Done]) -> None:
    found = check(came("traced"))
    assert (found["requests"], found["completed"], found["failures"]) == (30, 30, {})
    assert (found["asked"]["trace"], found["asked"]["scale"], found["asked"]["rate"]) == ("trace.jsonl", 2.0, None)
    assert found["output_tokens"] == 90
    assert found["seconds"] == pytest.approx(1.5)
    assert list(found["classes"]) == ["trace"]
    assert "TTFT p50" in came("traced").err


def test_a_ramp_of_conversations_sends_what_it_should(came: Callable[[str], Done]) -> None:
    found = check(came("ramped"))
    assert found["asked"]["ramp"] == [2.0, 40.0]
    assert found["failures"] == {}
    plan = Plan(url="http://h", model="m", workload=Workload(), ramp=(2.0, 40.0), duration=2.0, seed=1)
    begun = sum(1 for _ in itertools.takewhile(lambda at: at < 2, plans.arrivals(plan)))
    assert begun > 25, "about 42 are expected"
    assert begun <= found["requests"] <= 2 * begun, "conversations of two turns, the last ones' second turn behind the window"
    assert found["ttft_scheduled"]["p50"] >= found["ttft"]["p50"]
    assert "TTFT p50" not in came("ramped").err, "no table with --json"
