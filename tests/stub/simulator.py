"""A queue that moves like an engine's: steps that take longer the more runs in them, a cap on running requests, a token budget.

It imitates, it measures nothing: what comes out follows from the four numbers in `Costs` alone. Its limits are changed while it
runs by the same control file, mailbox and arithmetic as the real scheduler's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fenno.control import Acknowledgement, Wanted
from fenno.vllm_plugin import limits
from fenno.vllm_plugin.limits import Limits, Settings, Start
from fenno.vllm_plugin.mailbox import Mailbox
from fenno.vllm_plugin.order import Work


@dataclass(frozen=True)
class Costs:
    """Seconds a step, for each request that runs in it, for each prompt token, and for each event of the step before."""

    base: float
    request: float
    token: float
    event: float

    @staticmethod
    def of_environment() -> Costs:
        return Costs(*(float(os.environ.get(f"STUB_{name}_MS", default)) / 1e3 for name, default in MILLISECONDS.items()))


MILLISECONDS = {"BASE": "5", "REQUEST": "0.05", "TOKEN": "0.005", "EVENT": "0"}


@dataclass(eq=False)
class Request:
    """One request. `token` is called with True for the last one, and says whether an event was sent; `gone` says whether its client
    went away."""

    prompt: int
    answer: int
    token: Callable[[bool], bool]
    gone: Callable[[], bool]
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first: float = 0.0
    computed: int = 0
    produced: int = 0


class Histogram:
    """Counts by upper edge, as Prometheus has them."""

    EDGES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 128, 256, 512, 1024, 2048, 4096)

    def __init__(self) -> None:
        self.total, self.values = 0.0, [0] * (len(self.EDGES) + 1)

    def add(self, value: float) -> None:
        self.total += value
        self.values[next((i for i, edge in enumerate(self.EDGES) if value <= edge), len(self.EDGES))] += 1


class Simulator:
    """The requests of one engine, moved a step at a time. `mailbox` is None without fenno's scheduler."""

    def __init__(self, costs: Costs, start: Limits, mailbox: Mailbox | None, short_first: bool) -> None:
        self.costs, self.mailbox, self.gate = costs, mailbox, Path(os.environ.get("STUB_GATE", os.devnull))
        self.start = Start(start, start.seqs, 1, 1, frozenset({"prefill_schedule_interval"}))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.held = 0  # requests that run and will never end
        self.events = 0  # of the step before
        self.counts = dict.fromkeys(("prompt_tokens", "generation_tokens", "request_success", "num_preemptions"), 0)
        names = ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds")
        names += ("request_decode_time_seconds", "e2e_request_latency_seconds", "iteration_tokens_total")
        self.histograms = {name: Histogram() for name in names}
        self._awake = asyncio.Event()
        self._revision = 0
        self._settings = limits.settings(self.start, {} if short_first else {"policy": "fcfs"})
        self.answer()

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._awake.set()

    async def run(self) -> None:
        """Make steps while there are requests, for ever."""
        while True:
            if not self.waiting and not self.running:
                self._awake.clear()
                await self._awake.wait()
            self.look()
            while self.gate.is_file():
                await asyncio.sleep(0.02)
            step = self._schedule()
            tokens = sum(step.values())
            prompts = sum(count for request, count in step.items() if request.computed < request.prompt)
            costs = self.costs
            await asyncio.sleep(costs.base + costs.request * len(step) + costs.token * prompts + costs.event * self.events)
            self.events = 0
            self.histograms["iteration_tokens_total"].add(tokens)
            for request, count in step.items():
                self._advance(request, count)
            if self.mailbox and self.mailbox.due():
                self.answer()

    def _schedule(self) -> dict[Request, int]:
        """Tokens of this step, by request: those that run first, then those that wait, as long as cap and budget allow."""
        for request in [r for r in (*self.running, *self.waiting) if r.gone()]:
            (self.running if request in self.running else self.waiting).remove(request)
        now = limits.in_force(self.start, self._settings, len(self.running), len(self.waiting) > 1)
        left, step = now.tokens, {}
        self._sort()
        for request in list(self.running):
            step[request] = self._share(request, left, now)
            left -= step[request]
        while self.waiting and len(self.running) < now.seqs and left > 0:
            request = self.waiting.pop(0)
            request.started = time.monotonic()
            self.running.append(request)
            step[request] = self._share(request, left, now)
            left -= step[request]
        return {request: count for request, count in step.items() if count}

    def _sort(self) -> None:
        order = self._settings.order
        if order:
            work = {r: Work(r.prompt, r.produced, r.answer, 1 << 20) for r in self.waiting}
            self.waiting.sort(key=lambda r: order.place(0, r.arrived, work[r], self.start.limits.tokens))
        else:
            self.waiting.sort(key=lambda r: r.arrived)

    @staticmethod
    def _share(request: Request, left: int, now: Limits) -> int:
        wanted = max(1, request.prompt - request.computed)
        return min(wanted, left, now.long_prefill or wanted)

    def _advance(self, request: Request, count: int) -> None:
        now = time.monotonic()
        if request.computed < request.prompt:
            request.computed += count
            self.counts["prompt_tokens"] += count
            if request.computed < request.prompt:
                return
            request.first = now
            self.histograms["time_to_first_token_seconds"].add(now - request.arrived)
            self.histograms["request_queue_time_seconds"].add(request.started - request.arrived)
            self.histograms["request_prefill_time_seconds"].add(now - request.started)
        request.produced += 1
        self.counts["generation_tokens"] += 1
        last = request.produced >= request.answer
        self.events += request.token(last)
        if last:
            self.running.remove(request)
            self.counts["request_success"] += 1
            self.histograms["request_decode_time_seconds"].add(now - request.first)
            self.histograms["e2e_request_latency_seconds"].add(now - request.arrived)

    def look(self, at_once: bool = False) -> None:
        """Obey the control file if it has changed."""
        if not self.mailbox or not self.mailbox.changed(at_once):
            return
        wanted = self.mailbox.read()
        if wanted:
            self._obey(wanted)
        self.answer()

    def _obey(self, wanted: Wanted) -> None:
        self._settings: Settings = limits.settings(self.start, wanted.knobs)
        self._revision = wanted.revision

    def answer(self) -> None:
        if not self.mailbox:
            return
        now = self._settings
        applied = {
            "max_num_scheduled_tokens": limits.in_force(self.start, now, len(self.running), False).tokens,
            "max_num_active_seqs": now.limits.seqs,
            "long_prefill_token_threshold": now.limits.long_prefill,
            "policy": now.policy,
        }
        reached, counts = len(self.running) <= now.limits.seqs, (len(self.running), len(self.waiting))
        answer = Acknowledgement(self._revision, 0, applied, reached, now.unsupported, *counts, pid=os.getpid(), engine="stub")
        self.mailbox.answer(answer)

    def metrics(self) -> str:
        """The exposition, with the names that vLLM has."""
        running, waiting = len(self.running) + self.held, len(self.waiting)
        gauges = {"num_requests_running": running, "num_requests_waiting": waiting, "kv_cache_usage_perc": 0.1}
        lines = []
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f'vllm:{name}{{engine="0"}} {float(value)}']
        for name, count in {**self.counts, "prefix_cache_queries": 0, "prefix_cache_hits": 0}.items():
            lines += [f"# TYPE vllm:{name}_total counter", f'vllm:{name}_total{{engine="0"}} {float(count)}']
        for name, histogram in self.histograms.items():
            lines.append(f"# TYPE vllm:{name} histogram")
            below = 0
            for edge, count in zip((*Histogram.EDGES, "+Inf"), histogram.values, strict=True):
                below += count
                lines.append(f'vllm:{name}_bucket{{engine="0",le="{edge}"}} {float(below)}')
            lines += [f'vllm:{name}_count{{engine="0"}} {float(below)}', f'vllm:{name}_sum{{engine="0"}} {histogram.total}']
        return "\n".join(lines) + "\n"
