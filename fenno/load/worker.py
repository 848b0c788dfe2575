"""A worker of a load test that another host leads: locust in a child process, for as long as its master has use for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fenno import process, units
from fenno.errors import LoadError
from fenno.load import client, hosts, run
from fenno.load.client import ClientState


def work(
    master: str,
    folder: Path,
    *,
    processes: int = 1,
    headers: Mapping[str, str] | None = None,
    api_key_env: str | None = None,
    to: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ClientState:
    """Send what the master at "HOST:PORT" wants sent, to its end. `folder` keeps what the master has not, one folder a process.

    `to`: the address that its traffic goes to, or none. Raises `UsageError` for what is no address, `LoadError` when there is no
    master, or it refuses this worker, or is lost.
    """
    at = units.address(master, hosts.PORT)
    argv = [*run.LOCUST, "--worker", "--master-host", at.bare, "--master-port", str(at.port)]
    argv += ["--processes", str(processes)] if processes > 1 else []
    told = {"headers": sorted(headers or {}), "key": api_key_env, "host": at.bare, "to": to}
    env = {"FENNO_LOAD_FOLDER": str(folder.resolve()), "FENNO_LOAD_HEADERS": json.dumps(dict(headers or {}))}
    env["FENNO_LOAD_WORKER"] = json.dumps(told)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"worker of {at}")
    # The grace is for locust's goodbye: the master names who has left at once, and waits 15 s for who was killed.
    with process.running(argv, log=folder / "client.log", env=env, grace=10.0) as child:
        begun, url = False, None
        while (code := child.poll()) is None:
            if url is None and (url := address(folder)):
                say(f"worker of {at}: traffic to {url}")
            if not begun and (state := of(folder)).phase != "starting":
                begun = True
                say(f"{'; '.join(worker.name for worker in state.workers)}: traffic")
            time.sleep(0.1)
    if code and not list(folder.glob("worker-*")):
        raise LoadError(f"no master was found at {at}", f"was it started there with --master and --bind? See {child.log}")
    if code:
        hint = f"what it recorded and the master has not lies in {folder}" if code == hosts.ALONE else f"see {child.log}"
        raise LoadError(f"the worker ended: {run.last_line(child.log)}", hint)
    return of(folder)


def address(folder: Path) -> str | None:
    """Where the traffic goes, once the master has said it."""
    plan = next(folder.glob("*/plan.json"), None)
    return str(json.loads(plan.read_text(encoding="utf-8"))["url"]) if plan else None


def of(folder: Path) -> ClientState:
    """What the processes of a worker say of themselves."""
    states = [client.last(path) for path in sorted(folder.glob("*/client-*.jsonl"))]
    return client.merge([state for state in states if state is not None])
