"""A study of `level.py` on vLLM's real scheduler under fenno, with a clock of its own in an engine's place: what is to be expected.

usage: python benchmarks/scheduler/virtual.py level.yaml [--only PART …] [--host slow]    (the Python of an engine)

A step costs what its tokens cost on an H200, roughly: without a prompt 1 ms and 0.08 ms a sequence, as was seen with 70 of them; of
more than 512 tokens, for which vLLM captures no graph, 20 ms and 12.5 us a token, as was seen at 1,548 tokens; between the two what
sequences and tokens come to. With that 256 sequences in a closed loop hold 68.9 requests/s, as was seen on one host; `--host fast`
takes 0.6 of every step, for the host that held 113. Answers are exactly as long as asked for.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import step_cost
import yaml
from level import Block, Part, Seen, parts_of, stretch, table, trial
from study import order

from fenno import control, recipe
from fenno.control import Wanted
from fenno.engine import dummy
from fenno.load.plan import draw
from fenno.recipe import LengthClass

HOSTS = {"slow": 1.0, "fast": 0.6}
# Where arrivals lie: the scheduler takes seconds since 1970.
BASE = 1.7e9
LENGTH, STOP = 4096, 9


def step_seconds(seqs: int, tokens: int) -> float:
    decode = 0.001 + 0.00008 * seqs
    if tokens > 512:
        return max(decode, 0.020 + 0.0000125 * tokens)
    return decode + 0.0000125 * (tokens - seqs)


class Engine:
    """A scheduler and its clock. `seen`: every request that has ended; `ended`: how many did in the last step."""

    def __init__(self, part: Part, slowness: float, model: Any, path: Path) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        from fenno.vllm_plugin.scheduler import steered

        self.part, self.slowness, self.path, self.now, self.revision = part, slowness, path, 0.0, 0
        control.clear(path)
        os.environ[control.VARIABLE] = str(path)
        self.scheduler = step_cost.scheduler(steered(AsyncScheduler), "fcfs", model, part.cap, part.budget, blocks=80_000)
        self.sent: dict[str, tuple[str, float, int]] = {}
        self.first: dict[str, float] = {}
        self.seen: list[Seen] = []
        self.set(next(iter(part.arms)))

    def set(self, arm: str) -> None:
        self.revision += 1
        control.write_wanted(self.path, Wanted(self.revision, self.part.knobs(arm)))
        self.scheduler._look(answer=True)

    def add(self, at: float, cls: str, prompt: int, answer: int) -> None:
        """A request of `answer` tokens that arrived at `at`. It ends by a stop token: its client may have set no limit."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = str(len(self.sent))
        self.sent[name] = (cls, at, answer)
        limits = SamplingParams(max_tokens=LENGTH - prompt if self.part.unset else answer, stop_token_ids=[STOP])
        self.scheduler.add_request(Request(name, list(range(3, 3 + prompt)), limits, None, arrival_time=BASE + at))

    def step(self) -> int:
        """One step; how many requests it ended."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.now += self.slowness * step_seconds(len(names), output.total_num_scheduled_tokens)
        running = {name: self.scheduler.requests[name] for name in names}
        tokens = [[] if r.is_prefill_chunk else [self.token(name, r)] for name, r in running.items()]
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens))
        for name, request in running.items():
            cls, at, answer = self.sent[name]
            if request.num_output_tokens and name not in self.first:
                self.first[name] = self.now
            if request.num_output_tokens == answer:
                self.seen.append(Seen(cls, self.first[name], self.first[name] - at, self.now - at))
        return sum(name not in self.scheduler.requests for name in names)

    def token(self, name: str, request: Any) -> int:
        return STOP if request.num_output_tokens == self.sent[name][2] - 1 else 7


def part(name: str, told: Part, rate: float, classes: Sequence[LengthClass], engine: Engine) -> list[dict[str, Any]]:
    """The trials of a part, as `level.py` makes them."""
    blocks = [
        Block(seed, arm, told.before + n * told.length, told.before + (n + 1) * told.length)
        for n, (seed, arm) in enumerate(order(told))
    ]
    coming, dice = iter(()) if told.users else iter(stretch(told, rate, classes, len(blocks))), random.Random(1)
    names = {c.output_tokens: c.name for c in classes}
    drawn = drawing(told, classes, dice)
    for user in range(told.users or 0):
        engine.add(2.0 * user / told.users, *next(drawn))
    due = next(coming, None)
    for block in [Block(0, blocks[0].arm, 0.0, told.before), *blocks]:
        engine.set(block.arm)
        while engine.now < block.end:
            while due and due[0] <= engine.now:
                engine.add(due[0], names.get(due[2], ""), *due[1:])
                due = next(coming, None)
            if not engine.scheduler.requests:
                engine.now = due[0] if due else block.end
                continue
            ended = engine.step()
            for _ in range(ended if told.users else 0):
                engine.add(engine.now, *next(drawn))
            block.levels.append(engine.scheduler.get_request_counts())
    while engine.scheduler.requests:
        engine.step()
    return [trial(name, told, block, engine.seen) for block in blocks]


def drawing(told: Part, classes: Sequence[LengthClass], dice: random.Random) -> Iterator[tuple[str, int, int]]:
    """Class, prompt and answer of one request after the other."""
    while True:
        cls = dice.choices(classes, [c.share for c in classes])[0]
        free = 1 + int(dice.expovariate(1 / told.unset)) if told.unset else 0
        yield ("all" if free else cls.name), draw(cls.prompt_tokens, dice), min(free, 3000) or draw(cls.output_tokens, dice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--host", choices=HOSTS, default="slow")
    parser.add_argument("--capacity", type=float)
    asked = parser.parse_args()
    told = yaml.safe_load(asked.study.read_text())
    classes = recipe.load(recipe.find(told["recipe"])).workload.classes
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        from vllm.config import ModelConfig

        tiny = str(dummy.make("grok2-small", Path(folder)))
        model = ModelConfig(model=tiny, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LENGTH)
        for name, one in parts_of(told, asked.only).items():
            held = [t["qps"] for t in trials if t["part"] == one.of and t["arm"] == "fcfs"]
            rate = asked.capacity or (statistics.fmean(held) if held else 0.0)
            trials += part(name, one, rate, classes, Engine(one, HOSTS[asked.host], model, Path(folder) / "control.json"))
            print(table([t for t in trials if t["part"] == name]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
