"""One decode step and peak memory with transformers' dynamic and static caches and with fenno's contiguous one, side by side.

usage: python benchmarks/kv/cache.py [--device cuda] [--dtype bfloat16] [--no-cudnn] [--tokens N ...] [--out FILE]

A Llama-shaped model with random weights: a small one on a CPU, eight layers of an 8B model on a GPU (SHAPES). Each cache is filled
with random keys and values up to a length, then STEPS tokens follow, the caches in turn at each of them, so that whatever else the
machine does falls on all. A step's time is the whole model's. On a GPU it is taken twice: as a program waits for it, and as
the GPU takes for it alone, behind a wait that lets this process launch all of it first. Memory is what one cache and its steps
need at most, above what there was with the model loaded and run once: on a CPU that of a process of its own, on a GPU what torch's
allocator gave. `--no-cudnn`: torch's attention may not take cuDNN's kernels, which have to be planned anew for every length.
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

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
}
LARGE = SMALL | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHAPES = {"cpu": SMALL, "cuda": LARGE}
STEPS = {"cpu": 64, "cuda": 64}
TOKENS = {"cpu": (256, 1024, 2048, 4096), "cuda": (256, 1024, 2048, 4096, 8192, 16384)}
BATCHES, WARM = (1, 8), 8
WAIT = 40_000_000  # cycles of a GPU's clock: 20 ms and more
CACHES = ("dynamic", "static", "contiguous")


def model(device: str, dtype: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES[device]))
    return made.to(device, getattr(torch, dtype)).eval()


def filled(name: str, model: Any, batch: int, tokens: int) -> Any:
    """A cache with `tokens` random tokens in it and room for the steps."""
    shape = SHAPES[model.device.type]
    room = tokens + STEPS[model.device.type] + WARM
    cache = {
        "dynamic": lambda: transformers.DynamicCache(config=model.config),
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=room),
        "contiguous": lambda: ContiguousCache(model.config, room),
    }[name]()
    heads = (batch, shape["num_key_value_heads"], tokens, shape["head_dim"])
    for layer in range(shape["num_hidden_layers"]):
        pair = (torch.randn(heads, device=model.device, dtype=model.dtype) for _ in range(2))
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


def alone(model: Any, cache: Any, batch: int) -> float:
    """Seconds of it on the GPU, where nothing waits for this process."""
    ids = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT)
    began.record()
    model(ids, past_key_values=cache, logits_to_keep=1)
    ended.record()
    settle(model)
    return began.elapsed_time(ended) / 1e3


def settle(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def times(model: Any, batch: int, tokens: int, taking: Any = step) -> dict[str, dict[str, float]]:
    """Of a step in ms, by cache: median, quartiles and mean; and the median of its ratios to the dynamic cache's step of the same
    turn, for a host that wanders. `taking` says how a step is taken."""
    caches = {name: filled(name, model, batch, tokens) for name in CACHES}
    taken: dict[str, list[float]] = {name: [] for name in CACHES}
    for number in range(WARM + STEPS[model.device.type]):
        turn = number % len(CACHES)
        for name in CACHES[turn:] + CACHES[:turn]:
            taken[name].append(1e3 * taking(model, caches[name], batch))
    kept = {name: values[WARM:] for name, values in taken.items()}
    return {name: {**quartiles(values), **beside(values, kept["dynamic"])} for name, values in kept.items()}


def beside(values: list[float], dynamic: list[float]) -> dict[str, float]:
    """The mean, in which the contiguous cache's making of views for many steps counts, and the ratio of the same turns."""
    ratio = statistics.median(mine / its for mine, its in zip(values, dynamic, strict=True))
    return {"mean": round(statistics.fmean(values), 3), "to_dynamic": round(ratio, 4)}


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
    """MiB that one cache and its steps take at most above the model; on a CPU only true in a process that does nothing else."""
    step(model, filled(name, model, batch, 1), batch)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = peak(model)
    cache = filled(name, model, batch, tokens)
    for _ in range(STEPS["cpu"] if model.device.type == "cpu" else WARM):
        step(model, cache, batch)
    return round(peak(model) - before, 1)


def memory_alone(args: argparse.Namespace, model: Any, name: str, batch: int, tokens: int) -> float:
    if args.device == "cuda":
        return memory(model, name, batch, tokens)
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
    parser.add_argument("--no-cudnn", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3)
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
    made = model(args.device, args.dtype)
    if args.one:
        print(memory(made, args.one[0], int(args.one[1]), int(args.one[2])))
        return
    rows = []
    for batch in BATCHES:
        for tokens in args.tokens or TOKENS[args.device]:
            row = {"batch": batch, "tokens": tokens, "step_ms": times(made, batch, tokens)}
            if args.device == "cuda":
                row["gpu_ms"] = times(made, batch, tokens, alone)
            row["memory_mib"] = {name: memory_alone(args, made, name, batch, tokens) for name in CACHES}
            rows.append(row)
            medians = [{name: found["median"] for name, found in row.get(key, {}).items()} for key in ("step_ms", "gpu_ms")]
            said = f"ms a step {medians[0]}, of the GPU alone {medians[1]}; MiB {row['memory_mib']}"
            print(f"batch {batch}, {tokens} tokens: {said}", flush=True)
            # After each row: what was measured is kept, whatever ends the rest.
            document = {
                **host(args.device),
                "cudnn": not args.no_cudnn,
                "dtype": args.dtype,
                "shape": SHAPES[args.device],
                "steps": STEPS[args.device],
            }
            if args.out:
                args.out.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
