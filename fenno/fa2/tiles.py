"""Other tile sizes for a plan's kernels, as an experiment: which are possible, the code that has them, which one is kept.

No line of upstream's is edited: a unit with other tiles is a file of its own that calls upstream's templates. Where several tiles
are to be tried, one library has them all, and a variable of the environment says which one a call takes. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from fenno.errors import UsageError
from fenno.fa2.lattice import Direction, Tile, Unit, kernels, tiles
from fenno.fa2.plan import STUBS, Plan
from fenno.fa2.stubs import FUNCTIONS, TYPES

# KiB of shared memory that one block may have, by architecture.
SHARED = {"80": 163, "90": 227, "100": 227, "110": 227, "120": 99}
MMA_ROWS = 16  # of one warp
COLUMNS = (32, 64, 128, 256)  # forward kernels take pairs of 16: a static_assert of dropout.h
REGISTERS = 200  # a thread's accumulators; of 255 the rest is for everything else
FOLDER = "csrc/flash_attn/src"
# Whose tiles are tried: prompts; decoding where there is a block for every processor; decoding in splits where there is not.
TRIED: tuple[tuple[Direction, bool], ...] = (("fwd", True), ("fwd", False), ("fwd_split", False))
CALLED: Mapping[str, str] = {
    "fwd": "run_flash_fwd<Flash_fwd_kernel_traits<{head}, {tile}, false, false, {type}>, false, {causal}>(params, stream);",
    "fwd_split": "run_flash_splitkv_fwd<Flash_fwd_kernel_traits<{head}, {tile}, false, false, {type}>, {causal}>(params, stream);",
}


def possible(direction: Direction, head: int, arch: str) -> tuple[Tile, ...]:
    """The tiles that the kernels' layout allows: 16 rows a warp, columns in pairs of 16, whole passes of the copying threads,
    shared memory, registers.

    Split kernels have four warps, since their partial results are written by 128 threads, and at most twice as many rows as
    columns: those results, in float32, lie where queries, keys and values lay, and upstream makes no more room for them.
    """
    found = []
    for warps in (4,) if direction == "fwd_split" else (2, 4, 8):
        copied = 32 * warps // (8 if head % 64 == 0 else 4)
        for rows in (MMA_ROWS * warps, 2 * MMA_ROWS * warps):
            for columns in COLUMNS:
                shared = (rows + 2 * columns) * head * 2
                accumulators = rows * (head + columns) / (32 * warps)
                partial = rows * head * 4 if direction == "fwd_split" else 0
                if columns % copied == 0 and partial <= shared <= SHARED[arch] * 1024 and accumulators <= REGISTERS:
                    found.append(Tile(rows, columns, warps))
    return tuple(found)


def upstreams(unit: Unit) -> Tile:
    """The tile of upstream's forward kernels on GPUs other than sm_86 and sm_89, and of its split kernels."""
    if unit.direction == "fwd_split":
        return Tile(64, 256 if unit.head <= 64 else 128 if unit.head <= 128 else 64, 4)
    return Tile(*map(int, tiles(unit.head, unit.causal, False)[0].split("x")))


def experiment(plan: Plan) -> Plan:
    """The plan of a library with every possible tile, for the largest head size of a model.

    Raises `UsageError` for more than one architecture and for releases whose units fenno does not write.
    """
    if len(plan.archs) > 1:
        raise UsageError("--tiles measures one architecture", "name one: --arch sm_90")
    if not plan.release.alibi_uneven:
        raise UsageError(f"--tiles is for flash-attn 2.8 and later, not {plan.release.version}", "leave --version out")
    chosen = [Unit(direction, plan.heads[-1], plan.need.dtypes[0], causal) for direction, causal in TRIED]
    return with_tiles(plan, {unit: possible(unit.direction, unit.head, plan.archs[0]) for unit in chosen})


