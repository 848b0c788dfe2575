"""Whether vLLM's CPU engine itself answers in the ways of sharing a model in which Grok does not: small models of vLLM's own.

usage: python benchmarks/grok/others.py [--python PY] [--out FILE]     (some two minutes on two cores)

A Llama and a Mixtral of two layers with random weights on two ranks: tensor, pipeline and expert parallel, no plugin loaded.
Each engine is a child that ends after 110 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMON = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "float32"},
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON},
    "Mixtral": {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **COMMON, **EXPERTS},
}
WAYS = {
    "Llama, two pipeline stages": {"pipeline_parallel_size": 2},
    "Mixtral, two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "Mixtral, two expert-parallel ranks": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
# The crash of a kernel, and its place.
CRASH = re.compile(r"(Segfault|SIG\w+) encountered.*?File \"[^\"]*?(csrc/[^\"]+)\", line (\d+)", re.DOTALL)


def one(folder: str, options: dict[str, Any]) -> None:
    """One engine in this process."""
    from vllm import LLM, SamplingParams, __version__

    usual = {"enforce_eager": True, "max_num_seqs": 4, "max_model_len": 256, "dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(model=folder, load_format="dummy", **usual, **options)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    said = llm.generate([{"prompt_token_ids": list(range(1, 40))}], greedy, use_tqdm=False)
    print("others:" + json.dumps({"vllm": __version__, "tokens": list(said[0].outputs[0].token_ids)}), flush=True)


def started(python: str, home: Path, way: str) -> dict[str, Any]:
    """What comes of one way: its answer, or how its engine ended."""
    folder = home / way.replace(" ", "-")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[way.partition(",")[0]]))
    first, second = sorted(os.sched_getaffinity(0))[:2]
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
    env = {**os.environ, **quiet, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"}
    argv = ["timeout", "-k", "5", "110", python, __file__, "--one", str(folder), json.dumps(WAYS[way])]
    child = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=home)
    answer = re.search(r"^others:(.*)$", child.stdout, re.MULTILINE)
    if answer:
        return dict(json.loads(answer[1]))
    text = child.stdout + child.stderr
    if crash := CRASH.search(text):
        return {"code": child.returncode, "why": f"{crash[1]} in {crash[2]}, line {crash[3]}"}
    errors = re.findall(r"^(?!.*WARNING).*?\b(assert .+|\w+Error\b.*)$", text, re.MULTILINE)
    return {"code": child.returncode, "why": [*errors, text[-200:]][0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], json.loads(given.one[1]))
        return
    from beside import host, write

    with tempfile.TemporaryDirectory() as folder:
        found = {way: started(given.python, Path(folder), way) for way in WAYS}
    write(host() | {"ways": found}, given.out)


if __name__ == "__main__":
    main()
