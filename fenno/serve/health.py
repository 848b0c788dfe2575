"""Whether an engine that runs still answers: /health, its own counters, and a real one-token request where these say nothing."""

from __future__ import annotations

import time
from typing import NoReturn

from fenno import units
from fenno.engine import http, metrics, server
from fenno.engine.server import Server
from fenno.errors import EngineError

SICK = 10.0  # seconds an engine may say that it is unhealthy; vLLM ends by itself long before


def watch(running: Server, hang: float) -> NoReturn:
    """Look after a server until it dies: raises `EngineError` with the cause.

    A sign of life is a counter of tokens or requests that has moved, or a one-token request that is answered; that one is sent
    only to a server that has shown nothing for half of `hang` seconds, so a busy one gets none. Nothing for `hang` is a death.
    """
    pause = min(5.0, hang / 8)
    alive = well = time.monotonic()
    counted: float | None = None
    while True:
        running.check()
        well = time.monotonic() if healthy(running, hang / 4) else well
        seen = progress(running, hang / 4)
        if seen is not None and seen != counted:
            counted, alive = seen, time.monotonic()
        elif time.monotonic() - alive > hang / 2 and answers(running, hang / 2):
            alive = time.monotonic()
        running.check()
        if time.monotonic() - alive > hang:
            raise hung(running, hang)
        if time.monotonic() - well > max(SICK, 2 * pause):
            raise server.death(running.log, None, "load")
        rest(running, pause)


def rest(running: Server, seconds: float) -> None:
    """Wait, but not for a server that has died: raises `EngineError` then."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        running.check()
        time.sleep(min(0.25, seconds))


def healthy(running: Server, timeout: float) -> bool:
    """False only for a server that says it is not; one that says nothing may be busy, and `progress` tells more."""
    try:
        http.call(f"{running.url}/health", timeout=timeout)
    except http.Refused as error:
        return error.status is None or error.status < 500
    return True


def progress(running: Server, timeout: float) -> float | None:
    """A number that grows with every token and every finished request; None where the server does not say."""
    try:
        now = metrics.scrape(running.url, timeout)
    except EngineError:
        return None
    counts = (now.prompt_tokens, now.generation_tokens, now.requests_finished)
    return sum(count or 0.0 for count in counts) if any(count is not None for count in counts) else None


def answers(running: Server, timeout: float) -> bool:
    """Whether a real one-token request is answered in time."""
    try:
        server.one_token(running, timeout)
    except http.Refused:
        return False
    return True


def hung(running: Server, hang: float) -> EngineError:
    """The error for an engine that runs and answers nothing; it is not waited for."""
    if running.child:
        running.child.allow(server.GRACE)
    return EngineError(
        f"the engine hangs: not one token for {units.show_duration(hang)}, though one was asked for",
        f"see {running.log}; a step that may take longer needs `serve.hang` in the recipe",
        stage="load",
        cause="hang",
    )
