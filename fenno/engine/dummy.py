"""Models with random weights, made locally in a second: a config and a byte-level tokenizer, nothing downloaded.

vLLM fills the weights itself (`--load-format dummy`), so a model here is three JSON files.
"""

from __future__ import annotations

import itertools
import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno.errors import DiskError, RecipeError


# Grok-2's proportions (many query heads on few KV heads, 8 experts of which 2 are active) in the Mixtral architecture, which every
# supported vLLM has.
def _grok2(hidden: int, layers: int, heads: int, kv_heads: int, head: int, expert: int, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": expert,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


@dataclass(frozen=True)
class Size:
    """What of a Grok may be made smaller; widths in numbers, `shared` only in Grok-2."""

    layers: int = 2
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 2
    head: int = 32
    expert: int = 256
    shared: int = 512
    experts: int = 8


def grok2(size: Size, dtype: str) -> dict[str, Any]:
    """Grok-2's config.json in another size: every field of the published one that says how it computes."""
    return {
        "architectures": ["Grok1ForCausalLM"],
        "model_type": "git",
        "hidden_size": size.hidden,
        "intermediate_size": size.shared,
        "moe_intermediate_size": size.expert,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "num_local_experts": size.experts,
        "num_experts_per_tok": 2,
        "residual_moe": True,
        "embedding_multiplier_scale": size.hidden**0.5,
        "output_multiplier_scale": 0.5,
        "attn_logit_softcapping": 30.0,
        "router_logit_softcapping": 30.0,
        "final_logit_softcapping": 50,
        "attn_temperature_len": 1024,
        "sliding_window_size": -1,
        "rms_norm_eps": 1e-5,
        "rope_type": "original",
        "rope_theta": 208533496,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def grok1(size: Size, dtype: str) -> dict[str, Any]:
    """The same for Grok-1, as its ports on the Hub spell it."""
    return {
        "architectures": ["Grok1ModelForCausalLM"],
        "model_type": "grok-1",
        "hidden_size": size.hidden,
        "intermediate_size": size.expert,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "attn_output_multiplier": size.head**-0.5,
        "embedding_multiplier_scale": size.hidden**0.5,
        "output_multiplier_scale": 3**-0.5,
        "max_attn_value": 30.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
    }


# Llama-3-8B in its published sizes, the vocabulary's too: what a token costs at the model's last layer is part of its speed.
LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "grok2-small": _grok2(256, 4, 8, 1, 32, 512, "float32"),
    # Grok-2 itself, as fenno's plugin serves it.
    "grok2-tiny": grok2(Size(layers=4, hidden=256, heads=8, kv_heads=1, head=32, expert=512, shared=1024), "float32"),
    "grok2-9b": _grok2(4096, 20, 32, 8, 128, 4096, "bfloat16"),
    "grok2-12b": grok2(Size(20, 4096, 32, 8, 128, expert=4096, shared=8192), "bfloat16") | {"vocab_size": 131072},
    "llama3-8b": LLAMA3_8B,
}
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 256
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


def fault(name: str) -> str | None:
    """What is wrong with the name of a dummy model, in a sentence; None for one that there is."""
    return None if name in SHAPES else f"there is no dummy model {name}; there are {', '.join(SHAPES)}"


def make(name: str, folder: Path) -> Path:
    """Write the model `name` into `folder/name` unless it is there, and return that folder.

    Raises `RecipeError` for an unknown name and `DiskError` when it cannot be written.
    """
    if (wrong := fault(name)) is not None:
        raise RecipeError(wrong, "name one of these behind `dummy:`")
    target = folder / name
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, content in files(SHAPES[name]).items():
            text = json.dumps(content, indent=1, ensure_ascii=False)
            if not (target / file).exists() or (target / file).read_text(encoding="utf-8") != text:
                (target / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {target}: {error.strerror}", "free some space, or set XDG_CACHE_HOME") from error
    return target


def files(shape: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files of a model, by name."""
    end = VOCABULARY + SPECIAL.index("<|endoftext|>")
    # Unless a shape has its own, a multiple of 64, as every engine pads it to.
    size = -(-(VOCABULARY + len(SPECIAL)) // 64) * 64
    return {
        "config.json": {"vocab_size": size, **shape, "bos_token_id": end, "eos_token_id": end},
        "tokenizer.json": _tokenizer(shape.get("vocab_size", 0)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": shape["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level tokenizers write each byte as: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


def _tokenizer(size: int) -> dict[str, Any]:
    """A byte-level BPE without merges: one token a byte, so that lengths are exact and every text is legal.

    Up to `size` entries, the rest are words that no text is cut into, and that a model may say.
    """
    letters, first = byte_letters(), VOCABULARY + len(SPECIAL)
    words = map("".join, itertools.product(string.ascii_letters, repeat=3))
    added = [
        {"id": VOCABULARY + i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letters[byte]: byte for byte in range(VOCABULARY)} | {text: VOCABULARY + i for i, text in enumerate(SPECIAL)}
    vocabulary |= {word: i for i, word in zip(range(first, size), words, strict=False)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
