"""Run as a script under an engine's Python: a Grok in vLLM beside the reference; prints how far apart they are, as JSON.

Arguments: the folder that vLLM loads, the folder that the reference reads, and a JSON object of options for vLLM.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from grok_reference import Reference

ANSWER = 4
SEED = 9


def prompts() -> list[list[int]]:
    """Eight of different lengths; the last two begin alike."""
    rng = random.Random(SEED)
    lengths = (97, 5, 33, 64, 1, 128, 120, 150)
    made = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    made[7][:100] = made[6][:100]
    return made


class Errors:
    """max |difference| / max |reference| over everything that was compared, and what it was over."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.known: dict[tuple[int, ...], Any] = {}

    def of(self, results: list[Any]) -> dict[str, float]:
        import torch

        apart = largest = 0.0
        compared = 0
        for result in results:
            tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
            known = self.known.setdefault(tuple(tokens), self.reference.logits(tokens))
            prompt = len(result.prompt_token_ids)
            rows = {at - 1: row for at, row in enumerate(result.prompt_logprobs or []) if row}
            rows |= {prompt - 1 + at: row for at, row in enumerate(result.outputs[0].logprobs)}
            for at, row in rows.items():
                seen = torch.tensor([row[token].logprob for token in range(known.shape[1])])
                apart = max(apart, float((seen - known[at]).abs().max()))
                largest = max(largest, float(known[at].abs().max()))
            compared += len(rows)
        return {"error": apart / largest, "largest": largest, "positions": compared}


def main(folder: str, other: str, options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        seed=0,
        **({"dtype": "float32", "max_model_len": 256} | options),
    )
    errors = Errors(Reference(Path(other)))

    def run(wanted: list[list[int]], *, prompt: bool = True) -> list[Any]:
        sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=-1, prompt_logprobs=-1 if prompt else None, detokenize=False
        )
        return llm.generate([{"prompt_token_ids": tokens} for tokens in wanted], sampling, use_tqdm=False)

    found: dict[str, Any] = {"one": errors.of(run(prompts()[:1])), "eight": errors.of(run(prompts()))}
    llm.reset_prefix_cache()
    run(prompts(), prompt=False)
    cached = run(prompts(), prompt=False)
    found["cached"] = errors.of(cached) | {"hits": sum(result.num_cached_tokens or 0 for result in cached)}
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        steps = 0
        schedule = core.scheduler.schedule

        def counted(*args: Any, **named: Any) -> Any:
            nonlocal steps
            steps += 1
            return schedule(*args, **named)

        llm.reset_prefix_cache()
        core.scheduler.schedule = counted
        core.scheduler.max_num_scheduled_tokens = 32
        found["chunked"] = errors.of(run(prompts())) | {"steps": steps}
    return found | {"margin": errors.reference.margin}


if __name__ == "__main__":
    print("grok:" + json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
