"""A load test on several hosts: real masters and workers on loopback addresses, one with a clock of its own, and kill -9 of each.

Three runs of this file go on at a time, since a start of locust takes seconds, and a silent worker is waited for.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from stub.harness import Done, Place, Run, side_by_side
from stub.waiting import until

from fenno.load import calibration, loadtest, raw, record, run, stored
from fenno.load.calibration import Served, Timing
from fenno.load.record import Record

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]  # a busy host may take minutes

FAST = Timing(ttft=0.05, itl=0.01)
LIMIT = 240.0  # seconds that end a hang: a run of this file is three starts of locust, beside those of two others
APART = ("unshare", "--time", "--monotonic", "1000")  # a clock that is 1000 s ahead


class Ran(NamedTuple):
    """A run on two workers that is over. `folders`: the master's, and each worker's own."""

    done: Done
    workers: list[Done]
    folders: list[Path]
    served: dict[str, Served]

    @property
    def records(self) -> list[Record]:
        return list(raw.records(self.folders[0]))

    def answered(self) -> set[str]:
        """The load's requests that the server answered whole, by its own log."""
        return {served.id for served in self.served.values() if served.ended == "whole" and served.id.startswith("url-")}


class Company:
    """A master and two workers at work."""

    def __init__(self, folder: Path, url: str, *options: object, before: tuple[str, ...] = (), count: int = 2) -> None:
        self.place, self.folder = Place(folder), folder
        with socket.create_server(("127.0.0.2", 0)) as server:
            self.address = f"127.0.0.2:{server.getsockname()[1]}"
        led = ("--master", "--workers", 2, "--bind", self.address, "--json", "--out", "runs")
        self.master = self.place.start("loadtest", url, *led, *options)
        self.workers = [self.worker(before if i == 0 else ()) for i in range(count)]

    def worker(self, before: tuple[str, ...]) -> Run:
        return self.place.start("loadtest", "--worker", self.address, "--out", "own", before=before)

    @property
    def run(self) -> Path:
        return next(iter(self.folder.glob("runs/*/plan.json"))).parent

    def own(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("own/*/*/plan.json"))

    def under_way(self) -> Company:
        """Wait until records of both have come."""
        until(lambda: all(any(path.stat().st_size > 5000 for path in self.copies(index)) for index in (0, 1)), LIMIT)
        return self

    def copies(self, index: int) -> list[Path]:
        """The master's copies of a worker's records."""
        return list(self.folder.glob(f"runs/*/records-{index}-*"))

    def locust(self, of: Run) -> psutil.Process:
        """The process that measures, or leads, below a command's."""
        for below in psutil.Process(of.popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(below.cmdline())
                if "locustfile.py" in line and "guard.py" not in line:
                    return below
        raise AssertionError("it has no locust")

    def over(self, served: dict[str, Served]) -> Ran:
        done = self.master.finish(LIMIT)
        return Ran(done, [worker.finish(LIMIT) for worker in self.workers], [self.run, *self.own()], served)


def whole(folder: Path) -> Ran:
    """A trace of 60 requests in 3 s; one worker has a clock of its own, where that is allowed."""
    lines = [{"timestamp": 50 * i, "input_length": 4 + i % 3, "output_length": 3 + i % 5, "hash_ids": []} for i in range(60)]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = APART if subprocess.run([*APART, "true"], capture_output=True).returncode == 0 else ()
    with calibration.serving(folder, FAST) as server:
        options = ("--trace", folder / "trace.jsonl", "--warmup", "525ms", "--timeout", "300s")
        company = Company(folder, server.url, *options, before=before)
        company.master.finish(LIMIT)
        return company.over(server.served())


def killed_worker(folder: Path) -> Ran:
    with calibration.serving(folder, FAST) as server:
        company = Company(folder, server.url, "--users", 6, "--warmup", 0, "--duration", "300s").under_way()
        late = company.worker(()).finish(LIMIT)
        company.locust(company.workers[0]).send_signal(signal.SIGKILL)
        ran = company.over(server.served())
        return ran._replace(workers=[*ran.workers, late])


def left(folder: Path) -> Ran:
    """Somebody presses Ctrl-C where a worker runs."""
    with calibration.serving(folder, FAST) as server:
        company = Company(folder, server.url, "--users", 6, "--warmup", 0, "--duration", "300s").under_way()
        company.workers[0].signal(signal.SIGINT)
        return company.over(server.served())


def called_off(folder: Path) -> Ran:
    """One of two workers comes, and then somebody presses Ctrl-C."""
    with calibration.serving(folder, FAST) as server:
        company = Company(folder, server.url, "--users", 6, count=1)
        until(lambda: list(company.folder.glob("own/*/worker-*")) and list(company.folder.glob("runs/*/plan.json")), LIMIT)
        company.master.signal(signal.SIGINT)
        return company.over(server.served())


def killed_master(folder: Path) -> Ran:
    with calibration.serving(folder, FAST) as server:
        company = Company(folder, server.url, "--users", 6, "--warmup", 0, "--duration", "300s").under_way()
        company.locust(company.master).send_signal(signal.SIGKILL)
        company.master.finish(LIMIT)
        [worker.popen.wait(LIMIT) for worker in company.workers]
        return company.over(server.served())


def killed_server(folder: Path) -> Ran:
    with calibration.serving(folder, FAST) as server:
        company = Company(folder, server.url, "--users", 6, "--warmup", 0, "--duration", "300s", "--timeout", "2s").under_way()
        psutil.Process(server.child.pid).children()[0].kill()
        return company.over(server.served())


Runs = Callable[[str], Ran]
JOBS = {job.__name__: job for job in (whole, killed_worker, left, called_off, killed_master, killed_server)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with side_by_side(JOBS, tmp_path_factory.mktemp, 3, Path) as tell:
        yield tell


def number(record: Record) -> int:
    return int(record.id.rpartition("-")[2])


def test_workers_together_send_exactly_the_planned_schedule(runs: Runs) -> None:
    ran = runs("whole")
    assert ran.done.code in (0, 4), ran.done.err  # this host may have been too busy to measure
    assert [worker.code for worker in ran.workers] == [0, 0]
    begun = run.state(ran.folders[0]).traffic
    assert begun is not None
    within = 2 * max(worker["uncertainty_ms"] for worker in ran.done.document["client"]["workers"]) / 1e3 + 1e-4
    assert sorted(map(number, ran.records)) == list(range(60))
    for r in ran.records:
        i = number(r)
        assert (r.outcome, r.cls, r.tokens, ran.served[r.id].prompt) == ("ok", "trace", 3 + i % 5, 4 + i % 3)
        assert r.scheduled - begun == pytest.approx(0.05 * i, abs=within), "what a clock's estimate may move by"
    assert {number(r) for r in ran.records if r.phase == "counted"} == set(range(11, 60))
    assert ran.done.document["requests"] == 49


def test_each_worker_sends_its_part(runs: Runs) -> None:
    ran = runs("whole")
    copies = [ran.folders[0].glob(f"records-{i}-*") for i in (0, 1)]
    parts = [{number(record.parse(line)) for path in paths for line in path.read_text().splitlines()} for paths in copies]
    assert parts == [set(range(0, 60, 2)), set(range(1, 60, 2))]


def test_stamps_of_a_host_with_another_clock_are_on_the_masters(runs: Runs) -> None:
    ran = runs("whole")
    workers = ran.done.document["client"]["workers"]
    within = max(worker["uncertainty_ms"] for worker in workers) / 1e3
    for r in ran.records:  # nothing arrives before it is written, and a host may stand still between the two
        assert r.first is not None
        assert r.first - ran.served[r.id].writes[0] > -within - 0.0001
    offsets = sorted(round(worker["offset_ms"] / 1e3) for worker in workers)
    assert offsets in ([0, 1000], [0, 0]), "the latter where a process may not have a clock of its own"
    assert all(abs(w["offset_ms"] - 1e3 * round(w["offset_ms"] / 1e3)) <= w["uncertainty_ms"] for w in workers)


def test_a_worker_that_is_killed_is_named_and_the_run_is_marked(runs: Runs) -> None:
    ran = runs("killed_worker")
    assert ran.done.code == 4, ran.done.err
    assert "was not heard of for 15 s" in ran.done.document["reasons"][0]
    assert ran.done.document["ended"]["how"] == "lost"
    named = [worker["name"] for worker in ran.done.document["client"]["workers"]]
    assert sum(name in ran.done.document["ended"]["why"] for name in named) == 1
    assert sorted(worker.code == 0 for worker in ran.workers[:2]) == [False, True], "the other one ended as told"


def test_a_worker_says_where_its_traffic_goes(runs: Runs) -> None:
    ran = runs("killed_worker")
    url = json.loads((ran.folders[0] / "plan.json").read_text())["url"]
    assert all(f"traffic to {url}\n" in worker.err for worker in ran.workers[:2])


def test_what_a_killed_worker_had_sent_is_kept_and_the_rest_lies_on_its_host(runs: Runs) -> None:
    ran = runs("killed_worker")
    where = next(folder for folder in ran.folders[1:] if str(folder) in ran.done.document["ended"]["why"])
    own = next(where.glob("records-*"))
    copy = next(ran.folders[0].glob(f"records-?-{own.name.removeprefix('records-')}")).read_bytes()
    assert len(copy) > 5000
    assert own.read_bytes().startswith(copy)


def test_no_more_workers_are_let_in_than_were_asked_for(runs: Runs) -> None:
    late = runs("killed_worker").workers[2]
    assert late.code != 0
    assert "the load test has all its 2 workers" in late.err


def test_a_worker_that_is_ended_is_named_at_once(runs: Runs) -> None:
    ran = runs("left")
    assert ran.done.code == 4, ran.done.err
    assert " left, " in ran.done.document["ended"]["why"]
    assert ran.done.document["completed"] > 0
    assert sorted(worker.code for worker in ran.workers) == [0, 130]


def test_workers_that_wait_are_told_when_it_comes_to_nothing(runs: Runs) -> None:
    ran = runs("called_off")
    assert ran.done.code == 130
    assert ran.workers[0].code == 5, ran.workers[0].err


def test_without_their_master_workers_end_and_keep_every_answer(runs: Runs) -> None:
    ran = runs("killed_master")
    assert ran.done.code == 5
    assert "the load client ended early" in ran.done.err
    assert all("nothing was heard of the master" in worker.err and worker.code == 5 for worker in ran.workers)
    kept = {r.id for folder in ran.folders[1:] for r in raw.records(folder)}
    assert ran.answered() <= kept
    assert {r.id for r in ran.records} <= kept


def test_what_came_to_a_killed_master_can_be_told_of(runs: Runs) -> None:
    ran = runs("killed_master")
    document = loadtest.document(stored.read(ran.folders[0]))
    assert document["ended"]["how"] == "interrupted"
    assert document["requests"] + document["cancelled"] == sum(r.phase == "counted" for r in ran.records) > 0


def test_a_killed_server_ends_the_run_of_all_and_nothing_is_lost(runs: Runs) -> None:
    ran = runs("killed_server")
    assert ran.done.code == 5, ran.done.err
    assert ran.done.document["ended"]["how"] == "gone"
    assert ran.answered() <= {r.id for r in ran.records}
    assert [worker.code for worker in ran.workers] == [0, 0]


def test_nothing_of_any_of_them_is_left(runs: Runs) -> None:
    assert all(Place(runs(name).folders[0].parent.parent).empty(LIMIT) for name in JOBS)
