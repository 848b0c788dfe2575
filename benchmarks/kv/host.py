"""What storing a token costs the host, with transformers' dynamic cache and with fenno's contiguous one: calls of torch, and time.

usage: python benchmarks/kv/host.py [--out FILE]

On a CPU, one thread, with a Llama of eight layers that is so small that what is measured is Python and torch's dispatch, not bytes:
on a GPU this is what a step waits for where the GPU is quicker than its host. Caches are emptied every TOKENS steps, for more
would be read from memory. Taken twice: `update` of all layers one after the other, and within steps of the whole model, the
caches in turn; with the median the mean, for the contiguous cache makes its views for many steps at one. The calls are those of a
step of the whole model, the mean of TOKENS steps from an empty cache, by name where the caches differ; those are the same on a GPU.
To compare with another commit, put its checkout first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from cache import host, quartiles
from torch.utils._python_dispatch import TorchDispatchMode

from fenno.kv import ContiguousCache

LAYERS, TOKENS, STEPS = 8, 40, 1200
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def alone(cache: Any, model: Any) -> float:
    """Seconds of `update` for all layers."""
    new = torch.zeros(1, SHAPE["num_key_value_heads"], 1, SHAPE["head_dim"])
    began = time.perf_counter()
    for layer in range(LAYERS):
        cache.update(new, new, layer)
    return time.perf_counter() - began


def within(cache: Any, model: Any) -> float:
    """The same within one step of the model."""
    spent, usual = 0.0, type(cache).update

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        said = usual(cache, *given, **named)
        spent += time.perf_counter() - began
        return said

    cache.update = timed
    model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    del cache.update
    return spent


def both(model: Any) -> dict[str, Any]:
    return {"dynamic": transformers.DynamicCache(config=model.config), "contiguous": ContiguousCache(model.config, TOKENS)}


class Counted(TorchDispatchMode):
    """Counts what torch is called for, by name: kernels and views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls(model: Any) -> dict[str, dict[str, float]]:
    """Calls of torch in one step of the model, by cache: all of them, and those of which the caches need different numbers."""
    found = {}
    for name, cache in both(model).items():
        with Counted() as counted:
            for _ in range(TOKENS):
                model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        found[name] = counted.calls
    kinds = sorted(kind for kind in set.union(*map(set, found.values())) if len({counts[kind] for counts in found.values()}) > 1)
    told = {name: {"all": counts.total(), **{kind: counts[kind] for kind in kinds}} for name, counts in found.items()}
    return {name: {kind: round(number / TOKENS, 1) for kind, number in counts.items()} for name, counts in told.items()}


def times(taking: Any, model: Any) -> dict[str, dict[str, float]]:
    """Median, quartiles and mean in microseconds a layer, by cache."""
    caches = both(model)
    taken: dict[str, list[float]] = {name: [] for name in caches}
    for number in range(STEPS):
        if number % TOKENS == 0:
            for cache in caches.values():
                cache.reset()
        for name in list(caches)[:: 1 if number % 2 else -1]:
            taken[name].append(1e6 * taking(caches[name], model) / LAYERS)
    kept = {name: values[TOKENS:] for name, values in taken.items()}
    return {name: {**quartiles(values), "mean": round(statistics.fmean(values), 3)} for name, values in kept.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    found = {"alone": times(alone, model), "within_a_step": times(within, model)}
    told = {"calls_a_step": calls(model), "us_a_layer": found}
    print(json.dumps(told))
    if args.out:
        args.out.write_text(json.dumps({**host("cpu"), "shape": SHAPE, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
