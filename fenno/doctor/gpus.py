"""Checks of each GPU: modes, memory, health."""

from __future__ import annotations

from collections.abc import Iterable

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Card, Facts
from fenno.doctor.host import size
from fenno.plan.fit import UTILIZATION

MODES = {1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
# NVML's bits for clocks that are lower than they could be; power capping (4) under load is normal and idle (1) is no fault.
SLOW = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


def cards(facts: Facts) -> tuple[Card, ...]:
    assert facts.gpus is not None
    return facts.gpus.cards


def named(indexes: Iterable[int]) -> str:
    return "GPU " + ", ".join(map(str, indexes))


@check(
    "gpu.count",
    "GPUs for this recipe",
    expected="as many GPUs as the recipe's `host.gpus` and its parallel sizes",
    why="vLLM starts a worker for each rank and ends with `world size is larger than the number of available GPUs`.",
    fix="Lower tensor-parallel-size, or choose a host or a recipe that fit each other.",
    needs=("gpus",),
)
def count(facts: Facts) -> Finding:
    found = cards(facts)
    pp = facts.flag("pipeline-parallel-size")
    ranks = facts.tp * (pp if isinstance(pp, int) else 1)
    need = max(facts.recipe.host.gpus or 0, ranks) if facts.recipe and facts.needs_gpu else 0
    names = ", ".join(f"{[c.name for c in found].count(name)} x {name}" for name in dict.fromkeys(c.name for c in found))
    return ok(names or "none") if len(found) >= need else fail(names or "none", expected=f"{need} for this recipe")


@check(
    "gpu.memory",
    "GPU memory",
    expected="the recipe's `host.gpu_memory` on each GPU",
    why="The recipe was written for a larger card: weights or KV cache will not fit.",
    fix="More GPUs (tensor-parallel-size), a quantised checkpoint, or a larger card.",
    needs=("gpus",),
)
def memory(facts: Facts) -> Finding:
    need = (facts.recipe.host.gpu_memory if facts.recipe else None) or 0
    small = [card for card in cards(facts) if card.memory < need]
    found = " / ".join(dict.fromkeys(size(card.memory) for card in cards(facts)))
    return fail(f"{named(c.index for c in small)}: {found}", expected=size(need)) if small else ok(found)


@check(
    "gpu.free-memory",
    "GPU memory in use",
    expected="gpu-memory-utilization of each GPU's memory free",
    why="vLLM asks for its share of the whole card, not of what is left: with another process there, the start ends with "
    "`Free memory on device ... is less than desired GPU memory utilization`.",
    fix="nvidia-smi shows the processes; end yours, or lower --gpu-memory-utilization to what is free",
    needs=("gpus",),
)
def free_memory(facts: Facts) -> Finding:
    share = facts.flag("gpu-memory-utilization")
    wanted = share if isinstance(share, float) and 0 < share <= 1 else UTILIZATION
    full = [c for c in cards(facts) if c.used is not None and c.memory - c.used < wanted * c.memory]
    if full and facts.needs_gpu:
        worst = max(full, key=lambda c: c.used or 0)
        return fail(f"{named(c.index for c in full)}: {size(worst.used or 0)} in use", expected=f"{wanted:.0%} of it free")
    known = [card.used for card in cards(facts) if card.used is not None]
    return ok(f"{size(max(known))} in use at most") if known else skip("the cards do not say")


@check(
    "gpu.same",
    "One kind of GPU",
    expected="the same model and memory in one tensor-parallel group",
    why="Every step waits for the slowest rank, and the KV cache is as large as the smallest card allows.",
    fix="CUDA_VISIBLE_DEVICES with GPUs of one kind (CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers those of nvidia-smi)",
    needs=("gpus",),
)
def same(facts: Facts) -> Finding:
    kinds = dict.fromkeys((card.name, card.capability) for card in cards(facts))
    found = ", ".join(f"{name} (sm_{a}{b})" for name, (a, b) in kinds)
    if len(kinds) < 2:
        return ok(found or "none")
    return warn(found) if facts.tp > 1 or not facts.recipe else ok(found + "; one is used")


@check(
    "gpu.compute-mode",
    "Compute mode",
    expected="DEFAULT (0)",
    why="In an exclusive mode one process alone may use a GPU: vLLM's own P2P test, a second rank or a second server on it "
    "fails with `all CUDA-capable devices are busy or unavailable`. Mode 3 does not turn NVLink on, as some guides say.",
    fix="An administrator sets it back: nvidia-smi -c 0",
    needs=("gpus",),
)
def compute_mode(facts: Facts) -> Finding:
    odd = {card.index: MODES.get(card.compute_mode or 0, str(card.compute_mode)) for card in cards(facts) if card.compute_mode}
    if not odd:
        return ok("DEFAULT")
    found = f"{named(odd)}: {', '.join(dict.fromkeys(odd.values()))}"
    return fail(found) if "PROHIBITED" in odd.values() or facts.tp > 1 else warn(found)


@check(
    "gpu.mig",
    "MIG",
    expected="off for a tensor-parallel engine",
    why="MIG instances have no P2P and no NVLink between each other: they serve one-GPU models only.",
    fix="An administrator turns it off (nvidia-smi -mig 0), or: one engine for each instance",
    needs=("gpus",),
)
def mig(facts: Facts) -> Finding:
    on = [card.index for card in cards(facts) if card.mig]
    if not on:
        return ok("off")
    return fail(f"on for {named(on)}") if facts.tp > 1 else warn(f"on for {named(on)}", "Name an instance in CUDA_VISIBLE_DEVICES.")


@check(
    "gpu.persistence",
    "Persistence mode",
    expected="on",
    why="Without it the driver sets the GPU up anew for each first process: seconds at every start, and NVML itself is slow.",
    fix="systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)",
    needs=("gpus",),
)
def persistence(facts: Facts) -> Finding:
    off = [card.index for card in cards(facts) if card.persistence == 0]
    return warn(f"off for {named(off)}") if off else ok("on")


@check(
    "gpu.errors",
    "Memory errors",
    expected="no uncorrected ECC error, no row waiting to be remapped",
    why="An uncorrected error ends the process that meets it (Xid 48, 94, 95); rows are remapped at the next reset of the "
    "GPU, and a failed remapping is a card to be replaced.",
    fix="Drain the host and let its administrator reset the GPU; replace it when remapping failed.",
    needs=("gpus",),
)
def errors(facts: Facts) -> Finding:
    if all(card.remap is None and card.uncorrected is None for card in cards(facts)):
        return skip("the cards do not count errors")
    broken = [card for card in cards(facts) if card.remap and card.remap[3]]
    waiting = [card for card in cards(facts) if card.remap and card.remap[2]]
    wrong = [card for card in cards(facts) if card.uncorrected]
    if broken:
        return fail(f"row remapping failed on {named(c.index for c in broken)}")
    if waiting or wrong:
        which = named(sorted({card.index for card in waiting + wrong}))
        return warn(f"{which}: " + ("rows wait to be remapped" if waiting else "uncorrected errors"))
    return ok("none")


@check(
    "gpu.throttling",
    "Clocks held back",
    expected="no thermal or power-brake slowdown",
    why="A hot or badly fed card runs at a fraction of its clock, and with tensor parallelism all others wait for it.",
    fix="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; then fans, airflow, power cables",
    needs=("gpus",),
)
def throttling(facts: Facts) -> Finding:
    slow = {c.index: [word for bit, word in SLOW.items() if (c.throttle or 0) & bit] for c in cards(facts)}
    found = [f"GPU {index}: {', '.join(words)}" for index, words in slow.items() if words]
    return warn("; ".join(found)) if found else ok("no")


@check(
    "gpu.power",
    "Power limit",
    expected="the card's default limit",
    why="Somebody lowered it: the card clocks down under load, most of all while prompts are read.",
    fix="nvidia-smi -q -d POWER shows both; an administrator sets it back with nvidia-smi -pl WATTS",
    needs=("gpus",),
)
def power(facts: Facts) -> Finding:
    low = [c for c in cards(facts) if c.power and c.power[0] < 0.95 * c.power[1]]
    if all(card.power is None for card in cards(facts)):
        return skip("the cards do not say")
    if not low:
        return ok("the default")
    watts = low[0].power or (0, 0)
    return warn(f"{named(c.index for c in low)}: {watts[0] / 1e3:.0f} W of {watts[1] / 1e3:.0f} W")


@check(
    "gpu.pcie",
    "PCIe width",
    expected="the width that card and slot allow",
    why="A card that came up with 4 or 8 lanes of 16 loads weights slowly, and all traffic between GPUs without NVLink "
    "takes that road. (A lower generation at rest is normal: links save power.)",
    fix="Reseat card or riser; look at the slot's bifurcation in the BIOS.",
    needs=("gpus",),
)
def pcie(facts: Facts) -> Finding:
    narrow = [card for card in cards(facts) if card.pcie_width and card.pcie_width[0] < card.pcie_width[1]]
    if not narrow:
        widths = dict.fromkeys(f"x{card.pcie_width[0]}" for card in cards(facts) if card.pcie_width)
        return ok(", ".join(widths)) if widths else skip("the cards do not say")
    width = narrow[0].pcie_width or (0, 0)
    return warn(f"{named(c.index for c in narrow)}: x{width[0]} of x{width[1]}")


@check(
    "gpu.capability",
    "Compute capability",
    expected="7.5 or more, 8.0 or more for bfloat16, 8.9 or more for FP8 arithmetic",
    why="Older cards lack the instructions: vLLM refuses bfloat16 below 8.0, and FlashAttention needs 8.0 too.",
    fix="--dtype float16 on cards before Ampere; another checkpoint, or another card",
    needs=("gpus",),
)
def capability(facts: Facts) -> Finding:
    low = min((card.capability for card in cards(facts)), default=(99, 0))
    found = ", ".join(dict.fromkeys(f"{a}.{b}" for a, b in (card.capability for card in cards(facts))))
    wanted = facts.flag("dtype") or (facts.model.config.get("torch_dtype") if facts.model else None)
    if low < (7, 5):
        return fail(found)
    if low < (8, 0) and wanted == "bfloat16":
        return fail(f"{found}, and bfloat16 is asked for")
    fp8 = str(facts.flag("quantization") or "").startswith("fp8") or str(facts.flag("kv-cache-dtype") or "").startswith("fp8")
    return warn(f"{found}: FP8 is unpacked before use") if fp8 and low < (8, 9) else ok(found)


CHECKS: tuple[Check, ...] = (
    count, memory, free_memory, same, compute_mode, mig, persistence, errors, throttling, power, pcie, capability,
)  # fmt: skip
