"""Bounds of speed: no step is faster than its bytes come from memory, nor than its products are made. Real steps are slower."""

from __future__ import annotations

from dataclasses import dataclass

from fenno.plan import fit
from fenno.plan.fit import Setting
from fenno.plan.gpus import Device
from fenno.plan.shape import Shape


@dataclass(frozen=True)
class Bound:
    """`seconds`: at least; `rate`: tokens a second of all replicas, at most; `by`: what bounds, "memory" or "compute"."""

    seconds: float
    rate: float
    by: str


@dataclass(frozen=True)
class Step:
    """Seconds that one step of a replica takes at least, through all its stages: until its bytes have come from memory, and until
    its products are made."""

    memory: float
    compute: float


def step(shape: Shape, at: Setting, device: Device, tokens: float, batch: float, length: float) -> Step | None:
    """A step of `tokens` tokens on each replica: of prompts, and one for each of `batch` sequences that have `length` tokens in the
    cache. None where the device's figures are not known. Attention's own products are left out."""
    if not device.bandwidth or not device.bf16:
        return None
    moved = (_read(shape, at, tokens) + batch * kept(shape, at, length)) / device.bandwidth
    # Of a prompt only the last token meets the head.
    made = 2 * ((shape.computing - _head(shape)) * tokens + _head(shape) * batch) / (at.tp * at.pp) / peak(at, device)
    return Step(at.pp * moved, at.pp * made)


def decode(shape: Shape, at: Setting, device: Device, batch: int, length: float) -> Bound | None:
    """A step of `batch` sequences of `length` tokens on each replica; None where the device's figures are not known."""
    if (found := step(shape, at, device, batch, batch, length)) is None:
        return None
    seconds = max(found.memory, found.compute)
    # Stages work side by side, each on sequences of its own.
    return Bound(seconds, at.dp * at.pp * batch / seconds, "memory" if found.memory >= found.compute else "compute")


def prefill(shape: Shape, at: Setting, device: Device, prompt: float) -> Bound | None:
    """One prompt alone; None where the device's figures are not known."""
    if not device.bandwidth or not device.bf16 or prompt < 1:
        return None
    pairs = sum(
        prompt * prompt / 2 if not window or window >= prompt else window * (prompt - window / 2) for window in shape.windows
    )
    products = 2 * (shape.computing - _head(shape)) * prompt / peak(at, device) + 4 * shape.heads * shape.head * pairs / device.bf16
    made, moved = products / (at.tp * at.pp), at.pp * _read(shape, at, prompt) / device.bandwidth
    return Bound(max(made, moved), at.dp * prompt / made, "memory" if moved >= made else "compute")


def _head(shape: Shape) -> float:
    """Weights that compute for a token that is sampled, and not for every token of a prompt."""
    return sum(part.numbers * part.used for part in shape.parts if part.name in ("embedding", "head"))


def peak(at: Setting, device: Device) -> float:
    """FLOP/s of the products with weights: those of FP8 where weights and units are; fewer bits are unpacked first."""
    return device.fp8 or device.bf16 or 0.0 if at.bits == 8 else device.bf16 or 0.0


def kept(shape: Shape, at: Setting, length: float) -> float:
    """Bytes that one GPU reads of the cache for one more token of a sequence."""
    seen = sum(min(length, window) if window else length for window in shape.windows)
    return seen / at.pp * fit.token(shape, at) / at.dcp


def _read(shape: Shape, at: Setting, tokens: float) -> float:
    """Bytes of weights that one GPU reads for so many tokens of one replica. Experts are taken as chosen evenly by all replicas."""
    held = fit.weights(shape, at)
    unchosen = (1 - shape.active / shape.experts) ** (tokens * at.dp) if shape.experts else 0.0
    shares = {part.name: 1.0 if part.used else 0.0 for part in shape.parts} | {"experts": 1 - unchosen}
    return sum((shares[name] * size for name, size in held.items()), 0.0)
