"""What GPUs have: memory, bandwidth and peaks of dense matrix products, as their makers' datasheets say (docs/plan.md)."""

from __future__ import annotations

from dataclasses import dataclass

from fenno.errors import UsageError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What weights and cache lie in. `memory`: bytes, as CUDA reports them; `bandwidth`: bytes/s of that memory; `bf16` and
    `fp8`: FLOP/s of dense products. None where it is not known, or where there are no such units."""

    name: str
    memory: int
    bandwidth: float | None = None
    bf16: float | None = None
    fp8: float | None = None


def _of(name: str, gib: float, gigabytes: float, bf16: float, fp8: float | None) -> Device:
    return Device(name, int(gib * GIB), gigabytes * 1e9, bf16 * 1e12, fp8 and fp8 * 1e12)


TABLE = {
    device.name: device
    for device in (
        _of("A100-40G", 39.39, 1555, 312, None),
        _of("A100-80G", 79.15, 2039, 312, None),
        _of("H100", 79.18, 3350, 989, 1979),
        _of("H200", 139.80, 4800, 989, 1979),
        _of("B200", 178.35, 8000, 2250, 4500),
        _of("L4", 22.03, 300, 121, 242),
        _of("L40S", 44.39, 864, 362, 733),
        _of("RTX3090", 23.56, 936, 71, None),
        _of("RTX4090", 23.52, 1008, 165, 330),
    )
}


def named(kind: str) -> Device:
    """The type of that name, in capitals or not. Raises `UsageError` with the names there are."""
    found = next((device for name, device in TABLE.items() if name.lower() == kind.lower()), None)
    if found is None:
        raise UsageError(f"--gpu-type {kind} is not known", f"there are {', '.join(TABLE)}, and CPU")
    return found


def like(name: str, memory: int) -> Device:
    """The type of a GPU that calls itself so ("NVIDIA H200") and has so many bytes; what the table lacks has its memory alone."""
    words = name.upper().replace("RTX ", "RTX").replace("-", " ").split()
    near = [device for key, device in TABLE.items() if key.split("-")[0] in words and abs(device.memory / memory - 1) < 0.05]
    return near[0] if near else Device(name, memory)
