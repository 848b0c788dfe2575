"""What a response says: token events, the server's counts, errors inside the stream, and the one outcome of a request. Pure."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fenno.load.sse import Event, Response, events

STALL = 1.0  # seconds of silence after the first token (or half the timeout, if that is less) that make a timeout a stall
BATCH = 16  # events read between two pauses: less than 0.1 ms


@dataclass
class Reply:
    """What a stream held. Stamps are of the reads that completed the events.

    `marks`: time and kind of every event with a choice in it: "token", "answer", or "blank" (no visible text, which may be a
    token all the same: half a character, or one that is not shown).
    """

    marks: list[tuple[float, str]] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str | None = None
    done: bool = False
    error: str = ""
    said: list[str] | None = None  # the answer's pieces, where they are wanted

    def tokens(self) -> list[tuple[float, str]]:
        """The marks that carried tokens. Blank ones count when the server's own count has room for all of them."""
        visible = [mark for mark in self.marks if mark[1] != "blank"]
        return self.marks if len(self.marks) <= (self.completion_tokens or 0) else visible


def read(response: Response, reply: Reply) -> Iterator[None]:
    """Fill `reply` from a response; yields after each batch of events, so that the caller may pause."""
    if "json" in response.headers.get("content-type", "") or response.status != 200:
        reply.error = _error_of(b"".join(data for _, data in response.body)) or ""
        return
    batch: list[Event] = []
    for event in events(response.body):
        batch.append(event)
        if len(batch) == BATCH:
            _take(reply, batch)
            batch = []
            yield
    _take(reply, batch)
    yield


def _take(reply: Reply, batch: list[Event]) -> None:
    """Add a batch of events. One call to the JSON parser for all of them, which halves its cost."""
    batch = [event for event in batch if not _done(reply, event)]
    try:
        found = json.loads(b"[" + b",".join(event.data for event in batch) + b"]")
        if len(found) != len(batch):
            raise ValueError("an event held more than one value")
    except ValueError:
        found = [_value(reply, event) for event in batch]
    for event, value in zip(batch, found, strict=True):
        if isinstance(value, dict):
            _message(reply, event, value)


def _done(reply: Reply, event: Event) -> bool:
    if event.data == b"[DONE]":
        reply.done = True
        return True
    return False


def _value(reply: Reply, event: Event) -> Any:
    try:
        return json.loads(event.data)
    except ValueError:
        reply.error = reply.error or f"an event is not JSON: {event.data[:60]!r}"
        return None


def _message(reply: Reply, event: Event, value: dict[str, Any]) -> None:
    error = value.get("error")
    if error or event.name == b"error" or value.get("object") == "error":
        reply.error = reply.error or _sentence(error or value)
        return
    usage = value.get("usage")
    if usage:
        reply.prompt_tokens, reply.completion_tokens = (_count(usage.get(f"{name}_tokens")) for name in ("prompt", "completion"))
    for choice in value.get("choices") or ():
        reply.finish = choice.get("finish_reason") or reply.finish
        kind = _kind(choice)
        if kind == "answer" and reply.said is not None:
            reply.said.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        if kind:
            reply.marks.append((event.time, kind))


def _count(value: Any) -> int | None:
    """A number of tokens as a server says it; None for what can be none."""
    return value if type(value) is int and 0 <= value < 2**31 else None


def _kind(choice: dict[str, Any]) -> str | None:
    """ "answer", "token" (of reasoning), "blank", or None for an event that only names the role."""
    delta = choice.get("delta")
    if delta is None:
        return "answer" if choice.get("text") else "blank"
    if delta.get("content") or delta.get("tool_calls"):
        return "answer"
    if delta.get("reasoning_content") or delta.get("reasoning"):
        return "token"
    return None if delta.get("role") else "blank"


def _error_of(body: bytes) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode(errors="replace").strip()
    if isinstance(value, dict):
        return _sentence(value.get("error") or value.get("detail") or value)
    return _sentence(value)[:200]


def _sentence(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:300].encode(errors="replace").decode()  # JSON allows halves of characters, and files do not


def outcome(response: Response, reply: Reply, asked: int, exact: bool) -> tuple[str, str]:
    """(outcome, error) of a response that is complete. `exact`: an answer must have the `asked` number of tokens."""
    status = response.status
    if status != 200:
        name = "429" if status == 429 else "4xx" if 400 <= status < 500 else "5xx" if status >= 500 else "headers"
        return name, f"HTTP {status}: {reply.error}" if reply.error else f"HTTP {status}"
    if "json" in response.headers.get("content-type", ""):
        return "in-band", f"a JSON document where a stream was asked for: {reply.error}"
    if reply.error or reply.finish == "error":
        return "in-band", reply.error or "finish_reason is error"
    tokens = reply.tokens()
    if not reply.done and not reply.finish:
        return "truncated", f"the stream ended after {len(tokens)} events with neither a finish_reason nor [DONE]"
    if not tokens:
        return "short", "the stream held no token"
    return _length(reply, len(tokens), asked, exact)


def _length(reply: Reply, seen: int, asked: int, exact: bool) -> tuple[str, str]:
    if reply.finish == "abort":
        return "short", "the server aborted the answer"
    count = reply.completion_tokens
    if exact and count is not None and count != asked:
        return "short", f"{count} tokens where {asked} were asked for"
    if exact and count is None and seen < asked and reply.finish != "length":
        return "short", f"{seen} events where {asked} tokens were asked for"
    return "ok", ""


def cut(response: Response | None, reply: Reply, sent: float, end: float, timeout: float, why: str) -> tuple[str, str]:
    """(outcome, error) of a request whose response never became complete. `why`: "" when its time was up, else what ended it."""
    heard = response is not None and response.head_time is not None
    if why:
        name = "truncated" if heard else "headers"
    elif not heard:
        name, why = "headers", f"no response within {timeout:g} s"
    else:
        last = response.body[-1][0] if response is not None and response.body else sent
        silent = end - last >= min(STALL, timeout / 2)
        name = "stalled" if reply.tokens() and silent else "timeout"
        why = f"not complete within {timeout:g} s, silent for the last {end - last:.3g} s"
    if reply.error and heard:
        return "in-band", reply.error
    return name, why


def gaps(tokens: list[tuple[float, str]]) -> array[float]:
    """Milliseconds between neighbouring token events."""
    times = [time for time, _ in tokens]
    return array("f", [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)])
