"""What the load client knows of itself: phases, requests in flight, lag, lateness. It appends that to a file, line by line."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import resource
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path

from fenno.load.record import Phase

LIVE = ("starting", "warmup", "counted", "drain")
ENDS = ("done", "stopped", "gone", "lost")


def take_precedence() -> None:
    """Run before other programs of this host, where that is allowed: a measuring instrument that waits for its turn measures that.

    It sleeps nearly always, so it takes little from the engine. With Linux's autogroups (sched(7)) a process's own nice value ranks
    it within its session alone, and the session's group has another one.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15", encoding="ascii")


def make_room() -> None:
    """Let the kernel grow this process's table of open files now, to all it may come to.

    It doubles the table whenever a connection finds it full, and in a process with threads that waits for every core (RCU): 6 to
    570 ms were seen at the 52nd and the 116th connection, in which no stream was read.
    """
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65_536)
    with contextlib.suppress(OSError):
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, most - 1))


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Milliseconds of a delay that the client itself causes."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


def pause(so_far: float) -> float:
    """Seconds between two states of a run that goes on for `so_far` seconds: three days of them are 4 MB."""
    return max(0.5, so_far / 1000)


def rank(count: int, p: float) -> int:
    """Where the `p`th percentile of so many sorted values is, from 0."""
    return max(0, math.ceil(count * p / 100 - 1e-9) - 1)


class Delays:
    """Delays of hours or days, in bounded memory: counted by the microsecond up to 2 ms, above that by a thousandth of themselves.

    Neither a count nor a look gets slower with their number: the loop that is watched is the one that does it.
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._number = self._most = 0

    def add(self, seconds: float) -> None:
        """Count one; less than nothing is none."""
        micros = max(0, round(seconds * 1e6))
        shift = max(0, micros.bit_length() - 11)
        place = (shift << 10) + (micros >> shift)
        if place >= len(self._counts):
            self._counts += [0] * (place + 1 - len(self._counts))
        self._counts[place] += 1
        self._number += 1
        self._most = max(self._most, micros)

    def told(self) -> Delay:
        """Their percentiles by nearest rank, and the greatest."""
        upto = list(accumulate(self._counts))
        p50, p95, p99 = (self._at(bisect_right(upto, rank(self._number, p))) / 1e3 for p in (50, 95, 99)) if upto else (0.0,) * 3
        return Delay(p50=p50, p95=p95, p99=p99, max=self._most / 1e3)

    def _at(self, place: int) -> int:
        """The least delay in microseconds that is counted there."""
        shift = max(0, (place >> 10) - 1)
        return min(self._most, (place - (shift << 10)) << shift)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A client process on a host of its own: how far its clock is ahead of the run's, and within what that is known, at the worst
    moment of the run. Its stamps are on the run's clock already."""

    name: str
    offset_ms: float = 0.0
    uncertainty_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """The client at one moment. `start` and `end` bound the counted window on the monotonic clock, `end` once it is over.

    `phase`: one of `LIVE`, then "done", "stopped" (asked to), "gone" (the endpoint refused connections, see `reason`) or "lost"
    (a worker on another host died).
    `cpu`: processor time of the busiest process during the window, as a share of one core. `in_flight_mean`: time-averaged over
    the window. `lag` and `lateness` are of the window too.
    """

    phase: str = "starting"
    reason: str = ""
    traffic: float | None = None  # when traffic began
    start: float | None = None
    end: float | None = None
    lag: Delay = Delay()
    lateness: Delay = Delay()
    cpu: float = 0.0
    in_flight: int = 0
    in_flight_mean: float = 0.0
    asked: int | None = None  # users of a closed loop
    sent: int = 0
    done: int = 0
    failed: int = 0
    counted_sent: int = 0
    counted_done: int = 0
    backlog: int = 0  # reads of ended streams whose events are not read yet
    versions: dict[str, str] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()

    def dump(self) -> str:
        return json.dumps(asdict(self))


def parse(text: str) -> ClientState:
    """What `ClientState.dump` wrote; what another version said beyond that is left out. Raises `ValueError`."""
    known = {f.name for f in fields(ClientState)}
    data = {name: value for name, value in json.loads(text).items() if name in known}
    workers = tuple(Worker(**worker) for worker in data.get("workers", ()))
    return ClientState(**{**data, "lag": Delay(**data["lag"]), "lateness": Delay(**data["lateness"]), "workers": workers})


def last(path: Path) -> ClientState | None:
    """The last state in a file of them, one a line; None before the first."""
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
        lines = file.read().split(b"\n")[:-1]
    return parse(lines[-1].decode()) if lines else None


def merge(states: Sequence[ClientState]) -> ClientState:
    """One state for several processes: counts add up, delays are the worst process's. The phase is the earliest while some are at
    work, and then that of the worst end."""
    if len(states) < 2:
        return states[0] if states else ClientState()
    phase = min((s.phase for s in states if s.phase in LIVE), key=LIVE.index, default=None)
    total = {name: sum(getattr(s, name) for s in states) for name in _SUMS}
    return ClientState(
        phase=phase or max((s.phase for s in states), key=ENDS.index),
        reason=next((s.reason for s in states if s.reason), ""),
        traffic=states[0].traffic,
        start=states[0].start,
        end=max((s.end for s in states if s.end is not None), default=None),
        lag=max((s.lag for s in states), key=lambda d: d.p95),
        lateness=max((s.lateness for s in states), key=lambda d: d.p95),
        cpu=max(s.cpu for s in states),
        asked=sum(s.asked or 0 for s in states) if states[0].asked is not None else None,
        versions=states[0].versions,
        workers=tuple(worker for s in states for worker in s.workers),
        **total,
    )


_SUMS = ("in_flight", "in_flight_mean", "sent", "done", "failed", "counted_sent", "counted_done", "backlog")


class Window:
    """Which requests count: those scheduled in [start, end), or the first `quota` from `start` on."""

    def __init__(self, start: float, duration: float | None, quota: int | None) -> None:
        self.start = start
        self.end = start + duration if duration is not None else None
        self._left = quota

    def move(self, by: float) -> None:
        """Have it so many seconds later: the clock it is on was set."""
        self.start += by
        self.end = self.end + by if self.end is not None else None

    def phase(self, at: float) -> Phase:
        """The phase of a request scheduled at `at`; asked once a request, in the order of schedules."""
        if at < self.start:
            return "warmup"
        if self.end is not None and at >= self.end:
            return "drain"
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.end = time.monotonic() if at < time.monotonic() else at
        return "counted"

    def now(self, now: float) -> Phase:
        """The phase of this moment."""
        if now < self.start:
            return "warmup"
        return "counted" if self.end is None or now < self.end else "drain"


class Flight:
    """Requests in flight, integrated over time."""

    def __init__(self) -> None:
        self.count = 0
        self._area = 0.0
        self._since = time.monotonic()

    def change(self, by: int, now: float) -> None:
        self._area += self.count * (now - self._since)
        self._since = now
        self.count += by

    def area(self, now: float) -> float:
        """Request-seconds up to `now`."""
        return self._area + self.count * (now - self._since)
