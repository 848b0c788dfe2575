"""One model over several hosts: what each of them runs, and how head and worker find and lose each other."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from stub.harness import Place, Run
from stub.waiting import until

from fenno.engine.server import claim_port
from fenno.errors import FennoError
from fenno.recipe import Recipe
from fenno.serve import hosts
from fenno.serve.hosts import Hosts
from fenno.serve.worker import linked
from fenno.units import Address


def recipe(**flags: Any) -> Recipe:
    engine = {"model": "org/model", "flags": {"tensor-parallel-size": 8, "pipeline-parallel-size": 2, **flags}}
    return Recipe.model_validate({"name": "large", "engine": engine, "host": {"gpus": 16}})


def test_every_host_has_its_rank_and_all_but_the_head_no_server() -> None:
    head = hosts.given(recipe(), "head", None, None, "10.0.0.1")
    assert head == Hosts(2, 0, Address("10.0.0.1", 29501))
    shared = {"distributed-executor-backend": "mp", "nnodes": 2, "master-addr": "10.0.0.1", "master-port": 29501}
    assert hosts.flags(head) == {**shared, "node-rank": 0}
    assert hosts.flags(head.at(1)) == {**shared, "node-rank": 1, "headless": True}
    assert hosts.flags(None) == {}


def test_with_ray_every_host_joins_the_cluster() -> None:
    head = hosts.given(recipe(**{"distributed-executor-backend": "ray"}), "head", 2, None, "[fd00::1]")
    assert head
    assert hosts.ray(head) == ["ray", "start", "--head", "--block", "--node-ip-address", "fd00::1", "--port", "6379"]
    assert hosts.ray(head.at(1)) == ["ray", "start", "--block", "--address", "[fd00::1]:6379"]


def test_each_host_needs_its_part_of_the_gpus_alone() -> None:
    assert hosts.share(recipe(), Hosts(4, 1, Address("h", 1))).host.gpus == 4
    assert hosts.share(recipe(), None) == recipe()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((None, 2, None, None), "go with --role"),
        (("chief", 2, None, "h"), "--role is 'chief'"),
        (("head", 2, None, None), "needs them"),
        (("head", 1, None, "h"), "needs them"),
        (("head", 2, 1, "h"), "--node-rank is 1 for a head of 2 hosts"),
        (("worker", 4, None, "h"), "--node-rank is None for a worker of 4 hosts"),
        (("worker", 4, 4, "h"), "--node-rank is 4"),
        (("worker", 2, 0, "h"), "--node-rank is 0"),
        (("head", 3, None, "h"), "16 ranks cannot be shared out over 3 hosts"),
        (("head", 2, None, "h h"), "is no address"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: tuple[Any, ...], said: str) -> None:
    with pytest.raises(FennoError, match=said):
        hosts.given(recipe(), *asked)


def test_data_parallel_ranks_are_servers_of_their_own() -> None:
    with pytest.raises(FennoError, match="data-parallel ranks") as caught:
        hosts.given(recipe(**{"data-parallel-size": 2}), "head", 2, None, "h")
    assert "fenno export --to nginx" in caught.value.hint


def test_one_host_is_no_several() -> None:
    assert hosts.given(recipe(), None, None, None, None) is None
    assert hosts.given(recipe(), "worker", 2, None, "h") == Hosts(2, 1, Address("h", 29501))


def test_why_there_is_no_head_yet_is_told_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    # Of a platform that calls it by another name.
    monkeypatch.delattr(socket, "TCP_KEEPIDLE")
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address, connect = head.getsockname(), socket.create_connection
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        answers: list[OSError | None] = [unknown, unknown, ConnectionRefusedError(111, "Connection refused"), None]

        def dial(to: tuple[str, int], timeout: float) -> socket.socket:
            if (error := answers.pop(0)) is not None:
                raise error
            return connect(address, timeout=timeout)

        monkeypatch.setattr(socket, "create_connection", dial)
        with linked(Hosts(2, 1, Address("head", 1)), said.append) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    waiting = "waiting for the head at head:1"
    assert said == [waiting, f"{waiting}: Name or service not known", f"{waiting}: Connection refused"]


def parallel(place: Place, **flags: Any) -> Path:
    return place.recipe(engine={"flags": {"max-num-seqs": 64, "tensor-parallel-size": 2, **flags}})


@pytest.mark.scenario
def test_a_dry_run_prints_the_command_of_each_host(tmp_path: Path) -> None:
    place = Place(tmp_path)
    done = place.fenno("serve", parallel(place), "--role", "head", "--master-addr", "10.0.0.1", "--dry-run")
    assert (done.code, place.starts()) == (0, []), done.err
    first, head, second, worker = done.out.splitlines()
    assert (first, second) == ("# head, host 0 of 2", "# worker, host 1 of 2")
    assert "--node-rank 0" in head and "--headless" not in head
    assert "--node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --headless" in worker
    ray = place.fenno(
        *("serve", parallel(place, **{"distributed-executor-backend": "ray"})),
        *("--role", "head", "--master-addr", "10.0.0.1", "--dry-run"),
    )
    lines = [shlex.split(line) for line in ray.out.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == ["ray", "RAY_ADDRESS=10.0.0.1:6379", "ray"]


def ready(run: Run, times: int) -> str:
    run.until(lambda said: said.count("ready after") >= times)
    return run.error.read_text()


def engine(of: Run) -> psutil.Process:
    below = psutil.Process(of.popen.pid).children(recursive=True)
    for each in below:
        with contextlib.suppress(psutil.Error):  # it may have ended meanwhile
            if "engine.py" in " ".join(each.cmdline()[:2]):
                return each
    raise AssertionError("it has no engine")


@pytest.mark.scenario
def test_head_and_worker_wait_for_each_other_and_start_again_when_the_other_dies(tmp_path: Path) -> None:
    place = Place(tmp_path)
    chosen, master = parallel(place), f"127.0.0.1:{claim_port(None)}"
    worker = place.start("serve", chosen, "--name", "w", "--role", "worker", "--master-addr", master)
    worker.until(lambda said: f"waiting for the head at {master}" in said)
    assert place.starts() == [], "its ranks would wait for the head no longer than torch does"
    head = place.start("serve", chosen, "--name", "h", "--role", "head", "--master-addr", master)
    url = ready(head, 1).rpartition("ready after")[2].split()[2]
    assert "it has joined the head" in ready(worker, 1)
    with urllib.request.urlopen(f"{url}/models", timeout=120) as answer:
        assert b"stub-model" in answer.read()
    status = place.fenno("status")
    assert status.code == 0, status.err
    assert [(each["name"], each["phase"], each["url"] != "") for each in status.document["servers"]] == [
        ("h", "ready", True),
        ("w", "ready", False),
    ]
    engine(head).kill()
    assert "the head has ended" in ready(worker, 2)
    ready(head, 2)
    for run in (head, worker):
        run.signal(signal.SIGINT)
    assert (head.finish().code, worker.finish().code) == (130, 130)
    until(lambda: not place.left())


@pytest.mark.scenario
def test_a_worker_in_the_background_says_what_it_does_and_is_not_rolled_back_alone(tmp_path: Path) -> None:
    place = Place(tmp_path)
    chosen, master = parallel(place), ("--master-addr", f"127.0.0.1:{claim_port(None)}")
    worker = place.start("serve", chosen, "--name", "w", "--role", "worker", *master, "--detach")
    head = place.fenno("serve", chosen, "--name", "h", "--role", "head", *master, "--detach")
    joined = worker.finish()
    assert (head.code, joined.code) == (0, 0), head.err + joined.err
    assert "ready: it has joined the head; `fenno status w`" in joined.err
    refused = place.fenno("rollback", "w")
    assert refused.code == 2
    assert "w is the worker of several hosts" in refused.err
    assert [place.fenno("stop", name).code for name in ("h", "w")] == [0, 0]
    until(lambda: not place.left())
