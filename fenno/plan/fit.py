"""Weights, KV cache and the rest on the fullest GPU, as arithmetic: what fits, as the engine reckons it when it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fenno import units
from fenno.errors import UsageError
from fenno.kv import layout
from fenno.plan import runner
from fenno.plan.gpus import GIB, Device
from fenno.plan.runner import Runner
from fenno.plan.shape import Config, Part, Shape
from fenno.recipe import IN_THOUSANDS, PARALLEL

# The share of a GPU that vLLM takes unless told, and its block: on a CPU another, unless attention is latent (0.24 to 0.32).
UTILIZATION, BLOCK, CPU_BLOCK = 0.92, 16, 128
# Allowances, from the starts that docs/plan.md names: what libraries keep on one GPU, what ranks of several GPUs keep besides,
# and the process on a CPU. Those that depend on the engine's model runner are in runner.py.
KEPT, RANKS, PROCESS = int(0.35 * GIB), int(1.8 * GIB), 1 * GIB
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
# Bits of a weight and its scales, by the method's name: four bits in groups of 128 with a scale of 16 bits (and a zero of 4).
BITS = {
    **{"fp8": 8, "fbgemm_fp8": 8, "modelopt": 8, "experts_int8": 8, "awq": 4.16, "gptq": 4.16, "awq_marlin": 4.16},
    **{"gptq_marlin": 4.16, "moe_wna16": 4.16, "bitsandbytes": 4.5, "mxfp4": 4.25, "modelopt_fp4": 4.5},
}


@dataclass(frozen=True)
class Setting:
    """How a model is cut and kept. `dtype`, `kv`: bytes of a number in the layers and in the cache; `bits`: of a quantised weight,
    `attending`: of one in attention, which some checkpoints leave as it was; `reserved`: bytes of cache that were asked for, None
    where it takes what is left; `dealt`: whether ranks have whole experts, and not a part of each; `graphs`: whether CUDA graphs
    are captured, by `runner`."""

    tp: int
    pp: int
    dp: int
    dcp: int
    dtype: int
    bits: float
    attending: float
    kv: int
    block: int
    longest: int
    budget: int
    sequences: int
    share: float
    graphs: bool
    runner: Runner
    reserved: int | None = None
    dealt: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


# The flags that `setting` reads: with any other a plan is the same.
FLAGS = (
    *PARALLEL,
    "decode-context-parallel-size",
    *("dtype", "quantization", "kv-cache-dtype", "kv-cache-memory-bytes", "block-size", "enable-expert-parallel"),
    *("max-model-len", "max-num-batched-tokens", "max-num-seqs", "gpu-memory-utilization", "enforce-eager"),
)


def setting(
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    config: Config,
    shape: Shape,
    device: Device,
    gpus: int,
    release: tuple[int, int] | None = None,
) -> Setting:
    """What the flags of `vllm serve` make of it on so many GPUs (0: a CPU); without parallel flags the heads are cut. `release` of
    vLLM: None for today's.

    Raises `UsageError` for a layout that does not come to so many GPUs, heads that cannot be cut so, a context too long, and a
    value that no plan can be made with.
    """
    number = partial(_number, flags)
    tp, pp, dp = _layout(flags, shape, gpus)
    dtype = _dtype(flags.get("dtype"))
    weight = bits(str(flags.get("quantization") or ""), config, dtype)
    longest = number("max-model-len", shape.longest)
    if longest > shape.longest and shape.positions != "ALiBi":
        raise UsageError(f"max-model-len {longest}, and the model has {shape.longest} positions", "lower it")
    budget, sequences = usual(device, gpus)
    space = env.get("VLLM_CPU_KVCACHE_SPACE", "") if gpus == 0 else ""
    reserved = number("kv-cache-memory-bytes", int(space) * GIB if space.isdigit() else 0)
    return Setting(
        **{"tp": tp, "pp": pp, "dp": dp, "dcp": number("decode-context-parallel-size", 1)},
        dtype=dtype,
        bits=weight,
        attending=8 * dtype if _spares_attention(config) else weight,
        kv=_kept(flags.get("kv-cache-dtype"), dtype),
        block=number("block-size", BLOCK if gpus or shape.latent else CPU_BLOCK),
        longest=longest,
        budget=number("max-num-batched-tokens", budget),
        sequences=number("max-num-seqs", sequences),
        share=_share(flags.get("gpu-memory-utilization")),
        graphs=gpus > 0 and not _switch(flags, "enforce-eager"),
        runner=runner.of(release, config, not shape.experts, env),
        reserved=reserved or None,
        dealt=_switch(flags, "enable-expert-parallel"),
    )


def _number(flags: Mapping[str, Any], name: str, default: int) -> int:
    if flags.get(name) is None:
        return default
    try:
        found = units.tokens(flags[name]) if name in IN_THOUSANDS else int(str(flags[name]))
    except (UsageError, ValueError) as error:
        # vLLM takes auto and -1 for a length, and looks how long a sequence it has room for.
        hint = "in digits" + (", or such as 8k (8000), 8K (8192)" if name in IN_THOUSANDS else "")
        raise UsageError(f"{name} {flags[name]}: a plan needs a number", hint) from error
    if found < 1:
        raise UsageError(f"{name} {found}: at least 1 is needed")
    return found


def _switch(flags: Mapping[str, Any], name: str) -> bool:
    value = flags.get(name)
    if not isinstance(value, bool | None):
        raise UsageError(f"{name} {value}: it is a switch", "true or false")
    return value is True


def _share(asked: object) -> float:
    try:
        # No percentage: vLLM takes none.
        return units.share(UTILIZATION if asked is None else float(str(asked)))
    except (UsageError, ValueError) as error:
        raise UsageError(f"gpu-memory-utilization {asked}: it is a share of the memory, at most 1", "such as 0.9") from error


def _layout(flags: Mapping[str, Any], shape: Shape, gpus: int) -> tuple[int, int, int]:
    """Ranks by tensor, pipeline and data."""
    sizes = {name: _number(flags, name, 1) for name in PARALLEL}
    tp, pp, dp = sizes.values()
    if gpus == 0 and tp * pp * dp > 1:
        hint = " ".join(f"--flag {name}=1" for name, size in sizes.items() if size > 1)
        raise UsageError(f"the flags cut the model for {tp * pp * dp} ranks, and a CPU is planned as one", hint)
    gpus = max(gpus, 1)
    if not any(flags.get(name) for name in PARALLEL):
        tp = next(size for size in range(gpus, 0, -1) if gpus % size == 0 and shape.heads % size == 0)
        pp = gpus // tp
    if tp * pp * dp != gpus:
        others = pp * dp
        also = f", or --flag {PARALLEL[0]}={gpus // others}" if gpus % others == 0 else ""
        raise UsageError(f"the flags cut the model for {tp * others} GPU(s), and there are {gpus}", f"--gpus {tp * others}{also}")
    if shape.heads % tp or pp > shape.layers:
        raise UsageError(f"{shape.heads} heads in {shape.layers} layers cannot be cut for {tp} x {pp} ranks", "another layout")
    return tp, pp, dp


def _dtype(asked: object) -> int:
    if asked is not None and asked not in DTYPES:
        raise UsageError(f"dtype {asked} is none that vLLM has", f"there are {', '.join(DTYPES)}")
    return loaded(asked)


def _kept(asked: object, dtype: int) -> int:
    """Bytes of a number in the cache, of a model whose layers have so many."""
    found = layout.width(str(asked or "auto"), dtype)
    if found is None:
        raise UsageError(f"how many bytes a token has under kv-cache-dtype {asked} is not known here", "known are auto and fp8")
    return found


def loaded(dtype: object) -> int:
    """Bytes of a number in the layers under the flag `dtype`; without it vLLM makes 16 bits of float32."""
    return 4 if dtype in ("float32", "float") else 2


def bits(flag: str, config: Config, dtype: int) -> float:
    """Bits of a weight in the layers. Raises `UsageError` for a quantisation that is not known here."""
    declared = _quantization(config)
    method = flag or str(declared.get("quant_method") or "")
    groups = list((declared.get("config_groups") or {}).values())
    bits = declared.get("bits") or declared.get("w_bit") or (groups[0]["weights"]["num_bits"] if groups else None)
    if not method:
        return 8 * dtype
    if declared.get("load_in_8bit"):
        return 8
    if bits:
        return float(bits) if bits >= 8 else bits + 0.16
    if method not in BITS:
        raise UsageError(f"how many bits a weight has under {method} is not known here", f"known are {', '.join(BITS)}")
    return BITS[method]


def _quantization(config: Config) -> Config:
    """What the checkpoint says of its quantisation, wherever it says it; empty where it says nothing."""
    return {**config, **(config.get("text_config") or {})}.get("quantization_config") or {}


def _spares_attention(config: Config) -> bool:
    """Whether a quantised checkpoint leaves attention as it was, by its list of such modules."""
    declared = _quantization(config)
    lists = (declared.get(name) or () for name in ("modules_to_not_convert", "ignore", "ignored_layers"))
    return any("self_attn" in str(name).split(".")[-1] for names in lists for name in names)


def usual(device: Device, gpus: int) -> tuple[int, int]:
    """Tokens and sequences of a step that vLLM's server takes unless told, by the GPU's memory."""
    if gpus == 0:
        return 2048, 128
    if device.memory < 70 * GIB or device.name.startswith("A100"):
        return 2048, 256
    return (16384 if device.memory >= 160 * GIB else 8192), 1024


def weights(shape: Shape, at: Setting) -> dict[str, int]:
    """Bytes of each part on the fullest GPU: of several stages one that has a whole share of the layers, and the embedding."""
    ranks = at.tp * at.dp
    among = shape.experts / -(-shape.experts // ranks) if at.dealt and shape.experts else ranks
    ways = {"tp": at.tp, "kv": min(at.tp, shape.kv_heads), "experts": among, "whole": 1}
    stage = -(-shape.layers // at.pp) / shape.layers
    found = {}
    for part in shape.parts:
        outside = part.name in ("embedding", "head", "positions")
        if at.pp > 1 and part.name == "head":
            continue  # on the last stage, the embedding on the first
        found[part.name] = round(part.numbers * (1 if outside else stage) / ways[part.cut] * width(part, at) / 8)
    return found


def width(part: Part, at: Setting) -> float:
    """Bits of a weight of this part."""
    if not part.quantised:
        return 8 * at.dtype
    return at.attending if part.name in ("attention", "keys and values", "latents") else at.bits


def token(shape: Shape, at: Setting) -> int:
    """Bytes that one layer keeps of a token on one rank."""
    # Latents are not cut by heads: each rank has all of them.
    return layout.kept(max(1, shape.kv_heads // at.tp), shape.head, shape.latent, at.kv)


def cache(shape: Shape, at: Setting, room: int) -> tuple[int, float]:
    """Bytes that one sequence of full length takes at most, and how many of these fit into so many bytes.

    As vLLM does it: blocks of one size for all kinds of layers, each kind in groups of as many layers, the last one padded.
    """
    kinds = {window: -(-count // at.pp) for window, count in Counter(shape.windows).items()}
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * least else least
    blocks = sum(-(-count // size) * _blocks(window, at) for window, count in kinds.items())
    page = size * token(shape, at) * at.block
    return blocks * page, max(room // page, 0) / blocks


def _blocks(window: int, at: Setting) -> int:
    whole = -(-at.longest // (at.dcp * at.block))
    # A window holds its own tokens and those of the step, and need not begin where a block does.
    return -(-min(window - 1 + at.budget, at.longest) // at.block) + 1 if window else whole


def rest(shape: Shape, at: Setting, gpus: int) -> dict[str, int]:
    """What else the fullest GPU holds, as allowances in bytes. The sampler begins when the layers are through: the greater counts,
    beside the experts' workspaces, which stay."""
    if gpus == 0:
        return {"process": PROCESS}
    each = at.budget * at.dtype
    between = each * (shape.cut // at.tp + shape.whole)
    sampling = at.sequences * shape.vocab * at.runner.logit + each * shape.hidden
    forward = 2 * each * shape.hidden + (0 if shape.experts else between)
    return {
        "activations": max(forward, sampling) + (between if shape.experts else 0),
        "CUDA graphs": at.runner.graphs if at.graphs and not beside(at) else 0,
        "libraries": KEPT + (RANKS if at.gpus > 1 else 0),
    }


def beside(at: Setting) -> bool:
    """Whether CUDA graphs lie beside the engine's share of the memory. Where the cache was given a size there is no share."""
    return at.graphs and not at.runner.counted and at.reserved is None


@dataclass(frozen=True)
class Fit:
    """What it comes to on the fullest GPU, in bytes. `room`: for the cache; `sequence`: the most that one of full length takes;
    `sequences`: of full length that fit at once; `lacks`: bytes, 0 where it fits."""

    limit: int
    weights: Mapping[str, int]
    rest: Mapping[str, int]
    room: int
    sequence: int
    sequences: float
    lacks: int

    @property
    def fits(self) -> bool:
        return self.lacks == 0


def fit(shape: Shape, at: Setting, device: Device, gpus: int) -> Fit:
    """Whether weights, allowances and one sequence of full length have room in the engine's share of the memory."""
    held, also = weights(shape, at), rest(shape, at, gpus)
    limit = int(device.memory * (at.share if at.reserved is None else 1))
    left = limit - sum(held.values()) - sum(also.values())
    room = left if at.reserved is None else at.reserved
    sequence, sequences = cache(shape, at, room)
    lacks = max(sequence - room, 0) if sequences < 1 else 0
    return Fit(limit, held, also, room, sequence, sequences, max(lacks, room - left if at.reserved is not None else 0, 0))


def impossible(shape: Shape, at: Setting, found: Fit) -> bool:
    """Whether weights and one sequence of full length have no room even if all allowances were nothing."""
    room = found.limit - sum(found.weights.values())
    reserved = room if at.reserved is None else at.reserved
    return reserved > room or cache(shape, at, reserved)[1] < 1


def ways(shape: Shape, at: Setting, device: Device, gpus: int) -> list[str]:
    """What would make it fit, each alone, in flags; the first that cost no quality."""

    def good(**changed: Any) -> bool:
        other = replace(at, **changed)
        return fit(shape, other, device, other.gpus if gpus else 0).fits

    found = []
    sizes = _reserves(shape, at, device, gpus)
    reserve = next((size for size in sizes if good(reserved=size * GIB)), None)
    if reserve:
        found.append(f"VLLM_CPU_KVCACHE_SPACE {reserve}" if gpus == 0 else f"kv-cache-memory-bytes {reserve * GIB}")
    shorter = _longest(shape, at, device, gpus)
    if shorter:
        found.append(f"max-model-len {shorter} (now {at.longest})")
    smaller = next((size for size in (8192, 4096, 2048, 1024, 512) if size < at.budget and good(budget=size)), None)
    if gpus and smaller:
        found.append(f"max-num-batched-tokens {smaller} (now {at.budget})")
    fewer = next((size for size in (512, 256, 128, 64, 32) if size < at.sequences and good(sequences=size)), None)
    if gpus and fewer:
        found.append(f"max-num-seqs {fewer} (now {at.sequences})")
    if gpus and at.share < 0.95 and at.reserved is None and good(share=0.95):
        found.append(f"gpu-memory-utilization 0.95 (now {at.share:g})")
    more = next((tp for tp in (2, 4, 8, 16, 32) if tp > at.tp and shape.heads % tp == 0 and good(tp=tp)), None)
    if gpus and more:
        found.append(f"tensor-parallel-size {more} (now {at.tp}): {more * at.pp * at.dp} such GPUs")
    if at.kv > 1 and good(kv=1):
        found.append("kv-cache-dtype fp8: it changes answers a little")
    for bits, what in ((8, "weights in FP8 (quantization fp8, or another checkpoint)"), (4.16, "a checkpoint of four bits")):
        if at.bits > bits and good(bits=bits, attending=bits):
            found.append(f"{what}: it changes answers")
            break
    return found


def _reserves(shape: Shape, at: Setting, device: Device, gpus: int) -> list[int]:
    """GiB to reserve for the cache instead, where a size was asked for: enough for one sequence, or no more than there is."""
    if at.reserved is None:
        return []
    found = fit(shape, at, device, gpus)
    left = found.limit - sum(found.weights.values()) - sum(found.rest.values())
    return [size for size in (-(-found.sequence // GIB), left // GIB) if size > 0]


def _longest(shape: Shape, at: Setting, device: Device, gpus: int) -> int | None:
    """The longest context that fits, in steps of a block; None where not even 256 tokens do."""
    low, high = 0, at.longest // at.block
    while low < high:
        middle = (low + high + 1) // 2
        good = fit(shape, replace(at, longest=middle * at.block), device, gpus).fits
        low, high = (middle, high) if good else (low, middle - 1)
    return low * at.block if 256 <= low * at.block < at.longest else None
