"""The calibration server answers by its clock and logs the truth; calibration pairs every request with it."""

import contextlib
import dataclasses
import http.client
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from stub.waiting import until

from fenno.errors import UsageError
from fenno.load import accuracy, calibration, stats
from fenno.load.accuracy import Accuracy
from fenno.load.calibration import Served, Server, Timing
from fenno.load.plan import Plan
from fenno.load.run import running
from fenno.recipe import LengthClass, Workload

pytestmark = pytest.mark.scenario

SMALL = Workload(classes=(LengthClass(name="x", share=1.0, prompt_tokens=10, output_tokens=10),))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with calibration.serving(tmp_path, Timing(ttft=0.1, itl=0.02)) as running_server:
        yield running_server


@contextlib.contextmanager
def connected(server: Server) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    yield connection
    connection.close()


def ask(connection: http.client.HTTPConnection, identity: str, **body: object) -> http.client.HTTPResponse:
    asked = {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, **body}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"X-Request-Id": identity})
    return connection.getresponse()


def noted(server: Server, identity: str) -> Served:
    """What the server logged of a request; it does so after its last write."""
    until(lambda: identity in server.served())
    return server.served()[identity]


def test_tokens_are_written_on_an_absolute_schedule_and_logged(server: Server) -> None:
    with connected(server) as connection:
        for name in ("one", "two"):
            text = ask(connection, name).read().decode()
            assert text.count('"text":" tok"') == 5
            assert '"completion_tokens": 5' in text
            assert text.endswith("data: [DONE]\n\n")
    for name in ("one", "two"):
        served = noted(server, name)
        due = [served.received + 0.1 + i * 0.02 for i in range(5)]
        late = [at - at_due for at, at_due in zip(served.writes, due, strict=True)]
        assert min(late) >= 0
        assert stats.percentile(sorted(late), 50) < 0.05
        assert (served.ended, served.prompt) == ("whole", 3)


def test_a_client_that_goes_away_is_logged(server: Server) -> None:
    with connected(server) as connection:
        ask(connection, "goner", max_tokens=500).read(300)
    assert noted(server, "goner").ended == "gone"


SMALL_ENDPOINTS = [("/health", 200, "{}"), ("/v1/models", 200, "calibration"), ("/no", 404, "/no")]


@pytest.mark.parametrize(("path", "status", "words"), SMALL_ENDPOINTS)
def test_the_small_endpoints_answer(server: Server, path: str, status: int, words: str) -> None:
    with connected(server) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, words in response.read().decode()) == (status, True)


def test_metrics_say_how_many_requests_run(server: Server) -> None:
    with connected(server) as one, connected(server) as two:
        ask(one, "held", max_tokens=500)
        two.request("GET", "/metrics")
        assert "vllm:num_requests_running 1" in two.getresponse().read().decode()


def test_calibration_measures_this_host_and_would_notice_a_late_client(tmp_path: Path) -> None:
    plan = Plan(url="http://unused", model="m", workload=SMALL, users=5, warmup=0.5, duration=1.5)
    with calibration.serving(tmp_path, Timing(0.05, 0.01)) as server:
        with running(dataclasses.replace(plan, url=server.url), tmp_path / "run") as load:
            result = load.wait()
        served = server.served()
    found = accuracy.accuracy(plan, result.state, result.records, served)
    assert found.exact
    assert found.requests > 20
    assert 0 < found.ttft[0] < 5
    assert found.tokens_per_second == pytest.approx(5 * 10 / 0.141, rel=0.15)
    late = [dataclasses.replace(r, first=(r.first or 0.0) + 0.5) for r in result.records]
    assert accuracy.accuracy(plan, result.state, late, served).ttft[0] > 500
    lost = [dataclasses.replace(r, token_count=r.token_count - 1) for r in result.records]
    assert not accuracy.accuracy(plan, result.state, lost, served).exact


GOOD = Accuracy(
    users=200,
    rate=None,
    tokens_per_second=7400.0,
    requests=500,
    ttft=(0.1, 0.42, 1.1, 2.0),
    gap=(0.1, 0.5, 1.0, 2.0),
    lateness=(0.0, 0.1, 0.2, 0.3),
    exact=True,
    in_flight=1.0,
    lag_p95=0.2,
    cpu=0.3,
)


