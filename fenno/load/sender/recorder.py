"""Streams that are over become records, whenever the event loop is idle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import gevent
import gevent.event
from locust import events

from fenno.load import reply as replies
from fenno.load.plan import Plan, Request
from fenno.load.record import Record, dump, moved
from fenno.load.sender.spool import Spool
from fenno.load.sse import Response

BACKLOG = 400_000  # reads of ended streams, about 100 MB, to hold back for an idle loop


@dataclass
class Ended:
    """A request up to its end, its stream not read yet. `why` as from `Connection.ask`; "connect: ..." never had a connection."""

    request: Request
    identity: str
    phase: Any
    scheduled: float
    sent: float
    connected: float | None
    end: float
    response: Response | None
    why: str | None
    given: str = ""  # the outcome, where it was known without reading
    answer: Any = None  # an AsyncResult for what was said, where a later turn needs it; None said: the request failed

    @property
    def complete(self) -> bool:
        """Whether a response came, and to its end."""
        return self.why is None and self.response is not None and self.response.status == 200


class Recorder:
    """Reads ended streams and keeps the records. One `request` event is fired a request; all else goes to our own records.

    `backlog`: reads of ended streams whose events are not read yet. `ahead`: seconds by which this host's clock is ahead of the
    run's, which the records are on.
    """

    def __init__(self, plan: Plan, spool: Spool, ahead: float = 0.0) -> None:
        self.plan, self.spool, self.ahead = plan, spool, ahead
        self.done = self.failed = self.counted_done = self.backlog = 0
        self._ended: deque[Ended] = deque()
        self._wake = gevent.event.Event()

    @property
    def busy(self) -> bool:
        """Whether some stream waits to be read."""
        return bool(self._ended)

    def add(self, ended: Ended) -> None:
        """Take a request that is over."""
        self._ended.append(ended)
        self.backlog += len(ended.response.body) if ended.response is not None else 0
        self._wake.set()

    def run(self) -> None:
        """Turn ended streams into records, a few events at a time, whenever the loop is idle."""
        while True:
            if not self._ended:
                self._wake.clear()
                self._wake.wait()
            ended = self._ended[0]
            reply = replies.Reply(said=[] if ended.answer is not None else None)
            for _ in replies.read(ended.response, reply) if ended.response is not None else ():
                gevent.idle() if self.backlog < BACKLOG else gevent.sleep(0)
            record = self._record(ended, reply)
            self.spool.add(dump(moved(record, -self.ahead) if self.ahead else record))
            self._ended.popleft()
            self.backlog -= len(ended.response.body) if ended.response is not None else 0
            self._count(record)
            if ended.answer is not None:
                ended.answer.set("".join(reply.said or ()) if record.ok else None)

    def _record(self, ended: Ended, reply: replies.Reply) -> Record:
        request, response = ended.request, ended.response
        if ended.given:
            outcome, error = ended.given, ended.why or ""
        elif response is not None and response.complete:
            outcome, error = replies.outcome(response, reply, request.output_tokens, self.plan.exact)
        else:
            outcome, error = replies.cut(response, reply, ended.sent, ended.end, self.plan.timeout, ended.why or "")
        tokens = reply.tokens()
        answer = next((at for at, kind in tokens if kind == "answer"), None)
        return Record(
            id=ended.identity,
            cls=request.cls,
            arm=str(self.plan.arm),
            phase=ended.phase,
            scheduled=ended.scheduled,
            sent=ended.sent,
            connected=ended.connected,
            headers=response.head_time if response is not None else None,
            first=tokens[0][0] if tokens else None,
            first_answer=answer if answer is not None or not tokens else tokens[0][0] if not _told_apart(tokens) else None,
            last=tokens[-1][0] if tokens else None,
            end=ended.end,
            asked_prompt=request.prompt_tokens,
            asked_tokens=request.output_tokens,
            prompt_tokens=reply.prompt_tokens,
            completion_tokens=reply.completion_tokens,
            token_count=len(tokens),
            gaps=replies.gaps(tokens),
            status=response.status or None if response is not None else None,
            outcome=outcome,
            error=error,
            turn=request.turn,
        )

    def _count(self, record: Record) -> None:
        self.done += 1
        self.failed += not record.ok
        self.counted_done += record.phase == "counted"
        events.request.fire(
            request_type="POST",
            name=record.cls,
            response_time=(record.end - record.sent) * 1e3,
            response_length=record.token_count,
            exception=None if record.ok else RuntimeError(record.outcome),
            context={},
        )


def _told_apart(tokens: list[tuple[float, str]]) -> bool:
    """Whether some of the tokens are known to be reasoning."""
    return any(kind == "token" for _, kind in tokens)
