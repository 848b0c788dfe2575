"""The device kernels that one unit of FlashAttention-2 holds, by going through its switches as its templates do.

Each `BOOL_SWITCH` in the launch templates doubles the kernels, but not all combinations differ: a kernel here is what the
template's arguments come to, and equal ones are one. Pure arithmetic: neither a compiler nor the source is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from fenno.fa2.releases import Release

Direction = Literal["fwd", "fwd_split", "bwd"]
Dtype = Literal["bf16", "fp16"]
Switch = Literal["dropout", "alibi", "local", "softcap", "uneven_k"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
BOTH = (False, True)
COMBINE_SIZES = 7  # 2, 4, 8, … 128 splits
Kernel = tuple[object, ...]


@dataclass(frozen=True)
class Unit:
    """One .cu file: one direction, head size, dtype and mask."""

    direction: Direction
    head: int
    dtype: Dtype
    causal: bool

    @property
    def file(self) -> str:
        """Its path in the source."""
        return f"csrc/flash_attn/src/flash_{self.direction}_hdim{self.head}_{self.dtype}_{'causal_' if self.causal else ''}sm80.cu"


@dataclass(frozen=True)
class Tile:
    """Rows of queries and columns of keys that one block works on, and its warps."""

    rows: int
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.warps}"


def units(
    heads: Collection[int], dtypes: Collection[Dtype] = DTYPES, directions: Collection[Direction] = get_args(Direction)
) -> tuple[Unit, ...]:
    """Every unit of these head sizes, dtypes and directions, with and without the causal mask."""
    return tuple(Unit(*parts) for parts in product(directions, heads, dtypes, BOTH))


def kernels(unit: Unit, release: Release, off: Collection[Switch] = ()) -> set[Kernel]:
    """The kernels of `unit` when the switches `off` are compiled out."""
    if unit.direction == "fwd":
        return _forward(unit, release, off)
    return _split(unit, release, off) if unit.direction == "fwd_split" else _backward(unit, release, off)


def tiles(head: int, causal: bool, dropout: bool) -> tuple[str, ...]:
    """Rows x columns x warps of the forward kernels; where there are two, the GPU decides when it runs."""
    return {
        32: ("128x128x4",),
        64: ("128x64x4",) if dropout else ("128x128x4",),
        96: ("128x64x4", "64x64x4") if causal else ("128x64x4",),
        128: ("128x32x4",) if dropout else ("128x64x4", "64x64x4" if causal else "128x32x4"),
        160: ("128x32x4", "64x64x4" if causal else "128x64x8"),
        192: ("64x64x4",) if dropout else ("128x64x8",),
        256: ("128x64x8", "64x64x4"),
    }[head]


def backward_tiles(head: int, dropout: bool) -> tuple[str, ...]:
    """The same of the backward kernels; V: the values are kept in registers, S: one buffer instead of two."""
    return {
        32: ("128x128x8 V", "128x128x8") if dropout else ("128x128x8 V",),
        64: ("128x128x8", "64x128x8 V"),
        96: ("64x128x8 V", "64x128x8") if dropout else ("64x128x8 V",),
        128: ("64x128x8", "64x64x8 V"),
        160: ("64x64x8", "64x64x8 S"),
        192: ("64x64x8", "64x64x8 VS"),
        256: ("64x64x8", "64x64x8 S") if dropout else ("64x64x8", "64x64x8 S", "64x32x8 VS"),
    }[head]


def _choices(switch: Switch, off: Collection[Switch]) -> tuple[bool, ...]:
    """The values a switch can have; head sizes that fill the kernel's are what is left without `uneven_k`."""
    if switch == "uneven_k":
        return (True,) if switch in off else BOTH
    return (False,) if switch in off else BOTH


def _forward(unit: Unit, release: Release, off: Collection[Switch]) -> set[Kernel]:
    found: set[Kernel] = set()
    axes = [_choices(switch, off) for switch in ("dropout", "local", "alibi", "softcap", "uneven_k")]
    for dropout, local, alibi, softcap, even_k, even_mn, returned in product(*axes, BOTH, BOTH):
        plain = not (release.alibi_uneven and alibi)
        full = even_k and plain and not (release.alibi_uneven and returned)
        even = even_mn and even_k and not local and plain and not returned and unit.head <= 128
        shape = (
            dropout and not softcap,
            local and not unit.causal,
            alibi,
            even,
            full,
            softcap,
            returned and dropout and not softcap,
        )
        found |= {("fwd", tile, *shape) for tile in tiles(unit.head, unit.causal, dropout)}
    return found


def _split(unit: Unit, release: Release, off: Collection[Switch]) -> set[Kernel]:
    found: set[Kernel] = {("combine", size, even) for size in range(COMBINE_SIZES) for even in _choices("uneven_k", off)}
    axes = [_choices(switch, off) for switch in ("local", "alibi", "softcap", "uneven_k")]
    for local, alibi, softcap, even_k, even_mn, split, append in product(*axes, BOTH, BOTH, BOTH):
        plain = not (release.alibi_uneven and alibi)
        even = even_mn and not append and even_k and not local and plain and unit.head <= 128
        found.add(("split", local and not unit.causal, alibi, even, even_k and plain, softcap, split, append))
    return found


def _backward(unit: Unit, release: Release, off: Collection[Switch]) -> set[Kernel]:
    found: set[Kernel] = set()
    axes = [_choices(switch, off) for switch in ("dropout", "local", "alibi", "softcap", "uneven_k")]
    for dropout, local, alibi, softcap, even_k, even_mn in product(*axes, BOTH):
        plain = not (release.alibi_uneven and alibi)
        even = even_mn and even_k and not local and plain and unit.head <= 128
        shape = (dropout and not softcap, local and not unit.causal, alibi, even, even_k and plain, softcap)
        for tile in backward_tiles(unit.head, dropout):
            found |= {("bwd", tile, *shape), ("dot", tile, True), ("dot", tile, False), ("convert", tile)}
    return found
