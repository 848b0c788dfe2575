"""Has an engine answer a prompt and looks at every number of its KV cache and logits: run as a script under its own interpreter.

The arguments are those of `vllm serve`; it prints one JSON line. What is no number is named by the layers that hold it and the
first token that brought it there. Standard library, torch and vLLM only.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MARK = "fenno-kv:"
PROMPT, ANSWER = 48, 16  # tokens
PIECE = 2**24  # numbers that are looked at together: what that takes is a hundredth of a large cache


def started(words: list[str]) -> Any:
    """The engine of `vllm serve WORDS`, in this process and without its HTTP server."""
    from arguments import engine_args
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(engine_args(words))


def lengths(limit: int) -> tuple[int, int]:
    """Tokens of the prompt and of its answer under `--max-model-len LIMIT`."""
    count = max(1, min(ANSWER, limit // 2))
    return max(1, min(PROMPT, limit - count)), count


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
    """Empty the caches, and note of all logits from now on whether they are finite, one call after the other."""
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
    """The layers of this rank, those whose caches hold what is no number, and of each call for logits whether all were finite."""
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
    narrow = cache.dtype.itemsize == 1  # torch has no isfinite for them
    parts = (cache[piece] for piece in pieces(cache.shape))
    return all(bool((part.float() if narrow else part).isfinite().all()) for part in parts)


def pieces(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Where parts of at most PIECE numbers lie in a tensor of this shape: views of all of it, whichever axis is the long one."""
    below = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    steps = [max(1, PIECE // max(1, each)) for each in below]
    cuts = [[slice(at, at + step) for at in range(0, size, step)] for size, step in zip(shape, steps, strict=True)]
    return itertools.product(*cuts)


def seen(engine: Any, ids: Sequence[int], count: int) -> tuple[list[int], list[dict[str, Any]]]:
    """An answer, and what each rank holds after it."""
    engine.collective_rpc(watch)
    said = answered(engine, ids, count)
    return said, engine.collective_rpc(look)


def layers(ranks: Sequence[dict[str, Any]], which: str = "layers") -> list[str]:
    """The layers of all ranks in their order, each once: tensor-parallel ranks share them, pipeline stages have their own."""
    marked = {name for each in ranks for name in each[which]}
    return [name for name in dict.fromkeys(name for each in ranks for name in each["layers"]) if name in marked]


def steps(ranks: Sequence[dict[str, Any]]) -> list[bool]:
    """Of each call for logits whether all were finite, by the first rank that has any."""
    return next((each["logits"] for each in ranks if each["logits"]), [])


def report(words: list[str]) -> dict[str, Any]:
    """What was looked at, and what of it is no number: `kv` and `logits` are empty where all is well. Tokens count from 0."""
    from vllm import __version__

    engine = started(words)
    model = engine.model_config
    size, count = lengths(model.max_model_len)
    ids = prompt(model.get_vocab_size())[:size]
    said, ranks = seen(engine, ids, count)
    whole = [*ids, *said[:-1]]  # the last token of an answer is never read again

    def again(tokens: int) -> list[dict[str, Any]]:
        return seen(engine, whole[:tokens], 1)[1]

    found: dict[str, Any] = {"kv": {}, "logits": {}}
    if bad := layers(ranks, "bad"):
        first = bisect.bisect_left(range(1, len(whole) + 1), True, key=lambda tokens: bool(layers(again(tokens), "bad")))
        found["kv"] = {"layers": bad, "token": first if first < len(whole) else None}
    if not all(steps(ranks)):
        # A call may be for a part of a prompt or for several tokens; of a beginning the last call is for its last token.
        found["logits"] = {"tokens": [end - 1 for end in range(size, len(whole) + 1) if not all(steps(again(end))[-1:])]}
    return {"version": __version__, "layers": len(layers(ranks)), "tokens": len(whole), **found}


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(MARK + json.dumps(report(sys.argv[1:])), flush=True)
