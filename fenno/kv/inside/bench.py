"""Times a KV cache moved between two ranks of this host, under an engine's own interpreter.

usage: python bench.py '{"layers": 64, "heads": 8, "batch": 8, "tokens": 256, "size": 128, "dtype": "bfloat16"}'
It prints one line of JSON, the only one that begins with a brace.
Two GPUs over NCCL where there are two, else two processes over gloo. Standard library, torch and fenno's `kv/transfer.py` only.
"""

from __future__ import annotations

import functools
import importlib.util
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

RANKS, WARM = 2, 3
REPEATS = {"cpu": 15, "cuda": 60}
Call = Callable[[list[torch.Tensor]], list[torch.Tensor]]
LINK = 64 * 2**20  # bytes of the plain message that the link's bandwidth is measured with, at least


def library() -> Any:
    """`kv/transfer.py` from beside this script: an engine's interpreter has no fenno."""
    spec = importlib.util.spec_from_file_location("transfer", Path(__file__).parents[1] / "transfer.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Mover:
    """One rank: rank 0 sends, rank 1 receives, both gather."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.transfer = library()

    def written(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """A tensor whose pages are really there: those that were never written to are quicker to read."""
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        made.view(torch.uint8).fill_(1)
        return made

    def move(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        (self.transfer.receive if self.rank else self.transfer.send)(parts, 1 - self.rank)
        return parts

    def one_by_one(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        for part in parts:
            self.move([part])
        return parts

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.transfer.all_gather(part) for part in parts]

    def right(self, parts: list[torch.Tensor], call: Call) -> bool:
        """Whether what lies on both ranks after a call is, to the byte, rank 0's parts, or where they are gathered everyone's."""
        marks = [torch.stack([self.mark(part, RANKS * index + rank) for rank in range(RANKS)]) for index, part in enumerate(parts)]
        for part, mark in zip(parts, marks, strict=True):
            part.view(torch.uint8).copy_(mark[self.rank])
        came = [found.view(torch.uint8) for found in call(parts)]
        same = [torch.equal(found, mark if found.dim() == mark.dim() else mark[0]) for found, mark in zip(came, marks, strict=True)]
        everywhere = torch.tensor([all(same)], dtype=torch.int32, device=self.device)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere.item())

    def mark(self, part: torch.Tensor, seed: int) -> torch.Tensor:
        """Random bytes in the part's shape, the same wherever they are made with this seed."""
        random = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(256, part.view(torch.uint8).shape, dtype=torch.uint8, device=self.device, generator=random)

    def seconds(self, action: Callable[[], object]) -> dict[str, float]:
        """Median and quartiles of REPEATS: from when both ranks are there to when both have done. Their clock is this host's."""
        taken = []
        for _ in range(WARM + REPEATS[self.device.type]):
            dist.barrier()
            self.settle()
            started = time.monotonic()
            action()
            self.settle()
            ends = torch.tensor([started, time.monotonic()], dtype=torch.float64, device=self.device)
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            taken.append(float(ends[1] - ends[0]))
        low, middle, high = statistics.quantiles(taken[WARM:], n=4)
        return {"seconds": middle, "low": low, "high": high}

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def ways(mover: Mover, shape: dict[str, Any]) -> list[tuple[str, str, str, list[torch.Tensor], Call]]:
    """What is timed: what moves, the layout it lies in, how, the parts, and the call."""
    layers, heads, batch, tokens, size = (shape[name] for name in ("layers", "heads", "batch", "tokens", "size"))
    one = mover.written((2, layers, heads, batch, tokens, size), shape["dtype"])
    many = [mover.written((batch, heads, tokens, size), shape["dtype"]) for _ in range(2 * layers)]
    found: list[tuple[str, str, str, list[torch.Tensor], Call]] = []
    for what, span in (("step", slice(tokens - 1, tokens)), ("cache", slice(0, tokens))):
        whole, apart = [one[..., span, :]], [part[..., span, :] for part in many]
        found += [
            (what, "one tensor", "send, one message", whole, mover.move),
            (what, "a tensor a layer", "send, one group", apart, mover.move),
            (what, "a tensor a layer", "send, one by one", apart, mover.one_by_one),
            (what, "one tensor", "all-gather", whole, mover.gather),
            (what, "a tensor a layer", "all-gather, one by one", apart, mover.gather),
        ]
    return found


def rank(number: int, shape: dict[str, Any], meeting: str) -> None:
    """One rank's life; rank 0 prints what was found."""
    gpus = torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", number) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=number, world_size=RANKS)
    mover = Mover(number, device)
    rows = []
    largest = LINK
    for what, layout, how, parts, call in ways(mover, shape):
        right = mover.right(parts, call)
        taken = mover.seconds(functools.partial(call, parts))
        count = sum(part.numel() * part.element_size() for part in parts)
        largest = max(largest, count)
        rows.append({"what": what, "layout": layout, "how": how, "messages": len(parts), "bytes": count, "right": right, **taken})
    plain = [mover.written((largest,), "uint8")]
    bandwidth = largest / mover.seconds(functools.partial(mover.move, plain))["seconds"]
    for row in rows:
        row["share"] = row["bytes"] / row["seconds"] / bandwidth
    dist.destroy_process_group()
    if number == 0:
        name = torch.cuda.get_device_name() if gpus else "cpu"
        link = {"bytes": largest, "bytes_per_second": bandwidth}
        said = {"backend": backend, "device": name, "ranks": RANKS, "torch": torch.__version__, "shape": shape, "link": link}
        print(json.dumps({**said, "rows": rows}), flush=True)


def main() -> None:
    # NVLink multicast stays off, and gloo needs no more than this host's own interface.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="fenno-kv-") as folder:
        # Forked before anything of torch has run: nothing is imported twice.
        torch.multiprocessing.start_processes(
            rank, (json.loads(sys.argv[1]), f"{folder}/meeting"), nprocs=RANKS, start_method="fork"
        )


if __name__ == "__main__":
    main()
