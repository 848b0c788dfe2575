"""A server that answers by the clock, to measure the ruler with: `python -m fenno.load.calibration --port 0`.

It speaks enough of the OpenAI protocol for any load client, answers each token at an absolute time (receipt + TTFT + i x ITL), and
logs when each request really came and each token was really written, on the monotonic clock that all processes of a host share.
On request it misbehaves: see `FAULTS`. `accuracy.py` runs traffic against it and pairs every request with the log.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import heapq
import itertools
import json
import math
import random
import re
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno import process
from fenno.errors import LoadError
from fenno.load.timer import Timer

_TIMESTAMP = 35  # SO_TIMESTAMPNS
AFTER = 3  # tokens written before a fault that comes mid-stream
FAULTS = {
    "none": "a whole answer",
    "in-band": "an error event in the stream",
    "truncated": "the connection closed mid-stream",
    "early-end": "a well-framed end with neither finish_reason nor [DONE]",
    "stall": "silence after some tokens, the connection left open",
    "slow-headers": "no response at all, the connection left open",
    "no-token": "headers, and then nothing",
    "closed": "the connection closed before any response",
    "429": "HTTP 429",
    "400": "HTTP 400",
    "500": "HTTP 500",
    "empty": "HTTP 200 and a stream with no event",
    "short": "half of the tokens asked for, orderly ended",
    "no-done": "a whole answer without [DONE]",
    "role-first": "an event that only names the role at once, and then a whole answer",
    "four": "a whole answer with four tokens an event",
    "json": "HTTP 200 with a JSON document",
    "garbage": "bytes that are no HTTP",
}


@dataclass(frozen=True)
class Timing:
    """Seconds to the first token and between tokens. `spread`: the standard deviation of the logarithm of the time to the first
    token, of which each request then has its own, with `ttft` as their median."""

    ttft: float = 0.1
    itl: float = 0.025
    spread: float = 0.0

    def first(self, identity: str) -> float:
        """Seconds to the first token of one request."""
        return self.ttft * math.exp(self.spread * random.Random(identity).gauss(0, 1)) if self.spread else self.ttft


@dataclass(frozen=True)
class Served:
    """One request as the server saw it. `writes`: when each token was written."""

    id: str
    fault: str
    received: float
    writes: array[float]
    ended: str  # "whole", "fault", or "gone" when the client closed first
    asked: int
    prompt: int


class Loop:
    """Sockets and the steps of all streams by due time, in one thread: with asyncio a token would cost three times as much."""

    BURST = 32  # steps between two looks at the sockets

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[int], None]] = {}
        self._heap: list[tuple[float, int, Callable[[], float | None]]] = []
        self._order = itertools.count()
        self._timer = Timer()
        self.watch(self._timer.fd, lambda _: self._timer.clear())

    def watch(self, fd: int, ready: Callable[[int], None]) -> None:
        """Call `ready` with the events whenever `fd` has something to read."""
        self._ready[fd] = ready
        self._epoll.register(fd, select.EPOLLIN)

    def want_write(self, fd: int, wanted: bool) -> None:
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def forget(self, fd: int) -> None:
        self._ready.pop(fd, None)
        self._epoll.unregister(fd)

    def at(self, due: float, step: Callable[[], float | None]) -> None:
        """Call `step` at `due`, and again at every time it returns, until it returns None."""
        heapq.heappush(self._heap, (due, next(self._order), step))

    def run(self) -> None:
        """Serve for ever."""
        heap, waiting = self._heap, math.inf
        while True:
            due = heap[0][0] if heap else math.inf
            late = due <= time.monotonic()
            if not late and due != waiting and heap:
                self._timer.set(due)
                waiting = due
            for fd, events in self._epoll.poll(0 if late else None):
                if fd in self._ready:
                    self._ready[fd](events)
            for _ in range(self.BURST):
                if not heap or heap[0][0] > time.monotonic():
                    break
                _, order, step = heap[0]
                following = step()
                if following is None:
                    heapq.heappop(heap)
                else:
                    heapq.heapreplace(heap, (following, order, step))


class Log:
    """One line a request, flushed as it ends: a killed server leaves what it knew."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path else None
        self.running = 0

    def write(self, served: Served) -> None:
        if self._file:
            writes = base64.b64encode(served.writes.tobytes()).decode()
            self._file.write(json.dumps({**served.__dict__, "writes": writes}) + "\n")
            self._file.flush()


