"""Everything that differs between vLLM 0.24 and 0.33, as far as Grok is concerned."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

ARCHITECTURES = ("Grok1ForCausalLM", "Grok1ModelForCausalLM")
MODEL = "fenno.vllm_plugin.grok:GrokForCausalLM"
LOAD_FORMAT = "fenno_presharded"
# Set to anything: take fenno's Grok also where vLLM (up to 0.24) has one of its own.
FORCE = "FENNO_GROK"


def register() -> None:
    """Tell vLLM of both Groks, the config of `model_type: grok-1` and the loader of presharded files. Cheap, and may be repeated.

    The model is registered by name, so that nothing of it is imported before an engine wants it.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from fenno.vllm_plugin.grok_config import Grok1Config

    own = ModelRegistry.get_supported_archs()
    for architecture in ARCHITECTURES:
        if architecture not in own or os.environ.get(FORCE):
            ModelRegistry.register_model(architecture, MODEL)
    AutoConfig.register(Grok1Config.model_type, Grok1Config, exist_ok=True)
    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from fenno.vllm_plugin.grok_loader import PreshardedLoader

        register_model_loader(LOAD_FORMAT)(PreshardedLoader)


def fused_experts(**options: Any) -> Any:
    """vLLM's fused mixture of experts; options that this version has no name for and needs none of are left out.

    `FusedMoE` up to 0.26, `FusedMoEFactory` from 0.28; `ckpt_names` from 0.26 on.
    """
    from vllm.model_executor.layers import fused_moe

    build = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    known = inspect.signature(build).parameters
    return build(**{name: value for name, value in options.items() if name in known or name != "ckpt_names"})


def plain_name(parameter: str) -> str:
    """A parameter's name without the module in which newer versions keep the experts' weights."""
    return re.sub(r"\.experts\.(\w+\.)+(?=w13_|w2_)", ".experts.", parameter)
