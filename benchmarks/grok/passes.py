"""Run as a script under an engine's Python: one Grok in vLLM that runs workloads when told to, and says how long each took.

Its argument is JSON: `folder` (the model's) and `options` for vLLM's `LLM`. Once it is up it says what it is; then each line on
stdin is a workload, JSON with `sequences`, and `prompt` and `answer` (tokens of each), and each answer is one line on stdout: its
seconds. Everything that vLLM says goes to stderr. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, TextIO

WORDS = 256


def channel() -> TextIO:
    """What was stdout, for the answers alone; from here on everything else that is written goes to stderr."""
    kept = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return kept


def spread(model: Any) -> str:
    """Random weights by which tokens choose experts as differently as they do in a trained model: vLLM's dummy weights are a
    thousandth, and the same in each matrix. What is quantised stays as it is. Says which class the model has."""
    import torch

    torch.manual_seed(7)
    for name, weight in model.named_parameters():
        if weight.dtype in (torch.bfloat16, torch.float32) and "scale" not in name and "bias" not in name:
            weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(0.0, 0.02)
    return f"{type(model).__module__}.{type(model).__name__}"


def workload(llm: Any, given: dict[str, int]) -> float:
    """Seconds for all sequences of a workload, whose prompts are the same in every engine."""
    import vllm

    rng = random.Random(9)
    prompts = [{"prompt_token_ids": [rng.randrange(WORDS) for _ in range(given["prompt"])]} for _ in range(given["sequences"])]
    # Greedy answers of random weights fall into loops.
    sampling = vllm.SamplingParams(temperature=1, max_tokens=given["answer"], ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(result.outputs[0].token_ids) == given["answer"] for result in results)
    return seconds


def main(job: dict[str, Any]) -> None:
    answers = channel()
    began = time.perf_counter()
    # By the module's name the engine's processes find it, too; what is of `__main__` they cannot pickle.
    import passes
    import torch
    import vllm

    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = vllm.LLM(model=job["folder"], **fixed, **job["options"])
    said = {"model": llm.apply_model(passes.spread)[0], "vllm": vllm.__version__, "torch": torch.__version__}
    print(json.dumps(said | {"start_seconds": round(time.perf_counter() - began, 1)}), file=answers)
    for line in sys.stdin:
        print(json.dumps(workload(llm, json.loads(line))), file=answers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
