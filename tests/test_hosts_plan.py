"""What a worker makes of the plan that its master sent, and how the states of several hosts become one."""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub.runs import answer

from fenno import cli
from fenno.commands.load import led
from fenno.engine.server import claim_port
from fenno.errors import LoadError, UsageError
from fenno.load import client, hosts, job, run, words, worker
from fenno.load import plan as plans
from fenno.load.client import ClientState, Delay, Window, Worker
from fenno.load.plan import Plan
from fenno.load.record import moved
from fenno.load.run import Result
from fenno.recipe import Targets, Workload


def plan(**change: Any) -> Plan:
    return Plan(**{"url": "http://127.0.0.1:8000", "model": "m", "workload": Workload(), "rate": 2.0, "duration": 30.0, **change})


@pytest.mark.parametrize(
    ("url", "host", "seen"),
    [
        ("http://127.0.0.1:8000", "10.0.0.1", "http://10.0.0.1:8000"),
        ("http://localhost:8000/v1", "node-3", "http://node-3:8000/v1"),
        ("http://127.0.0.1:8000", "fe80::1", "http://[fe80::1]:8000"),
        ("http://127.0.0.1:8000", "127.0.0.2", "http://127.0.0.1:8000"),
        ("https://api.example/v1", "10.0.0.1", "https://api.example/v1"),
    ],
)
def test_what_is_on_the_master_itself_is_at_the_masters_address_for_others(url: str, host: str, seen: str) -> None:
    assert hosts.seen(url, host) == seen


def test_a_worker_uses_its_own_copies_of_the_files_and_its_own_key(tmp_path: Path) -> None:
    files = {"workload": Workload(prompts="/master/some.jsonl"), "ca_file": "/master/ca.pem"}
    sent = plan(**files, api_key_env="MASTERS", headers={"X": "a secret"})
    assert "a secret" not in plans.dump(sent)
    found = hosts.mine(plans.dump(sent), tmp_path, ["X", "Y"], "MINE", "10.0.0.1")
    assert (found.workload.prompts, found.ca_file) == (str(tmp_path / "prompts.jsonl"), str(tmp_path / "ca_file.pem"))
    assert set(hosts.given(sent)) == {"prompts.jsonl", "ca_file.pem"}
    assert found.api_key_env == "MINE"
    assert found.url == "http://10.0.0.1:8000"


@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl-v2", "some", "a.b/some", ".some", "some.", "söme.jsönl"])
def test_whatever_a_file_is_called_a_worker_keeps_a_copy(tmp_path: Path, name: str) -> None:
    sent = plan(workload=Workload(prompts=f"/master/{name}"))
    hosts.keep(dict.fromkeys(hosts.given(sent), b"x"), tmp_path)
    copy = hosts.mine(plans.dump(sent), tmp_path, [], None, "h").workload.prompts
    assert copy and Path(copy).read_bytes() == b"x"


@pytest.mark.parametrize("name", ["../prompts.jsonl", "/etc/passwd", "prompts.d/x", "records-1.jsonl", ""])
def test_a_master_cannot_write_elsewhere_on_a_workers_disk(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="sends a file called"):
        hosts.keep({name: b"x"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_the_key_or_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sends an API key"):
        hosts.mine(plans.dump(plan(api_key_env="KEY")), tmp_path, [], None, "h")
    with pytest.raises(UsageError, match="sends the header X-Team"):
        hosts.mine(plans.dump(plan(headers={"X-Team": "a"})), tmp_path, ["X-Other"], None, "h")


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("http://10.0.0.1:8000", True),
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", True),
        ("https://api.example/v1", True),
        ("http://api.example/v1", False),
        ("http://10.0.0.1@10.0.0.2:8000", False),
        ("http://10.0.0.10:8000", False),
    ],
)
def test_a_workers_key_and_headers_go_to_no_other_host_in_plain_text(tmp_path: Path, url: str, safe: bool) -> None:
    sent = plans.dump(plan(url=url))
    for own in ((["X"], None), ([], "KEY")):
        with contextlib.nullcontext() if safe else pytest.raises(UsageError, match="in plain text"):
            hosts.mine(sent, tmp_path, *own, "10.0.0.1")
    assert hosts.mine(sent, tmp_path, [], None, "10.0.0.1").api_key_env is None, "without them it may go anywhere"
    there = hosts.seen(url, "10.0.0.1")
    assert hosts.mine(sent, tmp_path, ["X"], "KEY", "10.0.0.1", f"{there}/").url == there, "and where this host names it"
    with pytest.raises(UsageError, match="this worker's to http://other"):
        hosts.mine(sent, tmp_path, ["X"], "KEY", "10.0.0.1", "http://other:8000")


def state(phase: str, **change: Any) -> ClientState:
    return ClientState(phase=phase, **{"start": 10.0, "end": 40.0, **change})


@pytest.mark.parametrize(
    ("phases", "phase"),
    [
        (("done", "counted"), "counted"),
        (("drain", "warmup"), "warmup"),
        (("done", "done"), "done"),
        (("stopped", "lost"), "lost"),
        (("gone", "done"), "gone"),
    ],
)
def test_several_are_as_far_as_the_last_and_end_as_the_worst(phases: tuple[str, ...], phase: str) -> None:
    assert client.merge([state(each) for each in phases]).phase == phase


