"""The recording half of the load client, fed as fast as it takes: `python sender.py FOLDER REQUESTS PROCESSES`. See record.py.

Streams that have ended go to the client's own `Recorder`, which reads their events, fires locust's request event with locust's own
statistics listening, and hands a line for each to the `Spool`. What is missing of a load test is the network. Request number i has
latencies that follow from i alone (`latencies`), so that all percentiles are known beforehand.
"""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gevent
from locust import User, events
from locust.env import Environment

from fenno.load import plan as plans
from fenno.load import raw
from fenno.load.client import ClientState
from fenno.load.plan import Plan, Request
from fenno.load.sender.conductor import forget
from fenno.load.sender.recorder import Ended, Recorder
from fenno.load.sender.spool import Spool
from fenno.load.sse import Response

RATE = 42.7  # requests a second that the stamps are of
START = 1000.0


def latencies(number: int, count: int) -> tuple[int, tuple[int, ...]]:
    """Microseconds to the first token of a request, each value from 50,000 on once in `count`, and its gaps."""
    mixed = number * 7_654_321 % count
    return 50_000 + mixed, (20_000 + mixed % 10_007, 20_000 + mixed % 9_973)


def reads(cls: str) -> list[bytes]:
    """What a server sends for three tokens, read by read, without its framing."""
    choices = [{"text": f" {cls}", "finish_reason": None}] * 2 + [{"text": " .", "finish_reason": "length"}]
    events = [{"choices": [choice]} for choice in choices]
    parts = [f"data: {json.dumps({'id': 'cmpl', 'object': 'text_completion', 'model': 'm', **event})}\n\n" for event in events]
    usage = {"choices": [], "usage": {"prompt_tokens": 256, "completion_tokens": 3}}
    return [part.encode() for part in (*parts, f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n")]


def ended(number: int, count: int, made: dict[str, list[bytes]]) -> Ended:
    """A request that is over, as the client's connection leaves it."""
    cls = ("short", "medium", "long")[number % 10 // 4]
    sent = START + number / RATE
    ttft, gaps = latencies(number, count)
    stamps = [sent + ttft / 1e6]
    for gap in gaps:
        stamps.append(stamps[-1] + gap / 1e6)
    response = Response()
    response.status, response.head_time, response.complete = 200, stamps[0], True
    response.body = list(zip([*stamps, stamps[-1] + 1e-3], made[cls], strict=True))
    request = Request(index=number, at=number / RATE, cls=cls, prompt_tokens=256, output_tokens=3, body={})
    return Ended(request, f"bench-{number}", "counted", sent, sent, sent, stamps[-1] + 1e-3, response, None)


def main(folder: Path, count: int, index: int, of: int) -> None:
    """Record the requests of process `index` of so many."""
    plan: Plan = plans.parse((folder / "plan.json").read_text(), {})
    environment = Environment(user_classes=[User], events=events)
    runner = environment.create_local_runner()
    spool, states = Spool(functools.partial(raw.file, folder, index), raw.FULL), Spool(lambda _: folder / f"client-{index}.jsonl")
    recorder = Recorder(plan, spool)
    gevent.spawn(recorder.run)
    made = {cls: reads(cls) for cls in ("short", "medium", "long")}
    state = ClientState(phase="counted", traffic=START, start=START)
    gc.collect()
    gc.freeze()
    gc.disable()
    for number in range(index, count, of):
        recorder.add(ended(number, count, made))
        if number // of % 2000 == 0 or number + of >= count:
            while recorder.busy:
                gevent.sleep(0.001)  # the recorder works whenever the loop is idle
            forget(runner.stats)
            states.add(replace(state, done=recorder.done, failed=recorder.failed).dump())
            spool.flush(wait=True)
            states.flush(wait=True)
    end = START + count / RATE
    states.add(replace(state, phase="done", end=end, done=recorder.done, counted_done=recorder.counted_done).dump())
    states.flush(wait=True)


if __name__ == "__main__":
    folder, (count, of, *index) = Path(sys.argv[1]), map(int, sys.argv[2:])
    others = [] if index else [subprocess.Popen([sys.executable, *sys.argv, str(other)]) for other in range(1, of)]
    main(folder, count, index[0] if index else 0, of)
    sys.exit(max((other.wait() for other in others), default=0))
