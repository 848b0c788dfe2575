"""The models that fenno's recipes name and few people have at hand: what their published configs say of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv},
        **{"intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": longest, "torch_dtype": "bfloat16"},
        "tie_word_embeddings": False,
    }


_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "xai-org/grok-2": (
        _sizes(8192, 64, 64, 8, 32768, 131072, 131072)
        | {"architectures": ["Grok1ForCausalLM"], "model_type": "git", "head_dim": 128, "attn_logit_softcapping": 30.0}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16384, "residual_moe": True}
    ),
    "hpcai-tech/grok-1": (
        _sizes(6144, 64, 48, 8, 32768, 131072, 8192)
        | {"architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "head_dim": 128, "max_attn_value": 30.0}
        | {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    ),
    "meta-llama/Meta-Llama-3-70B-Instruct": _sizes(8192, 80, 64, 8, 28672, 128256, 8192) | _LLAMA,
    "Qwen/Qwen2-72B-Instruct": _sizes(8192, 80, 64, 8, 29568, 152064, 32768) | _QWEN2,
    "Qwen/Qwen2.5-7B-Instruct": _sizes(3584, 28, 28, 4, 18944, 152064, 32768) | _QWEN2,
    "deepseek-ai/DeepSeek-V2-Chat": (
        _sizes(5120, 60, 128, 128, 12288, 102400, 163840)
        | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1536}
        | {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    ),
}
