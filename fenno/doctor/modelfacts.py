"""Looks at the recipe's model: its config, what weights there are, and whether they are whole. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fenno.doctor.facts import Model
from fenno.engine import server
from fenno.engine.command import DUMMY
from fenno.engine.dummy import SHAPES, files
from fenno.plan import shape
from fenno.plan.known import KNOWN
from fenno.recipe import Recipe

# The pointer that Git LFS leaves where a file was not fetched.
POINTER = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tokenizer.tok.json", "vocab.json", "tekken.json")


def model(recipe: Recipe, hub: Path) -> Model | None:
    """The model of a recipe; None for a server that runs already. `hub` is the Hub's cache folder."""
    name = recipe.engine.model
    if name is None:
        return None
    fault = server.model_fault(recipe.engine) or ""
    if name.startswith(DUMMY):
        config = {} if fault else files(SHAPES[name.removeprefix(DUMMY)])["config.json"]
        return Model(name, config, local=True, weights=size(config), dummy=True, fault=fault)
    folder = Path(name) if Path(name).is_dir() else snapshot(hub, name)
    if folder is None:
        known = KNOWN.get(name, {})
        return Model(name, known, local=False, weights=size(known) or None, fault=fault)
    return replace(read(name, folder), fault=fault)


def snapshot(hub: Path, name: str) -> Path | None:
    """The folder of a model in the Hub's cache: the main branch's snapshot, else the newest."""
    place = hub / f"models--{name.replace('/', '--')}"
    try:
        main = place / "snapshots" / (place / "refs" / "main").read_text().strip()
    except OSError:
        main = place / "none"
    found = [main] if main.is_dir() else sorted(place.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read(name: str, folder: Path) -> Model:
    """A model in a folder. Raises `ValueError` for a config that is no JSON."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        config = {}
    there = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    wanted = shards(folder)
    return Model(
        name,
        {**config, **(config.get("text_config") or {})},
        local=True,
        weights=sum(path.stat().st_size for path in there) or None,
        pointers=tuple(path.name for path in there if path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER)),
        absent=tuple(sorted(wanted - {path.name for path in there})),
        tokenizers=tuple(file for file in TOKENIZERS if (folder / file).is_file()),
    )


def shards(folder: Path) -> set[str]:
    """The files that the index of the weights names."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except OSError:
        return set()
    return set(index.get("weight_map", {}).values())


def size(config: Mapping[str, Any]) -> int:
    """Bytes of the weights that a config describes, as its dtype has them."""
    return shape.read(config).parameters * width(str(config.get("torch_dtype"))) if config else 0


def width(dtype: str) -> int:
    """Bytes of one number."""
    return {"float32": 4, "float": 4, "float8_e4m3fn": 1, "fp8": 1}.get(dtype.removeprefix("torch."), 2)
