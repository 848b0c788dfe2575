"""Times attention calls of several builds of flash_attn, and torch's own, by interleaved replays of CUDA graphs.

Standard input: {"libraries": {name: path of flash_attn_2_cuda*.so}, "variants": {name: variables of the environment that its calls
see}, "shapes": [`verify.Case`, …]}. Prints one line of JSON with the cost of first calls and of launches, one for each shape, and
{"done": true}.
"""

import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS = 41
GRAPH_US = 1000.0  # a replay lasts about so long, so that the clock's grain and the launch of the graph do not count
Call = Callable[[], Any]


def load(name: str, path: str) -> ModuleType:
    """A build's module. Several can be there at once under names of their own: pybind11 gives one name one module, and the second
    build would be the first."""
    spec = importlib.util.spec_from_file_location(f"{name}.flash_attn_2_cuda", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(case: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    rest = {"device": "cuda", "dtype": DTYPES[case["dtype"]]}
    q = torch.randn(case["batch"], case["queries"], case["heads"], case["head_dim"], **rest)
    k, v = (torch.randn(case["batch"], case["keys"], case["kv_heads"], case["head_dim"], **rest) for _ in range(2))
    filled = torch.full((case["batch"],), case["keys"], device="cuda", dtype=torch.int32)
    return q, k, v, filled


def flash(module: ModuleType, case: dict[str, Any], q: Any, k: Any, v: Any, filled: Any) -> Call:
    """A call as flash_attn's own Python makes it."""
    scale, left = 1 / math.sqrt(case["head_dim"]), case["window"] or -1
    right = 0 if case["window"] and case["causal"] else -1
    mask = (case["causal"], left, right, case["softcap"])
    if case["kind"] == "whole":
        return lambda: module.fwd(q, k, v, None, None, 0.0, scale, *mask, False, None)
    nothing = (None,) * 2, (None,) * 7  # no new keys and values; no rotary, index, padding, pages, slopes, output
    return lambda: module.fwd_kvcache(q, k, v, *nothing[0], filled, *nothing[1], scale, *mask, True, 0)


def under(variables: dict[str, str], call: Call) -> Call:
    """A call that sees these variables of the environment; a graph sees them when it is captured."""

    def made() -> Any:
        os.environ.update(variables)
        return call()

    return made if variables else call


def sdpa(case: dict[str, Any], q: Any, k: Any, v: Any) -> Call:
    """torch's own attention on the same numbers; it has no soft cap."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = case["causal"] and case["queries"] > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def seconds(call: Call, times: int = 1) -> float:
    """Until the GPU has done it `times` times."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def launch(call: Call, times: int = 200) -> float:
    """Microseconds of this thread for one call, while the GPU is behind."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / times * 1e6


def graph(call: Call) -> tuple[Any, int]:
    """A graph of so many calls that a replay lasts about a millisecond."""
    for _ in range(3):
        call()
    count = max(1, min(100, round(GRAPH_US / (seconds(call, 10) * 1e6))))
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(count):
            call()
    return made, count


def replayed(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Microseconds a call, by name; in each round every graph once, and another one first in each."""
    graphs = {name: graph(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for turn in range(ROUNDS + 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            made, count = graphs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end) * 1000 / count)
    quartiles = {name: statistics.quantiles(found, n=4) for name, found in times.items()}
    return {name: {"low": low, "median": median, "high": high} for name, (low, median, high) in quartiles.items()}


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    asked = json.load(sys.stdin)
    modules = {name: load(name, path) for name, path in asked["libraries"].items()}
    variants = asked["variants"]
    assert len({id(module) for module in modules.values()}) == len(modules), "one build was loaded twice"
    small = min(asked["shapes"], key=lambda case: case["batch"] * case["queries"] * case["keys"])
    made = tensors(small)
    calls = {name: under(variants.get(name, {}), flash(module, small, *made)) for name, module in modules.items()}
    torch.cuda.synchronize()
    first = {name: seconds(call) * 1000 for name, call in calls.items()}
    say({"first_call_ms": first, "launch_us": {name: launch(call) for name, call in calls.items()}})
    for case in asked["shapes"]:
        made = tensors(case)
        calls = {name: under(variants.get(name, {}), flash(module, case, *made)) for name, module in modules.items()}
        say({"shape": case, "times": replayed({**calls, "sdpa": sdpa(case, *made[:3])})})
    say({"done": True})


if __name__ == "__main__":
    main()
