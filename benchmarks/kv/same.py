"""Greedy answers of small random models with fenno's contiguous cache, and with transformers' dynamic and static ones.

usage: python benchmarks/kv/same.py MODEL [--device cuda] [--out FILE.json]    (MODEL: Llama, Qwen2, Mixtral or Gemma2)

256 tokens from prompts of 20, batches of 1 and 8, float32: the largest difference of a logit, and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from fenno.kv import ContiguousCache

ANSWER, PROMPT, VOCABULARY = 256, 20, 128
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Gemma2": {"head_dim": 16, "sliding_window": 32},
}


def answer(model: Any, batch: int, cache: Any) -> tuple[Any, Any]:
    """Tokens (batch, tokens) and logits (tokens, batch, vocabulary), from prompts that are padded on the left."""
    torch.manual_seed(batch)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT))
    mask = (torch.arange(PROMPT)[None] >= torch.arange(batch)[:, None]).long()
    given = {"input_ids": (ids * mask).to(model.device), "attention_mask": mask.to(model.device)}
    wish = {"max_new_tokens": ANSWER, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    # With a static cache on a GPU `generate` would compile.
    said = model.generate(**given, past_key_values=cache, disable_compile=True, **wish)
    return said.sequences, torch.stack(said.logits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = getattr(transformers, f"{args.model}Config")(**SIZE, **MODELS[args.model])
    model = getattr(transformers, f"{args.model}ForCausalLM")(config).eval().to(args.device)
    limit, rows = PROMPT + ANSWER, []
    for batch in (1, 8):
        tokens, logits = answer(model, batch, ContiguousCache.for_model(model, limit))
        others = {
            "dynamic": transformers.DynamicCache(config=config),
            "static": transformers.StaticCache(config=config, max_cache_len=limit),
            "growing": ContiguousCache.for_model(model, limit, step=64),
        }
        for other, cache in others.items():
            same, close = answer(model, batch, cache)
            apart, said = (logits - close).abs().max().item(), bool((tokens == same).all())
            rows.append({"model": args.model, "batch": batch, "other": other, "apart": apart, "same_tokens": said})
            print(f"{args.model}, batch {batch}, {other}: logits apart by {apart:.1e} at most, tokens the same: {said}", flush=True)
    if args.out:
        known = {"device": args.device, "torch": torch.__version__, "transformers": transformers.__version__}
        args.out.write_text(json.dumps({**known, "largest_logit": logits.abs().max().item(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
