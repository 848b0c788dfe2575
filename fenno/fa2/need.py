"""What a model needs of FlashAttention-2, read from its config.json alone. What is not understood is kept, never trimmed away."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fenno.errors import BuildError, UsageError
from fenno.fa2.lattice import DTYPES, Dtype, Switch

LARGEST = 256
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim")
HEAD_SIZES = ("head_dim", "global_head_dim")
# What a config may leave out, because the model's own code has it: xai-org/grok-1's model.py; the config classes of the others.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grok": {"attn_logit_softcapping": 30.0},
    "gemma2": {"attn_logit_softcapping": 50.0, "sliding_window": 4096, "head_dim": 256},
    "gemma": {"head_dim": 256},
    "mistral": {"sliding_window": 4096},
}
NAMES: Mapping[str, Dtype] = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16"}
SOFTCAP = re.compile(r"attn.*cap|attention.*cap|max_attn_val")
WINDOW = re.compile(r"window|attention_chunk")
NO_WINDOW = {"max_window_layers", "use_sliding_window"}


@dataclass(frozen=True)
class Need:
    """`sizes`: head sizes of the attention, each at most 256. `keep`: the switches that have to stay compiled in. `reasons`: a
    sentence for each of these facts. `heads`, `kv_heads`: of the language model; no kernel depends on them."""

    model: str
    sizes: tuple[int, ...]
    dtypes: tuple[Dtype, ...]
    keep: frozenset[Switch]
    reasons: tuple[str, ...]
    heads: int
    kv_heads: int


def of(config: Mapping[str, Any], model: str, dtype: str | None = None) -> Need:
    """The need of the model with this config; `dtype` overrules the config's.

    Raises `UsageError` for a config without attention heads and `BuildError` for a model that FlashAttention-2 cannot run.
    """
    parts = [(name, {**_defaults(part), **part}) for name, part in _parts(config)]
    if not parts:
        raise UsageError(f"the config of {model} names no attention heads", "give the folder of a model whose config.json has them")
    sizes = {size: name for name, part in reversed(parts) for size in _sizes(part, model)}
    dtypes, why = _dtypes(config, model, dtype)
    reasons = [f"head size {size}{f' ({name})' if name else ''}" for size, name in sorted(sizes.items())]
    keep = {}
    for name, part in parts:
        found: dict[Switch, str] = {**_softcap(part), **_window(part), **_alibi(part)}
        keep.update({switch: f"{reason}{f' ({name})' if name else ''}" for switch, reason in found.items()})
    heads = _first(parts[0][1], HEADS) or 1
    shared = _first(parts[0][1], ("num_key_value_heads",)) or heads
    told = (*reasons, why, *keep.values(), *_grouped(heads, shared))
    return Need(model, tuple(sorted(sizes)), dtypes, frozenset(keep), told, heads, shared if heads % shared == 0 else heads)


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The language model, named "", and whatever else in the config has attention heads: vision, audio."""
    text = {**config, **(config.get("text_config") or {})}
    if _first(text, HEADS):
        yield "", text
    for key, part in config.items():
        if key != "text_config" and isinstance(part, Mapping) and _first(part, HEADS):
            yield key.removesuffix("_config"), part


