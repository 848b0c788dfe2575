"""What a Grok is, as arithmetic: its sizes from a config, its published weights, and how presharded files make whole ones.

No torch and no vLLM. The sizes and names are those of the two releases: Grok-1 (`model_type: grok-1`; xAI's own code, Hub ports
in PyTorch names) and Grok-2 (`model_type: git`, architecture `Grok1ForCausalLM`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Grok:
    """One Grok. `shared`: the width of the dense MLP beside the experts, 0 without one. A cap of 0 is none. `attention`: what
    query times key is multiplied by before the cap. `temperature`: tokens up to which attention has no temperature, 0: ever."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    experts: int
    active: int
    expert: int
    shared: int
    epsilon: float
    rope_base: float
    attention: float
    attention_cap: float
    router_cap: float
    final_cap: float
    embedding: float
    output: float
    temperature: int
    tied: bool


class Weight(NamedTuple):
    """One weight's shape, and the axis along which a tensor-parallel rank holds its part (None: every rank has all of it)."""

    shape: tuple[int, ...]
    axis: int | None = None


def read(config: object) -> Grok:
    """The Grok that a Hub config describes.

    Raises `ValueError` for what this implementation does not do: another way to cap or rotate, sliding windows.
    """

    def get(name: str, default: Any) -> Any:
        found = getattr(config, name, None)
        return default if found is None else found

    _refuse(get)
    second = get("model_type", "") == "git" or bool(get("residual_moe", False))
    hidden, heads = get("hidden_size", 0), get("num_attention_heads", 0)
    head = get("head_dim", hidden // heads)
    rope = get("rope_parameters", {})
    return Grok(
        layers=get("num_hidden_layers", 0),
        hidden=hidden,
        heads=heads,
        kv_heads=get("num_key_value_heads", heads),
        head=head,
        vocab=get("vocab_size", 0),
        experts=get("num_local_experts", get("num_experts", 8)),
        active=get("num_experts_per_tok", 2),
        expert=get("moe_intermediate_size", get("intermediate_size", 0)),
        shared=get("intermediate_size", 0) if get("residual_moe", False) else 0,
        epsilon=get("rms_norm_eps", 1e-5),
        rope_base=float(get("rope_theta", rope.get("rope_theta", 10000.0))),
        # Grok-2's code scales by the head's size and never reads a multiplier; Grok-1's has only the multiplier.
        attention=head**-0.5 if second else float(get("attn_output_multiplier", head**-0.5)),
        attention_cap=max(0.0, float(get("attn_logit_softcapping", get("max_attn_value", 30.0)))),
        # Grok-1's router has no cap in xAI's code.
        router_cap=max(0.0, float(get("router_logit_softcapping", 30.0 if second else 0.0))),
        final_cap=max(0.0, float(get("final_logit_softcapping", 0.0))),
        embedding=float(get("embedding_multiplier_scale", 1.0)),
        output=float(get("output_multiplier_scale", 1.0)),
        temperature=max(0, int(get("attn_temperature_len", 0))),
        tied=bool(get("tie_word_embeddings", False)),
    )


def _refuse(get: Any) -> None:
    """Raise `ValueError` for what no published Grok has and this one does not do."""
    kind = get("rope_type", get("rope_parameters", {}).get("rope_type", "default"))
    if kind not in ("original", "default"):
        raise ValueError(f"Grok with rope_type {kind!r} is not known here: 'original' (plain rotary embedding) is")
    if get("attn_logit_softcapping_method", "tanh") != "tanh":
        raise ValueError(f"Grok with attn_logit_softcapping_method {get('attn_logit_softcapping_method', '')!r} is not known here")
    if get("rope_rotate_half_dims", False):
        raise ValueError("Grok with rope_rotate_half_dims is not known here")
    if get("sliding_window_size", -1) > 0:
        raise ValueError("Grok with a sliding window is not known here")


# Grok-1's names, each with Grok-2's. None of the left occurs in a name of Grok-2.
NAMES = (
    (".attn.", ".self_attn."),
    (".moe_block.", ".block_sparse_moe."),
    (".linear.", ".w1."),
    (".linear_1.", ".w2."),
    (".linear_v.", ".w3."),
    ("norm.scale", "norm.weight"),
)


def second_name(name: str) -> str:
    """The name that Grok-2 has for a weight of either."""
    for old, new in NAMES:
        name = name.replace(old, new)
    return name


def first_name(name: str) -> str:
    """The name that Grok-1 has for a weight of either."""
    for old, new in NAMES:
        name = name.replace(new, old)
    return name


def weights(grok: Grok) -> dict[str, Weight]:
    """Every weight of `grok` under Grok-2's name. The order is that of the published files, kind after kind."""
    table = {"model.embed_tokens.weight": Weight((grok.vocab, grok.hidden), 0)}
    if not grok.tied:
        table["lm_head.weight"] = Weight((grok.vocab, grok.hidden), 0)
    table["model.norm.weight"] = Weight((grok.hidden,))
    for kind, weight in _layer(grok).items():
        table |= {f"model.layers.{layer}.{kind}.weight": weight for layer in range(grok.layers)}
    return table


def _layer(grok: Grok) -> dict[str, Weight]:
    """The weights of one layer."""
    queries, keys = grok.heads * grok.head, grok.kv_heads * grok.head
    wide, narrow = Weight((grok.shared, grok.hidden), 0), Weight((grok.hidden, grok.shared), 1)
    table = {"mlp.gate_proj": wide, "mlp.down_proj": narrow, "mlp.up_proj": wide} if grok.shared else {}
    for part in ("w1", "w2", "w3"):
        weight = Weight((grok.hidden, grok.expert), 1) if part == "w2" else Weight((grok.expert, grok.hidden), 0)
        table |= {f"block_sparse_moe.experts.{expert}.{part}": weight for expert in range(grok.experts)}
    return table | {
        "self_attn.k_proj": Weight((keys, grok.hidden), 0),
        "self_attn.o_proj": Weight((grok.hidden, queries), 1),
        "self_attn.q_proj": Weight((queries, grok.hidden), 0),
        "self_attn.v_proj": Weight((keys, grok.hidden), 0),
        "pre_attn_norm": Weight((grok.hidden,)),
        "post_attn_norm": Weight((grok.hidden,)),
        "pre_moe_norm": Weight((grok.hidden,)),
        "post_moe_norm": Weight((grok.hidden,)),
        "block_sparse_moe.gate": Weight((grok.experts, grok.hidden)),
    }


def unused(name: str, grok: Grok) -> bool:
    """Whether some ports' files hold `name` (Grok-2's) and `grok` needs it not: tables of the rotation, a head that is tied."""
    return ".rotary_emb." in name or (name == "lm_head.weight" and grok.tied)


class Parts(NamedTuple):
    """A weight as files hold it: the files in the order in which they are joined along `axis`; one file: the whole weight."""

    name: str
    files: tuple[str, ...]
    axis: int


RANK = re.compile(r"-TP-(\d{3})\.safetensors$")


def join(files: Mapping[str, Mapping[str, tuple[int, ...]]], grok: Grok) -> list[Parts]:
    """How the weights in `files` (file -> name as it is there -> shape) make whole ones.

    `*-TP-00r.safetensors` holds the r-th part of each of its weights, every other file whole ones. Raises `ValueError` that
    names a weight which is missing, doubled, misshaped or none of Grok's; scales of quantised ones are none.
    """
    expected = weights(grok)
    ranks = {file: int(found[1]) for file in files if (found := RANK.search(file))}
    held: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(files):
        for name in files[file]:
            held.setdefault(second_name(name), []).append((file, name))
    for name in held:
        if name not in expected and not unused(name, grok):
            raise ValueError(f"the weight {name} is none of Grok's")
    complete(expected, held)
    joined = []
    for name, weight in expected.items():
        where = held[name]
        shapes = [files[file][spelt] for file, spelt in where]
        if len(where) > 1 or where[0][0] in ranks:
            _check_ranks(name, [ranks.get(file) for file, _ in where], 1 + max(ranks.values(), default=0))
        _check_shapes(name, weight, shapes)
        joined.append(Parts(where[0][1], tuple(file for file, _ in where), weight.axis or 0))
    return joined


def _check_ranks(name: str, ranks: list[int | None], count: int) -> None:
    """Raise `ValueError` unless `ranks` are 0 to `count` - 1, each once; None is a file of whole weights."""
    if None in ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"the weight {name} is there twice")
    absent = sorted(set(range(count)) - {rank for rank in ranks if rank is not None})
    if absent:
        raise ValueError(f"the weight {name} lacks the part of rank {absent[0]} of {count}")


