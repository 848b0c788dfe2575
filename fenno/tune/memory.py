"""The memory target as a flag of the start: vLLM takes its share of a GPU at once, whether it needs it or not. Pure.

With the default of 0.9 or 0.92 no target of 85 % can be met, whatever the search does afterwards. The first start takes a share by
experience; from what that engine says of itself, and NVML of its GPUs, follows how large a KV cache every later one may have.
"""

from __future__ import annotations

import math
import re

from fenno import units
from fenno.engine.catalogue import Catalogue
from fenno.errors import UsageError
from fenno.machine import Machine
from fenno.recipe import Recipe

FLAG, OTHER = "gpu-memory-utilization", "kv-cache-memory-bytes"
# What a GPU holds beside the share that vLLM accounts for: the CUDA context, captured graphs, buffers of NCCL.
OUTSIDE = 0.03
# Bytes that a GPU takes on once there is traffic on an engine that is ready: torch's allocator, workspaces, kernels that are loaded
# late. On one H200 with vLLM 0.24.0 it was 1.0 to 1.7 GiB in three trials (2026-11-30, benchmarks/tuner): this leaves more room.
GROWTH = 3 * 2**30
# A cache that is right to so many bytes stays as it is.
NOISE = 2**28
CACHE = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")


def within(recipe: Recipe, known: Catalogue, host: Machine) -> Recipe:
    """`recipe` with the share of a GPU that its memory target leaves, rounded down to a hundredth. Itself where that is more than
    this engine takes by default, where it runs on no GPU, or where the recipe says how much memory to take.

    Raises `UsageError` for a target that leaves nothing.
    """
    target, asked = recipe.targets.memory, {*recipe.engine.flags, *recipe.search.restart}
    flag = known.flags.get(FLAG)
    if target is None or known.platform == "cpu" or flag is None or asked & {FLAG, OTHER}:
        return recipe
    gpus = recipe.engine.ranks
    if target > 1 and len(host.gpus) < gpus:
        return recipe  # bytes of GPUs that are on other hosts as well
    left = leaves(target, gpus * least(recipe, host))
    if isinstance(flag.default, float) and flag.default <= left:
        return recipe
    flags = {**recipe.engine.flags, FLAG: left}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"flags": flags})})


def leaves(target: float, memory: int) -> float:
    """The share of GPUs with `memory` bytes in all, rounded down to a hundredth, that a target leaves; the target a share or bytes.

    Raises `UsageError` where that is nothing.
    """
    share = target if target <= 1 else target / memory
    # To the thousandth first: 0.85 - 0.03 is a little less than 0.82.
    left = math.floor(100 * round(share - OUTSIDE, 3)) / 100
    if left <= 0:
        raise UsageError(f"a memory target of {target:g} leaves an engine no memory", "give more, such as --max-memory 85%")
    return left


def least(recipe: Recipe, host: Machine) -> int:
    """The memory of the smallest GPU that an engine of `recipe` uses, in bytes; 0 where none is known."""
    return min((gpu.memory for gpu in host.gpus[: recipe.engine.ranks]), default=0)


def allowed(recipe: Recipe, host: Machine) -> float | None:
    """The bytes that may be used of each GPU under the memory target; None without one, and where no GPU is known."""
    target, memory = recipe.targets.memory, least(recipe, host)
    if target is None or not memory:
        return None
    return target * memory if target <= 1 else target / recipe.engine.ranks


def reported(log: str) -> int | None:
    """The bytes of KV cache that the rank with the least of it had room for, as an engine's log says; None where it does not."""
    found = [float(size) for size in CACHE.findall(log)]
    return int(min(found) * 2**30) if found else None


def fits(allowed: float, used: int, cache: int) -> int | None:
    """The KV cache in bytes, whole MiB, of an engine that stays below `allowed` bytes a GPU under traffic. `used`: what the fullest
    GPU holds now that it is ready with a `cache` of so many bytes. None where that is right as it is, or nothing is left."""
    size = int(cache + allowed - GROWTH - used) // 2**20 * 2**20
    return size if size > 0 and abs(size - cache) > NOISE else None


def tight(size: int, cache: int) -> bool:
    """Whether an engine with a cache of so many bytes, where `size` is what fits, has most likely no room for traffic."""
    return size < cache - GROWTH / 2


def correction(allowed: float, used: int, cache: int, size: int) -> str:
    """What the next start changes and why, in a sentence."""
    said = f"ready, the GPU holds {units.show_memory(used)}, of which {units.show_memory(cache)} are KV cache"
    limit = f"the memory target allows {units.show_memory(allowed)}"
    return f"{said}; {limit}, and traffic takes up to {units.show_memory(GROWTH)}: the next start has {OTHER} {size}"


def remark(before: Recipe, after: Recipe) -> list[str]:
    """In a sentence, what the memory target has set; nothing where it has set nothing."""
    if before is after:
        return []
    return [f"the memory target sets {FLAG} to {after.engine.flags[FLAG]:g}: the engine's default takes more than it allows"]
