"""Whether vLLM, really started, takes and refuses the pairs of layout and block size that `fenno patch-kv plan` says it does.

usage: python benchmarks/kv/starts.py PLAN.json MODEL RESULTS [--limit SECONDS] [--gpus N]

For each backend that the plan calls usable three legal pairs, with the smallest blocks and the largest, and two illegal ones, all
engines at once, spread over the GPUs: a model of two layers in the folder MODEL with random weights, eight tokens. RESULTS gets
starts.json and a log for each engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "fenno-start:"


def pairs(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The pairs to start: of every usable backend the first two legal ones and the last, and the first and the last illegal one."""
    found = []
    for name, backend in plan["backends"].items():
        for legal, listed, first in ((True, backend["legal"], 2), (False, backend["illegal"], 1)):
            for pair in [*listed[:first], *listed[first:][-1:]]:
                said = {"backend": name, "layout": pair["layout"], "block": pair["block"], "legal": legal}
                found.append({**said, "plan": pair.get("why", "")})
    return found


def one(pair: dict[str, Any], model: str) -> None:
    """One engine in this process: what it made of its cache, and what it answers."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_KV_CACHE_LAYOUT": pair["layout"]}
    from vllm import LLM, SamplingParams

    given: dict[str, Any] = {"attention_config": {"backend": pair["backend"]}} if "cuda" in pair["platform"] else {}
    engine = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        block_size=pair["block"],
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=64 * 2**20,
        **given,
    )
    cache = engine.collective_rpc(laid_out)[0]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    said = engine.generate([{"prompt_token_ids": list(range(1, 101))}], greedy, use_tqdm=False)
    print(MARK + json.dumps({"cache": cache, "tokens": list(said[0].outputs[0].token_ids)}), flush=True)


def laid_out(worker: Any) -> list[list[int]]:
    """Shape and strides of the first layer's cache."""
    first = worker.model_runner.kv_caches[0]
    return [list(first.shape), list(first.stride())] if hasattr(first, "shape") else []


def started(pair: dict[str, Any], number: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """That engine in a child process, which its own `timeout` ends."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number % args.gpus)} if args.gpus else dict(os.environ)
    own = [sys.executable, __file__, args.plan, args.model, args.results, "--one", json.dumps(pair)]
    with (Path(args.results) / f"start-{number:02}.log").open("wb") as log:
        return subprocess.Popen(["timeout", "-k", "5", str(args.limit), *own], stdout=log, stderr=log, env=env)


def outcome(pair: dict[str, Any], text: str, code: int) -> dict[str, Any]:
    """What came of one: the engine's answer, or the last error it named."""
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    errors = [line.split("Error: ", 1) for line in text.splitlines() if "Error: " in line]
    said = json.loads(line.removeprefix(MARK)) if line else {"error": errors[-1][1][:300] if errors else text[-300:]}
    return {**pair, "started": line is not None, "code": code, **said}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("model")
    parser.add_argument("results")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--one")
    args = parser.parse_args()
    if args.one:
        one(json.loads(args.one), args.model)
        return
    plan = json.loads(Path(args.plan).read_text().splitlines()[-1])
    began = time.monotonic()
    wanted = [{**pair, "platform": plan["platform"]} for pair in pairs(plan)]
    running = [started(pair, number, args) for number, pair in enumerate(wanted)]
    found = []
    for number, (pair, child) in enumerate(zip(wanted, running, strict=True)):
        code = child.wait()
        found.append(outcome(pair, (Path(args.results) / f"start-{number:02}.log").read_text(errors="replace"), code))
        print({key: found[-1].get(key) for key in ("backend", "layout", "block", "legal", "started", "error")}, flush=True)
    said = {"vllm": plan["engine"], "seconds": round(time.monotonic() - began, 1), "starts": found}
    (Path(args.results) / "starts.json").write_text(json.dumps(said, indent=1) + "\n")
    agree = sum(each["legal"] == each["started"] for each in found)
    print(f"{agree} of {len(found)} starts agree with the plan", flush=True)


if __name__ == "__main__":
    main()
