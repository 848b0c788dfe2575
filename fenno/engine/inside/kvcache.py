"""What an installed vLLM says of its KV cache for one model: run as a script under the engine's own interpreter.

The arguments are those of `vllm serve`; it prints one JSON line. Nothing is decided here: the platform says which attention
backends can be used, the backends which block sizes and layouts, and the engine's own resolver has the last word on each.
Standard library and vLLM only.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

MARK = "fenno-kv:"
VARIABLE = "VLLM_KV_CACHE_LAYOUT"
BLOCKS = (8, 16, 32, 64, 128, 256)
# What a platform, or the import of a backend that is not for it, answers instead of a class.
REFUSALS = (ValueError, ImportError, OSError, AttributeError, NotImplementedError, AssertionError, RuntimeError)
NOMINAL = 1021  # blocks of a cache that is only reckoned with; no other size is this
PROBE = 127 * 256  # tokens of a block that backends are asked about: they take it, and no head's size, nor twice one, is this


def configured(words: list[str]) -> tuple[Any, int]:
    """The engine's configuration for `vllm serve WORDS`, as one rank sees it, and the tensor-parallel size that was asked for."""
    from arguments import engine_args

    args = engine_args(words)
    ranks = args.tensor_parallel_size
    # This host need not have the GPUs: the shares are divided afterwards.
    args.tensor_parallel_size = args.pipeline_parallel_size = 1
    config = args.create_engine_config()
    config.parallel_config.tensor_parallel_size = ranks
    return config, ranks


def backends(config: Any) -> tuple[dict[str, Any], dict[str, str], str]:
    """The attention backends that can be used here for this model, by name; why not the others; and the one that is the default."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = config.model_config
    heads = model.get_num_attention_heads(config.parallel_config)
    wanted = selector(config)
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    own = candidates(wanted, heads)
    for member in AttentionBackendEnum:
        if own is not None and member.name not in own:
            refused[member.name] = "this platform does not choose it for such a model"
            continue
        try:
            backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(member, wanted, heads))
            # A platform with one backend answers with that one, whatever it is asked for.
            found[backend.get_name()] = backend
        except REFUSALS as error:
            refused[member.name] = (str(error).splitlines() or [type(error).__name__])[0]
    usual = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(config.attention_config.backend, wanted, heads))
    return {usual.get_name(): usual, **found}, refused, usual.get_name()


def candidates(wanted: Any, heads: int) -> set[str] | None:
    """The backends that the platform chooses from, None where it does not say: named by hand it takes other vendors' as well."""
    from vllm.platforms import current_platform

    try:
        valid, invalid = current_platform.get_valid_backends(current_platform.get_device_capability(), wanted, heads)
    except (AttributeError, TypeError):
        return None
    return {member.name for member in invalid} | {candidate.backend.name for candidate in valid}


def selector(config: Any) -> Any:
    """What the platform is asked with. Fields that this version does not have are left out."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    known = {
        "head_size": config.model_config.get_head_size(),
        "dtype": config.model_config.dtype,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "block_size": None,
        "use_mla": bool(config.model_config.use_mla),
        "has_sliding_window": config.model_config.get_sliding_window() is not None,
        "use_kv_connector": config.kv_transfer_config is not None,
    }
    return AttentionSelectorConfig(**{name: known[name] for name in AttentionSelectorConfig._fields if name in known})


def spec(config: Any, backend: Any, block: int) -> Any:
    """The engine's own description of one layer's cache."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    made = (MLAAttentionSpec if config.model_config.use_mla else FullAttentionSpec)(
        block_size=block,
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
        head_size=config.model_config.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config),
    )
    return backend.customize_spec(made) if hasattr(backend, "customize_spec") else made


def kernel_block(backend: Any, made: Any) -> tuple[int | None, str]:
    """The block that the backend's kernels would work with for the engine's block, or None and the engine's reason."""
    from vllm.v1.worker import utils

    try:
        try:
            return utils.select_common_block_size(made.block_size, [backend], [made]), ""
        except TypeError:
            return utils.select_common_block_size(made.block_size, [backend]), ""
    except ValueError as error:
        return None, str(error)


def layouts(config: Any, backend: Any, block: int) -> list[dict[str, Any]]:
    """One cell for each layout of this version with this block: legal or why not, and the axes in bytes, [size, stride]."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
    except ImportError:
        return _old_layouts(config, backend, block)
    from vllm.v1.kv_cache_interface import compute_layer_kv_cache_shape_bytes, compute_layout_strides

    made = spec(config, backend, block)
    kernel, why = kernel_block(backend, made)
    cells = []
    for layout in KVCacheLayout:
        refusal = why or resolved(config, backend, made, layout.name)[1]
        layers = config.model_config.get_num_layers(config.parallel_config)
        strides = compute_layout_strides(made, NOMINAL, layers, layout)
        sizes = (layers, *compute_layer_kv_cache_shape_bytes(made, NOMINAL))
        axes = dict(zip("LBHNC", zip(sizes, strides, strict=True), strict=True))
        if not refusal and kernel != block and axes["B"][1] != made.page_size_bytes:
            refusal = f"blocks of {block} cannot be split into the {kernel} of the kernels where other layers lie between them"
        cells.append({"layout": layout.name, "block": block, "kernel": kernel, "why": refusal, "axes": axes})
    return cells


def resolved(config: Any, backend: Any, made: Any, asked: str | None) -> tuple[str | None, str]:
    """What the engine's resolver makes of a wish for a layout (None: no wish): its name, or None and the reason."""
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    os.environ.pop(VARIABLE, None)
    if asked is not None:
        os.environ[VARIABLE] = asked
    config.cache_config.kv_cache_layout = None
    try:
        supported = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
        return resolve_kv_cache_layout(config, [supported], [made]).name, ""
    except ValueError as error:
        return None, str(error)
    finally:
        os.environ.pop(VARIABLE, None)


