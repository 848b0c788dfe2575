"""What locust runs in a child process: `python -m locust -f locustfile.py --headless`. The work is done in `load/sender/`."""

from __future__ import annotations

import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import gevent
from locust import User, events, runners, task

from fenno.load import client, raw
from fenno.load import plan as plans
from fenno.load.plan import Plan
from fenno.load.sender import loops, master, worker
from fenno.load.sender.conductor import TICK, Conductor, forget
from fenno.load.sender.recorder import Recorder
from fenno.load.sender.spool import Spool, give_up
from fenno.load.sender.traffic import Traffic, common_start

# Who is silent for too long is found in `load/sender/`: locust would share the users out anew whenever a host stood still.
runners.HEARTBEAT_LIVENESS = runners.MASTER_HEARTBEAT_TIMEOUT = 10**9


@events.init.add_listener  # type: ignore[untyped-decorator]
def _meet(environment: Any, **_: Any) -> None:
    """Before workers come, or right after this one came to its master."""
    folder = Path(os.environ["FENNO_LOAD_FOLDER"])
    environment.worker = worker.of(environment.runner, folder)
    environment.master = None if environment.worker else master.of(environment.runner, _plan(folder), folder)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Any, **_: Any) -> None:
    """Load the plan. Called in every process; the master of several only waits for the others."""
    client.take_precedence()
    client.make_room()
    if type(environment.runner).__name__ == "MasterRunner":
        _lead(environment)
        return
    me: worker.Worker | None = environment.worker
    folder = me.folder if me else Path(os.environ["FENNO_LOAD_FOLDER"])
    plan = _plan(folder)
    try:
        spool = Spool(functools.partial(raw.file, folder, os.getpid()), raw.FULL)
        recorder = Recorder(plan, spool, me.offset.seconds if me else 0.0)
        index = me.index if me else max(0, environment.runner.worker_index) if plan.processes > 1 else 0
        environment.fenno = traffic = Traffic(plan, index, me.start if me else common_start(folder), recorder)
        conductor = Conductor(traffic, folder, environment.runner, me)
    except OSError as error:
        give_up(error)
    if me:
        me.begin(traffic)
    events.quitting.add_listener(lambda **_: recorder.spool.flush(wait=True))
    for job in (traffic.prepare, recorder.run, conductor.probe, conductor.run):
        gevent.spawn(job).link_exception(_fail)
    gc.collect()
    gc.freeze()
    gc.disable()  # a request leaves no cycle behind, whichever way it ends; a collection would stop the loop for milliseconds


def _plan(folder: Path) -> Plan:
    headers = json.loads(os.environ.get("FENNO_LOAD_HEADERS", "{}"))
    return plans.parse((folder / "plan.json").read_text(encoding="utf-8"), headers)


def _lead(environment: Any) -> None:
    """The master's part: no traffic."""
    folder = Path(os.environ["FENNO_LOAD_FOLDER"])
    if environment.master is not None:
        environment.master.begin()
    gevent.spawn(_wait_for_all, environment, folder, _plan(folder).processes)


def _fail(greenlet: Any) -> None:
    """A mistake of our own ends the process: a run without its conductor would never end."""
    os._exit(70)


def _wait_for_all(environment: Any, folder: Path, processes: int) -> None:
    paths = [folder / f"client-{index}.jsonl" for index in range(processes)]
    while any((state := client.last(path)) is None or state.phase in client.LIVE for path in paths):
        forget(environment.stats)
        gevent.sleep(TICK)
    environment.process_exit_code = 0
    environment.runner.quit()


class Client(User):  # type: ignore[misc]
    """One user of a closed loop, or the pacer of an open one."""

    @task  # type: ignore[untyped-decorator]
    def run_loop(self) -> None:
        traffic: Traffic = self.environment.fenno
        if traffic.plan.users is None:
            loops.pace(traffic)
        else:
            loops.use(traffic)
