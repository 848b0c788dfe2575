"""Watches a run: its window, its end, the loop's own lag, and the files that others read."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent

from fenno.load import client
from fenno.load.client import ClientState, Delays
from fenno.load.sender.spool import Spool
from fenno.load.sender.traffic import Traffic
from fenno.load.sender.wire import Alarm, monotonic
from fenno.load.sender.worker import Worker

GONE = 5.0  # seconds (or the timeout, if less) of refused connections, with none accepted, that end a run
TICK = 0.05


class Conductor:
    """Conducts one process's traffic; `runner` is locust's; `worker`: who this is in a run of several hosts."""

    def __init__(self, traffic: Traffic, folder: Path, runner: Any, worker: Worker | None = None) -> None:
        self.traffic, self.folder, self.runner, self.worker = traffic, folder, runner, worker
        self.plan, self.window, self.flight, self.recorder = traffic.plan, traffic.window, traffic.flight, traffic.recorder
        self.state = ClientState(versions=_versions(), asked=traffic.users if self.plan.users else None)
        self._states = Spool(lambda _: folder / f"client-{traffic.index}.jsonl")
        self._lags = Delays()
        self._marks: list[tuple[float, float, float]] = []  # time, in-flight area, processor time: at the window's start, and last

    def probe(self) -> None:
        """How late the loop comes round: an alarm each 10 ms."""
        alarm = Alarm()
        while True:
            due = monotonic() + 0.01
            alarm.until(due)
            if self.window.now(due) == "counted":
                self._lags.add(monotonic() - due)

    def run(self) -> None:
        """Watch the run: its window, its end, and the files that others read."""
        alarm, due = Alarm(), 0.0
        while True:
            now = monotonic()
            self._mark(now)
            reason = self._over(now)
            if reason:
                self._finish(reason)
                return
            self.recorder.spool.flush()  # little and often: a large write would hold the core that the loop runs on
            if now >= due or self.window.now(now) != self.state.phase:
                due = now + client.pause(now - self.traffic.start)
                self._report(now, "")
            following = [at for at in (self.window.start, self.window.end) if at is not None and now < at < now + TICK]
            alarm.until(min([now + TICK, *following]))

    def _mark(self, now: float) -> None:
        """Keep the in-flight area at the window's start, and at the latest moment in it."""
        inside = now >= self.window.start and (self.window.end is None or not self._marks or self._marks[-1][0] < self.window.end)
        if inside:
            self._marks[1:] = [(now, self.flight.area(now), time.process_time())]

    def _over(self, now: float) -> str:
        """ "" while traffic goes on; else the final phase."""
        if (self.folder / "stop").exists():
            return "stopped"
        if self.traffic.refused is not None and now - self.traffic.refused > min(GONE, self.plan.timeout):
            return "gone"
        end = self.window.end
        if end is None or now < end:
            return ""
        mine = self.folder / f"enough-{self.traffic.index}"
        if self.recorder.counted_done >= self.traffic.counted_sent or now > end + self.plan.timeout + 5:
            mine.touch()
        everyone = all((self.folder / f"enough-{i}").exists() for i in range(self.plan.processes))
        return "done" if everyone else ""

    def _finish(self, phase: str) -> None:
        self.traffic.pool.kill()
        self.runner.user_greenlets.kill()
        limit = monotonic() + 20
        while self.recorder.busy and monotonic() < limit:
            gevent.sleep(0.01)
        self._report(monotonic(), phase)
        if type(self.runner).__name__ == "LocalRunner":
            self.runner.environment.process_exit_code = 0
            gevent.spawn(self.runner.quit)

    def _report(self, now: float, final: str) -> None:
        forget(self.runner.stats)
        self.recorder.spool.flush(wait=bool(final))
        self.state = self._state(now, final)
        self._states.add(self.state.dump())
        self._states.flush(wait=bool(final))

    def _state(self, now: float, final: str) -> ClientState:
        end = self.window.end if self.window.end is not None and self.window.end <= now else None
        end = end if end is not None or not final else max(now, self.window.start)
        ahead = self.recorder.ahead
        return replace(
            self.state,
            traffic=self.traffic.start - ahead,
            start=self.window.start - ahead,
            end=end - ahead if end is not None else None,
            phase=final or self.window.now(now),
            reason=f"the endpoint took no connection for {min(GONE, self.plan.timeout):g} s" if final == "gone" else "",
            lag=self._lags.told(),
            lateness=self.traffic.lateness.told(),
            cpu=round(_rate(self._marks, 2), 3),
            in_flight=self.flight.count,
            in_flight_mean=round(_rate(self._marks, 1), 3),
            sent=self.traffic.sent,
            done=self.recorder.done,
            failed=self.recorder.failed,
            counted_sent=self.traffic.counted_sent,
            counted_done=self.recorder.counted_done,
            backlog=self.recorder.backlog,
            workers=(self.worker.state(),) if self.worker is not None else (),
        )


def forget(stats: Any) -> None:
    """Let go of what locust's statistics keep of every second, 100 MB in three days; their totals stay."""
    stats.history.clear()
    for entry in (stats.total, *stats.entries.values()):
        entry.num_reqs_per_sec.clear()
        entry.num_fail_per_sec.clear()


def _rate(marks: list[tuple[float, float, float]], column: int) -> float:
    """The mean growth a second of a column of the marks."""
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return 0.0
    return float(marks[-1][column] - marks[0][column]) / (marks[-1][0] - marks[0][0])


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("locust", "gevent")}
