"""One endpoint and the keep-alive connections to it, on gevent's event loop, and an alarm that rings on time.

A socket is watched by an io watcher of the event loop, whose callback stamps and unframes what arrived: no greenlet is woken for a
token.
"""

from __future__ import annotations

import json
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
import gevent.event
import gevent.socket

from fenno.load.plan import Plan
from fenno.load.sse import BadResponse, Response
from fenno.load.timer import Timer

READ = 16_384

monotonic = time.monotonic


class Alarm:
    """Wakes a greenlet at an absolute time."""

    def __init__(self) -> None:
        self._timer = Timer()
        self._watcher = gevent.get_hub().loop.io(self._timer.fd, 1)

    def until(self, when: float) -> None:
        """Sleep until `when` on the monotonic clock; gives way to others even when that is past."""
        if when <= monotonic():
            gevent.sleep(0)
            return
        self._timer.set(when)
        gevent.get_hub().wait(self._watcher)
        self._timer.clear()


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: one resolved address, and what every request says."""

    address: tuple[Any, ...]
    family: int
    host: str
    tls: ssl.SSLContext | None
    head: bytes  # up to the headers that differ from request to request

    @classmethod
    def of(cls, plan: Plan) -> Endpoint:
        parts = urlsplit(plan.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        family, _, _, _, address = gevent.socket.getaddrinfo(parts.hostname, port, type=gevent.socket.SOCK_STREAM)[0]
        headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "User-Agent": "fenno",
        }
        key = plan.api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        headers |= plan.headers
        path = parts.path.rstrip("/").removesuffix("/v1") + plan.path
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        context = ssl.create_default_context(cafile=plan.ca_file) if parts.scheme == "https" else None
        return cls(address, family, parts.hostname or "", context, "\r\n".join(lines).encode("latin-1"))

    def message(self, identity: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body, separators=(",", ":")).encode()
        return self.head + f"\r\nX-Request-Id: {identity}\r\nContent-Length: {len(data)}\r\n\r\n".encode("latin-1") + data


class Connection:
    """One keep-alive connection. `alive` is False once the server has closed it."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.alive = True
        self.rested = monotonic()
        self.response = Response()
        self._result: Any = None
        self._socket = gevent.socket.socket(endpoint.family, gevent.socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        self._watcher: Any = None
        self._tls = endpoint.tls is not None
        try:
            self._socket.connect(endpoint.address)
            self._socket.setsockopt(gevent.socket.IPPROTO_TCP, gevent.socket.TCP_NODELAY, 1)
            if endpoint.tls is not None:
                self._socket = endpoint.tls.wrap_socket(self._socket, server_hostname=endpoint.host)
        except BaseException:
            self._socket.close()
            raise
        if self._tls:
            self._recv = self._socket.recv
        else:
            # The plain socket below gevent's: its recv returns at once, with data or BlockingIOError.
            self._recv = self._socket._sock.recv
            self._watcher = gevent.get_hub().loop.io(self._socket.fileno(), 1)
            self._watcher.start(self._readable)

    def ask(self, message: bytes, deadline: float) -> tuple[Response, str | None]:
        """Send and read to the end. Returns the response so far and None when it is complete, "" when time was up, else why."""
        self.response, self._result = Response(), gevent.event.AsyncResult()
        response, result = self.response, self._result
        reader = None
        try:
            self._send(message, deadline)
            if self._tls:
                reader = gevent.spawn(self._read_all)
            return response, result.get(timeout=max(0.0, deadline - monotonic()))
        except (gevent.Timeout, TimeoutError):
            return response, ""
        except OSError as error:
            return response, words(error)
        finally:
            if reader is not None:
                reader.kill(block=False)
            self._result = None
            self.rested = monotonic()
            self.alive = self.alive and response.reusable

    def _send(self, message: bytes, deadline: float) -> None:
        try:
            sent = 0 if self._tls else self._socket._sock.send(message)
        except BlockingIOError:
            sent = 0
        if sent < len(message):
            self._socket.settimeout(max(0.001, deadline - monotonic()))
            self._socket.sendall(message[sent:])
            self._socket.settimeout(None)

    def close(self) -> None:
        self.alive = False
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None
        self._socket.close()

    def _readable(self) -> None:
        """The hot path, called by the event loop when bytes are there."""
        try:
            data = self._recv(READ)
            now = monotonic()
        except BlockingIOError:
            return
        except OSError as error:
            self._end(words(error))
            return
        self._take(now, data)

    def _take(self, now: float, data: bytes) -> None:
        if not data:
            self.alive = False
            self._end(None if self.response.closed() else "the server closed the connection")
            return
        try:
            if self.response.feed(now, data):
                self._end(None)
        except BadResponse as error:
            self._end(str(error))

    def _end(self, why: str | None) -> None:
        if why is not None:
            self.alive = False
        if self._result is None:  # nothing was asked: a connection that idled was closed
            self.alive = False
        elif not self._result.ready():
            self._result.set(why)
        if not self.alive and self._watcher is not None:
            self._watcher.stop()

    def _read_all(self) -> None:
        """TLS: the socket wraps reads and renegotiation itself, so a greenlet reads it."""
        while self._result is not None and not self._result.ready():
            try:
                data = self._recv(READ)
                self._take(monotonic(), data)
            except OSError as error:
                self._end(words(error))


def words(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
