"""One request, one record: how it is written, read back, and what follows from its stamps. Pure.

All stamps are seconds of the monotonic clock, which every process of a host shares. `docs/metrics.md` defines every figure.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Phase = Literal["warmup", "counted", "drain"]
OUTCOMES = (
    "ok",
    "connect",
    "headers",
    "4xx",
    "429",
    "5xx",
    "in-band",
    "truncated",
    "stalled",
    "short",
    "timeout",
    "client",
    "cancelled",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One request from its schedule to its end. A stamp is None where the request never got so far.

    `gaps`: milliseconds between the events that carried tokens, one fewer than those. `cancelled` means that fenno ended the
    run first: no failure of the server, and no success either.
    """

    id: str
    cls: str
    arm: str
    phase: Phase
    scheduled: float  # when it should have been sent
    sent: float  # when it was: before connecting, where a connection had to be made
    connected: float | None  # when there was a connection
    headers: float | None
    first: float | None  # first token, of reasoning too
    first_answer: float | None  # first token of the answer or of a tool call
    last: float | None
    end: float
    asked_prompt: int | None
    asked_tokens: int
    prompt_tokens: int | None  # as the server counts
    completion_tokens: int | None
    token_count: int  # events that carried tokens
    gaps: array[float]
    status: int | None
    outcome: str
    error: str
    turn: int = 1  # of a conversation

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def counted(self) -> bool:
        """Whether figures are made of it."""
        return self.phase == "counted" and self.outcome != "cancelled"

    @property
    def ttft(self) -> float:
        """Seconds to the first token; a failed request is infinitely late."""
        return self.first - self.sent if self.ok and self.first is not None else math.inf

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.last - self.sent if self.ok and self.last is not None else math.inf

    @property
    def ttft_scheduled(self) -> float:
        """Seconds to the first token from when the request should have been sent."""
        return self.ttft + self.lateness

    @property
    def e2el_scheduled(self) -> float:
        """Seconds to the last token from when the request should have been sent."""
        return self.e2el + self.lateness

    @property
    def tokens(self) -> int:
        """Tokens of the answer, by the server's count where it gave one."""
        return self.completion_tokens if self.completion_tokens is not None else self.token_count

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for an answer of one token."""
        if not self.ok or self.first is None or self.last is None:
            return math.inf
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gap(self) -> float | None:
        """The longest gap in seconds; None for an answer of one event."""
        if not self.ok:
            return math.inf
        return max(self.gaps) / 1e3 if self.gaps else None

    @property
    def lateness(self) -> float:
        """Seconds between schedule and send: the client's own delay."""
        return self.sent - self.scheduled


def moved(record: Record, by: float) -> Record:
    """The same request with every stamp `by` seconds later: on another host's clock."""
    stamps = {name: getattr(record, name) for name in _STAMPS}
    return replace(record, **{name: at + by for name, at in stamps.items() if at is not None})


_STAMPS = ("scheduled", "sent", "connected", "headers", "first", "first_answer", "last", "end")
_FIELDS = tuple(f.name for f in fields(Record))
_SHARED = ("cls", "arm", "phase", "outcome", "error")  # the same few strings in all records, kept once


def dump(record: Record) -> str:
    """One line of JSON; the gaps as base64 of little-endian float32."""
    data = {name: getattr(record, name) for name in _FIELDS}
    data["gaps"] = base64.b64encode(_little(record.gaps).tobytes()).decode()
    return json.dumps(data, separators=(",", ":"))


def parse(line: str) -> Record:
    """The record of one line. Raises `ValueError` for anything else."""
    data: dict[str, Any] = json.loads(line)
    gaps = array("f")
    gaps.frombytes(base64.b64decode(data["gaps"]))
    data["gaps"] = _little(gaps)
    for name in _SHARED:
        data[name] = sys.intern(data[name])
    return Record(**data)


def _little(gaps: array[float]) -> array[float]:
    if sys.byteorder == "big":
        gaps = gaps[:]
        gaps.byteswap()
    return gaps
