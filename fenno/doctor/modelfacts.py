"""Looks at the recipe's model: its config, what weights there are, and whether they are whole. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenno.doctor.facts import Model
from fenno.engine.command import DUMMY
from fenno.engine.dummy import SHAPES
from fenno.recipe import Recipe

# The pointer that Git LFS leaves where a file was not fetched.
POINTER = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tokenizer.tok.json", "vocab.json", "tekken.json")
GROK = {
    "architectures": ["Grok1ForCausalLM"],
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attn_logit_softcapping": 30.0,
    "torch_dtype": "bfloat16",
}
# Models that a recipe of fenno's names and nobody has at hand: their public configs, and the bytes of their files.
KNOWN: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "xai-org/grok-2": (
        {**GROK, "hidden_size": 8192, "num_attention_heads": 64, "max_position_embeddings": 131072},
        539_000_000_000,
    ),
}


def model(recipe: Recipe, hub: Path) -> Model | None:
    """The model of a recipe; None for a server that runs already. `hub` is the Hub's cache folder."""
    name = recipe.engine.model
    if name is None:
        return None
    if name.startswith(DUMMY):
        shape = SHAPES.get(name.removeprefix(DUMMY), {})
        return Model(name, shape, local=True, weights=parameters(shape) * width(str(shape.get("torch_dtype"))), dummy=True)
    folder = Path(name) if Path(name).is_dir() else snapshot(hub, name)
    if folder is None:
        config, weights = KNOWN.get(name, ({}, None))
        return Model(name, config, local=False, weights=weights)
    return read(name, folder)


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
    files = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    wanted = shards(folder)
    return Model(
        name,
        {**config, **(config.get("text_config") or {})},
        local=True,
        weights=sum(path.stat().st_size for path in files) or None,
        pointers=tuple(path.name for path in files if path.stat().st_size < 1024 and path.read_bytes().startswith(POINTER)),
        absent=tuple(sorted(wanted - {path.name for path in files})),
        tokenizer=any((folder / file).is_file() for file in TOKENIZERS),
    )


def shards(folder: Path) -> set[str]:
    """The files that the index of the weights names."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    except OSError:
        return set()
    return set(index.get("weight_map", {}).values())


def parameters(config: Mapping[str, Any]) -> int:
    """Roughly the parameters of a decoder with gated experts or one gated feed-forward, embeddings counted twice unless tied."""
    if not config:
        return 0
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    attention = hidden * head * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    expert = config.get("moe_intermediate_size") or config["intermediate_size"]
    feed = 3 * hidden * expert * experts + hidden * (experts if experts > 1 else 0)
    if config.get("residual_moe"):
        feed += 3 * hidden * config["intermediate_size"]
    return int(layers * (attention + feed) + 2 * hidden * config.get("vocab_size", 0))


def width(dtype: str) -> int:
    """Bytes of one number."""
    return {"float32": 4, "float": 4, "float8_e4m3fn": 1, "fp8": 1}.get(dtype.removeprefix("torch."), 2)
