"""One process's part of a run: the requests made ahead of their time, and each from its send to its end."""

from __future__ import annotations

import contextlib
import errno
import re
from collections import deque
from pathlib import Path

import gevent
import gevent.event
import gevent.pool

from fenno.load import plan as plans
from fenno.load.client import Delays, Flight, Window
from fenno.load.plan import Plan, Request
from fenno.load.sender.recorder import Ended, Recorder
from fenno.load.sender.wire import Connection, Endpoint, monotonic, words

PREPARED = 64  # requests made ahead, when the loop is idle
REST = 2.0  # seconds after which an idle connection is not used again: servers close them from 5 s on, just as we may send


class Traffic:
    """The requests of process `index` and the connections they go over. `users`: of a closed loop, this process's part."""

    def __init__(self, plan: Plan, index: int, start: float, recorder: Recorder) -> None:
        self.plan, self.index, self.start, self.recorder = plan, index, start, recorder
        self.endpoint = Endpoint.of(plan)
        self.pool = gevent.pool.Group()
        share = plan.requests // plan.processes + (index < plan.requests % plan.processes) if plan.requests else None
        self.window = Window(start + plan.warmup, plan.duration, share)
        self.flight = Flight()
        users = plan.users or 0
        self.users = users // plan.processes + (index < users % plan.processes)
        self.started = 0  # users that have begun
        self.sent = self.counted_sent = 0
        self.lateness = Delays()
        self.refused: float | None = None
        self._requests = plans.requests(plan, index, plan.processes)
        self._prepared: deque[tuple[Request, str, bytes]] = deque()
        self._idle: list[Connection] = []
        self._name = re.sub(r"[^A-Za-z0-9_-]", "", str(plan.arm)) + f"-{int((start - recorder.ahead) * 1e3):x}"

    def keep(self, ahead: float) -> None:
        """Follow the run's clock, of which this host's is `ahead` by so many seconds now."""
        by, self.recorder.ahead = ahead - self.recorder.ahead, ahead
        self.start += by
        self.window.move(by)

    def take(self) -> tuple[Request, str, bytes] | None:
        """The next request, ready to send; None when a trace is over."""
        return self._prepared.popleft() if self._prepared else self._make()

    def _make(self) -> tuple[Request, str, bytes] | None:
        request = next(self._requests, None)
        return None if request is None else self._dress(request)

    def _dress(self, request: Request) -> tuple[Request, str, bytes]:
        identity = f"{self._name}-{request.index}" + (f".{request.turn}" if request.turn > 1 else "")
        return request, identity, self.endpoint.message(identity, request.body)

    def prepare(self) -> None:
        """Make requests ahead of their time, whenever the loop is idle."""
        while True:
            if len(self._prepared) < PREPARED:
                made = self._make()
                if made is None:
                    return
                self._prepared.append(made)
                gevent.idle()
            else:
                gevent.sleep(0.005)

    def converse(self, scheduled: float, made: tuple[Request, str, bytes]) -> bool:
        """One request, and where it is the first of a conversation its later turns. True when the last response became complete."""
        while True:
            ended, request = self._exchange(scheduled, made), made[0]
            if not request.later or not ended.complete:
                return ended.complete
            answer = ended.answer.get()
            if answer is None:
                return False
            scheduled = max(ended.end + self.plan.workload.think_time, monotonic())
            gevent.sleep(max(0.0, scheduled - monotonic()))
            made = self._dress(plans.follow(self.plan, request, answer))

    def _exchange(self, scheduled: float, made: tuple[Request, str, bytes]) -> Ended:
        """One request from its send to its end."""
        request, identity, message = made
        phase = self.window.phase(scheduled)
        sent = monotonic()
        if phase == "counted":
            self.counted_sent += 1
            self.lateness.add(sent - scheduled)
        self.sent += 1
        self.flight.change(1, sent)
        ended = Ended(request, identity, phase, scheduled, sent, None, sent, None, "")
        ended.answer = gevent.event.AsyncResult() if request.later else None
        try:
            self._ask(ended, message, sent + self.plan.timeout)
        except gevent.GreenletExit:
            ended.given, ended.why = "cancelled", "the run was ended"
            raise
        finally:
            ended.end = monotonic()
            self.flight.change(-1, ended.end)
            self.recorder.add(ended)
        return ended

    def _ask(self, ended: Ended, message: bytes, deadline: float) -> None:
        try:
            connection = self._connection(deadline)
        except OSError as error:
            mine = error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
            ended.given, ended.why = "client" if mine else "connect", words(error)
            self.refused = self.refused or monotonic()
            return
        self.refused = None
        ended.connected = monotonic()
        try:
            ended.response, ended.why = connection.ask(message, deadline)
        except BaseException:
            ended.response = connection.response
            connection.close()
            raise
        if connection.alive:
            self._idle.append(connection)
        else:
            connection.close()

    def _connection(self, deadline: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive and monotonic() - connection.rested < REST:
                return connection
            connection.close()
        return Connection(self.endpoint, max(0.001, deadline - monotonic()))


def common_start(folder: Path) -> float:
    """When traffic starts, the same for every process: the first one to ask decides."""
    path = folder / "start"
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(repr(monotonic() + 0.1))
    text = ""
    while not text:
        text = path.read_text(encoding="utf-8")
    return float(text)
