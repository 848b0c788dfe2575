"""The memory target as a flag of the start: vLLM takes its share of a GPU at once, whether it needs it or not. Pure.

With the default of 0.9 or 0.92 no target of 85 % can be met, whatever the search does afterwards.
"""

from __future__ import annotations

import math

from fenno import units
from fenno.engine.catalogue import Catalogue
from fenno.errors import UsageError
from fenno.machine import Machine
from fenno.recipe import Recipe, Scalar

FLAG, OTHER = "gpu-memory-utilization", "kv-cache-memory-bytes"
# Bytes that a GPU holds beside that share at its peak under load: the CUDA context, captured graphs, what torch's allocator adds. A
# larger GPU has no more of it. 1.5 to 2.05 GiB were measured, and some models capture up to 1 GiB more (docs/tuning.md).
BESIDE = 3 * 2**30
LESS = 0.05  # of a GPU, when that was not enough
# The GPU that is reckoned with where NVML says nothing.
USUAL = 80 * 2**30


def within(recipe: Recipe, known: Catalogue, host: Machine) -> Recipe:
    """`recipe` with the share of a GPU that its memory target leaves, rounded down to a hundredth. Itself where that is more than
    this engine takes by default, where it runs on no GPU, or where the recipe says how much memory to take.

    Raises `UsageError` for a target that leaves nothing.
    """
    target, asked = recipe.targets.memory, {*recipe.engine.flags, *recipe.search.restart}
    flag = known.flags.get(FLAG)
    if target is None or known.platform == "cpu" or flag is None or asked & {FLAG, OTHER}:
        return recipe
    ranks = recipe.engine.ranks
    if target > 1 and len(host.gpus) < ranks:
        return recipe  # bytes of GPUs that are on other hosts as well
    # Where GPUs differ, the largest: of none is then taken more than its part.
    left = leaves(target, max((gpu.memory for gpu in host.gpus), default=USUAL), ranks)
    if isinstance(flag.default, float) and flag.default <= left:
        return recipe
    flags = {**recipe.engine.flags, FLAG: left}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"flags": flags})})


def less(recipe: Recipe, known: Catalogue) -> dict[str, list[Scalar]]:
    """A smaller share for where memory is over its target under load all the same; nothing where the recipe says what the cache
    takes, and where it runs on no GPU."""
    target, flag = recipe.targets.memory, known.flags.get(FLAG)
    share = recipe.engine.flags.get(FLAG, flag.default if flag else None)
    if target is None or known.platform == "cpu" or not isinstance(share, float) or OTHER in recipe.engine.flags:
        return {}
    left = round(min(share, target if target <= 1 else share) - LESS, 2)
    return {FLAG: [left]} if left > 0 else {}


def leaves(target: float, memory: int, gpus: int) -> float:
    """The share of each GPU that a target leaves to vLLM, rounded down to a hundredth. `target`: a share, or bytes of all `gpus`,
    which have `memory` bytes each.

    Raises `UsageError` where that is nothing.
    """
    share = (target if target <= 1 else target / (gpus * memory)) - BESIDE / memory
    left = math.floor(round(100 * share, 6)) / 100  # 0.8 is 79.99… hundredths in floating point
    if left <= 0:
        said = f"a memory target of {units.show_memory(target)} leaves an engine no memory"
        raise UsageError(said, "give more, such as --max-memory 85%")
    return left


def remark(before: Recipe, after: Recipe) -> list[str]:
    """In a sentence, what the memory target has set; nothing where it has set nothing."""
    if before is after:
        return []
    return [f"the memory target sets {FLAG} to {after.engine.flags[FLAG]:g}: the engine's default takes more than it allows"]
