"""What will be compiled for a model, and why: units, kernels, flags, jobs, time. Pure; needs no GPU, torch or compiler."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, get_args

import psutil

from fenno import machine
from fenno.errors import BuildError, UsageError
from fenno.fa2.lattice import Switch, Tile, Unit, kernels
from fenno.fa2.lattice import units as all_units
from fenno.fa2.need import Need
from fenno.fa2.releases import Release
from fenno.units import show_duration

# Measured with nvcc 13.0.88 for sm_80 and g++ 12.2, in seconds of CPU: stock and trimmed forward of head size 128, trimmed split.
MEASURED = {"forward, 39 kernels": 423.5, "forward, 12 kernels": 139.3, "split, 12 kernels and 7 to combine": 162.8}
PER_KERNEL = (MEASURED["forward, 39 kernels"] - MEASURED["forward, 12 kernels"]) / (39 - 12)
PER_UNIT = MEASURED["forward, 12 kernels"] - 12 * PER_KERNEL
PER_COMBINE = (MEASURED["split, 12 kernels and 7 to combine"] - PER_UNIT - 12 * PER_KERNEL) / 7
HOST_UNIT = 68.0
STUBS = 9.3
STUBS_FILE = "fenno_stubs.cpp"  # what stubs.py makes
SOURCE = (
    "estimated from five units of head size 128, measured with nvcc 13.0.88 for sm_80; kernels of other sizes and of the backward "
    "pass are taken to cost as much"
)
JOB_MEMORY = 4_340_000_000  # bytes at the peak of one compiler thread, stock; a trimmed unit takes hardly less
# GPU generation to the code that runs on it: one of a generation runs what was compiled for its first.
CODES = {8: "80", 9: "90", 10: "100", 11: "110", 12: "120"}
FLAG: dict[Switch, str] = {switch: f"-DFLASHATTENTION_DISABLE_{switch.upper()}" for switch in get_args(Switch)}
# No -std: torch's builder adds the one that its headers need, C++20 for torch 2.13, where upstream's C++17 is refused.
CXX_FLAGS = ("-O3",)
NVCC_FLAGS = (
    "-O3",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--use_fast_math",
)
BRINGS_ITS_OWN = (
    "vLLM on CUDA imports vllm.vllm_flash_attn, a build of its own fork, and never the flash_attn package: this wheel changes "
    "nothing for it. What would: vLLM built from source with VLLM_FLASH_ATTN_SRC_DIR, which names a checkout of that fork "
    "(upstream's pages hold 256 tokens, vLLM's 16), or an attention backend of your own, registered as CUSTOM"
)
# Who is meant to import the result: whether it does, and what to know.
CONSUMERS: dict[str, tuple[bool, str]] = {
    "transformers": (True, 'transformers imports flash_attn for models loaded with attn_implementation="flash_attention_2"'),
    "sglang": (True, "SGLang imports flash_attn for its image and video models alone; language models run on sgl-kernel's"),
    "vllm": (False, BRINGS_ITS_OWN),
    "vllm-src": (False, BRINGS_ITS_OWN),
}


@dataclass(frozen=True)
class Plan:
    """`off`: the switches compiled out. `jobs`: compilers side by side. `seconds`: CPU time for all of `archs`, `wall`: seconds at
    `jobs`, `stock_seconds`: CPU time of the untrimmed release for one architecture; all of these are estimates. `tiles`: for units
    that are not to have upstream's; several of one unit are tried against each other.
    """

    need: Need
    release: Release
    archs: tuple[str, ...]
    off: tuple[Switch, ...]
    units: tuple[Unit, ...]
    kernels: int
    stock_units: int
    stock_kernels: int
    jobs: int
    seconds: float
    stock_seconds: float
    wall: float
    consumer: str
    tiles: Mapping[Unit, tuple[Tile, ...]] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, ...]:
        """The head sizes whose kernels are compiled."""
        return tuple(sorted({unit.head for unit in self.units}))

    @property
    def estimates(self) -> dict[str, float]:
        """CPU seconds for each file that is compiled, by its name without the ending."""
        return estimates(self.units, self.release, self.off, len(self.archs))

    @property
    def local_version(self) -> str:
        """What `pip list` shows behind the version's plus."""
        sizes = [*(f"hd{head}" for head in self.heads), *(f"sm{arch}" for arch in self.archs)]
        return ".".join(["fenno", *self.need.dtypes, *sizes, *(["tiles"] if self.tiles else [])])

    @property
    def cxx_flags(self) -> list[str]:
        return [*CXX_FLAGS, *(FLAG[switch] for switch in self.off)]

    @property
    def nvcc_flags(self) -> list[str]:
        """The same switches again: the host's code refuses what the kernels would silently leave out."""
        codes = [part for arch in self.archs for part in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
        return [*NVCC_FLAGS, *codes, "--threads", "1", *(FLAG[switch] for switch in self.off)]


def make(
    need: Need, release: Release, archs: Sequence[str], *, cores: int, memory: int, jobs: int | None = None, consumer: str
) -> Plan:
    """The plan for one model. `memory`: bytes that compilers may use together. Raises `BuildError` when not one of them fits."""
    heads = {_kernel_size(size, release) for size in need.sizes}
    off = _off(need, heads)
    chosen = all_units(sorted(heads), need.dtypes, ("fwd", "fwd_split"))
    stock = all_units(release.heads)
    times = list(estimates(chosen, release, off, len(archs)).values())
    jobs = jobs or most_jobs(len(times), cores, memory)
    return Plan(
        need=need,
        release=release,
        archs=tuple(archs),
        off=off,
        units=chosen,
        kernels=sum(len(kernels(unit, release, off)) for unit in chosen),
        stock_units=len(stock),
        stock_kernels=sum(len(kernels(unit, release)) for unit in stock),
        jobs=jobs,
        seconds=sum(times),
        stock_seconds=sum(unit_seconds(unit, release) for unit in stock) + HOST_UNIT,
        wall=wall(times, jobs),
        consumer=_known(consumer),
    )


def with_stock_flags(plan: Plan) -> Plan:
    """The same units as upstream compiles them: nothing compiled out, no other tile. What a trimmed build is timed against."""
    made = replace(plan, off=(), tiles={}, kernels=sum(len(kernels(unit, plan.release)) for unit in plan.units))
    times = list(made.estimates.values())
    return replace(made, seconds=sum(times), wall=wall(times, plan.jobs))


def _known(consumer: str) -> str:
    if consumer not in CONSUMERS:
        raise UsageError(f"--consumer is {consumer!r}", f"it has to be one of {', '.join(CONSUMERS)}")
    return consumer


def _kernel_size(size: int, release: Release) -> int:
    """The head size of the kernel that a model's size runs on."""
    return next(head for head in release.heads if head >= size)


def _off(need: Need, heads: Collection[int]) -> tuple[Switch, ...]:
    """The switches that this model never uses. Dropout is for training alone.

    `uneven_k` goes only where every head fills its kernel: the host's check asks for a multiple of 32 (64 above 128), which
    160 in the kernel of 192 would pass, with wrong results.
    """
    keep = set(need.keep) | (set() if set(need.sizes) == set(heads) else {"uneven_k"})
    return tuple(switch for switch in get_args(Switch) if switch not in keep)


def unit_seconds(unit: Unit, release: Release, off: Collection[Switch] = ()) -> float:
    """CPU seconds to compile a unit for one architecture."""
    found = kernels(unit, release, off)
    small = sum(kernel[0] in ("combine", "dot", "convert") for kernel in found)
    return PER_UNIT + PER_KERNEL * (len(found) - small) + PER_COMBINE * small


def estimates(units: Sequence[Unit], release: Release, off: Collection[Switch], archs: int) -> dict[str, float]:
    """CPU seconds for each file of a build, by its name without the ending."""
    device = {PurePath(unit.file).stem: unit_seconds(unit, release, off) * archs for unit in units}
    return {**device, "flash_api": HOST_UNIT, PurePath(STUBS_FILE).stem: STUBS}


def most_jobs(tasks: int, cores: int, memory: int) -> int:
    """How many compilers may run side by side. Raises `BuildError` when memory is too little for one."""
    fitting = memory // JOB_MEMORY
    if fitting < 1:
        raise BuildError(
            f"one compiler takes {JOB_MEMORY / 1e9:.1f} GB, and {memory / 1e9:.1f} GB may be used here",
            "raise the container's memory limit, or build on another host: the wheel needs no GPU to be made",
        )
    return max(1, min(tasks, cores, fitting))


def capacity() -> dict[str, int]:
    """The cores and the bytes of memory that compilers may use here: what is free, or the container's limit where that is less."""
    return {
        "cores": machine.available_cores(),
        "memory": min(machine.memory_limit(), psutil.virtual_memory().available),
    }


def wall(times: Sequence[float], jobs: int) -> float:
    """Seconds until all are done, the longest begun first."""
    loads = [0.0] * jobs
    for seconds in sorted(times, reverse=True):
        loads[loads.index(min(loads))] += seconds
    return max(loads)


def codes(text: str) -> tuple[str, ...]:
    """The code to compile for "sm_80,sm_90": ("80", "90"). Raises `UsageError` or, for a GPU that is too old, `BuildError`."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(?:sm_?)?(\d+)(\d)[a-f]?\s*", word)
        if not match:
            raise UsageError(f"--arch is {text!r}", "write it as sm_80, or sm_80,sm_90")
        found.append(code((int(match[1]), int(match[2]))))
    return tuple(dict.fromkeys(found))


def code(capability: tuple[int, int]) -> str:
    """The code that runs on a GPU of this compute capability. Raises `BuildError` where FlashAttention-2 has none."""
    major, minor = capability
    if major in CODES:
        return CODES[major]
    reason = "it needs 8.0 or later (A100)" if major < 8 else "fenno does not know that generation"
    raise BuildError(
        f"FlashAttention-2 does not run on sm_{major}{minor}: {reason}",
        'use torch\'s own attention there: attn_implementation="sdpa"',
    )


def document(plan: Plan) -> dict[str, Any]:
    """The plan as JSON."""
    imports, sentence = CONSUMERS[plan.consumer]
    return {
        "model": plan.need.model,
        "version": plan.release.version,
        "archs": [f"sm_{arch}" for arch in plan.archs],
        "reasons": list(plan.need.reasons),
        "head_sizes": list(plan.need.sizes),
        "kernel_head_sizes": list(plan.heads),
        "dtypes": list(plan.need.dtypes),
        "off": list(plan.off),
        "units": [unit.file for unit in plan.units],
        "kernels": plan.kernels,
        "stock": {"units": plan.stock_units, "kernels": plan.stock_kernels, "cpu_seconds_an_arch": round(plan.stock_seconds)},
        "jobs": plan.jobs,
        "memory_a_job": JOB_MEMORY,
        "cpu_seconds": round(plan.seconds),
        "wall_seconds": round(plan.wall),
        "estimated": SOURCE,
        "cxx_flags": plan.cxx_flags,
        "nvcc_flags": plan.nvcc_flags,
        "local_version": plan.local_version,
        "consumer": {"name": plan.consumer, "imports_it": imports, "why": sentence},
    }


def lines(plan: Plan) -> list[str]:
    """The plan for people."""
    imports, sentence = CONSUMERS[plan.consumer]
    switched = ", ".join(plan.off) or "nothing"
    ratio = plan.stock_seconds / (plan.seconds / len(plan.archs))
    return [
        f"flash-attn {plan.release.version} for {plan.need.model} on {', '.join(f'sm_{arch}' for arch in plan.archs)}",
        *(f"  needed: {reason}" for reason in plan.need.reasons),
        "  kept: with and without the causal mask (one query at a time runs without), whole and split (decoding)",
        f"  left out: {switched}; the backward pass",
        f"  units: {len(plan.units)} of {plan.stock_units}, kernels: {plan.kernels} of {plan.stock_kernels}",
        f"  CPU time: {show_duration(plan.seconds)}, stock {show_duration(plan.stock_seconds)} an architecture"
        f" ({math.floor(ratio)} times as much)",
        f"  these times are {SOURCE}",
        f"  jobs: {plan.jobs} at {JOB_MEMORY / 1e9:.1f} GB each, about {show_duration(plan.wall)}",
        f"  both compilers get: {' '.join(FLAG[switch] for switch in plan.off) or 'no further flag'}",
        f"  wheel: {plan.release.version}+{plan.local_version}",
        f"  {'imported' if imports else 'NOT imported'}: {sentence}",
    ]
