"""The KV cache of 64 layers moved between two GPUs of this host: each way in turn, over and over, so that ratios are of one moment.

usage: python benchmarks/kv/pair.py OUT.json    (two GPUs: 20 s; without them it moves little, over gloo, and only tries this file)

Rank 0 copies from GPU 0 to GPU 1 by itself while rank 1 waits on the CPU; over NCCL both take part, by `fenno.kv.transfer`. A time
is from when both ranks are there to when all of it is done, launches included. `alone` is of one call, `in a row` of several,
divided by their number. What a way moves is compared with what was sent before it is timed. A way that fails is said and left out;
OUT is written after each group of ways.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fenno.kv import transfer

GPUS = torch.cuda.device_count() >= 2
LAYERS, HEADS, BATCH, SIZE, DTYPE = (64, 8, 8, 128, torch.bfloat16) if GPUS else (4, 2, 2, 16, torch.bfloat16)
TOKENS, ROW, REPEATS = (
    (256, 10, {1: 60, 10: 20, 5: 12}) if GPUS else (16, 2, {1: 5, 2: 5, 5: 5})
)  # 256 tokens of this shape are 0.5 GiB
HERE, THERE = (torch.device("cuda", 0), torch.device("cuda", 1)) if GPUS else (torch.device("cpu"), torch.device("cpu"))
PLAIN, APART = "cudaMemcpyAsync, one tensor", f"{2 * LAYERS} copies"
OTHERS = (APART, f"{2 * LAYERS} cudaMemcpyAsync", f"{2 * LAYERS} cudaMemcpyAsync, CUDA graph", PLAIN)
WHATS = ("step", "cache", "cache with room", "step, NCCL in CUDA graphs")
Way = tuple[str, Callable[[], object], Callable[[], bool]]  # its name, one call, whether what came is what was sent


def random(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, device=device, dtype=torch.float32).to(DTYPE)


def settle() -> None:
    for device in {HERE, THERE} if GPUS else ():
        torch.cuda.synchronize(device)


class Copies:
    """Copies from GPU 0 to GPU 1 by one process: `one` is all in one tensor, `many` a tensor a layer, keys and values apart."""

    def __init__(self, tokens: int, first: int, room: int) -> None:
        shape = (2, LAYERS, HEADS, BATCH, room, SIZE)
        self.block, self.there = random(shape, HERE), torch.zeros(shape, device=THERE, dtype=DTYPE)
        self.span, self.span_there = (block[..., first : first + tokens, :] for block in (self.block, self.there))
        self.one = self.span.contiguous()
        self.one_there = torch.zeros_like(self.one, device=THERE)
        # (batch, heads, tokens, size) of each layer, each a tensor of its own, as a cache that is kept layer by layer has it.
        self.many = [part.transpose(0, 1).contiguous() for pair in self.one.unbind() for part in pair.unbind()]
        self.many_there = [torch.zeros_like(part, device=THERE) for part in self.many]

    def same(self, sent: list[torch.Tensor], came: list[torch.Tensor]) -> bool:
        """Whether it arrived; what arrived is wiped, so that the next way has to bring it again."""
        settle()
        right = all(torch.equal(a, b.to(a.device)) for a, b in zip(sent, came, strict=True))
        for part in came:
            part.zero_()
        settle()
        return right

    def ways(self, cuda: Any) -> list[Way]:
        """All but the graphs."""
        spans = functools.partial(self.same, [self.span], [self.span_there])
        ones = functools.partial(self.same, [self.one], [self.one_there])
        manys = functools.partial(self.same, self.many, self.many_there)
        ways: list[Way] = [
            ("copy, block to block", lambda: self.span_there.copy_(self.span, non_blocking=True), spans),
            ("copy, one tensor", lambda: self.one_there.copy_(self.one, non_blocking=True), ones),
            (f"{len(self.many)} copies", lambda: pairwise(self.many, self.many_there), manys),
        ]
        if cuda:
            ways += [
                ("cudaMemcpyAsync, one tensor", lambda: cuda([self.one], [self.one_there]), ones),
                (f"{len(self.many)} cudaMemcpyAsync", lambda: cuda(self.many, self.many_there), manys),
            ]
        return ways

    def graphs(self, cuda: Any) -> list[tuple[str, Callable[[], object], Callable[[], bool]]]:
        """The same calls to be captured: name, what is captured, whether it arrived."""
        captured = [(f"{name}, CUDA graph", call, right) for name, call, right in self.ways(cuda)]
        return [way for way in captured if "cudaMemcpy" in way[0]] + [way for way in captured if "cudaMemcpy" not in way[0]]


def pairwise(sent: list[torch.Tensor], there: list[torch.Tensor]) -> None:
    """Layer by layer as a program in torch does it: nothing waits for a copy."""
    for part, target in zip(sent, there, strict=True):
        target.copy_(part, non_blocking=True)


def runtime() -> Callable[[list[torch.Tensor], list[torch.Tensor]], None]:
    """cudaMemcpyAsync on the current stream of GPU 0, without torch's events between the streams of both GPUs."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in lines if "libcudart" in line), "libcudart.so")
    call = ctypes.CDLL(path).cudaMemcpyAsync
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def copies(sent: list[torch.Tensor], there: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(HERE).cuda_stream
        for part, target in zip(sent, there, strict=True):
            code = call(target.data_ptr(), part.data_ptr(), part.numel() * part.element_size(), 4, stream)
            if code:
                raise RuntimeError(f"cudaMemcpyAsync: {code}")

    return copies


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of a call, and its replay. The other GPU's stream takes part, since torch's copies wait for it."""
    here, there = torch.cuda.Stream(HERE), torch.cuda.Stream(THERE)
    graph = torch.cuda.CUDAGraph()
    call()
    settle()
    with torch.cuda.stream(there), torch.cuda.stream(here), torch.cuda.graph(graph, stream=here, capture_error_mode="thread_local"):
        there.wait_stream(here)
        call()
        here.wait_stream(there)
    settle()
    return graph.replay


class Rank:
    """One of two ranks: what both do together, and when they meet, which they do over gloo, on the CPU."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.device = (HERE, THERE)[number]
        self.meeting = dist.new_group(backend="gloo")

    def seconds(self, call: Callable[[], object], times: int, both: bool) -> float:
        """One call, of `times`: from when both are there until the slower one has done; of rank 0 alone, by its own clock."""
        dist.barrier(self.meeting)
        started = time.monotonic()
        if both or self.number == 0:
            for _ in range(times):
                call()
            settle()
        ends = torch.tensor([started, time.monotonic()], dtype=torch.float64)
        if both:
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.meeting)
        return float(ends[1] - ends[0]) / times

    def agreed(self, right: bool) -> bool:
        both = torch.tensor([right], dtype=torch.int32)
        dist.all_reduce(both, op=dist.ReduceOp.MIN, group=self.meeting)
        return bool(both.item())

    def moves(self, tokens: int, first: int, room: int) -> list[Way]:
        """What both ranks do: rank 0 sends what rank 1 receives, and both gather both."""
        shape = (2, LAYERS, HEADS, BATCH, room, SIZE)
        sent = random(shape, HERE).to(self.device)  # the same bytes on both ranks
        block = sent.clone() if self.number == 0 else torch.zeros_like(sent)
        span, span_sent = (each[..., first : first + tokens, :] for each in (block, sent))
        one, one_sent = span.contiguous(), span_sent.contiguous()
        many, many_sent = (
            [part.transpose(0, 1).contiguous() for pair in each.unbind() for part in pair.unbind()] for each in (one, one_sent)
        )
        send = transfer.receive if self.number else transfer.send
        gathered: list[torch.Tensor] = []
        mine = one_sent * (self.number + 1)

        def gather() -> None:
            gathered[:] = [transfer.all_gather(mine)]

        def gathers() -> bool:
            return torch.equal(gathered[0], torch.stack([one_sent, one_sent * 2]))

        ways = [
            ("block to block", lambda: send([span], 1 - self.number), lambda: self.came([span], [span_sent])),
            ("one tensor", lambda: send([one], 1 - self.number), lambda: self.came([one], [one_sent])),
            (f"{len(many)} tensors, one group", lambda: send(many, 1 - self.number), lambda: self.came(many, many_sent)),
            (
                f"{len(many)} tensors, one by one",
                lambda: [send([part], 1 - self.number) for part in many],
                lambda: self.came(many, many_sent),
            ),
            ("all-gather, one tensor", gather, gathers),
        ]
        return [(f"{'NCCL' if GPUS else 'gloo'}, {name}", call, right) for name, call, right in ways]

    def came(self, parts: list[torch.Tensor], sent: list[torch.Tensor]) -> bool:
        if GPUS:
            torch.cuda.synchronize(self.device)
        right = all(torch.equal(part, source) for part, source in zip(parts, sent, strict=True))
        for part in parts if self.number else ():
            part.zero_()
        return right


