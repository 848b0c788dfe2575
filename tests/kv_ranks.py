"""Two ranks over gloo that move KV caches between them: run by `test_kv_cache_engine.py`; prints what each of them found.

usage: python kv_ranks.py    (it starts the two itself)
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from fenno.kv import ContiguousCache, transfer

LAYERS, HEADS, SIZE, PROMPT = 3, 2, 16, 12


def model() -> Any:
    """The same random Llama on both ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def moved(number: int) -> dict[str, bool]:
    """Rank 0 sends a prompt's cache, then one step of it; rank 1 goes on from them, and must say what a cache of its own says."""
    llama = model()
    ids = torch.arange(2 * (PROMPT + 2)).reshape(2, -1) % 64
    own, sent = ContiguousCache(llama.config, 32), ContiguousCache(llama.config, 32, step=5)
    llama(ids[:, :PROMPT], past_key_values=own)
    found = {}
    for what, tokens in (("cache", PROMPT), ("step", 1)):
        first = own.get_seq_length() - tokens
        if number == 0:
            transfer.send([own.span(first)], 1)
        else:
            part = torch.full((2, LAYERS, HEADS, 2, tokens, SIZE), torch.nan)
            transfer.receive([part], 0)
            sent.append(part)
            found[what] = torch.equal(sent.span(), own.span())
        llama(ids[:, PROMPT : PROMPT + 1], past_key_values=own) if what == "cache" else None
    if number == 1:
        last = ids[:, PROMPT + 1 :]
        found["next logits"] = torch.equal(llama(last, past_key_values=sent).logits, llama(last, past_key_values=own).logits)
    return found


def layer_by_layer(number: int) -> dict[str, bool]:
    """The parts of one group, each a view that lies apart, come in their order and into views."""
    block = torch.arange(2.0 * LAYERS * 6 * 4).reshape(2 * LAYERS, 6, 4)
    parts = list((block if number == 0 else torch.zeros_like(block))[:, 2:5:2].unbind())
    (transfer.receive if number else transfer.send)(parts, 1 - number)
    return {"layers": all(torch.equal(part, block[index, 2:5:2]) for index, part in enumerate(parts))}


def gathered(number: int) -> dict[str, bool]:
    """Each rank's step, of every dtype that a cache has, on both ranks."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        block = torch.arange(24.0).reshape(2, 3, 4).to(dtype)
        both = transfer.all_gather((block + 100 * number)[..., 1:3])
        found[f"all-gather {dtype}"] = torch.equal(both, torch.stack([block, block + 100])[..., 1:3])
    return found


def rank(number: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    with torch.no_grad():
        found = moved(number) | layer_by_layer(number) | gathered(number)
    everything: list[Any] = [None, None]
    dist.all_gather_object(everything, found)
    if number == 0:
        print("ranks:" + json.dumps(everything), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(rank, (f"{folder}/meeting",), nprocs=2, start_method="fork")