def read_log(path: Path) -> list[Served]:
    """What a calibration server logged, in the order the requests ended."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        writes = array("d")
        writes.frombytes(base64.b64decode(data["writes"]))
        found.append(Served(**{**data, "writes": writes}))
    return found


class Answer:
    """One answer in progress: its `step` writes the next token."""

    def __init__(self, server: Connection, head: dict[str, str], body: dict[str, Any], fault: str, received: float) -> None:
        self.server, self.fault, self.received = server, fault, received
        self.chat = "messages" in body
        self.identity = head.get("x-request-id", "")
        self.asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        prompt = body.get("prompt", "")
        self.prompt = len(prompt) if isinstance(prompt, list) else len(str(prompt or body.get("messages")).split())
        self.usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.writes = array("d")
        self.tokens = 0
        self.total = max(1, self.asked // 2) if fault == "short" else self.asked
        self.stride = 4 if fault == "four" else 1
        self.breaks = fault in ("in-band", "truncated", "early-end", "stall")
        self.event = _chunk(_event(self.chat, " tok" * self.stride))
        timing = server.app.timing
        self.first, self.itl = received + timing.first(self.identity), timing.itl

    def step(self) -> float | None:
        """Write what is due. Returns when the next token is, None at the end."""
        if not self.server.open:
            self._over("gone")
            return None
        if self.breaks and self.tokens >= min(AFTER, self.asked - 1):
            self._break()
            return None
        last = self.tokens + self.stride >= self.total
        data = self.event
        if last:
            left = self.total - self.tokens
            data = _chunk(_event(self.chat, " tok" * left, finish="length")) + self._tail(self.total)
        self.writes.append(time.monotonic())
        self.server.send(data)
        self.tokens = min(self.total, self.tokens + self.stride)
        if last:
            self._over("whole" if self.fault != "short" else "fault")
            return None
        return self.first + self.tokens * self.itl

    def _tail(self, tokens: int) -> bytes:
        counts = {"prompt_tokens": self.prompt, "completion_tokens": tokens, "total_tokens": self.prompt + tokens}
        usage = _chunk(json.dumps({**_base(self.chat), "choices": [], "usage": counts})) if self.usage else b""
        return usage + (b"" if self.fault == "no-done" else _chunk("[DONE]")) + b"0\r\n\r\n"

    def _break(self) -> None:
        if self.fault == "in-band":
            error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
            self.server.send(_chunk(json.dumps(error)) + _chunk("[DONE]") + b"0\r\n\r\n")
        elif self.fault == "early-end":
            self.server.send(b"0\r\n\r\n")
        elif self.fault == "truncated":
            self.server.close()
        self._over("fault")

    def _over(self, ended: str) -> None:
        log = self.server.app.log
        log.running -= 1
        log.write(Served(self.identity, self.fault, self.received, self.writes, ended, self.asked, self.prompt))


@dataclass
class App:
    """What all connections share."""

    timing: Timing
    faults: Iterator[str]
    log: Log
    loop: Loop


class Connection:
    """One client connection: requests in, answers out."""

    def __init__(self, app: App, sock: socket.socket) -> None:
        self.app, self.open = app, True
        self._socket = sock
        self._in = self._out = b""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
        app.loop.watch(sock.fileno(), self._ready)

    def send(self, data: bytes) -> None:
        """Write, now if the socket takes it."""
        if not self.open:
            return
        self._out += data
        try:
            self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._out:
            self.app.loop.want_write(self._socket.fileno(), True)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.app.loop.forget(self._socket.fileno())
            self._socket.close()

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self.app.loop.want_write(self._socket.fileno(), False)
            self.send(b"")
        if events & ~select.EPOLLOUT:
            self._readable()

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 18, 64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        received = _kernel_time(ancillary)
        self._in += data
        while (end := self._in.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._in[:end].decode("latin-1").split("\r\n")
            head = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            size = end + 4 + int(head.get("content-length", 0))
            if len(self._in) < size:
                return
            body, self._in = self._in[end + 4 : size], self._in[size:]
            method, path, *_ = first.split(" ")
            self._request(method, path, head, body, received)

    def _request(self, method: str, path: str, head: dict[str, str], body: bytes, received: float) -> None:
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            asked = json.loads(body)
            self._answer(head, asked, received) if asked.get("stream") else self._whole(asked, received)
        elif path == "/v1/models":
            self._document(200, {"object": "list", "data": [{"id": "calibration", "object": "model"}]})
        elif path == "/health":
            self._document(200, {})
        elif path == "/metrics":
            text = f"vllm:num_requests_running {self.app.log.running}\nvllm:num_requests_waiting 0\n"
            self._document(200, text, "text/plain")
        else:
            self._document(404, {"error": {"message": f"there is no {path}"}})

    def _whole(self, body: dict[str, Any], received: float) -> None:
        """An answer in one piece, when its last token is due. It is not logged: a load client asks for streams."""
        count = int(body.get("max_tokens") or 16)

        def step() -> None:
            said = {"message": {"content": " tok" * count}} if "messages" in body else {"text": " tok" * count}
            self._document(200, {"choices": [{"index": 0, **said, "finish_reason": "length"}]})

        self.app.loop.at(received + self.app.timing.ttft + (count - 1) * self.app.timing.itl, step)

    def _answer(self, head: dict[str, str], body: dict[str, Any], received: float) -> None:
        fault = str(body.get("fault") or next(self.app.faults))
        answer = Answer(self, head, body, fault, received)
        self.app.log.running += 1
        if fault in ("429", "400", "500"):
            self._document(int(fault), {"error": {"message": f"asked to answer {fault}"}})
        elif fault == "json":
            self._document(200, {"choices": [{"text": "all at once"}]})
        elif fault == "garbage":
            self.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
        elif fault == "closed":
            self.close()
        elif fault != "slow-headers":
            self.send(_HEAD)
            if fault == "empty":
                self.send(b"0\r\n\r\n")
            if answer.chat or fault == "role-first":
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                self.send(_chunk(json.dumps({**_base(True), "choices": [role]})))
            if fault not in ("empty", "no-token"):
                self.app.loop.at(answer.first, answer.step)
                return
        answer._over("fault")

    def _document(self, status: int, value: Any, kind: str = "application/json") -> None:
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send(f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _base(chat: bool) -> dict[str, Any]:
    """The part that all events have, as long as vLLM's."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    name = ("chatcmpl-" if chat else "cmpl-") + "0123456789abcdef0123456789abcdef"
    return {"id": name, "object": kind, "created": 1_700_000_000, "model": "calibration"}


