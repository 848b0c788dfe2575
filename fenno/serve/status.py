"""What a server does now, and how it is ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import psutil

from fenno import machine, process, units
from fenno.engine import http, metrics
from fenno.errors import EngineError
from fenno.serve import state
from fenno.serve.policy import Death
from fenno.serve.state import State

HEADER = ("server", "is", "running", "waiting", "KV cache", "tok/s", "memory", "restarts")
Counts = dict[str, tuple[float, float]]


def look(server: State, earlier: Counts) -> dict[str, Any]:
    """Everything about one server as a document: its state, and what it says now. `earlier`: by name, when it was looked at before
    and how many tokens it had made by then; rewritten here."""
    phase = server.phase if server.alive or server.phase in state.OVER else "gone"
    seen: dict[str, Any] = {**asdict(server), "phase": phase, "alive": server.alive, "healthy": False}
    seen["leftovers"] = [pid for pid, _ in server.leftovers()] if phase == "gone" else []
    seen["uptime"] = time.time() - server.ready if phase == "ready" and server.ready else None
    if phase not in ("ready", "draining"):
        return seen
    if not server.url:  # a worker of another host's head
        return {**seen, "healthy": phase == "ready", "memory": memory(server)}
    with contextlib.suppress(http.Refused):
        http.call(f"{server.url}/health", timeout=2.0)
        seen["healthy"] = True
    with contextlib.suppress(EngineError):
        now = metrics.scrape(server.url)
        seen |= {"running": now.running, "waiting": now.waiting, "kv_cache_usage": now.kv_cache_usage}
        seen["tokens_per_second"] = _rate(server.name, now.generation_tokens or 0.0, earlier)
    seen["memory"] = memory(server)
    return seen


def _rate(name: str, tokens: float, earlier: Counts) -> float | None:
    """Tokens a second since the last look; None at the first one, and after a restart."""
    at, (before, had) = time.monotonic(), earlier.get(name, (0.0, 0.0))
    earlier[name] = (at, tokens)
    return (tokens - had) / (at - before) if before and tokens >= had else None


def memory(server: State) -> int:
    """Bytes it holds: of the GPUs (all that run on them), or of main memory."""
    if server.on_gpu:
        return sum(gpu.used for gpu in machine.read_gpus()[0])
    with contextlib.suppress(psutil.NoSuchProcess):
        return machine.resident([child.pid for child in psutil.Process(server.pid).children(recursive=True)])
    return 0


def row(seen: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table of `HEADER`."""
    since = seen["ready"] if seen["phase"] == "ready" and seen["ready"] else seen["since"]
    phase = seen["phase"] if seen["healthy"] or seen["phase"] != "ready" else "not healthy"
    load = [_number(seen.get("running")), _number(seen.get("waiting")), _number(seen.get("kv_cache_usage"), 100, " %")]
    return (
        seen["name"],
        f"{phase} for {units.show_duration(max(1.0, round(time.time() - since)))}",
        *load,
        _number(seen.get("tokens_per_second")),
        units.show_memory(seen["memory"]) if seen.get("memory") else "",
        str(seen["restarts"]),
    )


def _number(value: float | None, factor: float = 1.0, unit: str = "") -> str:
    return "" if value is None else f"{value * factor:.0f}{unit}"


def notes(seen: dict[str, Any]) -> list[str]:
    """What a table has no room for."""
    name, said = seen["name"], []
    if seen["url"] and seen["phase"] in ("ready", "draining"):
        said.append(f"{name}: {seen['url']}/v1 serves {seen['model']}")
    if seen["phase"] == "starting":
        left = f", about {units.show_duration(max(1.0, round(seen['left'])))} from there" if seen["left"] else ""
        said.append(f"{name}: {seen['stage']}{left}")
    if seen["phase"] == "gone":
        said.append(f"{name}: the fenno that served it was ended from outside; `fenno stop {name}` tidies up")
    if seen["phase"] == "failed":
        said.append(f"{name}: {seen['said']}\n  {seen['hint']}")
    elif seen["deaths"]:
        death = Death(**seen["deaths"][-1])
        said.append(
            f"{name}: died {units.show_duration(max(1.0, round(time.time() - death.at)))} ago ({death.cause}): {death.said}"
        )
    return said


def well(seen: dict[str, Any]) -> bool:
    """Whether nobody needs to look after it."""
    return bool(seen["healthy"]) or seen["phase"] in ("stopped", "draining", "starting")


def stop(server: State, say: Callable[[str], None], *, now: bool = False) -> float:
    """End a server that fenno started, requests in flight first (`now`: they are lost). Returns the seconds it took.

    Only processes that were born when the state file says are ever told. Raises `EngineError` when it does not end.
    """
    began = time.monotonic()
    alive = server.alive and process.tell(server.pid, server.birth, signal.SIGTERM)
    limit = began + (2 * server.grace + 30.0 if alive and not now else 30.0)
    asked = shown = began
    while process.birth(server.pid) == server.birth:
        if time.monotonic() > limit:
            raise EngineError(f"{server.name} has not ended", f"it is pid {server.pid}; `fenno stop --now` loses its requests")
        if now and time.monotonic() - asked > 1.0:
            asked = time.monotonic()
            process.tell(server.pid, server.birth, signal.SIGTERM)
        if time.monotonic() - shown > 5.0:
            shown = time.monotonic()
            say(_in_flight(server))
        time.sleep(0.1)
    _end(server, say)
    return time.monotonic() - began


def _in_flight(server: State) -> str:
    try:
        found = metrics.scrape(server.url)
    except EngineError:
        return "ending …"
    return f"ending: {(found.running or 0) + (found.waiting or 0):.0f} requests in flight"


def _end(server: State, say: Callable[[str], None]) -> None:
    """See to it that nothing of a server is left whose fenno has ended, and note that it was stopped."""
    limit = time.monotonic() + 15.0
    while server.leftovers() and time.monotonic() < limit:
        time.sleep(0.1)  # its guard ends them
    for pid, birth in server.leftovers():
        if process.tell(pid, birth, signal.SIGKILL):
            say(f"pid {pid} was left over and is ended")
    left = state.read(state.root() / server.name)
    if left and left.birth == server.birth and left.phase != "stopped":
        state.write(replace(left, phase="stopped", since=time.time(), engine=[]))
