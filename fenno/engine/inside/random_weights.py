"""Writes safetensors files of random weights: run as a script under the engine's own interpreter, with a plan on its input.

The plan is one JSON object: `folder`, `dtype`, `std`, `seed`, and `files`, from a file's name to its weights, each a list of
the weight's name there, the name that its numbers follow from, the whole weight's shape, the axis, which part and of how many.
The same name and seed give the same numbers, whole or in parts.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any


def weight(name: str, shape: list[int], std: float, seed: int) -> Any:
    """The whole weight `name`: normal around 0, or around 1 for the factors of a norm."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(shape, generator=generator) * std + (1.0 if len(shape) == 1 else 0.0)


def write(plan: dict[str, Any]) -> None:
    """Write every file of `plan`."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, plan["dtype"])
    for file, wanted in plan["files"].items():
        tensors = {}
        for spelt, name, shape, axis, part, parts in wanted:
            whole = weight(name, shape, plan["std"], plan["seed"])
            tensors[spelt] = whole.chunk(parts, dim=axis)[part].to(dtype).contiguous()
        save_file(tensors, str(Path(plan["folder"], file)), metadata={"format": "pt"})


if __name__ == "__main__":
    write(json.load(sys.stdin))