def _old_layouts(config: Any, backend: Any, block: int) -> list[dict[str, Any]]:
    """The same for a version that knows NHD and HND alone (up to 0.28), where each layer has a tensor of its own."""
    from vllm.v1.attention.backends import utils

    made = spec(config, backend, block)
    kernel, why = kernel_block(backend, made)
    required = getattr(backend, "get_required_kv_cache_layout", lambda: None)()
    cells = []
    for name in ("NHD", "HND"):
        utils.get_kv_cache_layout.cache_clear()
        utils.set_kv_cache_layout(name)
        refusal = why or (f"{backend.get_name()} requires {required}" if required not in (None, name) else "")
        cells.append({"layout": name, "block": block, "kernel": kernel, "why": refusal, "axes": _old_axes(config, backend, made)})
    return cells


def _old_axes(config: Any, backend: Any, made: Any) -> dict[str, tuple[int, int]]:
    """Axes from the backend's shape, told apart by sizes that no other axis has; none where it packs more than keys with values."""
    probe = backend.get_kv_cache_shape(NOMINAL, PROBE, 7, made.head_size, config.cache_config.cache_dtype)
    # From 0.26 on a token's keys and values of one head lie together.
    names = {NOMINAL: "B", PROBE: "N", 7: "H", made.head_size: "C", 2 * made.head_size: "C", 2: "KV"}
    if len(names) < 6 or not set(probe) <= set(names):
        return {}
    try:
        order = backend.get_kv_cache_stride_order()
    except (AttributeError, NotImplementedError):
        order = tuple(range(len(probe)))
    content = next(size for size in probe if names[size] == "C") * made.dtype.itemsize
    sizes = {"B": NOMINAL, "N": made.block_size, "H": made.num_kv_heads, "C": content, "KV": 2}
    axes, stride = {}, 1
    for name in [names[probe[index]] for index in reversed(order)]:
        axes[name] = (sizes[name], stride)
        stride *= sizes[name]
    return {**axes, "L": (config.model_config.get_num_layers(config.parallel_config), stride)}


def usual_layout(config: Any, backend: Any, block: int) -> str | None:
    """The layout that this version would take by itself."""
    try:
        import vllm.v1.kv_cache_layout  # noqa: F401
    except ImportError:
        required = getattr(backend, "get_required_kv_cache_layout", lambda: None)()
        return str(required or "NHD")
    return resolved(config, backend, spec(config, backend, block), None)[0]


def report(words: list[str]) -> dict[str, Any]:
    """Everything at once, as plain data."""
    from vllm.config import set_current_vllm_config

    wish = os.environ.pop(VARIABLE, None)
    config, ranks = configured(words)
    # A backend may look at the configuration when it is asked for its blocks.
    with set_current_vllm_config(config):
        return {"wish": wish, "ranks": ranks, **told(config)}


def told(config: Any) -> dict[str, Any]:
    """What the engine says of a configuration that is the current one."""
    from vllm import __version__
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    usable, refused, usual = backends(config)
    blocks = sorted({*BLOCKS, cache.block_size})
    hf = model.hf_text_config
    return {
        "version": __version__,
        "platform": current_platform.device_type,
        "model": {
            "layers": model.get_num_layers(config.parallel_config),
            "windowed": list(getattr(hf, "layer_types", None) or []).count("sliding_attention"),
            "window": model.get_sliding_window(),
            "mla": bool(model.use_mla),
            "kv_heads": model.get_total_num_kv_heads(),
            "head_size": model.get_head_size(),
            "max_len": model.max_model_len,
            "cache_dtype": str(spec(config, usable[usual], cache.block_size).dtype).removeprefix("torch."),
        },
        "block": cache.block_size,
        "cache_bytes": getattr(cache, "kv_cache_memory_bytes", None),
        "sequences": config.scheduler_config.max_num_seqs,
        "leaves": config.kv_transfer_config is not None or bool(getattr(cache, "kv_offloading_size", None)),
        "usual": usual,
        "refused": refused,
        "backends": {
            name: {
                "layout": usual_layout(config, backend, cache.block_size),
                "cells": [cell for block in blocks for cell in layouts(config, backend, block)],
            }
            for name, backend in usable.items()
        },
    }


if __name__ == "__main__":
    print(MARK + json.dumps(report(sys.argv[1:])), flush=True)
