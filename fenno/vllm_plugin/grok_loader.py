"""`--load-format fenno_presharded`: Grok's files as they were published for eight tensor-parallel ranks, for any number of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf
from vllm.model_executor.models.utils import is_pp_missing_parameter

from fenno.vllm_plugin import grok_layout

FILES = "*.safetensors"


class PreshardedLoader(DefaultModelLoader):  # type: ignore[misc]
    """Joins the parts of a weight and hands the whole to the model, one at a time; vLLM's own loaders cut it again.

    Every rank reads every part of the layers that it has: what it does not keep is read for nothing.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        config = copy.copy(load_config)
        config.load_format = "safetensors"
        super().__init__(config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of `model` (a Grok), whole. Raises `ValueError` that names one which cannot be made whole."""
        folder = Path(model_config.model)
        if not folder.is_dir():
            folder = Path(download_weights_from_hf(str(folder), self.load_config.download_dir, [FILES], model_config.revision))
        with contextlib.ExitStack() as stack:
            files = {path.name: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob(FILES))}
            shapes = {
                file: {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118 (it is no mapping)
                for file, held in files.items()
            }
            for weight in grok_layout.join(shapes, model.grok):
                if is_pp_missing_parameter(grok_layout.second_name(weight.name), model):
                    continue
                parts = [files[file].get_tensor(weight.name) for file in weight.files]
                yield weight.name, parts[0] if len(parts) == 1 else torch.cat(parts, dim=weight.axis)