def with_tiles(plan: Plan, wanted: Mapping[Unit, tuple[Tile, ...]]) -> Plan:
    """The same plan with other tiles in some units."""
    made = replace(plan, tiles=dict(wanted))
    each = {unit: len(kernels(unit, plan.release, plan.off)) // _upstream_tiles(unit) for unit in wanted}
    more = sum(each[unit] * (len(some) - _upstream_tiles(unit)) for unit, some in wanted.items())
    return replace(made, kernels=plan.kernels + more, seconds=sum(estimates(made).values()))


def _upstream_tiles(unit: Unit) -> int:
    """Upstream's forward units hold two tiles where the GPU decides."""
    return len(tiles(unit.head, unit.causal, False)) if unit.direction == "fwd" else 1


def sources(plan: Plan) -> dict[str, str | None]:
    """The device's files of a plan, by their path in the source; the text of those that are made, None for upstream's."""
    found: dict[str, str | None] = {}
    for unit in plan.units:
        wanted = plan.tiles.get(unit, ())
        if not wanted:
            found[unit.file] = None
        elif len(wanted) == 1:
            found[file(unit, wanted[0])] = text(unit, wanted[0], specialised(unit))
        else:
            found |= {file(unit, tile): text(unit, tile, f"void {name(unit, tile)}") for tile in wanted}
            found[chooser(unit)] = switch(unit, wanted)
    return found


def estimates(plan: Plan) -> dict[str, float]:
    """CPU seconds for each file of a build, by its name without the ending."""
    known = dict(plan.estimates)
    for unit, wanted in plan.tiles.items():
        seconds = known.pop(PurePath(unit.file).stem) / _upstream_tiles(unit)
        known |= {PurePath(file(unit, tile)).stem: seconds for tile in wanted}
        known |= {PurePath(chooser(unit)).stem: STUBS} if len(wanted) > 1 else {}
    return known


def variable(unit: Unit) -> str:
    """The variable of the environment by which a library with several tiles is told which one to take."""
    return f"FENNO_TILE_{unit.direction.upper()}{'_CAUSAL' if unit.causal else ''}"


def name(unit: Unit, tile: Tile | None = None) -> str:
    return "_".join([PurePath(unit.file).stem.removesuffix("_sm80"), *([str(tile)] if tile else [])])


def file(unit: Unit, tile: Tile) -> str:
    return f"{FOLDER}/fenno_{name(unit, tile)}.cu"


def chooser(unit: Unit) -> str:
    """The file that takes one of several tiles."""
    return f"{FOLDER}/fenno_{name(unit)}.cpp"


def specialised(unit: Unit) -> str:
    """The function that the host's code calls for a unit, up to its arguments."""
    return f"template<> void {FUNCTIONS[unit.direction]}<{TYPES[unit.dtype]}, {unit.head}, {str(unit.causal).lower()}>"


def text(unit: Unit, tile: Tile, signature: str) -> str:
    """A unit whose kernels have this tile."""
    parts = {"head": unit.head, "tile": f"{tile.rows}, {tile.columns}, {tile.warps}", "type": TYPES[unit.dtype]}
    call = CALLED[unit.direction].format(**parts, causal=str(unit.causal).lower())
    lines = [
        "// Made by fenno build-fa2 --tiles.",
        *('#include "namespace_config.h"', '#include "flash_fwd_launch_template.h"'),
        "namespace FLASH_NAMESPACE {",
        f"{signature}(Flash_fwd_params &params, cudaStream_t stream) {{",
        f"    {call}",
        *("}", "}"),
    ]
    return "\n".join(lines) + "\n"


def switch(unit: Unit, wanted: Sequence[Tile]) -> str:
    """A unit that takes the tile that the environment names, upstream's when it names none."""
    return "\n".join(_switch(unit, wanted)) + "\n"


def _switch(unit: Unit, wanted: Sequence[Tile]) -> Iterator[str]:
    yield "// Made by fenno build-fa2 --tiles."
    yield from ("#include <cstdlib>", "#include <cstring>", "#include <c10/util/Exception.h>")
    yield from ("#include <cutlass/numeric_types.h>", '#include "flash.h"', "namespace FLASH_NAMESPACE {")
    for tile in wanted:
        yield f"void {name(unit, tile)}(Flash_fwd_params &params, cudaStream_t stream);"
    yield f"{specialised(unit)}(Flash_fwd_params &params, cudaStream_t stream) {{"
    yield f'    const char *tile = std::getenv("{variable(unit)}");'
    yield f'    if (tile == nullptr || *tile == 0) tile = "{upstreams(unit)}";'
    for tile in wanted:
        yield f'    if (std::strcmp(tile, "{tile}") == 0) return {name(unit, tile)}(params, stream);'
    yield '    TORCH_CHECK(false, "this library has no tile ", tile);'
    yield from ("}", "}")


def kept(rows: Sequence[Mapping[str, Any]], stock: Tile) -> Tile | None:
    """The tile that is faster than upstream's beyond noise: on some shape the upper quartile lies below upstream's lower one, on
    none the other way about. Of several the one with the least product of medians. None: upstream's stays.

    `rows`: for each shape the times by tile, each with low, median and high, and beside them torch's own attention's.
    """
    best: tuple[float, str] | None = None
    for tile in (name for name in (rows[0]["times"] if rows else ()) if name != "sdpa"):
        pairs = [(row["times"][tile], row["times"][str(stock)]) for row in rows]
        faster = any(time["high"] < own["low"] for time, own in pairs)
        slower = any(time["low"] > own["high"] for time, own in pairs)
        product = math.prod(time["median"] / own["median"] for time, own in pairs)
        if faster and not slower and product < 1 and (best is None or product < best[0]):
            best = product, tile
    return Tile(*map(int, best[1].split("x"))) if best else None
