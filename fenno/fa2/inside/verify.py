"""Calls flash_attn and compares its outputs with attention in float64. Runs under the interpreter that the wheel is for.

Standard input: {"cases": […], "refused": […], "variants": […]} of `verify.Case`, and of variables of the environment with which all
cases are called again. One line of JSON for each, the last is {"done": true}; what comes after a call that took the GPU from this
process is not called.
"""

import itertools
import json
import math
import os
import sys
from typing import Any

import flash_attn
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda"
PAGE = 256
BEYOND = 100.0  # stands in a cache where nothing is to be read
Tensors = dict[str, Any]


def attention(q: Any, k: Any, v: Any, case: dict[str, Any], slopes: Any) -> Any:
    """One sequence's attention, by its definition, in the dtype of its arguments: q (queries, heads, d), k and v (keys, kv, d)."""
    many = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(many, 1), v.repeat_interleave(many, 1)
    scores = torch.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
    if case["softcap"]:
        scores = case["softcap"] * torch.tanh(scores / case["softcap"])
    # The last query stands beside the last key.
    rows = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    columns = torch.arange(k.shape[0], device=q.device)[None, :]
    if slopes is not None:
        scores = scores - (slopes[:, None, None] * (rows - columns).abs()).to(scores.dtype)
    hidden = torch.zeros_like(rows - columns, dtype=torch.bool)
    hidden |= (columns > rows) if case["causal"] else hidden
    hidden |= (columns < rows - case["window"]) if case["window"] else hidden
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def lengths(batch: int, longest: int, shortest: int) -> list[int]:
    """Uneven lengths, the first the longest."""
    return [max(shortest, longest - i * longest // batch - (i % 3) * (i > 0)) for i in range(batch)]


def tensors(case: dict[str, Any]) -> Tensors:
    """Random queries, keys and values, padded to the longest, and each sequence's numbers of queries and keys."""
    torch.manual_seed(0)
    rest = {"device": DEVICE, "dtype": DTYPES[case["dtype"]]}
    batch, queries, keys, d = case["batch"], case["queries"], case["keys"], case["head_dim"]
    uneven = lengths(batch, keys, 1 if case["kind"] == "uneven" else queries)
    key_lengths = [keys] * batch if case["kind"] == "whole" else uneven
    return {
        "q": torch.randn(batch, queries, case["heads"], d, **rest),
        "k": torch.randn(batch, keys, case["kv_heads"], d, **rest),
        "v": torch.randn(batch, keys, case["kv_heads"], d, **rest),
        "keys": key_lengths,
        "queries": key_lengths if case["kind"] == "uneven" else [queries] * batch,
        "slopes": torch.rand(case["heads"], device=DEVICE) * 0.3 if case["alibi"] else None,
    }


def options(case: dict[str, Any], made: Tensors) -> dict[str, Any]:
    window = (case["window"], 0 if case["causal"] else -1) if case["window"] else (-1, -1)
    return {"causal": case["causal"], "softcap": case["softcap"], "window_size": window, "alibi_slopes": made["slopes"]}


def answer(case: dict[str, Any], made: Tensors) -> list[Any]:
    """What flash_attn makes of it, sequence by sequence."""
    q, k, v, more = made["q"], made["k"], made["v"], options(case, made)
    if case["kind"] == "whole":
        return list(flash_attn.flash_attn_func(q, k, v, **more))
    if case["kind"] == "uneven":
        packed = [torch.cat([t[i, :n] for i, n in enumerate(made["keys"])]) for t in (q, k, v)]
        ends = torch.tensor([0, *made["keys"]], device=DEVICE).cumsum(0).to(torch.int32)
        longest = max(made["keys"])
        out = flash_attn.flash_attn_varlen_func(*packed, ends, ends, longest, longest, **more)
        return list(out.split(made["keys"]))
    return cached(case, made, more)


def cached(case: dict[str, Any], made: Tensors, more: dict[str, Any]) -> list[Any]:
    """The same with a cache that is longer than what is in it, in pages, or appended to by the call."""
    q, (k, v) = made["q"], (room(made[name]) for name in ("k", "v"))
    filled = torch.tensor(made["keys"], device=DEVICE, dtype=torch.int32)
    new: dict[str, Any] = {}
    if case["kind"] == "append":
        filled = filled - case["queries"]
        rows = [slice(n - case["queries"], n) for n in made["keys"]]
        new = {name: torch.stack([t[i, row] for i, row in enumerate(rows)]) for name, t in (("k", made["k"]), ("v", made["v"]))}
        for t in (k, v):
            for i, row in enumerate(rows):
                t[i, row] = BEYOND
    if case["kind"] == "paged":
        table = torch.randperm(k.shape[0] * k.shape[1] // PAGE, device=DEVICE).to(torch.int32)
        k, v = (shuffled(t, table) for t in (k, v))
        new = {"block_table": table.view(case["batch"], -1)}
    return list(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=filled, **new, **more))


def shuffled(t: Any, table: Any) -> Any:
    """A cache in pages of which the first is the table's first."""
    pages = t.view(-1, PAGE, *t.shape[2:])
    return torch.empty_like(pages).index_copy_(0, table.long(), pages)


def room(t: Any) -> Any:
    """A cache of whole pages with `t` in it, and more room behind it."""
    tokens = -(-t.shape[1] // PAGE) * PAGE + PAGE
    made = torch.full((t.shape[0], tokens, *t.shape[2:]), BEYOND, device=t.device, dtype=t.dtype)
    made[:, : t.shape[1]] = t
    return made


def compare(case: dict[str, Any]) -> dict[str, float]:
    """The largest error against float64: flash_attn's, and that of the definition in the same dtype."""
    made = tensors(case)
    worst = {"error": 0.0, "plain": 0.0}
    for i, out in enumerate(answer(case, made)):
        queries, keys = made["queries"][i], made["keys"][i]
        parts = made["q"][i, :queries], made["k"][i, :keys], made["v"][i, :keys]
        true = attention(parts[0].double(), parts[1].double(), parts[2].double(), case, made["slopes"])
        plain = attention(*parts, case, made["slopes"])
        for name, found in (("error", out), ("plain", plain)):
            far = (found[:queries].double() - true).abs().max().item()
            worst[name] = max(worst[name], far if math.isfinite(far) else math.inf)
    return worst


def lost() -> bool:
    """Whether the GPU takes nothing more from this process: after an illegal access every call fails, whatever it is."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def say(row: dict[str, Any]) -> None:
    # A plain number where JSON has none: no error is so large.
    print(json.dumps(row).replace("Infinity", "1e30"), flush=True)


def main() -> None:
    asked = json.load(sys.stdin)
    there = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if there else None
    say({"gpu": name, "torch": torch.__version__, "flash_attn": flash_attn.__file__})
    for variant, case in itertools.product(asked["variants"], asked["cases"]) if there else []:
        os.environ.update(variant)
        try:
            say({"case": case, "variant": variant, **compare(case)})
        except RuntimeError as error:
            say({"case": case, "variant": variant, "failed": str(error).splitlines()[0]})
            if lost():
                say({"done": True})
                return
    for case in asked["refused"] if there else []:
        try:
            answer(case, tensors(case))
            say({"refused": case, "said": None})
        except RuntimeError as error:
            say({"refused": case, "said": str(error).splitlines()[0]})
    say({"done": True})


if __name__ == "__main__":
    main()
