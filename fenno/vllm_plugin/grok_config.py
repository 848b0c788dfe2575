"""The config class of `model_type: grok-1`, which transformers has not."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class Grok1Config(PretrainedConfig):  # type: ignore[misc]
    """A config.json of Grok-1. What it does not say is as in xAI's release."""

    model_type = "grok-1"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 131072,
        hidden_size: int = 6144,
        intermediate_size: int = 32768,
        num_hidden_layers: int = 64,
        num_attention_heads: int = 48,
        num_key_value_heads: int = 8,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        max_position_embeddings: int = 8192,
        rms_norm_eps: float = 1e-5,
        attn_output_multiplier: float = 0.08838834764831845,
        embedding_multiplier_scale: float = 78.38367176906169,
        output_multiplier_scale: float = 0.5773502691896257,
        max_attn_value: float = 30.0,
        tie_word_embeddings: bool = True,
        pad_token_id: int = 0,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        tokens = {name: given.pop(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")}
        for name, value in given.items():
            setattr(self, name, value)
        super().__init__(**tokens, **others)