def test_a_calibration_is_said_in_a_sentence() -> None:
    more = dataclasses.replace(GOOD, users=400, tokens_per_second=14_800.0)
    bad = dataclasses.replace(GOOD, users=800, tokens_per_second=29_000.0, ttft=(0.5, 3.0, 8.0, 9.0))
    text = accuracy.sentence([GOOD, more, bad], 1.0)
    assert text == "this host measures TTFT to within 0.42 ms (P95) / 1.1 ms (P99) at your load, up to 14,800 tokens/s"
    assert accuracy.sentence([bad], 1.0) == (
        "this host cannot measure TTFT to within 1 ms (P95) at your load, 29,000 tokens/s: the error is 3 ms (P95) / 8 ms (P99)"
    )
    document = accuracy.document([GOOD, bad], 1.0, Path("x"))
    assert (document["valid"], [load["lacks"] == "" for load in document["loads"]]) == (True, [True, False])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"exact": False}, "not counted right"),
        ({"requests": 19}, "only 19 requests"),
        ({"in_flight": 0.98}, "98.0% of the users"),
        ({"users": None, "rate": 5.0, "in_flight": None, "lateness": (0.0, 2.0, 2.0, 2.0)}, "2 ms late (P95)"),
        ({"ttft": (0.1, float("nan"), 1.1, 2.0), "requests": 0}, "only 0 requests"),
        ({"lateness": (0.0, 2.0, 2.0, 2.0)}, ""),
        ({}, ""),
    ],
)
def test_a_load_that_cannot_be_measured_has_a_reason(change: dict[str, Any], why: str) -> None:
    said = dataclasses.replace(GOOD, **change).lacks(1.0)
    assert (why in said) if why else (said == "")


def test_the_load_is_doubled_until_it_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(plan: Plan, folder: Path, clock: Timing) -> Accuracy:
        asked.append((plan.users, plan.rate, plan.duration, plan.requests, folder.name))
        late = (0.1, 2.0, 3.0, 4.0) if (plan.users or plan.rate or 0) > 25 else GOOD.ttft
        return dataclasses.replace(GOOD, users=plan.users, rate=plan.rate, ttft=late)

    monkeypatch.setattr(accuracy, "measure", measured)
    plan = Plan(url="http://unused", model="m", workload=SMALL, users=10, requests=500)
    said: list[str] = []
    found = accuracy.calibrate(plan, tmp_path, 1.0, Timing(), said.append)
    assert asked == [(10, None, None, 500, "10"), (20, None, 10.0, None, "20"), (40, None, 10.0, None, "40")]
    assert [a.lacks(1.0) == "" for a in found] == [True, True, False]
    assert said[0] == "10 users, 7,400 tokens/s: TTFT error 0.42 ms (P95) / 1.1 ms (P99)"
    assert len(accuracy.calibrate(dataclasses.replace(plan, users=None, rate=30.0), tmp_path, 1.0, Timing())) == 1
    with pytest.raises(UsageError, match="needs a steady load"):
        accuracy.calibrate(
            dataclasses.replace(plan, users=None, ramp=(1.0, 2.0), duration=5.0, requests=None), tmp_path, 1.0, Timing()
        )


def test_the_clock_follows_from_the_tokens_that_are_asked_for() -> None:
    plan = Plan(url="http://unused", model="m", workload=SMALL, users=100, duration=1.0)
    # Ten tokens in 0.1 s and nine gaps, for 100 users: 2000 a second need a cycle of half a second.
    assert accuracy.timing(plan, 2000.0).itl == pytest.approx(0.4 / 9)
    assert accuracy.timing(plan, None) == Timing()
    with pytest.raises(UsageError, match="100 users cannot take 20000 tokens a second here, 9174 at most"):
        accuracy.timing(plan, 20_000.0)
    with pytest.raises(UsageError, match="closed loop"):
        accuracy.timing(dataclasses.replace(plan, users=None, rate=5.0), 100.0)


def test_first_tokens_vary_about_their_median_and_each_request_has_its_own() -> None:
    timing = Timing(ttft=0.1, spread=0.2)
    times = sorted(timing.first(str(number)) for number in range(2001))
    assert times[1000] == pytest.approx(0.1, rel=0.02)
    assert math.log(times[1902] / 0.1) == pytest.approx(0.2 * 1.645, rel=0.1), "the P95"
    assert timing.first("7") == timing.first("7") != timing.first("8")
    assert Timing(ttft=0.1).first("7") == 0.1
