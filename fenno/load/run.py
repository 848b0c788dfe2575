"""Run a plan: locust in a child process, its records read as they come."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fenno import process, units
from fenno.errors import DiskError, LoadError, ProcessError
from fenno.load import client, endpoint, plan, raw
from fenno.load.client import ClientState
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.load.requests import Requests

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
LOCUST = (*process.module("locust"), "-f", str(LOCUSTFILE), "--loglevel", "WARNING", "--exit-code-on-error", "0")
START = 180.0  # seconds until the client must have reported itself: a shared host may stand still for a minute
PACK = 1.0  # seconds between two looks for files that are full
GATHER = 600.0  # the same as `START` where workers on other hosts have to come first


@dataclass(frozen=True)
class Result:
    """A run that is over. `state.phase` is "done", or says how it ended before that."""

    plan: Plan
    folder: Path
    state: ClientState

    @functools.cached_property
    def records(self) -> list[Record]:
        """Every record, in the order in which each client process ended them: for runs that are not long."""
        return list(raw.records(self.folder))

    @functools.cached_property
    def requests(self) -> Requests:
        """The same ones, column by column."""
        return Requests.read(self.folder)


class LoadRun:
    """A run in progress, made by `running`."""

    def __init__(self, plan: Plan, folder: Path, child: process.Child) -> None:
        self.plan = plan
        self.folder = folder
        self._child = child
        self._records: list[Record] = []
        self._read: dict[Path, int] = {}
        self._started = time.monotonic()
        self._began = False

    def poll(self) -> bool:
        """Whether it is over. Raises `LoadError` when the client has not begun in time."""
        if self._child.poll() is not None:
            return True
        self._began = self._began or self.client().phase != "starting"
        most = START if self.plan.bind is None else GATHER
        if not self._began and time.monotonic() - self._started > most:
            self._child.stop()
            who = "the load client" if self.plan.bind is None else f"a load client with {self.plan.processes} workers"
            raise LoadError(f"{who} did not start within {most:g} s", f"see {self._child.log}")
        return False

    def records(self) -> list[Record]:
        """Every record so far, in the order the requests ended. Each call reads only what is new, and packs what is full; the list
        is the same one. Not for a run that `wait` packs."""
        self._records += raw.new(self.folder, self._read)
        raw.pack(self.folder, self._read)
        return self._records

    def client(self) -> ClientState:
        """What the client last said of itself; "starting" until it has said something."""
        return state(self.folder)

    def stop(self) -> Result:
        """End it now: what is in flight is cancelled. Returns within about a second, unless the client is
        behind with reading."""
        _write(self.folder / "stop", "")
        with contextlib.suppress(ProcessError):
            self._child.wait(30)  # streams that have ended are still read
        self._child.stop()
        raw.pack(self.folder)
        return Result(self.plan, self.folder, self.client())

    def wait(self) -> Result:
        """Wait for its end, and pack what is full meanwhile. Raises `LoadError` when the client died, or when the endpoint never
        answered."""
        packed = time.monotonic()
        while not self.poll():
            if time.monotonic() - packed > PACK:
                raw.pack(self.folder)
                packed = time.monotonic()
            time.sleep(0.05)
        raw.pack(self.folder)
        return self.result()

    def result(self) -> Result:
        """What came of a run that is over. Raises as `wait` does."""
        ended = Result(self.plan, self.folder, self.client())
        if ended.state.phase in client.LIVE:
            hint = f"see {self._child.log}; `fenno report {self.folder}` tells what there is"
            raise LoadError(f"the load client ended early: {last_line(self._child.log)}", hint)
        requests = ended.requests
        if len(requests) and requests.words("outcome").are("connect").all():
            why = requests.error(len(requests) - 1)
            raise LoadError(f"{self.plan.url} never answered: {why}", "is the server running, and is the port right?")
        return ended


def state(folder: Path) -> ClientState:
    """What the client of a run in `folder` last said of itself; "starting" until it has said something."""
    states = [client.last(path) for path in sorted(folder.glob("client-*.jsonl"))]
    return client.merge([state for state in states if state is not None])


@contextlib.contextmanager
def running(plan_: Plan, folder: Path, log: Path | None = None) -> Iterator[LoadRun]:
    """Run a plan while the block lasts; raw records lie in `folder`, which must be new or empty. `log`: the client's own output.

    Raises `LoadError` when the prompts cannot be read or nothing listens at the address, `UsageError` when the API key is missing,
    `DiskError` when the folder cannot be written.
    """
    endpoint.check(plan_)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        raw.clear(folder)
        for old in (*folder.glob("client-*.jsonl"), *folder.glob("enough-*")):
            old.unlink()
        for name in ("start", "stop"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise DiskError(f"cannot write {folder}: {error.strerror}", "free some space, or choose another folder") from error
    _write(folder / "plan.json", plan.dump(plan_))
    env = {"FENNO_LOAD_FOLDER": str(folder.resolve()), "FENNO_LOAD_HEADERS": json.dumps(dict(plan_.headers))}
    with process.running(_argv(plan_), log=log or folder / "client.log", env=env, grace=2.0) as child:
        yield LoadRun(plan_, folder, child)


def run(plan_: Plan, folder: Path, log: Path | None = None) -> Result:
    """Run a plan to its end. Raises as `running` and `LoadRun.wait` do."""
    with running(plan_, folder, log) as load:
        return load.wait()


def _argv(plan_: Plan) -> list[str]:
    users = plan_.users if plan_.users is not None else plan_.processes
    argv = [*LOCUST, "--headless", "-H", plan_.url, "-u", str(users), "-r", str(users), "--only-summary"]
    if plan_.bind is not None:
        at = units.address(plan_.bind)
        argv += ["--master", "--expect-workers", str(plan_.processes)]
        argv += ["--master-bind-host", at.bare, "--master-bind-port", str(at.port)]
    elif plan_.processes > 1:
        port = str(_free_port())
        argv += ["--processes", str(plan_.processes), "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        argv += ["--master-host", "127.0.0.1", "--master-port", port]
    return argv


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}", "free some space, or choose another folder") from error


def last_line(log: Path) -> str:
    return process.last_line(log.read_text(errors="replace") if log.exists() else "")
