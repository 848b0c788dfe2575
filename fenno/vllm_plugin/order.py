"""The token-aware order, as arithmetic: no vLLM, no clock.

A request's place in the queue is its client's own priority first, then the moment it is *due*: its arrival plus a handicap
that grows with the work it has left and is always less than the aging time. Classes share the aging time evenly, and inside
a class the handicap rises with what is left. So of requests that arrive together the shorter class goes first and inside it
the shortest; and a request that arrived more than the aging time after another of the same client priority never goes
before it. The place is fixed when the request enters a queue, so that a heap of them stays one.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

EDGES = (32, 128)
AGING_SECONDS = 5.0
# An answer limit this many times the last edge says no more than "I don't know".
HUGE = 32


class Place(NamedTuple):
    """Where a request stands: smaller goes first. `group` (its class) is there to be counted; `due` decides before it."""

    client: int
    due: float
    group: int


@dataclass(frozen=True)
class Work:
    """What is known of a request: tokens of its prompt, generated so far, and its answer's limit; `room` is what the model's
    length leaves for an answer, and what a client who sets no limit is given."""

    prompt: int
    generated: int
    limit: int
    room: int


@dataclass(frozen=True)
class Order:
    """`edges` in tokens, rising, inclusive above: (32, 128) makes the classes 0-32, 33-128 and 129 up. `aging` in seconds."""

    edges: tuple[int, ...] = EDGES
    aging: float = AGING_SECONDS

    def group(self, tokens: int) -> int:
        """The class of `tokens`: 0 is the shortest."""
        return bisect_left(self.edges, tokens)

    def _share(self, tokens: int) -> tuple[int, float]:
        """The class of `tokens` and how far into it they reach, in [0, 1): strictly rising in `tokens`."""
        group = self.group(tokens)
        low = self.edges[group - 1] if group else 0
        if group == len(self.edges):
            return group, 1 - low / tokens
        return group, (tokens - low) / (self.edges[group] - low + 1)

    def _class_and_share(self, work: Work, step: int) -> tuple[int, float]:
        if work.limit < min(work.room, HUGE * self.edges[-1]):
            return self._share(max(0, work.limit - work.generated))
        # What is left is unknown. What it has generated tells, and a waiting request has generated something only if it was
        # preempted. Else it stands in the middle of the last class, where all such requests go by arrival: a client who says
        # nothing gains nothing by it. Only a prompt that would hold several steps yields, the longer the more.
        if work.generated:
            return self.group(work.generated), 0.0
        return len(self.edges), 1 - min(1.0, step / max(1, work.prompt)) / 2

    def place(self, client: int, arrival: float, work: Work, step: int) -> Place:
        """The place of a request of priority `client` that arrived at `arrival` (seconds); `step`: the token budget of a step."""
        group, share = self._class_and_share(work, step)
        return Place(client, arrival + self.aging * (group + share) / (len(self.edges) + 1), group)
