"""The two loops: the pacer of an open one, and one user of a closed one."""

from __future__ import annotations

import gevent
import gevent.event

from fenno.load.sender.traffic import Traffic
from fenno.load.sender.wire import Alarm, monotonic


def pace(traffic: Traffic) -> None:
    """Open loop: every request at its time, whatever became of the others."""
    alarm = Alarm()
    while (made := traffic.take()) is not None:
        due = traffic.start + (made[0].at or 0.0)
        alarm.until(due)
        traffic.pool.spawn(traffic.converse, due, made)
    gevent.event.Event().wait()  # a trace is over: to return would mean to be called again


def use(traffic: Traffic) -> None:
    """Closed loop: one request after the other. Users start spread over the first part of the warm-up."""
    plan, place = traffic.plan, traffic.started
    traffic.started += 1
    begin = traffic.start + min(2.0, plan.warmup / 2) * place / max(1, traffic.users)
    gevent.sleep(max(0.0, begin - monotonic()))
    due, failures = monotonic(), 0
    while (made := traffic.take()) is not None:
        good = traffic.converse(due, made)
        failures = 0 if good else failures + 1
        pause = plan.workload.think_time + (min(1.0, 0.05 * 2 ** min(failures, 6)) if failures else 0.0)
        due = monotonic() + pause
        if pause:
            gevent.sleep(pause)
