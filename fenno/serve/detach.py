"""Serving in the background: the same `fenno serve`, on its own, followed until it is ready."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence

from fenno import process
from fenno.errors import EngineError
from fenno.serve import state
from fenno.serve.keep import Told
from fenno.serve.state import State


def start(name: str, arguments: Sequence[str], told: Told) -> State:
    """Run `fenno serve ARGUMENTS` in the background; returns its state once it is ready.

    Raises `EngineError` with its words when it fails. Whoever is interrupted before it is ready ends it again.
    """
    folder = state.root() / name
    log = folder / "serve.log"
    popen = process.detached([*process.module("fenno"), "serve", *arguments], log)
    try:
        return _follow(popen, name, told)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(20.0)
        raise


def _follow(popen: subprocess.Popen[bytes], name: str, told: Told) -> State:
    folder, stage = state.root() / name, ""
    while True:
        over = popen.poll() is not None
        now = state.read(folder)
        if now and now.pid == popen.pid:
            if now.phase == "ready":
                return now
            if now.phase == "failed":
                raise EngineError(now.said, now.hint)
            if now.stage != stage:
                stage = now.stage
                told.stage(stage, now.left)
        if over:
            lines = (folder / "serve.log").read_text(errors="replace").strip().splitlines()
            raise EngineError(lines[-1] if lines else "it ended without a word", f"see {folder / 'serve.log'}")
        time.sleep(0.1)