def _check_shapes(name: str, weight: Weight, shapes: list[tuple[int, ...]]) -> None:
    """Raise `ValueError` unless `shapes`, joined along the weight's axis, are its shape."""
    axis = weight.axis or 0
    total = [*shapes[0]]
    if len(shapes[0]) == len(weight.shape):
        total[axis] = sum(shape[axis] for shape in shapes if len(shape) > axis)
    rests = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if tuple(total) != weight.shape or len(rests) > 1 or (len(shapes) > 1 and weight.axis is None):
        seen = " + ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"the weight {name} has the shape {seen} and should have {list(weight.shape)}")


def of_experts(expected: Iterable[str], given: set[int] | None) -> list[str]:
    """Of `expected` what is of no expert or of one that is `given`; all where that is None."""
    experts = ((name, name.partition(".experts.")[2].partition(".")[0]) for name in expected)
    return [name for name, expert in experts if given is None or not expert or int(expert) in given]


def scaled(eights: Iterable[str], found: Container[str]) -> None:
    """Raise `ValueError` that names the first scale which is not in `found` of weights (`eights`) in eight bits.

    vLLM asks for none: without its scale a weight would be used as if it had any.
    """
    for name in eights:
        if f"{name}_scale" not in found and f"{name}_scale_inv" not in found:
            raise ValueError(f"the checkpoint lacks {name}_scale")


def complete(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise `ValueError` that names the first weights of `expected` of which nothing is in `found`.

    A weight that is there in another form (packed, with scales: `q_proj.qweight`) counts as there.
    """
    stems = {name.rpartition(".")[0] for name in found}
    missing = [name for name in expected if name.removesuffix(".weight") not in stems]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the checkpoint lacks {', '.join(missing[:3])}{more}")