def tried(make: Callable[[], Way]) -> tuple[Way | None, str]:
    """A way and whether it works once: None and the reason where it does not."""
    try:
        name, call, right = make()
        call()
        return ((name, call, right), "") if right() else (None, "what came is not what was sent")
    except RuntimeError as error:
        return None, str(error).splitlines()[0]


def group(me: Rank, ways: list[tuple[str, Callable[[], Way], bool]], times: int) -> dict[str, Any]:
    """Tries each way, then times those that work, in turn: seconds of each call of each repeat, by name."""
    work: list[tuple[str, Callable[[], object], bool]] = []
    found: dict[str, Any] = {"failed": {}, "seconds": {}}
    for name, make, both in ways:
        way, why = tried(make) if both or me.number == 0 else (("", int, bool), "")
        if me.agreed(way is not None):
            assert way is not None
            work.append((name, way[1], both))
        else:
            found["failed"][name] = why or "failed on the other rank"
    for number in range(2 + REPEATS[times]):
        turn = number % max(1, len(work))
        for name, call, both in work[turn:] + work[:turn]:
            taken = me.seconds(call, times, both)
            if number >= 2:
                found["seconds"].setdefault(name, []).append(taken)
    return found


def everything(me: Rank, tokens: int, first: int, room: int, times: tuple[int, ...], graphs: bool) -> dict[str, Any]:
    """One step or cache by all ways."""
    copies = Copies(tokens, first, room) if me.number == 0 else None
    cuda = runtime() if copies and GPUS else None
    ways: list[tuple[str, Callable[[], Way], bool]] = []
    for index in range(5 if GPUS else 3):
        made = copies.ways(cuda)[index] if copies else ("", int, bool)
        ways.append((named(me, made[0]), lambda made=made: made, False))  # type: ignore[misc]
    moves = me.moves(tokens, first, room)
    ways += [(name, lambda way=(name, call, right): way, True) for name, call, right in moves]  # type: ignore[misc]
    if graphs and GPUS:
        for index in range(5):
            made = copies.graphs(cuda)[index] if copies else ("", int, bool)
            ways.append((named(me, made[0]), lambda made=made: (made[0], captured(made[1]), made[2]), False))  # type: ignore[misc]
    return {f"{count} in a row" if count > 1 else "alone": group(me, ways, count) for count in times}


