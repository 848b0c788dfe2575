"""A host without a server of its own: its ranks join the head's engine, and end when the head does.

vLLM's workers on another host do not notice that the head has ended. So a connection to the head's store is held as long as they
run: it ends with the head, or when the host no longer answers.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import psutil

from fenno.engine.server import Server
from fenno.errors import EngineError
from fenno.serve.hosts import Hosts
from fenno.serve.policy import HEAD_LOST

QUIET = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that is gone is so after 25 s


@contextlib.contextmanager
def linked(hosts: Hosts, progress: Callable[[str], None]) -> Iterator[socket.socket]:
    """A connection to the head's store, for which it is waited as long as need be. Why there is none yet is told once a reason."""
    told = f"waiting for the head at {hosts.master}"
    progress(told)
    while True:
        try:
            link = socket.create_connection((hosts.master.bare, hosts.master.port), timeout=5.0)
            break
        except OSError as error:
            why = f"waiting for the head at {hosts.master}: {error.strerror or error}"
        if why != told:
            progress(why)
            told = why
        time.sleep(0.5)
    with link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in QUIET.items():
            if option := getattr(socket, name, None):  # not everywhere do they have these names
                link.setsockopt(socket.IPPROTO_TCP, option, value)
        yield link


def wait(running: Server, hosts: Hosts, link: socket.socket) -> None:
    """Until one of the engine's processes has joined the head. Raises `EngineError` when it ends, or takes too long."""
    limit = running.recipe.engine.ready_timeout
    while not _joined(running.pids(), hosts.master.port):
        _check(running, link, "start")
        if time.monotonic() > running.began + limit:
            raise EngineError(f"the engine did not join the head within {limit:g} s", f"see {running.log}", cause="hang")
    running.seconds = time.monotonic() - running.began


def watch(running: Server, link: socket.socket) -> NoReturn:
    """Look after a worker until it or the head ends: raises `EngineError`."""
    while True:
        _check(running, link, "load")


def _check(running: Server, link: socket.socket, stage: str) -> None:
    """Take a quarter of a second to see whether both live."""
    running.check(stage)
    if select.select([link], [], [], 0.25)[0] and not _alive(link):
        raise EngineError("the head has ended", "its own log says why", stage=stage, cause=HEAD_LOST, again="yes")


def _alive(link: socket.socket) -> bool:
    try:
        return link.recv(1) != b""
    except OSError:
        return False


def _joined(pids: list[int], port: int) -> bool:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            links = psutil.Process(pid).net_connections("tcp")
            if any(each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in links):
                return True
    return False
