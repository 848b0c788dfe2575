"""Whether an engine that has left requests unanswered hangs, asked of real sockets that answer, refuse, or say nothing."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenno.engine.server import Server
from fenno.errors import EngineError
from fenno.load import probe
from fenno.recipe import Recipe
from fenno.tune import bench


@contextlib.contextmanager
def engine(folder: Path, statuses: list[int]) -> Iterator[Server]:
    """One that gives each request the next status, and to those after it no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener, statuses), daemon=True).start()
        chosen = Recipe.model_validate({"name": "one", "engine": {"model": "m"}})
        yield Server(chosen, f"http://127.0.0.1:{listener.getsockname()[1]}", "m", folder)


def answer(listener: socket.socket, statuses: list[int]) -> None:
    while statuses:
        link, _ = listener.accept()
        with link:
            link.recv(1 << 16)
            link.sendall(f"HTTP/1.1 {statuses.pop(0)} .\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())


@pytest.mark.parametrize("statuses", [[200], [400], [429], [500, 200]])
def test_an_engine_that_answers_a_request_or_refuses_it_does_not_hang(tmp_path: Path, statuses: list[int]) -> None:
    with engine(tmp_path, statuses) as running:
        bench.until_answer(running, time.monotonic() + 60)
    assert statuses == [], "of one that answers with 500 it is asked again: its core may have died"


def test_an_engine_that_goes_on_with_500_has_answered(tmp_path: Path) -> None:
    with engine(tmp_path, [500]) as running:
        bench.until_answer(running, time.monotonic())


def test_an_engine_that_has_said_nothing_by_the_deadline_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONGEST", 0.2)
    with engine(tmp_path, []) as running, pytest.raises(EngineError, match="the engine hangs: a request alone on it") as raised:
        bench.until_answer(running, time.monotonic())
    assert raised.value.stage == "load"