def _first(part: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((int(part[key]) for key in keys if isinstance(part.get(key), int)), None)


def _defaults(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = str(part.get("model_type", "")).lower()
    if "grok" in " ".join([kind, *map(str, part.get("architectures") or ())]).lower():
        return DEFAULTS["grok"]
    return DEFAULTS.get(kind, {})


def _sizes(part: Mapping[str, Any], model: str) -> set[int]:
    """The head sizes of one part. Raises `BuildError` for those that FlashAttention-2 lacks."""
    heads, width = _first(part, HEADS), _first(part, WIDTHS)
    if part.get("kv_lora_rank"):
        _refuse_latent(part, model)
        return {part["qk_nope_head_dim"] + part["qk_rope_head_dim"]}
    found = {int(part[key]) for key in HEAD_SIZES if part.get(key)} or ({width // heads} if heads and width else set())
    if not found:
        raise UsageError(f"the config of {model} names neither a head size nor a hidden size")
    if max(found) > LARGEST:
        raise BuildError(
            f"{model} has heads of {max(found)}, and FlashAttention-2 has kernels up to {LARGEST}",
            'use torch\'s own attention for it: attn_implementation="sdpa"',
        )
    # flash_attn pads to a multiple of 8 before it calls a kernel.
    return {-(-size // 8) * 8 for size in found}


def _refuse_latent(part: Mapping[str, Any], model: str) -> None:
    """Raise `BuildError` for latent attention whose values have another size than its keys."""
    key, value = part["qk_nope_head_dim"] + part["qk_rope_head_dim"], part["v_head_dim"]
    latent = part["kv_lora_rank"] + part["qk_rope_head_dim"]
    if key != value:
        raise BuildError(
            f"{model} has latent attention: heads of {key} for queries and keys, {value} for values, {latent} in its compressed "
            f"form; FlashAttention-2 has one size for all three, {LARGEST} at most",
            "engines bring kernels of their own for it (FlashMLA, FlashAttention-3); there is nothing to trim here",
        )


def _dtypes(config: Mapping[str, Any], model: str, dtype: str | None) -> tuple[tuple[Dtype, ...], str]:
    """The dtypes to build, and why. Raises `BuildError` for one that FlashAttention-2 has no kernels for."""
    text = {**config, **(config.get("text_config") or {})}
    wanted = dtype if dtype not in (None, "auto") else text.get("dtype") or text.get("torch_dtype")
    if wanted in (None, "auto"):
        return DTYPES, "the config names no dtype: both are kept"
    name = str(wanted).removeprefix("torch.")
    if name not in NAMES:
        raise BuildError(
            f"{model} runs in {name}, and FlashAttention-2 has kernels for bfloat16 and float16",
            "name the one it will run in: --dtype bfloat16",
        )
    return (NAMES[name],), f"dtype {name}"


def _softcap(part: Mapping[str, Any]) -> dict[Switch, str]:
    named = [f"{key} is {value:g}" for key, value in part.items() if SOFTCAP.search(key) and _positive(value)]
    return {"softcap": f"soft cap: {named[0]}"} if named else {}


def _window(part: Mapping[str, Any]) -> dict[Switch, str]:
    if part.get("use_sliding_window") is False:
        return {}
    layers = {str(kind) for kind in part.get("layer_types") or () if re.search("sliding|chunk|local", str(kind))}
    values = {key: value for key, value in part.items() if WINDOW.search(key) and key not in NO_WINDOW and _positive(value)}
    names = [*(f"{key} is {value}" for key, value in values.items()), *(f"layers of {kind}" for kind in sorted(layers))]
    return {"local": f"window: {names[0]}"} if names else {}


def _alibi(part: Mapping[str, Any]) -> dict[Switch, str]:
    nested = part.get("attn_config")
    where = {**part, **nested} if isinstance(nested, Mapping) else part
    named = next((f"{key} is {value}" for key, value in where.items() if "alibi" in key and value), None)
    if str(part.get("position_embedding_type")) == "alibi" or part.get("model_type") in ("bloom", "mpt", "baichuan"):
        named = named or "by its kind of model"
    return {"alibi": f"ALiBi: {named}"} if named else {}


def _positive(value: object) -> bool:
    """Whether a setting is on: a number above zero, or a list with one."""
    if isinstance(value, list | tuple):
        return any(map(_positive, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _grouped(heads: int, shared: int) -> tuple[str, ...]:
    if shared == heads:
        return ()
    return (f"{shared} key-value heads for {heads} query heads: no kernel of its own, heads are counted when it runs",)
