"""Real starts on the CPU beside their plans: KV cache and other memory of small models of each kind, and what was planned.

usage: python benchmarks/plan/starts.py [--python PY] [--only NAME] [--out FILE]      (half a minute and more a start)

PY: an interpreter with vLLM's CPU engine. Weights are random: `--load-format dummy`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from fenno import machine
from fenno.engine import catalogue, dummy, server
from fenno.errors import EngineError
from fenno.plan import make
from fenno.plan.gpus import GIB, Device
from fenno.recipe import Recipe

WORDS = re.compile(r"KV cache size: ([\d,]+) tokens")
SIZES = {
    **{"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    **{"intermediate_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16"},
}
SPACE = 1  # GiB of cache
FLAGS = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 512,
        "tie_word_embeddings": False,
    },
    "mixed windows": {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 14, "sliding_window": 512},
        **{"query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000},
    },
    "experts": {
        **{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
        **{"sliding_window": None, "tie_word_embeddings": False},
    },
    "latent": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 8, "head_dim": None},
        **{"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        **{"moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "tie_word_embeddings": False, "n_group": 1, "topk_group": 1},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy"},
    },
}


def start(name: str, folder: Path, python: str) -> dict[str, Any]:
    """Tokens of cache that a start reports, and what its processes hold beside the cache; and what was planned of both."""
    config = {key: value for key, value in {**SIZES, **MODELS[name], "hidden_act": "silu"}.items() if value is not None}
    files = dummy.files(config)
    place = folder / name.replace(" ", "-")
    place.mkdir()
    for file, content in files.items():
        (place / file).write_text(json.dumps(content), encoding="utf-8")
    flags = {
        "load-format": "dummy",
        "max-model-len": 4096,
        "enforce-eager": True,
        "max-num-batched-tokens": 1024,
        "dtype": "bfloat16",
    }
    engine = {"model": str(place), "python": python, "flags": flags, "env": {"VLLM_CPU_KVCACHE_SPACE": str(SPACE)}}
    recipe = Recipe.model_validate({"name": "start", "engine": engine, "host": {"gpus": 0}})
    planned = make.make(recipe, files["config.json"], Device("CPU", machine.memory_limit()), 0)
    with server.serving(recipe, folder / f"log-{place.name}") as running:
        log = running.log.read_text(errors="replace")
        beside = machine.resident(running.pids()) - SPACE * GIB  # all of the cache is in memory from the start
    found = WORDS.search(log)
    reported = int(found[1].replace(",", "")) if found else None
    other = sum(planned["weights"].values()) + sum(planned["rest"].values())
    memory = {"planned_beside_gib": round(other / GIB, 2), "beside_gib": round(beside / GIB, 2)}
    return {"planned": planned["cache"]["tokens"], "reported": reported, **memory, "config": files["config.json"]}


def main() -> None:
    """Every start, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    host = machine.probe()
    known = catalogue.read(catalogue.interpreter(asked.python)).engine
    document: dict[str, Any] = {
        "date": datetime.now().isoformat(timespec="minutes"),
        "host": f"{host.processor}, {host.cores} cores",
    }
    document |= {"engine": f"{known.distribution} {known.version}", "flags": FLAGS, "starts": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in [asked.only] if asked.only else MODELS:
            try:
                document["starts"][name] = start(name, Path(folder), asked.python)
            except EngineError as error:
                document["starts"][name] = {"error": str(error)}
            print(name, {key: value for key, value in document["starts"][name].items() if key != "config"}, flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
