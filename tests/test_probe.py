"""Outages are found by a probe of its own: a real server that is killed and started again, and the arithmetic of what was asked."""

import contextlib
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from stub.waiting import until

from fenno import process
from fenno.engine.server import claim_port
from fenno.load import probe
from fenno.load.plan import Plan
from fenno.load.probe import Outage, Probe
from fenno.recipe import Workload

pytestmark = pytest.mark.scenario


def plan(port: int, **change: object) -> Plan:
    asked = {"url": f"http://127.0.0.1:{port}", "model": "m", "workload": Workload(), "users": 1, "duration": 1.0, **change}
    return Plan(**asked)  # type: ignore[arg-type]


@contextlib.contextmanager
def server(port: int, folder: Path, ttft: float = 0.01) -> Iterator[process.Child]:
    argv = [sys.executable, "-m", "fenno.load.calibration", "--port", str(port), "--ttft", str(ttft)]
    with process.running(argv, log=folder / "server.log", grace=0.2) as child:
        yield child


def test_a_server_that_is_killed_and_started_again_was_out_for_as_long_as_it_was(tmp_path: Path) -> None:
    port = claim_port(None)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server(port, tmp_path))
        until(lambda: not probe.ask(plan(port)))
        began = time.monotonic()
        stack.enter_context(probe.probing(plan(port), tmp_path, 0.05))
        until(lambda: probe.read(tmp_path))
        first.stop()
        down = time.monotonic()
        until(lambda: sum(bool(p.error) for p in probe.read(tmp_path)) >= 8)
        again = time.monotonic()
        stack.enter_context(server(port, tmp_path))
        until(lambda: any(not p.error and p.asked > again for p in probe.read(tmp_path)))
        over = time.monotonic()
        found = probe.summarize(probe.read(tmp_path), (began, over), over)
    # It was out from the first question after `down`, or one before that was still open, until one between `again` and `over`.
    noticed = min(p.asked for p in probe.read(tmp_path) if p.asked > down)
    assert again - noticed - 0.001 <= found["outage_seconds"] <= over - began
    assert found["recovery_seconds"] == pytest.approx(found["outage_seconds"], abs=0.002)
    ((start, end),) = found["probes"]["outages"]
    assert 0 < start <= noticed - began + 0.001
    assert again - began - 0.001 <= end <= over - began
    assert found["probes"]["failed"] >= 8
    assert "did not answer" in found["probes"]["errors"][0]


def test_probes_keep_their_times_while_answers_are_slow(tmp_path: Path) -> None:
    port = claim_port(None)
    with server(port, tmp_path, ttft=0.6):
        until(lambda: not probe.ask(plan(port)))
        with probe.probing(plan(port), tmp_path, 0.1):
            until(lambda: len(probe.read(tmp_path)) >= 6)
    probes = probe.read(tmp_path)
    stamps = sorted(p.asked for p in probes)
    assert all(p.ended - p.asked >= 0.6 for p in probes)
    assert any(after - before < 0.6 for before, after in pairwise(stamps)), "none waits for the one before"
    assert not any(p.error for p in probes)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_silent_server_is_out_after_the_timeout_and_an_answer_must_be_one(tmp_path: Path, endpoint: str) -> None:
    port = claim_port(None)
    with server(port, tmp_path, ttft=5.0):
        until(lambda: "timed out" in probe.ask(plan(port, timeout=0.3, endpoint=endpoint)))
        assert "404" in probe.ask(plan(port, url=f"http://127.0.0.1:{port}/elsewhere", endpoint=endpoint))


def test_outages_run_from_the_first_bad_question_to_the_next_good_one() -> None:
    def asked(at: float, error: str = "") -> Probe:
        return Probe(at, at + 0.1, error)

    probes = [asked(0.0), asked(2.0, "x"), asked(1.0, "x"), asked(3.0), asked(4.0), asked(5.0, "x")]
    assert probe.outages(probes, 7.0) == [Outage(1.0, 3.0, True), Outage(5.0, 7.0, False)]
    assert probe.outages(probes[:1], 7.0) == []
    found = probe.summarize(probes, (1.5, 6.0), 7.0)
    assert found["outage_seconds"] == 1.5 + 1.0
    assert found["recovery_seconds"] == 2.0
    assert found["probes"]["outages"] == [[-0.5, 1.5], [3.5, 5.5]]
    assert (found["probes"]["asked"], found["probes"]["failed"]) == (4, 2)
    still_out = probe.summarize(probes, (3.5, 6.0), 7.0)
    assert (still_out["outage_seconds"], still_out["recovery_seconds"]) == (1.0, None)
    assert probe.summarize([], (0.0, 1.0), 1.0)["outage_seconds"] is None
    assert probe.summarize(probes[:1], (0.0, 1.0), 1.0)["outage_seconds"] == 0
