"""A worker of a load test on several hosts: its end of what master and workers tell each other over locust's connection.

It learns the plan and the start from the master, asks it for the time all along, and sends it every byte that lies in its own
folder, each file from where the master's copy ends: whatever a broken connection loses comes again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import gevent
import gevent.event

from fenno import __version__, process
from fenno.errors import FennoError
from fenno.load import client, clock, endpoint, hosts
from fenno.load import plan as plans
from fenno.load.clock import Offset, Trip
from fenno.load.hosts import KIND, PATIENCE, TICK
from fenno.load.sender.traffic import Traffic
from fenno.load.sender.wire import monotonic

CHUNK = 2**18  # bytes of a file in one message
TRIPS = 5  # round trips each second; the shortest says most


class Worker:
    """`folder`: this worker's own. `offset`: of this host's clock to the master's."""

    def __init__(self, runner: Any, folder: Path, told: dict[str, Any]) -> None:
        self.runner, self.folder, self.told = runner, folder, told
        self.name = f"{socket.gethostname()} (pid {os.getpid()})"
        self.index = -1
        self.offset = Offset()
        self.at = 0.0  # when traffic starts, on the master's clock
        self.traffic: Traffic | None = None
        self._trips: deque[Trip] = deque(maxlen=20 * TRIPS)
        self._worst = 0.0
        self._silent = 0
        self._answer = gevent.event.Event()  # set whenever something came from the master
        self._copied: dict[str, int] = {}  # bytes of each file that the master has
        runner.register_message(KIND, self._take)
        self._send("hello", name=self.name, version=__version__, folder=str(folder))
        for job in (self._keep_time, self._copy):
            gevent.spawn(job).link_exception(lambda _: os._exit(70))

    @property
    def start(self) -> float:
        """When traffic starts, on this host's clock."""
        return self.at + self.offset.seconds

    def begin(self, traffic: Traffic) -> None:
        """Have this traffic follow the master's clock from now on."""
        self.traffic, self._worst = traffic, self.offset.uncertainty

    def state(self) -> client.Worker:
        """Who this is, and how well its clock is known."""
        found, worst = round(self.offset.seconds * 1e3, 3), round(self._worst * 1e3, 3)
        return client.Worker(name=self.name, offset_ms=found, uncertainty_ms=worst)

    def _send(self, kind: str, **data: Any) -> None:
        self.runner.send_message(KIND, {"kind": kind, **data})

    def _take(self, msg: Any, **_: Any) -> None:
        """A message of the master's, in the greenlet that reads them: nothing here may wait."""
        data = msg.data
        self._silent = 0
        match data["kind"]:
            case "time":
                self._trips.append(Trip(data["asked"], data["told"], monotonic()))
            case "plan":
                gevent.spawn(self._prepare, data).link_exception(lambda _: os._exit(70))
            case "start":
                self.at = data["at"]
            case "copied":
                self._copied[data["name"]] = data["size"]
            case "stop":
                (self.folder / "stop").touch()
            case "everyone":
                for index in range(data["count"]):
                    (self.folder / f"enough-{index}").touch()
            case "refused":
                _end(data["why"])
        self._answer.set()

    def _prepare(self, data: dict[str, Any]) -> None:
        """Keep the plan as this host can follow it, and say whether it can."""
        try:
            hosts.keep(data["files"], self.folder)
            plan = hosts.mine(data["plan"], self.folder, **self.told)
            process.write(self.folder / "plan.json", plans.dump(plan))  # which another process waits for
            endpoint.check(plan)
        except (FennoError, OSError) as error:
            self._send("unfit", why=str(error))
            gevent.sleep(1.0)  # the message leaves in zmq's own thread
            _end(str(error))
        while math.isinf(self.offset.uncertainty):
            gevent.sleep(TICK)
        self.index = data["index"]
        self._send("ready")

    def _keep_time(self) -> None:
        """Ask the master for the time, and give this worker's schedule and records what comes of it."""
        while True:
            for _ in range(TRIPS):
                self._answer.clear()
                self._send("time?", asked=monotonic())
                self._answer.wait(0.1)
            self.offset = clock.offset(self._trips)
            if self.traffic is not None:
                self.traffic.keep(self.offset.seconds)
                self._worst = max(self._worst, self.offset.uncertainty)
            gevent.sleep(1.0)
            self._silent += 1
            if self._silent > PATIENCE:
                self._give_up()

    def _give_up(self) -> NoReturn:
        """The master is gone: end the traffic, keep what is here."""
        (self.folder / "stop").touch()
        for _ in range(round(30 / TICK)):
            state = client.last(self.folder / f"client-{self.index}.jsonl")
            if state is None or state.phase not in client.LIVE:
                break
            gevent.sleep(TICK)
        _end(f"nothing was heard of the master for {PATIENCE} s", hosts.ALONE)

    def _copy(self) -> None:
        """Send what the master has not, records before the state that speaks of them."""
        while True:
            states = [(path, path.stat().st_size) for path in self.folder.glob("client-*.jsonl")]
            for path in sorted(self.folder.glob("records-*.jsonl")):
                self._copy_file(path, path.stat().st_size)
            for path, size in states:
                self._copy_file(path, size)
            self._drop()
            if (self.folder / f"enough-{self.index}").exists():
                self._send("enough")
            gevent.sleep(0.2)

    def _copy_file(self, path: Path, size: int) -> None:
        """Send a file up to `size`, chunk after chunk as the master says that it has them."""
        with path.open("rb") as file:
            while (have := self._copied.get(path.name, 0)) < size:
                file.seek(have)
                self._send("bytes", name=path.name, at=have, data=file.read(min(CHUNK, size - have)))
                for _ in range(50):  # 5 s: then it is sent again
                    if self._copied.get(path.name, 0) != have:
                        break
                    self._answer.clear()
                    self._answer.wait(0.1)

    def _drop(self) -> None:
        """Remove what is full and the master has whole: a run of days needs no second copy."""
        for path in sorted(self.folder.glob("records-*.jsonl"))[:-1]:
            if self._copied.get(path.name, 0) == path.stat().st_size:
                path.unlink()


def of(runner: Any, folder: Path) -> Worker | None:
    """The worker that this process is, in a folder of its own below `folder`; None in a run of one host."""
    told = os.environ.get("FENNO_LOAD_WORKER")
    if told is None or type(runner).__name__ != "WorkerRunner":
        return None
    mine = folder / f"worker-{os.getpid()}"
    mine.mkdir(parents=True)
    return Worker(runner, mine, json.loads(told))


def _end(why: str, code: int = 70) -> NoReturn:
    with contextlib.suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    os._exit(code)
