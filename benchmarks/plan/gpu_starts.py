"""Real starts on one GPU beside their plans: shapes in published sizes with random weights, one of which does not fit. The last two
had no part in making the plan's allowances.

usage: python benchmarks/plan/gpu_starts.py RESULTS [--python PY] [--gpu-type H200] [--only NAME]... [--limit S] [--tiny]
       python benchmarks/plan/gpu_starts.py --log ENGINE_LOG...       (what a log says, without a start)

PY: an interpreter with vLLM. It takes the GPU of CUDA_VISIBLE_DEVICES, for at most `--limit` seconds a start; two of these with a
GPU and folder each may share the shapes by `--only`. `--tiny`: small sizes on the CPU engine, a rehearsal. RESULTS gets
starts.json, written anew after each start, and a folder for each shape: recipe, config, the engine's log. The exit code is 1 where
a start misses a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from fenno import machine, process
from fenno.engine import catalogue, dummy, server
from fenno.errors import FennoError
from fenno.recipe import Recipe

GIB = 2**30
# The issue's: memory other than the cache in GiB, and the cache's tokens as a share of what the engine reports.
BARS = {"other_gib": 1.0, "tokens": 0.03}
LLAMA = dummy.LLAMA3_8B
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"config": LLAMA, "flags": {"max-model-len": 8192}},
    "experts": {
        "config": dummy.SHAPES["grok2-12b"],
        # vLLM 0.24 expects the published tokenizer file beside this architecture.
        "flags": {"max-model-len": 4096, "max-num-batched-tokens": 16384, "tokenizer-mode": "hf"},
    },
    "long": {
        "config": {
            **LLAMA,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
        "flags": {"max-model-len": 131072},
    },
    "fp8 cache": {"config": LLAMA, "flags": {"max-model-len": 8192, "kv-cache-dtype": "fp8"}},
    "too large": {
        "config": {
            **{**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
            "num_attention_heads": 64,
        },
        "flags": {"max-model-len": 8192},
    },
    "unseen 7b": {
        "config": {
            **{**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584},
            **{"intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        },
        "flags": {"max-model-len": 8192},
    },
    "unseen 24b": {
        "config": {
            **{**LLAMA, "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40},
            "head_dim": 128,
        },
        "flags": {"max-model-len": 8192},
    },
}
TINY = {
    **{"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 512},
    **{"head_dim": 64, "moe_intermediate_size": 256, "vocab_size": 320},
}
# What the engine's log says, in GiB where no other unit is named; the last of each counts. vLLM says the last four at DEBUG.
WORDS = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "cache_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "tokens": r"KV cache size: ([\d,]+) tokens",
    "graphs_planned_gib": r"Estimated CUDA graph memory: ([\d.]+) GiB",
    "graphs_gib": r"CUDA graph pool memory: ([\d.]+) GiB|Graph capturing finished in .* took ([\d.]+) GiB",
    "share_gib": r"Desired GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
    "whole_gib": r"Free memory on device \([\d.]+/([\d.]+) GiB\)",
    "activations_gib": r"([\d.]+) GiB for peak activation",
    "outside_torch_gib": r"([\d.]+) GiB for non-torch memory",
}


def report(log: str) -> dict[str, float]:
    """What an engine reports of its memory at its start, under the names of `WORDS`; what it does not say is left out."""
    found = {name: re.findall(words, log) for name, words in WORDS.items()}
    texts = {name: "".join(last[-1]) if last else "" for name, last in found.items()}
    return {name: float(text.replace(",", "")) for name, text in texts.items() if text}


def planned(plan: dict[str, Any]) -> dict[str, float]:
    """The plan's figures under the same names."""
    # What lies beside the engine's share weighs nothing in the rest, and is captured all the same.
    rest = {name: size / GIB for name, size in {**plan["rest"], **plan["beside"]}.items()}
    return {
        "weights_gib": sum(plan["weights"].values()) / GIB,
        "cache_gib": plan["cache"]["room"] / GIB,
        "tokens": plan["cache"]["tokens"],
        "graphs_gib": rest.get("CUDA graphs", 0.0),
        "share_gib": plan["limit"] / GIB,
        "whole_gib": plan["device"]["memory"] / GIB,
        "activations_gib": rest.get("activations", 0.0),
        "outside_torch_gib": rest.get("libraries", 0.0),
    }


def compared(plan: dict[str, float], said: dict[str, float]) -> dict[str, Any]:
    """Planned, reported and the difference of each, and of what the share of memory has beside the cache; whether the bars hold."""
    share = said.get("share_gib", plan["share_gib"])
    both = {name: (plan[name], said[name]) for name in plan if name in said}
    if "cache_gib" in said:
        both["other_gib"] = (plan["share_gib"] - plan["cache_gib"], share - said["cache_gib"])
    table = {
        name: {"planned": round(one, 3), "reported": round(two, 3), "difference": round(one - two, 3)}
        for name, (one, two) in both.items()
    }
    held = {}
    if "other_gib" in table:
        held["other_gib"] = abs(table["other_gib"]["difference"]) <= BARS["other_gib"]
    if "tokens" in table:
        held["tokens"] = abs(table["tokens"]["difference"]) <= BARS["tokens"] * table["tokens"]["reported"]
    return {"table": table, "held": held}


