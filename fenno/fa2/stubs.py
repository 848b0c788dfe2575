"""The functions that a trimmed build leaves out, defined so that they raise: nothing of upstream's C++ has to be edited.

`flash_api.cpp` refers to every head size, dtype, mask and direction; the linker wants all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fenno.fa2.lattice import Dtype, Unit, units
from fenno.fa2.plan import Plan

TYPES: dict[Dtype, str] = {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}
FUNCTIONS = {"fwd": "run_mha_fwd_", "fwd_split": "run_mha_fwd_splitkv_dispatch", "bwd": "run_mha_bwd_"}
NAMES = {"fwd": "the forward pass", "fwd_split": "the split forward pass", "bwd": "the backward pass"}


def missing(plan: Plan) -> tuple[Unit, ...]:
    """The units of the release that the plan leaves out."""
    return tuple(unit for unit in units(plan.release.heads) if unit not in plan.units)


def text(plan: Plan) -> str:
    """The C++ that defines what is missing."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield "// Made by fenno build-fa2: what this build of FlashAttention-2 leaves out, and how to have it."
    yield from ("#include <c10/util/Exception.h>", "#include <cutlass/numeric_types.h>", '#include "flash.h"', "")
    if plan.release.namespaced:
        yield "namespace FLASH_NAMESPACE {"
    for unit in missing(plan):
        params = "Flash_bwd_params" if unit.direction == "bwd" else "Flash_fwd_params"
        arguments = f"{TYPES[unit.dtype]}, {unit.head}, {str(unit.causal).lower()}"
        yield f"template<> void {FUNCTIONS[unit.direction]}<{arguments}>({params} &, cudaStream_t) {{"
        yield f'    TORCH_CHECK(false, "{sentence(plan, unit)}");'
        yield "}"
    if plan.release.namespaced:
        yield "}"


def sentence(plan: Plan, unit: Unit) -> str:
    """What the caller of a missing kernel reads."""
    name = f"flash_attn {plan.release.version}+{plan.local_version}"
    has = f"head sizes {', '.join(map(str, plan.heads))} in {', '.join(plan.need.dtypes)}"
    lacks = f"{NAMES[unit.direction]} of head size {unit.head} in {unit.dtype}{', causal' if unit.causal else ''}"
    if unit.direction == "bwd":
        return f"{name} lacks {lacks}: it cannot train; install flash-attn untrimmed for that"
    other = "bfloat16" if unit.dtype == "bf16" else "float16"
    how = f"fenno build-fa2 --model DIR --dtype {other}, DIR being the folder of a model with that head size"
    return f"{name} has {has} and lacks {lacks}; build it with: {how}"