def _event(chat: bool, text: str, finish: str | None = None) -> str:
    what = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **what, "logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
    return json.dumps({**_base(chat), "choices": [choice]}, separators=(",", ":"))


def _chunk(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def _kernel_time(ancillary: list[tuple[int, int, bytes]]) -> float:
    """When the bytes reached this host's kernel, on the monotonic clock: a busy server does not read them at once."""
    now = time.monotonic()
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMP) and len(data) >= 16:
            seconds, nanoseconds = struct.unpack_from("@qq", data)
            return float(min(now, now - (time.time() - (seconds + nanoseconds * 1e-9))))
    return now


def serve(host: str, port: int, timing: Timing, faults: Sequence[str], log: Path | None) -> None:
    """Serve there for ever; prints `listening PORT` once it does."""
    app = App(timing, itertools.cycle(faults or ["none"]), Log(log), Loop())
    server = socket.create_server((host, port), backlog=4096)
    server.setblocking(False)

    def accept(_: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                Connection(app, server.accept()[0])

    app.loop.watch(server.fileno(), accept)
    print("listening", server.getsockname()[1], flush=True)
    app.loop.run()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fenno.load.calibration", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ttft", type=float, default=Timing.ttft, help="seconds to the first token")
    parser.add_argument("--itl", type=float, default=Timing.itl, help="seconds between tokens")
    parser.add_argument("--spread", type=float, default=Timing.spread, help="of the first token's time: its logarithm's deviation")
    parser.add_argument("--faults", default="", help="comma-separated, one a request, in turn: " + ", ".join(FAULTS))
    parser.add_argument("--log", type=Path, help="where to write one line a request")
    args = parser.parse_args(argv)
    faults = [name for name in args.faults.split(",") if name]
    if set(faults) - set(FAULTS):
        parser.error(f"unknown faults: {', '.join(sorted(set(faults) - set(FAULTS)))}")
    with contextlib.suppress(KeyboardInterrupt):
        serve(args.host, args.port, Timing(args.ttft, args.itl, args.spread), faults, args.log)


@dataclass(frozen=True)
class Server:
    """A calibration server that runs."""

    url: str
    log: Path
    child: process.Child

    def served(self) -> dict[str, Served]:
        """By request id."""
        return {served.id: served for served in read_log(self.log)}


@contextlib.contextmanager
def serving(folder: Path, timing: Timing = Timing(), faults: Sequence[str] = ()) -> Iterator[Server]:
    """A calibration server in a child process while the block lasts. Raises `LoadError` when it does not start."""
    output, log = folder / "calibration.out", folder / "calibration.jsonl"
    output.unlink(missing_ok=True)
    argv = [*process.module("fenno.load.calibration"), "--ttft", str(timing.ttft), "--itl", str(timing.itl)]
    argv += ["--spread", str(timing.spread), "--faults", ",".join(faults), "--log", str(log)]
    with process.running(argv, log=output, grace=2.0) as child:
        limit = time.monotonic() + 30
        while not (whole := re.match(r"listening (\d+)\n", said := output.read_text())):  # to its end: a line may come in parts
            if child.poll() is not None or time.monotonic() > limit:
                raise LoadError(f"the calibration server did not start: {' '.join(said.split())[-200:]}", f"see {output}")
            time.sleep(0.02)
        yield Server(f"http://127.0.0.1:{whole[1]}", log, child)


if __name__ == "__main__":
    main()
