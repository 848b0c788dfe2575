"""Bytes of a KV cache and how they lie, as arithmetic. Axes are `name -> (size, stride)`, the stride in bytes.

L is the layer, B the block, H the KV head, N the token in its block, C the bytes of one head and token (K and V where they lie
together); KV, where the version has it, tells K from V.
"""

from __future__ import annotations

from collections.abc import Mapping

Axes = Mapping[str, tuple[int, int]]

# What is taken of each axis by those who read a cache; an axis that is not named is taken whole.
READS: Mapping[str, Mapping[str, int]] = {
    "attention": {"L": 1, "B": 1, "H": 1, "KV": 1},  # one head's part of one block, in one layer
    "shard": {"B": 1, "H": 1},  # one head of a block in every layer: what ranks of another number exchange
    "transfer": {"B": 1},  # a block, whole: disaggregated prefill, offload
}


def run(axes: Axes, taken: Mapping[str, int]) -> int:
    """The bytes that lie together when `taken` is read, from the innermost axis outwards until something else lies between."""
    length = 1
    for name, (size, stride) in sorted(axes.items(), key=lambda axis: axis[1][1]):
        if size == 1:
            continue
        if stride != length:
            break
        count = taken.get(name, size)
        length *= count
        if count < size:
            break
    return length


def volume(axes: Axes, taken: Mapping[str, int]) -> int:
    """The bytes that are read altogether."""
    total = 1
    for name, (size, _) in axes.items():
        total *= taken.get(name, size)
    return total


def token(axes: Axes) -> int:
    """Bytes of one token, in all layers of one rank."""
    return volume(axes, {"B": 1, "N": 1})


def kept(heads: int, head: int, latent: int, width: int) -> int:
    """Bytes that one layer keeps of a token: keys and values of so many KV heads, each of `head` numbers of `width` bytes; or
    `latent` numbers in their place, where that is not 0."""
    return (latent or 2 * heads * head) * width


def width(asked: str, model: int) -> int | None:
    """Bytes of a number in the cache. `asked`: the engine's `kv-cache-dtype`; `model`: bytes of a number in the model's layers.
    None for a format that is not known here: some have less than a byte, and scales of their own."""
    if asked == "auto":
        return model
    return 1 if asked.startswith(("fp8", "int8")) else 2 if asked in ("bfloat16", "float16") else None


def tail(block: int) -> float:
    """Tokens of a sequence's last block that stay empty, on average over sequence lengths."""
    return (block - 1) / 2
