"""A small random Grok-2 on GPUs: each way to share it between two, CUDA graphs, and FP8, beside the reference and one GPU's answer.

usage: python benchmarks/grok/ways.py [--device cuda|cpu] [--python PY] [--only WAY]... [--dtype DTYPE]... [--out FILE]

PY: an interpreter with vLLM. With 0.24, its own Grok stands beside fenno's, with the differences out that own.py names. On the CPU
expert parallelism wants 0.24, where plain_experts.py stands in for the kernel of vLLM's that crashes there.

Log-probabilities, since several ranks say no logits up to vLLM 0.28: |difference| / max |other|, of the worst and of the median
position. In bfloat16 a router may choose another expert, so there the worst position says little. Float32 products are whole
ones, no TF32, or no way would come near the reference. A way that fails is written down with the end of what it printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from beside import apart, ask, host, typical, write
from grok_reference import Reference
from logits import prompts
from own import BAR, DIFFERENCES
from ranks import CAPS, PARTS, bound

from fenno.engine import checkpoint, dummy
from fenno.errors import ProcessError
from fenno.vllm_plugin import grok_versions

# Heads as the GPU's attention kernels take them; 0.24's own takes the hidden size over the number of heads for a head's.
SIZE = dummy.Size(layers=4, hidden=512, heads=8, kv_heads=4, head=64, expert=512, shared=512)
CUT = {"load_format": grok_versions.LOAD_FORMAT}
# By default none is captured for more tokens than twice the sequences: fewer than any step has here.
GRAPHS = {"enforce_eager": False, "max_num_batched_tokens": 256, "compilation_config": {"cudagraph_capture_sizes": [16, 64, 256]}}
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "graphs": GRAPHS,
    "tp2": CUT | {"tensor_parallel_size": 2},
    "pp2": CUT | {"pipeline_parallel_size": 2},
    "pp2 whole": {"pipeline_parallel_size": 2},
    "ep2": CUT | EXPERTS,
    "ep2 filter": EXPERTS | {"enable_ep_weight_filter": True},
    "fp8": {"quantization": "fp8"},
    "own": {},
    "own fp8": {"quantization": "fp8"},
}
BFLOAT16_ONLY = ("fp8", "own", "own fp8")
# Several engines share a GPU, so each has a small part of it.
SHARE = {"gpu_memory_utilization": 0.04, "kv_cache_memory_bytes": 2**28}


def job(home: Path, way: str, dtype: str, device: str) -> dict[str, Any]:
    """How to get what `way` says in `dtype`."""
    options = {"dtype": dtype} | WAYS[way] | (SHARE if device == "cuda" else {})
    folder = str(home / dtype / ("cut" if "load_format" in options else "whole"))
    env = {"TRITON_F32_DEFAULT": "ieee"} | ({} if way.startswith("own") else {grok_versions.FORCE: "1"})
    if device == "cpu":
        env |= bound(max(options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)))
        options |= {"worker_extension_cls": "plain_experts.Worker"} if "enable_expert_parallel" in options else {}
    if not way.startswith("own"):
        return {"folder": folder, "options": options, "env": env}
    config = DIFFERENCES["grok2"]["caps logits, then multiplies"]["own"]["config"]
    return {"folder": folder, "options": options | {"hf_overrides": config}, "tanh": True, "env": env}


def said(python: str, home: Path, one: dict[str, Any], seconds: float) -> tuple[torch.Tensor | None, dict[str, str]]:
    """Log-probabilities [positions, vocabulary] of one job and who computed them, or None and why not. `home` is made for it."""
    home.mkdir()
    try:
        logits, who = ask(python, home, [one], timeout=seconds)
    except (SystemExit, ProcessError) as error:
        return None, {"failed": str(error)[-3000:]}
    return logits[0].log_softmax(-1), who[0]


def beside(found: dict[tuple[str, str], Any], right: dict[str, torch.Tensor]) -> dict[str, Any]:
    """By dtype and way: how far from the reference, from one GPU's, and in FP8 from 0.24's own FP8."""
    table: dict[str, Any] = {}
    for (dtype, way), (ours, who) in found.items():
        others = {"reference": right[dtype], "one": found.get((dtype, "one"), [None])[0]}
        if way == "fp8":
            others["own fp8"] = found.get((dtype, "own fp8"), [None])[0]
        pairs = {name: other for name, other in others.items() if ours is not None and other is not None and name != way}
        errors = {f"from_{name}": {"largest": apart(ours, other), "median": typical(ours, other)} for name, other in pairs.items()}
        table.setdefault(dtype, {})[way] = who | errors
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", action="append", choices=WAYS)
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"))
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long one way may take")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    dtypes = given.dtype or ["float32", "bfloat16"]
    wanted = [(dtype, way) for dtype in dtypes for way in given.only or WAYS if dtype == "bfloat16" or way not in BFLOAT16_ONLY]
    right = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        home = Path(folder)
        for dtype in dtypes:
            for place, parts in (("cut", PARTS), ("whole", 0)):
                config = dummy.grok2(SIZE, dtype) | CAPS
                checkpoint.make(config, home / dtype / place, python=given.python, std=0.05, seed=1, parts=parts)
            reference = Reference(home / dtype / "whole")
            right[dtype] = torch.cat([reference.logits(tokens) for tokens in prompts()]).log_softmax(-1)
        asked = [
            pool.submit(said, given.python, home / f"{dtype} {way}", job(home, way, dtype, given.device), given.seconds)
            for dtype, way in wanted
        ]
        table = beside(dict(zip(wanted, [one.result() for one in asked], strict=True)), right)
    facts = {"layers": SIZE.layers, "files_cut_for": PARTS, "positions": sum(map(len, prompts())), "bar_in_float32": BAR}
    write(host() | {"device": given.device} | facts | table, given.out)
    failed = any("failed" in one for ways in table.values() for one in ways.values())
    return 1 if failed or any(one["from_reference"]["largest"] > BAR for one in table.get("float32", {}).values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
