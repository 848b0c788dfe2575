"""What a decoder is made of, from its config.json alone: its weights by how they are cut, and what its layers keep of a token.

Norms and biases are left out: together they are below a thousandth of every model that is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fenno.errors import UsageError

Config = Mapping[str, Any]
# The names of one and the same thing in the configs of different families.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
INNER = ("intermediate_size", "ffn_dim", "n_inner")
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVE = ("num_experts_per_tok", "experts_per_token", "moe_top_k")
# What a config leaves out, because it is the default of the family's own class.
TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", "bloom", "falcon", "mpt", "cohere", "cohere2"}
UNGATED = {"gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "mpt", "falcon", "phi", "starcoder2", "nemotron"}
LEARNED = {"gpt2", "gpt_bigcode", "gpt_neo", "opt"}
ALIBI = {"bloom", "mpt"}
FULL, SLIDING = {"full_attention", "attention", "global"}, {"sliding_attention", "chunked_attention", "local"}
# Every so manieth layer is full, the others slide, where a config does not list its layers.
PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
RECURRENT = ("ssm_state_size", "mamba_d_state", "state_size", "linear_num_value_heads", "lru_width", "is_encoder_decoder")


class Part(NamedTuple):
    """Weights of one kind, in the whole model. `cut`: over the tensor-parallel ranks ("tp"), over at most as many as there are KV
    heads ("kv"), over all ranks of the experts ("experts"), or whole on each. `used`: the share that computes for one token."""

    name: str
    numbers: int
    cut: Literal["tp", "kv", "experts", "whole"] = "tp"
    used: float = 1.0
    quantised: bool = True


@dataclass(frozen=True)
class Shape:
    """One decoder. `latent`: numbers that a layer keeps of a token under latent attention, else 0. `windows`: of each layer, 0
    where it sees everything. `cut`, `whole`: numbers of a token between a feed-forward's products that a rank has a part of, or
    all of; with experts they lie in workspaces that stay. `positions`: how it knows them: "RoPE", "ALiBi" or "learned"."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    latent: int
    vocab: int
    experts: int
    active: int
    windows: tuple[int, ...]
    parts: tuple[Part, ...]
    cut: int
    whole: int
    longest: int
    dtype: str
    positions: str

    @property
    def parameters(self) -> int:
        """All weights."""
        return sum(part.numbers for part in self.parts)

    @property
    def computing(self) -> int:
        """Weights that compute for one token: of the experts those that are chosen, and not the embedding, which is looked up."""
        return round(sum(part.numbers * part.used for part in self.parts))


