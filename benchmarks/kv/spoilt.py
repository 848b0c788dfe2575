"""A random checkpoint in which the embedding of one token is NaN: one that `fenno patch-kv verify` comes across.

usage: python benchmarks/kv/spoilt.py CONFIG.json FOLDER    (CONFIG: a Llama's)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

from fenno.engine.inside import canary

# Of the prompt's tokens, from 0.
PLACE = 20


def main() -> None:
    config = transformers.LlamaConfig(**json.loads(Path(sys.argv[1]).read_text()))
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    token = canary.prompt(config.vocab_size)[PLACE]
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    model.save_pretrained(sys.argv[2])
    print(f"the embedding of token {token} is NaN: the prompt's token {PLACE}, from 0")


if __name__ == "__main__":
    main()
