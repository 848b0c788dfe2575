"""One decode step and peak memory with transformers' dynamic and static caches and with fenno's contiguous one, side by side.

usage: python benchmarks/kv/cache.py [--device cuda] [--dtype bfloat16] [--out FILE]    (about five minutes on two cores)

A Llama-shaped model with random weights (SHAPE). Each cache is filled with random keys and values up to a length, then STEPS tokens
follow, the caches in turn at each of them, so that whatever else the machine does falls on all. A step's time is the whole model's.
Memory is what a process of its own needs at most for one cache and its steps, above what it had with the model loaded and run once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from fenno.kv import ContiguousCache

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
TOKENS, BATCHES, STEPS, WARM = (256, 1024, 2048, 4096), (1, 8), 40, 8
CACHES = ("dynamic", "static", "contiguous")


def model(device: str, dtype: str) -> Any:
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    return made.to(device, getattr(torch, dtype)).eval()


def filled(name: str, model: Any, batch: int, tokens: int) -> Any:
    """A cache with `tokens` random tokens in it and room for the steps."""
    room = tokens + STEPS + WARM
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=room),
        "contiguous": lambda: ContiguousCache(model.config, room),
    }[name]()
    shape = (batch, SHAPE["num_key_value_heads"], tokens, SHAPE["head_dim"])
    for layer in range(SHAPE["num_hidden_layers"]):
        pair = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(*pair, layer)
    return cache


def step(model: Any, cache: Any, batch: int) -> float:
    """Seconds of one token for each row."""
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    settle(model)
    started = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    settle(model)
    return time.perf_counter() - started


def settle(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def times(model: Any, batch: int, tokens: int) -> dict[str, dict[str, float]]:
    """Median and quartiles of a step in ms, by cache."""
    caches = {name: filled(name, model, batch, tokens) for name in CACHES}
    taken: dict[str, list[float]] = {name: [] for name in CACHES}
    for number in range(WARM + STEPS):
        turn = number % len(CACHES)
        for name in CACHES[turn:] + CACHES[:turn]:
            taken[name].append(1e3 * step(model, caches[name], batch))
    return {name: quartiles(values[WARM:]) for name, values in taken.items()}


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def peak(model: Any) -> float:
    """The most memory that this process ever had, in MiB."""
    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    # Not getrusage: what it says begins with the memory of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def memory(model: Any, name: str, batch: int, tokens: int) -> float:
    """MiB that one cache and its steps take at most above the model; only true in a process that did nothing else before."""
    step(model, filled(name, model, batch, 1), batch)
    before = peak(model)
    cache = filled(name, model, batch, tokens)
    for _ in range(STEPS):
        step(model, cache, batch)
    return round(peak(model) - before, 1)


def memory_elsewhere(args: argparse.Namespace, name: str, batch: int, tokens: int) -> float:
    own = [sys.executable, __file__, "--device", args.device, "--dtype", args.dtype, "--one", name, str(batch), str(tokens)]
    return float(subprocess.run(own, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def host(device: str) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    made = model(args.device, args.dtype)
    if args.one:
        print(memory(made, args.one[0], int(args.one[1]), int(args.one[2])))
        return
    rows = []
    for batch in BATCHES:
        for tokens in TOKENS:
            row = {"batch": batch, "tokens": tokens, "step_ms": times(made, batch, tokens)}
            row["memory_mib"] = {name: memory_elsewhere(args, name, batch, tokens) for name in CACHES}
            rows.append(row)
            medians = {name: found["median"] for name, found in row["step_ms"].items()}
            print(f"batch {batch}, {tokens} tokens: ms a step {medians}; MiB {row['memory_mib']}", flush=True)
    document = {**host(args.device), "dtype": args.dtype, "shape": SHAPE, "steps": STEPS, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
