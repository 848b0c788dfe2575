"""Real locust against the calibration server: counts are exact, every fault has its name, and a run ends as it should.

All runs of this file go on at once, since a start of locust takes seconds; accuracy in ms is measured in benchmarks/loadgen.
"""

import contextlib
import itertools
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from stub import tls
from stub.harness import side_by_side
from stub.waiting import until

from fenno.errors import LoadError, UsageError
from fenno.load import calibration, figures, job, stats
from fenno.load import plan as plans
from fenno.load import raw as raws
from fenno.load.calibration import FAULTS, Served, Timing
from fenno.load.plan import Plan, Request
from fenno.load.run import Result, run, running
from fenno.recipe import LengthClass, Workload

pytestmark = pytest.mark.scenario

FAST = Timing(ttft=0.05, itl=0.01)
OUTCOMES = {
    **{"none": "ok", "no-done": "ok", "role-first": "ok", "four": "ok", "in-band": "in-band", "json": "in-band"},
    **{"truncated": "truncated", "early-end": "truncated", "empty": "truncated", "stall": "stalled", "no-token": "timeout"},
    **{"slow-headers": "headers", "closed": "headers", "garbage": "headers", "429": "429", "400": "4xx", "500": "5xx"},
    "short": "short",
}


class Ran(NamedTuple):
    result: Result
    served: dict[str, Served]


def plan(url: str, **change: Any) -> Plan:
    mix = (
        LengthClass(name="short", share=0.7, prompt_tokens=(5, 20), output_tokens=8),
        LengthClass(name="long", share=0.3, prompt_tokens=30, output_tokens=24),
    )
    workload = Workload(classes=mix, **change.pop("traffic", {}))
    return Plan(**{"url": url, "model": "calibration", "workload": workload, "timeout": 60.0, **change})


def every_fault(folder: Path) -> Ran:
    """Two rounds of every fault, open loop."""
    with calibration.serving(folder, FAST, list(FAULTS)) as server:
        asked = plan(server.url, rate=40.0, requests=2 * len(FAULTS), timeout=8.0, traffic={"arrival": "constant"})
        return Ran(run(asked, folder / "run"), server.served())


def closed_loop(folder: Path) -> Ran:
    with calibration.serving(folder, FAST) as server:
        return Ran(run(plan(server.url, users=10, warmup=0.5, duration=2.0, endpoint="chat"), folder / "run"), server.served())


def two_processes(folder: Path) -> Ran:
    with calibration.serving(folder, FAST) as server:
        return Ran(run(plan(server.url, rate=60.0, warmup=0.3, duration=1.5, processes=2), folder / "run"), server.served())


def traced(folder: Path) -> Ran:
    """A trace at twice its speed, by two processes: 60 requests in 3 s, the first half second uncounted."""
    lines = [{"timestamp": 100 * i, "input_length": 4 + i % 3, "output_length": 3 + i % 5, "hash_ids": []} for i in range(60)]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with calibration.serving(folder, FAST) as server:
        chosen = job.of_url(server.url, "calibration", "completions", None)
        options: dict[str, Any] = {"trace": str(path), "scale": 2.0, "warmup": 0.525, "processes": 2}
        return Ran(run(job.plan(chosen, **options), folder / "run"), server.served())


def conversations(folder: Path) -> Ran:
    """Five users in conversations of three turns, each after a pause of 0.1 s."""
    with calibration.serving(folder, FAST) as server:
        traffic = {"turns": 3, "think_time": 0.1}
        return Ran(run(plan(server.url, users=5, requests=30, endpoint="chat", traffic=traffic), folder / "run"), server.served())


def killed_server(folder: Path) -> Ran:
    """The server dies by SIGKILL in the middle of the window."""
    asked: dict[str, Any] = {"users": 6, "duration": 600.0, "timeout": 60.0}
    with calibration.serving(folder, FAST) as server, running(plan(server.url, **asked), folder / "run") as load:
        until(lambda: len(load.records()) > 20)
        psutil.Process(server.child.pid).children()[0].kill()
        return Ran(load.wait(), server.served())


def stopped_early(folder: Path) -> Ran:
    with calibration.serving(folder, Timing(ttft=0.05, itl=1.0)) as server:
        with running(plan(server.url, rate=50.0, duration=600.0, timeout=600.0), folder / "run") as load:
            until(lambda: load.client().in_flight > 10)
            result = load.stop()
        until(lambda: len(server.served()) >= len(result.records))
        return Ran(result, server.served())


def over_tls(folder: Path) -> Ran:
    """A server that ends TLS itself and writes in odd pieces."""
    cert = tls.certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, cert.with_name("key.pem"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_tls_server, args=(server, context), daemon=True).start()
        url = f"https://localhost:{server.getsockname()[1]}"
        traffic = {"ignore_eos": False}
        return Ran(run(plan(url, users=2, requests=6, ca_file=str(cert), traffic=traffic), folder / "run"), {})