def written(name: str, place: Path, args: argparse.Namespace) -> Path:
    """The recipe of a shape, beside its model."""
    shape = SHAPES[name]
    config = shape["config"] | ({key: size for key, size in TINY.items() if key in shape["config"]} if args.tiny else {})
    model = place / "model"
    model.mkdir(parents=True, exist_ok=True)
    for file, content in dummy.files(config).items():
        (model / file).write_text(json.dumps(content), encoding="utf-8")
    flags = {"load-format": "dummy", "dtype": "bfloat16", **shape["flags"]}
    engine: dict[str, Any] = {"model": str(model), "python": args.python, "flags": flags, "ready_timeout": args.limit}
    engine["env"] = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    if args.tiny:
        # The tiny one that is too large asks for too much cache.
        engine["env"] |= {"VLLM_CPU_KVCACHE_SPACE": "1000000" if name == "too large" else "1"}
        flags |= {"max-num-batched-tokens": 1024, "enforce-eager": True}
    recipe = {"name": name.replace(" ", "-"), "engine": engine, "host": {"gpus": 0 if args.tiny else 1}}
    path = place / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1) + "\n", encoding="utf-8")
    return path


def asked(recipe: Path, args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What `fenno plan` says of a recipe, and its exit code."""
    kind = "CPU" if args.tiny else args.gpu_type
    done = process.run([*process.module("fenno"), "plan", str(recipe), "--gpu-type", kind, "--json"], timeout=60.0)
    return json.loads(done.stdout or "{}"), done.returncode


def refused(recipe: Path, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What `fenno serve` says of one that does not fit, in at most so many seconds, and whether it started an engine."""
    env = {"XDG_CACHE_HOME": str(place / "cache")}
    began = time.monotonic()
    done = process.run([*process.module("fenno"), "serve", str(recipe)], timeout=args.limit, env=env)
    logs = [str(path) for path in (place / "cache").rglob("engine.log")]
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"code": done.returncode, "said": said[-12:], "seconds": round(time.monotonic() - began, 1), "started": logs != []}


def shape(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Plan and start of one shape."""
    place = args.results / name.replace(" ", "-")
    path = written(name, place, args)
    plan, code = asked(path, args)
    found: dict[str, Any] = {"flags": SHAPES[name]["flags"], "plan": {"code": code, "ways": plan.get("ways"), **plan_memory(plan)}}
    if code:
        served = refused(path, place, args)
        return found | {"serve": served, "held": {"refused": code == 3 and served["code"] > 0 and not served["started"]}}
    chosen = Recipe.model_validate(json.loads(path.read_text()))
    log, began = place / "engine.log", time.monotonic()
    try:
        with server.serving(chosen, place):
            found["start_seconds"] = round(time.monotonic() - began, 1)
    except FennoError as error:
        found["error"] = f"{error} ({error.hint})"
    said = report(log.read_text(errors="replace")) if log.exists() else {}
    return found | {"reported": said} | compared(planned(plan), said)


def plan_memory(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: plan.get(key) for key in ("limit", "weights", "rest", "cache", "fits", "lacks")}


def told(name: str, found: dict[str, Any]) -> None:
    """A shape's table on stdout."""
    print(f"{name}: {found.get('start_seconds', '-')} s; bars {found.get('held')} {found.get('error', '')}", flush=True)
    for row, each in found.get("table", {}).items():
        figures = "  ".join(f"{column} {each[column]:>13,.2f}" for column in ("planned", "reported", "difference"))
        print(f"  {row:18} {figures}", flush=True)
    for line in found.get("serve", {}).get("said", []):
        print(f"  serve: {line}", flush=True)


def document(args: argparse.Namespace) -> dict[str, Any]:
    host = machine.probe()
    return {
        "date": datetime.now().isoformat(timespec="minutes"),
        "host": f"{host.processor}, {host.cores} cores",
        "gpus": [f"{gpu.name}, driver {gpu.driver}" for gpu in host.gpus],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "bars": BARS,
        "starts": {},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--gpu-type", default="H200")
    parser.add_argument("--only", action="append", choices=SHAPES)
    parser.add_argument("--limit", type=float, default=180.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--log", type=Path, action="extend", nargs="+", default=[])
    args = parser.parse_args()
    for log in args.log:
        print(json.dumps({"log": str(log), **report(log.read_text(errors="replace"))}, indent=1))
    if args.results is None:
        return 0
    args.results = args.results.resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    found = document(args)
    for name in args.only or SHAPES:
        try:
            found["starts"][name] = shape(name, args)
        except (FennoError, OSError, ValueError, KeyError) as error:
            found["starts"][name] = {"error": f"{type(error).__name__}: {error}"}
        told(name, found["starts"][name])
        (args.results / "starts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    # What the engine is costs another start of Python; it comes last, so that nothing waits for it.
    known = catalogue.read(catalogue.interpreter(args.python)).engine
    found["engine"] = f"{known.distribution} {known.version}"
    (args.results / "starts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    held = [each.get("held") for each in found["starts"].values()]
    return 0 if all(bars and all(bars.values()) for bars in held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
