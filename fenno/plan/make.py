"""One plan as it is asked for: a recipe, its model's config and a device in, a document out. Pure."""

from __future__ import annotations

from typing import Any

from fenno.errors import BuildError, UsageError
from fenno.fa2 import need
from fenno.plan import fit, roofline, runner
from fenno.plan import shape as shapes
from fenno.plan.fit import Fit, Setting
from fenno.plan.gpus import GIB, Device
from fenno.plan.shape import Config, Shape
from fenno.recipe import PARALLEL, Recipe
from fenno.tune import memory
from fenno.vllm_plugin import versions

LEFT_OUT = (
    "norms and biases; towers for images and sound; drafts of speculative decoding; LoRA; the index of sparse attention; "
    "other processes on the device"
)


def make(
    recipe: Recipe, config: Config, device: Device, gpus: int, files: int | None = None, engine: str | None = None
) -> dict[str, Any]:
    """The plan of a recipe on so many GPUs of a kind (0: a CPU). `files`: bytes of the weights on disk, where they are here.
    `engine`: the version of vLLM, where it is known.

    Raises `UsageError` for a model or a layout that cannot be reckoned with.
    """
    shape = shapes.read(config)
    flags = _flags(recipe, device, gpus)
    at = fit.setting(flags, recipe.engine.variables, config, shape, device, gpus, versions.release(engine or ""))
    found = fit.fit(shape, at, device, gpus)
    prompt, answer = (round(length, 1) for length in recipe.workload.mean_lengths())
    batch = _sequences(at, found, prompt + answer)
    return {
        "model": recipe.engine.model,
        "engine": {"version": engine, "runner": at.runner.name if gpus else None},
        "device": {"name": device.name, "memory": device.memory, "count": gpus},
        "layout": {"tensor": at.tp, "pipeline": at.pp, "data": at.dp, "context": at.dcp},
        "parameters": {"all": shape.parameters, "computing": shape.computing},
        "bits": {"weights": at.bits, "cache": 8 * at.kv},
        "limit": found.limit,
        "weights": dict(found.weights),
        "rest": dict(found.rest),
        "beside": {"CUDA graphs": at.runner.graphs} if fit.beside(at) else {},
        "cache": _cache(shape, at, found),
        "fits": found.fits,
        "lacks": found.lacks,
        "impossible": fit.impossible(shape, at, found),
        "ways": [] if found.fits else fit.ways(shape, at, device, gpus),
        "request": {"prompt": prompt, "answer": answer},
        "bounds": _bounds(shape, at, device, batch, prompt, answer) if found.fits else {},
        "knobs": _knobs(at, batch, gpus) if found.fits else {},
        "notes": [
            *notes(shape, at, config, str(recipe.engine.model)),
            *_unknown(recipe),
            *_files(shape, at, files),
            *(_engine(at, engine) if gpus else ()),
        ],
        "left_out": LEFT_OUT,
    }


def if_known(
    recipe: Recipe, config: Config, device: Device, gpus: int, files: int | None = None, engine: str | None = None
) -> dict[str, Any] | None:
    """As `make`; None for a config or a flag that only the engine understands, whatever is wrong with it."""
    try:
        return make(recipe, config, device, gpus, files, engine)
    except (UsageError, LookupError, TypeError, ValueError):
        return None


def step(
    recipe: Recipe,
    config: Config,
    device: Device,
    gpus: int,
    engine: str | None,
    *,
    tokens: float,
    batch: float,
    length: float,
) -> roofline.Step | None:
    """What a step of the whole engine takes at least: of so many `tokens`, and in it `batch` sequences of `length` tokens, over all
    replicas. None for what cannot be reckoned with, as of `if_known`, and a device whose figures are not known."""
    try:
        shape = shapes.read(config)
        flags = _flags(recipe, device, gpus)
        at = fit.setting(flags, recipe.engine.variables, config, shape, device, gpus, versions.release(engine or ""))
        return roofline.step(shape, at, device, tokens / at.dp, batch / at.dp, length)
    except (UsageError, LookupError, TypeError, ValueError):
        return None


def _flags(recipe: Recipe, device: Device, gpus: int) -> dict[str, Any]:
    """The recipe's flags, and the share of a GPU that its memory target leaves."""
    flags, target = dict(recipe.engine.flags), recipe.targets.memory
    if not gpus or target is None or {memory.FLAG, memory.OTHER} & {*flags}:
        return flags
    return {**flags, memory.FLAG: min(memory.leaves(target, device.memory, gpus), fit.UTILIZATION)}


def _sequences(at: Setting, found: Fit, length: float) -> int:
    """How many sequences to begin with: as many of the recipe's requests as the cache holds, and no more than the engine runs."""
    most = int(found.sequences * at.longest / max(min(length, at.longest), 1))
    most = max(min(most, at.sequences), 1)
    return most - most % 8 if most > 16 else most


