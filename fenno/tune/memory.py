"""The memory target as a flag of the start: vLLM takes its share of a GPU at once, whether it needs it or not. Pure.

With the default of 0.9 or 0.92 no target of 85 % can be met, whatever the search does afterwards.
"""

from __future__ import annotations

import math

from fenno.engine.catalogue import Catalogue
from fenno.errors import UsageError
from fenno.machine import Machine
from fenno.recipe import Recipe

FLAG, OTHER = "gpu-memory-utilization", "kv-cache-memory-bytes"
# What a GPU holds beside the share that vLLM accounts for: the CUDA context, captured graphs, buffers of NCCL.
OUTSIDE = 0.03


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
    left = leaves(target, ranks * max((gpu.memory for gpu in host.gpus), default=0))
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


def remark(before: Recipe, after: Recipe) -> list[str]:
    """In a sentence, what the memory target has set; nothing where it has set nothing."""
    if before is after:
        return []
    return [f"the memory target sets {FLAG} to {after.engine.flags[FLAG]:g}: the engine's default takes more than it allows"]
