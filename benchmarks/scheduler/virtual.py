"""What a study of `level.py` is expected to show: fenno's order and vLLM's way of admitting, on a clock of its own, as arithmetic.

usage: python benchmarks/scheduler/virtual.py STUDY.yaml [--only PART …] [--host slow] [--capacity RATE]    (seconds; needs no vLLM)

As vLLM's scheduler does, a step gives a token to whoever decodes, then goes on with prompts that are half read, then takes in
whoever is next in the order, while seats and budget last. It costs what its tokens cost on an H200, roughly: without a prompt 1 ms
and 0.08 ms a sequence, as was seen with 70 of them; of more than 512 tokens, for which vLLM captures no graph, 20 ms and 12.5 us a
token, as was seen at 1,548 tokens; between the two what sequences and tokens come to. With that 256 sequences in a closed loop hold
69 requests/s, as was seen on one host; `--host fast` takes 0.6 of every step, for another that held 113. Memory never ends. With
the flag `max-num-queued-reqs` an arrival is refused when so many requests are there, which run or wait.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from level import Arrival, Block, Part, Seen, parts_of, stretch, table, trial
from study import order

from fenno import control, recipe
from fenno.load.plan import draw
from fenno.recipe import LengthClass
from fenno.tune.space import BUDGET, CAP, POLICY, THRESHOLD
from fenno.vllm_plugin.order import AGING_SECONDS, EDGES, Order, Work

HOSTS = {"slow": 1.0, "fast": 0.6}
LONGEST = 4096
# Class, prompt and answer.
Drawn = tuple[str, int, int]


def step_seconds(seqs: int, tokens: int) -> float:
    decode = 0.001 + 0.00008 * seqs
    if tokens > 512:
        return max(decode, 0.020 + 0.0000125 * tokens)
    return decode + 0.0000125 * (tokens - seqs)


class Engine:
    """One engine and its clock. `seen`: every request whose end is known: an answer once begun is never held up for long."""

    def __init__(self, part: Part, slowness: float, most: float) -> None:
        self.part, self.slowness, self.most = part, slowness, most
        self.now, self.steps, self.sent, self.decoding = 0.0, 0, 0, 0
        self.waiting: list[tuple[tuple[float, int], Drawn, float]] = []
        self.reading: list[tuple[int, Drawn, float]] = []  # tokens of the prompt that are left
        self.ends: list[tuple[int, int, Drawn, float, float]] = []  # the step of its last token first
        self.seen: list[Seen] = []
        self.set(next(iter(part.arms)))

    def set(self, arm: str) -> None:
        self.knobs = {name: value for name, value in self.part.knobs(arm).items() if value is not None}
        edges = control.edges(self.knobs["class_edges"]) if "class_edges" in self.knobs else EDGES
        self.order = Order(edges, self.knobs.get("aging_seconds", AGING_SECONDS))
        self.waiting = [((self.due(one, at), number), one, at) for (_, number), one, at in self.waiting]
        heapq.heapify(self.waiting)

    def due(self, one: Drawn, at: float) -> float:
        _, prompt, answer = one
        room = LONGEST - prompt
        work = Work(prompt, 0, room if self.part.unset else answer, room)
        return at if self.knobs[POLICY] == "fcfs" else self.order.place(0, at, work, self.knobs[BUDGET]).due

    @property
    def running(self) -> int:
        return self.decoding + len(self.reading)

    def add(self, at: float, one: Drawn) -> None:
        if self.running + len(self.waiting) >= self.most:
            self.seen.append(Seen(one[0], at, None, None))
            return
        self.sent += 1
        heapq.heappush(self.waiting, ((self.due(one, at), self.sent), one, at))

    def step(self) -> int:
        """One step; how many requests it ended."""
        left = self.knobs[BUDGET] - self.decoding
        chunk = self.knobs.get(THRESHOLD) or LONGEST
        prompts, self.reading, read, tokens = self.reading, [], [], self.decoding
        while left > 0 and (prompts or (self.waiting and self.decoding + len(self.reading) + len(read) < self.knobs[CAP])):
            rest, one, at = prompts.pop(0) if prompts else self.admitted()
            taken = min(rest, left, chunk)
            left, tokens = left - taken, tokens + taken
            (read if taken == rest else self.reading).append((rest - taken, one, at))
        self.reading = prompts + self.reading
        self.now += self.slowness * step_seconds(self.running + len(read), tokens)
        self.steps += 1
        self.decoding += len(read)
        for number, (_, one, at) in enumerate(read):
            heapq.heappush(self.ends, (self.steps + one[2] - 1, number, one, at, self.now))
        ended = 0
        while self.ends and self.ends[0][0] <= self.steps:
            _, _, one, at, first = heapq.heappop(self.ends)
            self.seen.append(Seen(one[0], first, first - at, self.now - at))
            self.decoding, ended = self.decoding - 1, ended + 1
        return ended

    def admitted(self) -> tuple[int, Drawn, float]:
        _, one, at = heapq.heappop(self.waiting)
        return one[1], one, at


def part_of(
    name: str, told: Part, coming: Iterator[Arrival], classes: Sequence[LengthClass], engine: Engine
) -> list[dict[str, Any]]:
    """The trials of a part, as `level.py` makes them."""
    blocks = [
        Block(seed, arm, told.before + n * told.length, told.before + (n + 1) * told.length)
        for n, (seed, arm) in enumerate(order(told))
    ]
    names, drawn = {c.output_tokens: c.name for c in classes}, drawing(told, classes)
    for user in range(told.users or 0):
        engine.add(2.0 * user / (told.users or 1), next(drawn))
    due = next(coming, None)
    for block in [Block(0, blocks[0].arm, 0.0, told.before), *blocks]:
        engine.set(block.arm)
        while engine.now < block.end:
            while due and due[0] <= engine.now:
                engine.add(due[0], (names.get(due[2], ""), *due[1:]))
                due = next(coming, None)
            if not engine.running and not engine.waiting:
                engine.now = due[0] if due else block.end
                continue
            ended = engine.step()
            for _ in range(ended if told.users else 0):
                engine.add(engine.now, next(drawn))
            if engine.now >= block.begin + 0.5 * len(block.levels):
                block.levels.append((engine.running, len(engine.waiting)))
    while engine.running or engine.waiting:
        engine.step()
    return [trial(name, told, block, engine.seen) for block in blocks]


def drawing(told: Part, classes: Sequence[LengthClass]) -> Iterator[Drawn]:
    """One request after the other."""
    dice = random.Random(1)
    while True:
        cls = dice.choices(classes, [c.share for c in classes])[0]
        free = min(3000, 1 + int(dice.expovariate(1 / told.unset))) if told.unset else 0
        yield ("all" if free else cls.name), draw(cls.prompt_tokens, dice), free or draw(cls.output_tokens, dice)


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
    for name, part in parts_of(told, asked.only, asked.capacity).items():
        held = [t["qps"] for t in trials if t["part"] == part.of and t["arm"] == "fcfs"]
        rate = asked.capacity or (statistics.fmean(held) if held else 0.0)
        coming = iter(() if part.users else stretch(part, rate, classes, part.seeds * len(part.arms)))
        engine = Engine(part, HOSTS[asked.host], told.get("flags", {}).get("max-num-queued-reqs", float("inf")))
        trials += part_of(name, part, coming, classes, engine)
    print(table(trials))


if __name__ == "__main__":
    sys.exit(main())
