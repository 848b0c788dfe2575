"""One HTTP/1.1 response and the server-sent events in its body, from reads split at any byte. Standard library only, no I/O.

`Response.feed` is the hot path: it takes framing off a read and keeps the payload with the read's time, nothing more. `events`
reads the payloads when nobody waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

MOST_HEAD = 65_536
MOST_LINE = 4_096
_LINE_END = re.compile(rb"\r\n|\n|\r")


class BadResponse(Exception):
    """Bytes that are no HTTP/1.1 response; the message says what was wrong."""


class Event(NamedTuple):
    """One server-sent event. `time`: of the read that brought the line end which completed it. `name` is "" unless given."""

    time: float
    name: bytes
    data: bytes


class Response:
    """One HTTP/1.1 response, fed as it arrives. `body` holds (time, payload) of every read; `surplus` what came after the end."""

    __slots__ = ("_carry", "_chunked", "_left", "_state", "body", "complete", "head_time", "headers", "status", "surplus")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head_time: float | None = None
        self.body: list[tuple[float, bytes]] = []
        self.complete = False
        self.surplus = b""
        self._carry = b""  # an unfinished head, size line, line end or trailer
        self._chunked = False
        self._left: int | None = 0  # payload bytes to come in this chunk or body; None: until the connection closes
        self._state = "size"  # of a chunked body: "size", "end" (the line end behind a chunk), "trailer"

    def feed(self, time: float, data: bytes) -> bool:
        """Take what one read brought. True when the response is complete. Raises `BadResponse`."""
        if self.complete:
            self.surplus += data
            return True
        if self._carry:
            data, self._carry = self._carry + data, b""
        if self.head_time is None:
            rest = self._head(time, data)
            if rest is None or self.complete:
                return self.complete
            data = rest
        return self._chunks(time, data) if self._chunked else self._plain(time, data)

    def closed(self) -> bool:
        """The connection has ended. True when that is how this response ends."""
        self.complete = self.complete or (self.head_time is not None and self._left is None)
        return self.complete

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request."""
        return self.complete and self._left is not None and not self.surplus and self.headers.get("connection") != "close"

    def _head(self, time: float, data: bytes) -> bytes | None:
        """Read the head. Returns what follows it, or None while it is unfinished."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MOST_HEAD:
                raise BadResponse("the head of the response is longer than 64 KiB")
            if not b"HTTP/1."[: len(data)] == data[:7]:
                raise BadResponse(f"not an HTTP/1.1 response: it starts with {data[:20]!r}")
            self._carry = data
            return None
        status, headers = _parse_head(data[:end])
        rest = data[end + 4 :]
        if 100 <= status < 200:
            return self._head(time, rest) if rest else None
        self.status, self.headers, self.head_time = status, headers, time
        self._chunked = headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = headers.get("content-length")
        if status in (204, 304):
            length = "0"
        if not self._chunked:
            if length is not None and not length.isdigit():
                raise BadResponse(f"Content-Length is {length!r}")
            self._left = None if length is None else int(length)
            if self._left == 0:
                self.complete, self.surplus = True, rest
        return rest

    def _plain(self, time: float, data: bytes) -> bool:
        if self._left is not None:
            data, self.surplus = data[: self._left], data[self._left :]
            self._left -= len(data)
        if data:
            self.body.append((time, data))
        self.complete = self._left == 0
        return self.complete

    def _chunks(self, time: float, data: bytes) -> bool:
        position, size = 0, len(data)
        while position < size:
            if self._left:
                payload = data[position : position + self._left]
                self.body.append((time, payload))
                position += len(payload)
                self._left -= len(payload)
                self._state = "end"
                continue
            line = data.find(b"\r\n", position)
            if line < 0:
                break
            if self._state == "size":
                self._left = _chunk_size(data[position:line])
                if self._left == 0:
                    self._state = "trailer"
            elif self._state == "end":
                if line != position:
                    raise BadResponse("a chunk is longer than its size says")
                self._state = "size"
            elif line == position:
                self.complete, self.surplus = True, data[line + 2 :]
                return True
            position = line + 2
        self._carry = data[position:]
        if len(self._carry) > MOST_LINE or (self._state == "end" and len(self._carry) > 1):
            raise BadResponse("a chunk of the body has no end where its size says")
        return False


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not code.isdigit() or len(code) != 3:
        raise BadResponse(f"not an HTTP/1.1 response: it starts with {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadResponse(f"{line[:40]!r} is no header")
        headers[name.lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(code), {**headers, "connection": headers.get("connection", "").lower()}


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadResponse(f"{line[:20]!r} is no chunk size")
    return int(digits, 16)


def events(body: Sequence[tuple[float, bytes]]) -> Iterator[Event]:
    """The events in a body, in order. An unfinished event at its end is dropped, as the standard says (WHATWG HTML, 9.2.6)."""
    if all(_is_one_line(data) for _, data in body):
        return (Event(time, b"", data[6:-2]) for time, data in body)
    whole = b"".join(data for _, data in body)
    ends = list(accumulate(len(data) for _, data in body))
    return _with_times(body, ends, _plain_events(whole) if b"\r" not in whole else _any_events(whole))


def _is_one_line(data: bytes) -> bool:
    """Whether a piece is one event with one line of data, whole: what a server writes for a token, when no read split it."""
    return data[:6] == b"data: " and data.find(b"\n") == len(data) - 2 and data[-1:] == b"\n" and b"\r" not in data


def _with_times(body: Sequence[tuple[float, bytes]], ends: list[int], found: Iterator[tuple[int, bytes, bytes]]) -> Iterator[Event]:
    read = 0
    for at, name, data in found:
        while ends[read] <= at:
            read += 1
        yield Event(body[read][0], name, data)


def _plain_events(whole: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """(offset of the byte that completed it, name, data) of every event, where all lines end with LF."""
    start = 3 if whole.startswith(b"\xef\xbb\xbf") else 0
    while (end := whole.find(b"\n\n", start)) >= 0:
        block = whole[start:end]
        if block.startswith(b"data: ") and b"\n" not in block:
            yield end + 1, b"", block[6:]
        elif (event := _event(block.split(b"\n"))) is not None:
            yield end + 1, *event
        start = end + 2


def _any_events(whole: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The same for lines that end with CR LF, LF or CR."""
    start, lines = 3 if whole.startswith(b"\xef\xbb\xbf") else 0, []
    for match in _LINE_END.finditer(whole, start):
        line, start = whole[start : match.start()], match.end()
        if line:
            lines.append(line)
            continue
        if (event := _event(lines)) is not None:
            yield match.start(), *event
        lines = []


def _event(lines: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    """(name, data) of the lines of one event; None when it has no data."""
    name, data = b"", []
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return (name, b"\n".join(data)) if data else None