def _cache(shape: Shape, at: Setting, found: Fit) -> dict[str, Any]:
    return {
        "token": fit.token(shape, at) * -(-shape.layers // at.pp),
        "room": found.room,
        "sequence": found.sequence,
        "least": max(found.sequence, at.reserved or 0),
        "sequences": round(found.sequences, 2),
        "tokens": int(found.sequences * at.longest),
        "longest": at.longest,
    }


def _bounds(shape: Shape, at: Setting, device: Device, batch: int, prompt: float, answer: float) -> dict[str, Any]:
    """Bounds of a step for one sequence and for `batch` of them half-way through their answers, and of a prompt."""
    found = {
        "prompt": roofline.prefill(shape, at, device, prompt),
        "one": roofline.decode(shape, at, device, 1, prompt + answer / 2),
        "many": roofline.decode(shape, at, device, batch, prompt + answer / 2),
    }
    return {name: {"seconds": it.seconds, "rate": it.rate, "by": it.by} for name, it in found.items() if it} | {"batch": batch}


def _knobs(at: Setting, batch: int, gpus: int) -> dict[str, Any]:
    """The first guess, in flags; `fenno tune` goes on from there."""
    sizes = dict(zip(PARALLEL, (at.tp, at.pp, at.dp), strict=True))
    share = {memory.FLAG: at.share} if gpus and at.reserved is None else {}
    return {
        **{name: size for name, size in sizes.items() if size > 1},
        **share,
        "max-model-len": at.longest,
        "max-num-seqs": batch,
        "max-num-batched-tokens": at.budget,
    }


def notes(shape: Shape, at: Setting, config: Config, name: str) -> list[str]:
    """What is true of this model and not of all, and what does not apply to it."""
    said = []
    if shape.positions == "ALiBi":
        said.append("ALiBi positions: nothing of RoPE applies (base, scaling); FlashAttention only in builds that keep ALiBi")
    if shape.positions == "learned":
        said.append("learned positions: nothing of RoPE applies (base, scaling), and no context beyond what was learned")
    if shape.latent:
        instead = f"; data-parallel-size {at.tp} in its place keeps each sequence once, and attention's weights on every rank"
        said.append(
            "latent attention: the cache is not cut by heads, every tensor-parallel rank keeps all of it" + instead * (at.tp > 1)
        )
    elif at.tp > shape.kv_heads:
        said.append(f"{shape.kv_heads} KV head(s) on {at.tp} ranks: each is kept {at.tp // shape.kv_heads} times")
    if shape.experts and (ranks := at.tp * at.dp) > 1 and not at.dealt:
        most = -(-shape.experts // ranks)
        said.append(
            f"each of {ranks} ranks has a part of all {shape.experts} experts; with enable-expert-parallel it has whole ones, "
            f"{most} at most: which is faster is for `fenno compare` to say"
        )
    slides = sum(window > 0 for window in shape.windows)
    if slides:
        said.append(f"{slides} of {shape.layers} layers keep a window of {max(shape.windows)} tokens, besides those of a step")
    try:
        need.of(config, name)
    except (BuildError, UsageError) as error:
        said.append(f"`fenno build-fa2` does not apply: {error}")
    return said


def _unknown(recipe: Recipe) -> list[str]:
    """Where the requests' lengths are not those of the recipe's classes."""
    workload = recipe.workload
    if not (workload.trace or workload.prompts or workload.turns != 1):
        return []
    return ["how long this recipe's requests are shows when they are sent: reckoned with its classes, or the usual mix"]


def _engine(at: Setting, version: str | None) -> list[str]:
    """Which vLLM the allowances are those of, and what that one puts beside its share."""
    if version is None:
        said = [f"no vLLM that fenno knows was found: the allowances are those of {'.'.join(map(str, runner.ALL))} and later"]
    else:
        said = [f"the allowances are those of vLLM {version}'s model runner {at.runner.name}"]
    if fit.beside(at):
        said.append(
            f"this vLLM puts its CUDA graphs (about {at.runner.graphs / GIB:.1f} GiB) beside the share that "
            f"{memory.FLAG} gives it: leave them room"
        )
    return said


def _files(shape: Shape, at: Setting, files: int | None) -> list[str]:
    """Where the files on disk are not as large as the plan says: the engine quantises them itself, or the plan is wrong."""
    told = sum(part.numbers * fit.width(part, at) / 8 for part in shape.parts)
    if not files or abs(files / told - 1) < 0.03:
        return []
    return [f"the files have {files / 1e9:.1f} GB, planned are {told / 1e9:.1f} GB"]