def read(config: Config) -> Shape:
    """The decoder of a config; of one that sees or hears too, its language model.

    Raises `UsageError` for a config that does not say enough, and for layers that are no attention.
    """
    config = {**config, **(config.get("text_config") or {})}
    kind = str(config.get("model_type", "")).lower()
    other = next((key for key in RECURRENT if config.get(key)), None)
    if other:
        raise UsageError(f"the config has `{other}`: layers that are no causal attention are not counted here")
    hidden, layers, heads = (_number(config, names) for names in (HIDDEN, LAYERS, HEADS))
    vocab, head = _number(config, ("vocab_size",)), int(config.get("qk_nope_head_dim") or config.get("head_dim") or hidden // heads)
    kv_heads = _kv_heads(config, heads)
    feed, cut, whole = _feed(config, kind, hidden, layers)
    latent = int(config["kv_lora_rank"] + config["qk_rope_head_dim"]) if config.get("kv_lora_rank") else 0
    attention = _latent(config, hidden, heads, layers) if latent else _attention(hidden, heads, kv_heads, head, layers)
    positions, longest = _positions(config, kind), _first(config, LONGEST) or 2048
    return Shape(
        **{"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head": head, "latent": latent},
        **{"vocab": vocab, "experts": _first(config, EXPERTS) or 0, "active": _first(config, ACTIVE) or 0},
        windows=_windows(config, kind, layers),
        parts=(*attention, *feed, *_ends(config, kind, vocab, hidden, longest if positions == "learned" else 0)),
        **{"cut": cut, "whole": whole, "longest": longest},
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        positions=positions,
    )


def _first(config: Config, names: tuple[str, ...]) -> int | None:
    found = (config[name] for name in names if isinstance(config.get(name), int) and not isinstance(config[name], bool))
    return next(found, None)


def _number(config: Config, names: tuple[str, ...]) -> int:
    found = _first(config, names)
    if not found:
        raise UsageError(f"the config has no `{names[0]}`", "give a folder whose config.json is that of a language model")
    return found


def _kv_heads(config: Config, heads: int) -> int:
    nested = config.get("attn_config")
    found = _first({**config, **(nested if isinstance(nested, Mapping) else {})}, KV_HEADS)
    return found or (1 if config.get("multi_query") else heads)


def _attention(hidden: int, heads: int, kv_heads: int, head: int, layers: int) -> list[Part]:
    return [
        Part("attention", layers * 2 * hidden * heads * head),
        Part("keys and values", layers * 2 * hidden * kv_heads * head, "kv"),
    ]


def _latent(config: Config, hidden: int, heads: int, layers: int) -> list[Part]:
    """Latent attention: what goes down to the latent is whole on each rank, what comes up from it is cut by heads."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope, nope, value = (_number(config, (name,)) for name in names)
    query, low = heads * (nope + rope), int(config.get("q_lora_rank") or 0)
    up = (low or hidden) * query + rank * heads * (nope + value) + heads * value * hidden
    return [Part("attention", layers * up), Part("latents", layers * hidden * (rank + rope + low), "whole")]


def _feed(config: Config, kind: str, hidden: int, layers: int) -> tuple[list[Part], int, int]:
    """The feed-forward's weights, and the numbers of a token between its products: cut over the ranks, and whole on each."""
    experts = _first(config, EXPERTS) or 0
    inner = _first(config, INNER) or 4 * hidden
    if experts < 2:
        products = 2 if kind in UNGATED else 3
        return [Part("feed-forward", layers * products * hidden * inner)], products * inner, 0
    active, wide = _number(config, ACTIVE), int(config.get("moe_intermediate_size") or inner)
    sparse = _sparse(config, layers)
    dense = int(config.get("intermediate_size_mlp") or inner)
    shared = _shared(config, kind, wide, inner)
    parts = [
        Part("experts", sparse * experts * 3 * hidden * wide, "experts", active / experts),
        Part("router", sparse * experts * hidden, "whole", quantised=False),
        Part("shared experts", sparse * 3 * hidden * shared),
        Part("feed-forward", (layers - sparse) * 3 * hidden * dense),
    ]
    return [part for part in parts if part.numbers], active * 2 * wide, active * hidden


def _shared(config: Config, kind: str, wide: int, inner: int) -> int:
    """The width of what every token passes beside its experts."""
    if config.get("residual_moe") or kind.startswith("llama4"):
        return inner
    return int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * wide)


def _sparse(config: Config, layers: int) -> int:
    """How many layers have experts."""
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or config.get("moe_layer_freq")
    step = step if isinstance(step, int) else 1
    first, dense = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    return sum(layer >= first and layer not in dense and (layer + 1 - first) % step == 0 for layer in range(layers))


def _ends(config: Config, kind: str, vocab: int, hidden: int, learned: int) -> list[Part]:
    """The embedding, the head unless it is the same matrix, and learned positions. A tied matrix computes: it is the head."""
    tied = bool(config.get("tie_word_embeddings", kind in TIED))
    parts = [Part("embedding", vocab * hidden, used=float(tied), quantised=False)]
    parts += [] if tied else [Part("head", vocab * hidden, quantised=False)]
    return parts + ([Part("positions", learned * hidden, "whole", 0.0, quantised=False)] if learned else [])


def _windows(config: Config, kind: str, layers: int) -> tuple[int, ...]:
    """The window of each layer, 0 where it sees everything. Raises `UsageError` for a kind of layer that is not known."""
    default = 4096 if kind in ("gemma2", "cohere2") else 0
    size = config.get("sliding_window", config.get("attention_chunk_size", default)) or 0
    kinds = config.get("layer_types")
    if kinds:
        strange = next((each for each in kinds if each not in FULL | SLIDING), None)
        if strange is not None:
            raise UsageError(f"the config has layers of `{strange}`: what they keep of a sequence is not known here")
        return tuple(size if each in SLIDING else 0 for each in kinds[:layers])
    asked = config.get("use_sliding_window", not kind.startswith("qwen"))
    if not asked or not size:
        return (0,) * layers
    every = int(config.get("sliding_window_pattern") or PATTERN.get(kind, 0))
    if every:
        return tuple(size if (layer + 1) % every else 0 for layer in range(layers))
    full = int(config.get("max_window_layers") or 0) if kind.startswith("qwen") else 0
    return tuple(0 if layer < full else size for layer in range(layers))


def _positions(config: Config, kind: str) -> str:
    nested = config.get("attn_config")
    where = {**config, **(nested if isinstance(nested, Mapping) else {})}
    # Of Baichuan's two sizes the greater has ALiBi.
    large = kind == "baichuan" and config.get("hidden_size") != 4096
    if large or kind in ALIBI or where.get("alibi") or str(config.get("position_embedding_type")) == "alibi":
        return "ALiBi"
    return "learned" if kind in LEARNED else "RoPE"
