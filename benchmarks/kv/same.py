"""Greedy answers of small random models with fenno's contiguous cache, and with transformers' dynamic and static ones.

usage: python benchmarks/kv/same.py MODEL [--device cuda] [--out FILE.json]    (MODEL: Llama, Qwen2, Mixtral or Gemma2)

256 tokens from prompts of 20, batches of 1 and 8, float32: the largest difference of a logit, and whether the tokens are the same.
`tests/test_kv_cache_engine.py` asks the same of the same models, and imports this where there may be no torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ANSWER, PROMPT, VOCABULARY = 256, 20, 128
LIMIT = PROMPT + ANSWER
# Wide enough weights for the answers not to repeat one token.
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


def made(name: str) -> Any:
    """One of the models, random, float32, in evaluation mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZE, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def prompts(batch: int) -> dict[str, Any]:
    """Random prompts, each one token shorter than the one before, padded on the left."""
    import torch

    torch.manual_seed(batch)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT))
    mask = (torch.arange(PROMPT)[None] >= torch.arange(batch)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def answer(model: Any, given: dict[str, Any], cache: Any, **options: Any) -> tuple[Any, Any]:
    """Tokens (batch, tokens) and logits (tokens, batch, vocabulary) of a greedy answer."""
    import torch

    there = {name: tensor.to(model.device) for name, tensor in given.items()}
    wish = {"max_new_tokens": ANSWER, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    said = model.generate(**there, past_key_values=cache, **wish)
    return said.sequences, torch.stack(said.logits)


def contiguous(model: Any, limit: int = LIMIT, **options: Any) -> Any:
    from fenno.kv import ContiguousCache

    return ContiguousCache.for_model(model, limit, **options)


def others(model: Any) -> dict[str, Any]:
    """The caches that fenno's of one fixed size has to answer like."""
    import transformers

    return {
        "dynamic": transformers.DynamicCache(config=model.config),
        "static": transformers.StaticCache(config=model.config, max_cache_len=LIMIT),
        "growing": contiguous(model, step=64),
    }


def main() -> None:
    import torch
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, rows = made(args.model).to(args.device), []
    # With a static cache on a GPU `generate` would compile.
    plain = {"disable_compile": True}
    for batch in (1, 8):
        given = prompts(batch)
        tokens, logits = answer(model, given, contiguous(model), **plain)
        for other, cache in others(model).items():
            same, close = answer(model, given, cache, **plain)
            apart, said = (logits - close).abs().max().item(), bool((tokens == same).all())
            rows.append({"model": args.model, "batch": batch, "other": other, "apart": apart, "same_tokens": said})
            print(f"{args.model}, batch {batch}, {other}: logits apart by {apart:.1e} at most, tokens the same: {said}", flush=True)
    if args.out:
        known = {"device": args.device, "torch": torch.__version__, "transformers": transformers.__version__}
        args.out.write_text(json.dumps({**known, "largest_logit": logits.abs().max().item(), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
