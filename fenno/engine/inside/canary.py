"""Has an engine answer a prompt and looks at every number of its KV cache and logits: run as a script under its own interpreter.

The arguments are those of `vllm serve`; it prints one JSON line. What is no number is named by the layers that hold it and the
first token that brought it there. Standard library, torch and vLLM only.
"""

from __future__ import annotations

import bisect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MARK = "fenno-kv:"
PROMPT, ANSWER = 48, 16  # tokens
PIECE = 2**24  # numbers that are looked at together: what that takes is a hundredth of a large cache


def started(words: list[str]) -> Any:
    """The engine of `vllm serve WORDS`, in this process and without its HTTP server."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    args = parser.parse_args(words)
    args.model = getattr(args, "model_tag", None) or args.model
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))


def prompt(vocabulary: int) -> list[int]:
    """Tokens from all over a vocabulary."""
    return [(7919 * number + 1) % vocabulary for number in range(PROMPT)]


def answered(engine: Any, ids: Sequence[int], count: int) -> list[int]:
    """The tokens of a greedy answer; nothing of an earlier prompt is used again."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    wish = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    engine.add_request("canary", {"prompt_token_ids": list(ids)}, wish)
    said: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            said = list(output.outputs[0].token_ids)
    return said


def caches(worker: Any) -> Iterator[tuple[str, Any]]:
    """Each layer that keeps a cache on this rank, and the cache."""
    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        kept = getattr(layer, "kv_cache", None)
        for each in kept if isinstance(kept, (list, tuple)) else [kept]:
            if getattr(each, "numel", lambda: 0)():
                yield name, each


def watch(worker: Any) -> None:
    """Empty the caches, and note of all logits from now on whether they are finite."""
    for _, cache in caches(worker):
        cache.zero_()
    worker.fenno_logits = []
    model = worker.get_model()
    compute = getattr(model.compute_logits, "fenno_inner", model.compute_logits)

    def watched(*args: Any, **more: Any) -> Any:
        logits = compute(*args, **more)
        if logits is not None:
            worker.fenno_logits.append(bool(logits.isfinite().all()))
        return logits

    watched.fenno_inner = compute  # type: ignore[attr-defined]
    model.compute_logits = watched


def look(worker: Any) -> dict[str, Any]:
    """The layers of this rank, those whose caches hold what is no number, and of each step's logits whether all were."""
    kept = list(caches(worker))
    bad = [name for name, cache in kept if not finite(cache, worker.vllm_config.cache_config.cache_dtype)]
    return {"layers": [name for name, _ in kept], "bad": bad, "logits": list(worker.fenno_logits)}


def finite(cache: Any, kind: str) -> bool:
    """Whether a cache holds numbers alone. One of 8 bits is kept as bytes, which are all numbers: it is read as what they mean."""
    import torch

    if cache.dtype == torch.uint8 and "fp8" in kind:
        cache = cache.view(torch.float8_e5m2 if "e5m2" in kind else torch.float8_e4m3fn)
    if not cache.dtype.is_floating_point:
        return True
    rows = max(1, PIECE // max(1, cache[0].numel()))
    return all(bool(part.float().isfinite().all()) for part in cache.split(rows))


def seen(engine: Any, ids: Sequence[int], count: int) -> tuple[list[int], list[dict[str, Any]]]:
    """An answer, and what each rank holds after it."""
    engine.collective_rpc(watch)
    said = answered(engine, ids, count)
    return said, engine.collective_rpc(look)


def report(words: list[str]) -> dict[str, Any]:
    """What was looked at, and what of it is no number: `kv` and `logits` are empty where all is well."""
    from vllm import __version__

    engine = started(words)
    model = engine.model_config
    size = min(PROMPT, model.max_model_len - ANSWER)
    ids = prompt(model.get_vocab_size())[:size]
    said, ranks = seen(engine, ids, ANSWER)
    whole = [*ids, *said[:-1]]  # the last token of an answer is never read again

    def spoilt(count: int) -> bool:
        return any(each["bad"] for each in seen(engine, whole[:count], 1)[1])

    bad = sorted({name for each in ranks for name in each["bad"]}, key=ranks[0]["layers"].index)
    first = bisect.bisect_left(range(1, len(whole) + 1), True, key=spoilt) if bad else None
    named = {"layers": bad, "token": first if first is not None and first < len(whole) else None}
    steps: list[bool] = next((each["logits"] for each in ranks if each["logits"]), [])
    return {
        "version": __version__,
        "layers": len(ranks[0]["layers"]),
        "tokens": len(whole),
        "kv": named if bad else {},
        "logits": [size + step for step, fine in enumerate(steps[:ANSWER]) if not fine],
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(MARK + json.dumps(report(sys.argv[1:])), flush=True)