def _tls_server(server: socket.socket, context: ssl.SSLContext) -> None:
    def answer(plain: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
            while secure.recv(65536):
                body = b'data: {"choices": [{"text": "a"}]}\n\n' * 5 + b"data: [DONE]\n\n"
                wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                for start in range(0, len(wire), 37):
                    secure.sendall(wire[start : start + 37])

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()


Runs = Callable[[str], Ran]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    jobs = (every_fault, closed_loop, two_processes, traced, conversations, killed_server, stopped_early, over_tls)
    with side_by_side({job.__name__: job for job in jobs}, tmp_path_factory.mktemp, len(jobs), Path) as tell:
        yield tell


def test_every_fault_is_called_by_its_name(runs: Runs) -> None:
    result, served = runs("every_fault")
    counted = [r for r in result.records if r.phase == "counted"]
    assert len(counted) == 2 * len(FAULTS)
    wrong = [(served[r.id].fault, r.outcome, r.error) for r in counted if r.outcome != OUTCOMES[served[r.id].fault]]
    assert wrong == []
    assert {served[r.id].fault for r in counted} == set(FAULTS)
    assert all(r.error for r in counted if not r.ok)


def test_a_role_is_no_token_and_four_tokens_in_an_event_are_four(runs: Runs) -> None:
    result, served = runs("every_fault")
    for r in (r for r in result.records if r.phase == "counted"):
        if served[r.id].fault in ("role-first", "none"):
            assert r.token_count == r.tokens == r.asked_tokens
            assert r.ttft > 0.045, "the role came at once"
        if served[r.id].fault == "four":
            assert (r.token_count, r.tokens) == (r.asked_tokens / 4, r.asked_tokens)


def test_counts_tokens_and_prompts_are_the_servers_own(runs: Runs) -> None:
    result, served = runs("closed_loop")
    finished = [r for r in result.records if r.outcome != "cancelled"]
    assert finished
    assert all(r.ok for r in finished)
    cancelled = {r.id for r in result.records if r.outcome == "cancelled"}  # some of these the server had just completed
    assert {r.id for r in finished} == {s.id for s in served.values() if s.ended == "whole"} - cancelled
    assert all(r.tokens == r.token_count == len(served[r.id].writes) for r in finished)
    window = (result.state.start, result.state.end)
    assert window[0] is not None
    assert window[1] is not None
    counted = {r.id for r in finished if r.phase == "counted"}
    assert counted == {r.id for r in result.records if window[0] <= r.scheduled < window[1]}
    assert len(counted) == result.state.counted_done == result.state.counted_sent


def test_stamps_agree_with_the_servers_log(runs: Runs) -> None:
    result, served = runs("closed_loop")
    counted = [r for r in result.records if r.counted]
    errors = sorted(r.ttft - (served[r.id].writes[0] - served[r.id].received) for r in counted)
    # Receive times are the kernel's, read on another clock: a pause between the two readings shifts one request by as much.
    assert errors[0] > -0.01
    assert 0 < stats.percentile(errors, 50) < 0.005, "nothing arrives before it is written"
    drift = sorted(abs(r.e2el - (served[r.id].writes[-1] - served[r.id].received)) for r in counted)
    assert stats.percentile(drift, 50) < 0.005


def test_reported_percentiles_are_those_of_the_raw_records(runs: Runs) -> None:
    result, _ = runs("closed_loop")
    lines = [json.loads(line) for path in raws.files(result.folder) for line in path.read_text().splitlines()]
    raw = sorted((r["first"] - r["sent"]) * 1e3 for r in lines if r["phase"] == "counted" and r["outcome"] == "ok")
    assert result.state.start is not None
    assert result.state.end is not None
    summary = figures.summarize(result.requests, (result.state.start, result.state.end))
    for p in (50, 95, 99):
        assert summary["ttft"][f"p{p}"] == pytest.approx(raw[-(-len(raw) * p // 100) - 1], abs=0.01)


def test_users_keep_a_request_in_flight_each_also_in_the_drain(runs: Runs) -> None:
    result, _ = runs("closed_loop")
    assert result.state.phase == "done"
    assert 9.9 <= result.state.in_flight_mean <= 10
    assert result.state.start is not None
    assert result.state.end is not None
    assert figures.in_flight(result.requests, result.state.start, result.state.end) == pytest.approx(10, abs=0.1)
    last = max(r.end for r in result.records if r.phase == "counted")
    assert any(r.phase == "drain" and r.sent < last for r in result.records)


def test_connections_are_kept_alive(runs: Runs) -> None:
    result, _ = runs("closed_loop")
    later = [r.connected - r.sent for r in result.records if r.phase != "warmup" and r.connected is not None]
    assert stats.percentile(sorted(later), 50) < 0.0001


def test_two_processes_share_the_arrivals_of_one_plan(runs: Runs) -> None:
    result, served = runs("two_processes")
    assert len(raws.files(result.folder)) == 2
    numbers = sorted(int(r.id.rpartition("-")[2]) for r in result.records if r.phase == "counted")
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "every request of the window once"
    assert all(r.ok for r in result.records if r.phase == "counted")
    assert result.state.counted_done == sum(r.phase == "counted" for r in result.records)
    assert set(served) >= {r.id for r in result.records if r.ok}


def test_a_trace_is_replayed_by_two_processes_to_its_end(runs: Runs) -> None:
    result, served = runs("traced")
    assert result.state.phase == "done"
    assert sorted(int(r.id.rpartition("-")[2]) for r in result.records) == list(range(60))
    counted = [r for r in result.records if r.phase == "counted"]
    assert {int(r.id.rpartition("-")[2]) for r in counted} == set(range(11, 60)), "all but those of the warm-up"
    for r in result.records:
        number = int(r.id.rpartition("-")[2])
        assert (r.outcome, r.cls, r.tokens, served[r.id].prompt) == ("ok", "trace", 3 + number % 5, 4 + number % 3)
        assert result.state.traffic is not None
        assert r.scheduled - result.state.traffic == pytest.approx(0.05 * number, abs=1e-6)


def test_a_turn_carries_what_was_said_and_the_answers_that_came(runs: Runs) -> None:
    result, _ = runs("conversations")
    records = {r.id.partition("-")[2].partition("-")[2]: r for r in result.records if r.ok}
    whole = 0
    for request in itertools.islice(plans.requests(result.plan), 30):
        before = records.get(str(request.index))
        if before is None:
            continue
        assert before.prompt_tokens == words(request)
        for turn in (2, 3):
            later = records.get(f"{request.index}.{turn}")
            if later is None:
                break
            request = plans.follow(result.plan, request, " tok" * before.tokens)
            assert (later.prompt_tokens, later.asked_tokens) == (words(request), request.output_tokens)
            assert (later.asked_prompt, later.turn) == (None, turn)
            assert later.scheduled >= before.end + 0.1
            before = later
        whole += before.id.endswith(".3")
    assert whole >= 6, "of 30 requests at most two of each of five users are left over"


def words(request: Request) -> int:
    """A prompt's length as the calibration server counts it."""
    return len(str(request.body["messages"]).split())


def test_warm_up_hands_its_users_over_to_the_window_without_a_drain(runs: Runs) -> None:
    result, _ = runs("closed_loop")
    start = result.state.start
    assert start is not None
    assert sum(r.phase == "warmup" and r.sent < start < r.end for r in result.records) >= 8, (
        "most users are in the middle of a request"
    )
    for before in (0.1, 0.02, 0.0):
        at = start - 0.05 + before
        assert figures.in_flight(result.requests, at, at + 0.05) > 9.5


def test_a_killed_server_ends_the_run_before_its_time_and_cuts_what_was_in_flight(runs: Runs) -> None:
    result, _ = runs("killed_server")
    assert result.state.phase == "gone"
    assert "took no connection" in result.state.reason
    failed = [r for r in result.records if not r.ok]
    assert {r.outcome for r in failed} <= {"truncated", "headers", "connect"}
    cut = sum(r.outcome in ("truncated", "headers") for r in failed)
    assert 0 < cut <= 6, "one in flight for every user, but for those between two requests"
    assert sum(r.outcome == "connect" for r in failed) < 6 * 20, "no hot loop"


def test_stopping_early_waits_for_nothing_and_cancels_what_is_in_flight(runs: Runs) -> None:
    result, served = runs("stopped_early")
    assert result.state.phase == "stopped"
    cancelled = [r for r in result.records if r.outcome == "cancelled"]
    assert len(cancelled) > 10
    assert all(served[r.id].ended == "gone" for r in cancelled)
    assert any(r.first is not None for r in cancelled), "what had come is kept"


def test_no_connection_waits_for_the_table_of_open_files_to_grow(tmp_path: Path) -> None:
    with calibration.serving(tmp_path, FAST) as server, running(plan(server.url, users=1, duration=60.0), tmp_path / "run") as load:
        until(lambda: load.client().sent)
        locust = psutil.Process(load._child.pid).children()[0]
        status = Path(f"/proc/{locust.pid}/status").read_text().split()
        room, most = int(status[status.index("FDSize:") + 1]), locust.rlimit(psutil.RLIMIT_NOFILE)[0]
    assert room >= min(most, 65_536)


def test_streams_over_tls_are_read_whole(runs: Runs) -> None:
    result, _ = runs("over_tls")
    counted = [r for r in result.records if r.phase == "counted"]
    assert [(r.outcome, r.token_count) for r in counted] == [("ok", 5)] * 6


def test_nothing_at_the_address_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LoadError, match=f"nothing answers at http://127.0.0.1:{port}: Connection refused"):
        run(plan(f"http://127.0.0.1:{port}", users=1, duration=1.0), tmp_path)


def test_a_missing_api_key_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENNO_NO_SUCH_KEY", raising=False)
    with pytest.raises(UsageError, match="FENNO_NO_SUCH_KEY is not set"):
        run(plan("http://127.0.0.1:9", users=1, duration=1.0, api_key_env="FENNO_NO_SUCH_KEY"), tmp_path)