def named(me: Rank, name: str) -> str:
    """A way's name as rank 0 calls it."""
    names = [name]
    dist.broadcast_object_list(names, 0, group=me.meeting)
    return names[0]


def graphs_of_moves(me: Rank, tokens: int, first: int, room: int) -> dict[str, Any]:
    """The messages captured as well: tried last, since what goes wrong inside a capture of NCCL may not come back."""

    def of(way: Way) -> Way:
        stream, graph = torch.cuda.Stream(me.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            way[1]()
        torch.cuda.synchronize(me.device)
        return way[0], graph.replay, way[2]

    ways = [(f"{way[0]}, CUDA graph", functools.partial(of, way), True) for way in me.moves(tokens, first, room)[:3]]
    return {f"{count} in a row" if count > 1 else "alone": group(me, ways, count) for count in (1, ROW)}


def rank(number: int, meeting: str, out: str) -> None:
    if GPUS:
        torch.cuda.set_device((HERE, THERE)[number])
    dist.init_process_group("nccl" if GPUS else "gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    one = Rank(number)
    said = {
        "device": torch.cuda.get_device_name() if GPUS else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if GPUS else None,
        "shape": {"layers": LAYERS, "heads": HEADS, "batch": BATCH, "size": SIZE, "dtype": str(DTYPE), "tokens": TOKENS},
        "repeats": REPEATS,
    }
    with torch.no_grad():
        for what, make in (
            ("step", lambda: everything(one, 1, TOKENS, TOKENS + 64, (1, ROW), graphs=True)),
            ("cache", lambda: everything(one, TOKENS, 0, TOKENS, (1, 5), graphs=False)),
            ("cache with room", lambda: everything(one, TOKENS, 0, TOKENS + 64, (1, 5), graphs=False)),
            ("step, NCCL in CUDA graphs", lambda: graphs_of_moves(one, 1, TOKENS, TOKENS + 64) if GPUS else {}),
        ):
            said[what] = make()
            if number == 0:
                Path(out).write_text(json.dumps({**said, "summary": summary(said)}) + "\n")
    if number == 0:
        print(*lines(said), sep="\n", flush=True)
    dist.destroy_process_group()


def summary(said: dict[str, Any]) -> dict[str, Any]:
    """Median and quartiles in microseconds, and of the ratios to the other ways, repeat by repeat."""
    found: dict[str, Any] = {}
    for what, how, run in runs_of(said):
        seconds = run["seconds"]
        others = {name: seconds[name] for name in OTHERS if name in seconds}
        for name, taken in seconds.items():
            row = {"us": quartiles([1e6 * each for each in taken])}
            for other, its in others.items():
                row[f"times faster than {other}"] = quartiles([a / b for a, b in zip(its, taken, strict=True)])
            found.setdefault(what, {}).setdefault(how, {})[name] = row
    return found


def runs_of(said: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """What was moved, alone or in a row, and its times."""
    return [(what, how, run) for what in WHATS for how, run in said.get(what, {}).items()]


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(each, 2) for each in (middle, low, high)]


def lines(said: dict[str, Any]) -> list[str]:
    whole = summary(said).items()
    rows = [f"{what}, {how}: {name}: {row}" for what, runs in whole for how, run in runs.items() for name, row in run.items()]
    return rows + [
        f"{what}, {how}: {name} FAILED: {why}" for what, how, run in runs_of(said) for name, why in run["failed"].items()
    ]


def main() -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="fenno-pair-") as folder:
        # NVML counts the GPUs, so nothing of CUDA has begun here: forking is safe.
        torch.multiprocessing.start_processes(rank, (f"{folder}/meeting", sys.argv[1]), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