def test_a_state_is_read_as_it_was_written() -> None:
    mine = state("done", workers=(Worker(name="a (pid 1)", offset_ms=1.5, uncertainty_ms=0.1),), lag=Delay(p50=0.1))
    assert client.parse(mine.dump()) == mine


@given(st.floats(-1e4, 1e4))
def test_a_record_on_another_clock_has_the_same_latencies(by: float) -> None:
    mine = replace(answer(1, 5.0), connected=None)
    there = moved(mine, by)
    assert there.sent == 5.0 + by
    assert there.connected is None
    for name in ("ttft", "e2el", "tpot", "gap", "lateness"):
        before, after = getattr(mine, name), getattr(there, name)
        assert before == after or math.isclose(before, after, abs_tol=1e-9)


def test_a_window_moves_with_the_clock_it_is_on() -> None:
    window = Window(10.0, 5.0, None)
    window.move(0.5)
    assert [window.phase(at) for at in (10.4, 10.5, 15.4, 15.5)] == ["warmup", "counted", "counted", "drain"]


@pytest.mark.parametrize(("way", "most"), [({"rate": 2.0}, 1.0), ({"rate": None, "users": 2}, 300.0)])
def test_a_run_whose_clocks_are_known_too_badly_for_it_is_invalid(way: dict[str, Any], most: float, tmp_path: Path) -> None:
    for uncertainty, good in ((0.9 * most, True), (1.1 * most, False)):
        known = state("done", workers=(Worker(name="a", uncertainty_ms=uncertainty), Worker(name="b")))
        document = job.document(Result(plan(**way), tmp_path, known), Targets())
        assert any("clocks" in reason for reason in document["reasons"]) is not good
        assert [worker["name"] for worker in document["client"]["workers"]] == ["a", "b"]


def test_people_read_who_sent_it_and_how_well_the_clocks_are_known() -> None:
    first = {"name": "a (pid 7)", "offset_ms": -12.5, "uncertainty_ms": 0.1}
    said = words.hosts([first, {"name": "b (pid 8)", "offset_ms": 0.0, "uncertainty_ms": 0.2}])
    assert said == "2 workers: a (pid 7), its clock -12.500 ms (within 0.100); b (pid 8), its clock +0.000 ms (within 0.200)"
    assert words.hosts([]) == ""


def test_a_worker_that_finds_no_master_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCUST", (sys.executable, "-c", "raise SystemExit(1)"))  # which gives up after five minutes
    with pytest.raises(LoadError, match="no master was found at 127.0.0.2:5599"):
        worker.work("127.0.0.2:5599", tmp_path / "own")


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["--rate", "2"], "goes without --rate"),
        (["--master", "--workers", "2"], "goes without --master and --workers"),
        (["--no-probe", "--warmup", "5s"], "goes without --warmup and --probe"),
        (["--target", "p95_ttft=1s"], "goes without --target"),
    ],
)
def test_what_a_worker_would_ignore_is_refused(others: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}$"):
        cli.app(["loadtest", "--worker", "127.0.0.2:5599", *others], standalone_mode=False)


def test_what_a_worker_has_of_its_own_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOCUST", (sys.executable, "-c", "raise SystemExit(1)"))
    own = ["--processes", "2", "--header", "X: y", "--api-key-env", "KEY", "--out", str(tmp_path), "--json"]
    with pytest.raises(LoadError, match="no master was found"):
        cli.app(["loadtest", "--worker", "127.0.0.2:5599", *own], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"master": True}, "--master takes --workers N"),
        ({"master": True, "workers": 2, "processes": 2}, "--master takes --workers N"),
        ({"master": True, "workers": 2, "alone": True}, "one load"),
        ({"workers": 2}, "--workers is for --master"),
        ({"master": True, "workers": 2, "bind": "127.0.0.1:x"}, "is no address"),
        ({"master": True, "workers": 2, "bind": "192.0.2.1"}, "--bind 192.0.2.1:5557: this user cannot listen"),
        ({"master": True, "workers": 2, "bind": "no..body:1"}, "--bind no..body:1: "),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        led(**{"master": False, "workers": None, "bind": "127.0.0.1:5557", "processes": 1, "alone": False, **options})


def test_of_several_hosts_each_worker_is_a_process_of_the_plan() -> None:
    port = claim_port(None)
    assert led(True, 3, f"127.0.0.1:{port}", 1, alone=False) == (3, f"127.0.0.1:{port}")
    assert led(True, 3, f"localhost:{port}", 1, alone=False) in ((3, f"127.0.0.1:{port}"), (3, f"[::1]:{port}"))
    assert led(True, 3, f"*:{port}", 1, alone=False) == (3, f"0.0.0.0:{port}")
    assert led(False, None, "127.0.0.1:5557", 2, alone=True) == (2, None)


def test_a_port_that_somebody_holds_is_named_before_an_engine_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        bind = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"--bind {bind}: port \d+ is held by another program"):
            led(True, 2, bind, 1, alone=False)
