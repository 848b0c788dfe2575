"""Checks of the model: are its files whole, can it be cut into these parts, does it fit."""

from __future__ import annotations

from typing import Any

from fenno import units
from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.driver import numbers
from fenno.doctor.facts import Facts, Model
from fenno.doctor.host import GIB, size
from fenno.engine import server
from fenno.engine.tokenizer import PUBLISHED
from fenno.errors import UsageError
from fenno.kv import layout
from fenno.plan.fit import UTILIZATION, loaded

# Head sizes of vLLM's own CPU kernels (v1/attention/backends/cpu_attn.py, 0.32); FlashAttention 2 takes multiples of 8 up to 256.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
# The compute capability below which vLLM refuses a quantisation (get_min_capability, 0.32), and from which a GPU computes in it.
NEEDS = {
    **{"fp8": (7, 5), "awq": (7, 5), "gptq": (6, 0), "torchao": (7, 5), "compressed-tensors": (7, 0), "moe_wna16": (7, 0)},
    **dict.fromkeys(("experts_int8", "fbgemm_fp8", "mxfp4"), (8, 0)),
}
NATIVE = {"fp8": (8, 9), "fbgemm_fp8": (8, 9)}
# Whose tokenizer vLLM 0.24 reads in a way of its own (config/model.py); Grok-2 calls itself so.
GROK = "Grok1ForCausalLM"


def there(facts: Facts) -> Model:
    assert facts.model is not None
    return facts.model


def config(facts: Facts, name: str, default: Any = None) -> Any:
    return there(facts).config.get(name, default)


def head_size(facts: Facts) -> int | None:
    heads, hidden = config(facts, "num_attention_heads"), config(facts, "hidden_size")
    given = config(facts, "head_dim")
    return int(given) if given else hidden // heads if heads and hidden else None


def soft_cap(facts: Facts) -> float | None:
    """The soft cap of the model's attention, None without one."""
    found = [config(facts, name) for name in CAPS if config(facts, name)]
    return float(found[0]) if found else None


def kv_bytes(facts: Facts) -> int | None:
    """Bytes of KV cache a token takes, on all GPUs together; None for a config that does not say, or a format not known here."""
    layers, head = config(facts, "num_hidden_layers"), head_size(facts)
    heads = config(facts, "num_key_value_heads") or config(facts, "num_attention_heads")
    latent = int(config(facts, "kv_lora_rank") or 0)
    if latent:
        latent += config(facts, "qk_rope_head_dim", 0)
    width = layout.width(str(facts.flag("kv-cache-dtype") or "auto"), loaded(facts.flag("dtype")))
    if not (layers and width and (latent or (heads and head))):
        return None
    # Every rank keeps the whole latent, and one head at least.
    return int(layers) * layout.kept(max(heads or 0, facts.tp), head or 0, latent * facts.tp, width)


def longest_asked(facts: Facts) -> int | None:
    """The recipe's max-model-len; None where it has none, or the engine is to find one that fits."""
    try:
        return units.tokens(facts.flag("max-model-len"))
    except UsageError:
        return None


def room(facts: Facts) -> tuple[float, str] | None:
    """Bytes that weights and KV cache may take together, and where; None where that is not known."""
    if facts.gpus and facts.needs_gpu:
        share = facts.flag("gpu-memory-utilization")
        cards = sorted(facts.gpus.cards, key=lambda card: card.memory)[: parts(facts)] or [facts.gpus.cards[0]]
        return (share or UTILIZATION) * cards[0].memory * parts(facts), f"{parts(facts)} GPU(s)"
    return None


def parts(facts: Facts) -> int:
    pp = facts.flag("pipeline-parallel-size")
    return facts.tp * (pp if isinstance(pp, int) and pp > 0 else 1)


@check(
    "model.config",
    "The model's config",
    expected="a config.json on this host",
    why="Without it nothing can be said of the model before the engine has fetched it.",
    fix="hf download MODEL, or give the folder that holds it",
    needs=("model",),
)
def readable(facts: Facts) -> Finding:
    model = there(facts)
    if model.fault:
        return fail(model.fault, server.MODEL)
    if not model.local:
        known = ", known by fenno" if model.config else ""
        said = f"{model.name} is not on this host{known}: the engine will fetch it at its start"
        return warn(said, f"hf download {model.name}, or give the folder that holds it")
    return ok(model.name) if model.config else fail(f"no config.json in {model.name}")


@check(
    "model.files",
    "Weight files",
    expected="every shard that the index names, and no Git LFS pointer among them",
    why="A clone without Git LFS leaves 130 bytes a file, an interrupted download leaves shards out: the engine fails "
    "after it has read the others, minutes later.",
    fix="git lfs pull, or hf download MODEL (it goes on where it ended)",
    needs=("model",),
)
def files(facts: Facts) -> Finding:
    model = there(facts)
    if model.dummy or facts.flag("load-format") == "dummy":
        return ok("none are needed: random weights")
    if not model.local:
        return skip("the model is not on this host")
    if model.pointers:
        return fail(
            f"{model.pointers[0]} is a Git LFS pointer" + (f" (and {len(model.pointers) - 1} more)" if model.pointers[1:] else "")
        )
    if model.absent:
        return fail(f"{model.absent[0]} is missing" + (f" (and {len(model.absent) - 1} more)" if model.absent[1:] else ""))
    return ok(size(model.weights)) if model.weights else fail("no weights in its folder")


@check(
    "model.tokenizer",
    "Tokenizer files",
    expected="a tokenizer beside the weights, or --tokenizer",
    why="A folder that was converted by hand often lacks it: the engine ends after the weights were loaded.",
    fix="copy tokenizer.json and tokenizer_config.json from the original model, or give --tokenizer",
    needs=("model",),
)
def tokenizer(facts: Facts) -> Finding:
    if facts.flag("tokenizer") or facts.flag("skip-tokenizer-init") is True:
        return ok("the recipe names one")
    if not there(facts).local:
        return skip("the model is not on this host")
    files, engine = there(facts).tokenizers, facts.engine
    if not files:
        return fail("no tokenizer's files in the model's folder")
    # A vLLM with a Grok of its own (the last was 0.24) reads this one file for it, whatever else there is.
    own = engine is not None and GROK in engine.architectures and GROK in (config(facts, "architectures") or ())
    if own and PUBLISHED not in files and facts.flag("tokenizer-mode") in (None, "auto"):
        return fail(f"this vLLM reads {PUBLISHED} for {GROK}, and the folder has none", "put `tokenizer-mode: hf` in engine.flags")
    return ok("there")


@check(
    "model.remote-code",
    "Code of the model's own",
    expected="no `auto_map` in the config, or trust_remote_code in the recipe",
    why="vLLM asks before it runs code from a repository, and a server has nobody to ask.",
    fix="read the code, then set engine.trust_remote_code: true; or use a checkpoint that needs none",
    needs=("model", "recipe"),
)
def remote_code(facts: Facts) -> Finding:
    assert facts.recipe is not None
    if not config(facts, "auto_map") or facts.recipe.engine.trust_remote_code:
        return ok("none" if not config(facts, "auto_map") else "allowed by the recipe")
    known = facts.engine is not None and any(a in facts.engine.architectures for a in config(facts, "architectures") or ())
    return ok("not needed: vLLM has the model itself") if known else warn("the config maps its classes to code in the repository")


@check(
    "model.heads",
    "Cutting the heads",
    expected="attention heads, and where there are enough KV heads too, divisible by tensor-parallel-size",
    why="Heads are dealt out to the GPUs. Query heads that do not divide end the start; fewer KV heads than GPUs are "
    "copied, so that each GPU keeps cache that another one has too.",
    fix="a tensor-parallel-size that divides the number of attention heads (2, 4 or 8 for nearly all models)",
    needs=("model",),
)
def heads(facts: Facts) -> Finding:
    query, kv = config(facts, "num_attention_heads"), config(facts, "num_key_value_heads")
    if not query:
        return skip("the config does not say how many heads there are")
    found = f"{query} query heads and {kv or query} KV heads on {facts.tp} GPU(s)"
    if query % facts.tp:
        return fail(found)
    if kv and kv < facts.tp:
        return warn(f"{found}: each KV head is kept {facts.tp // kv} times", "--decode-context-parallel-size, or fewer GPUs")
    return ok(found)


@check(
    "model.head-size",
    "Head size",
    expected="a head size that the attention kernels have: on a CPU 32 to 512 in steps, for FlashAttention a multiple of 8 "
    "up to 256",
    why="Another size falls back to a slow path, or ends the start with `Head size N is not supported`.",
    fix="--attention-backend TRITON_ATTN, which takes any size from 32 on",
    needs=("model", "engine"),
)
def head(facts: Facts) -> Finding:
    found = head_size(facts)
    if found is None:
        return skip("the config does not say")
    assert facts.engine is not None
    cpu = facts.engine.platform == "cpu"
    if (cpu and found not in CPU_HEADS) or (not cpu and (found % 8 or found > 256)):
        return warn(f"{found}", expected="one of " + ", ".join(map(str, CPU_HEADS)) if cpu else "a multiple of 8 up to 256")
    return ok(f"{found}")


@check(
    "model.flash-attention",
    "What the model needs of FlashAttention",
    expected="a build with the model's soft cap, head size and dtype, in version 2.6 or later where there is a soft cap",
    why="A soft cap (Grok, Gemma 2) came with flash-attn 2.6; before, it was silently not there. A trimmed build refuses "
    "what was left out: `This flash attention build does not support tanh softcapping`.",
    fix="fenno build-fa2 for this model, or pip install 'flash-attn>=2.6'",
    needs=("model", "stack"),
)
def flash_attention(facts: Facts) -> Finding:
    assert facts.stack is not None
    package, cap, made = facts.stack.packages.get("flash-attn"), soft_cap(facts), facts.stack.manifest
    if package is None:
        return ok("flash-attn is not installed; vLLM brings its own")
    if cap and numbers(package.version) < (2, 6):
        return fail(f"flash-attn {package.version} has no soft cap, the model's is {cap:g}")
    lost = _trimmed(facts, made) if made else ""
    if lost:
        return fail(f"the trimmed build {package.version} {lost}")
    return ok(f"flash-attn {package.version}" + (f", soft cap {cap:g}" if cap else ""))


def _trimmed(facts: Facts, made: Any) -> str:
    """What this model needs and a trimmed build's manifest does not list."""
    dtype = (
        str(facts.flag("dtype") or config(facts, "torch_dtype") or "bfloat16")
        .replace("bfloat16", "bf16")
        .replace("float16", "fp16")
    )
    if soft_cap(facts) and made.get("softcap") is False:
        return "was built without the soft cap"
    if made.get("head_dims") and head_size(facts) not in made["head_dims"]:
        return f"has head sizes {made['head_dims']}, the model's is {head_size(facts)}"
    return f"has {made['dtypes']}, the model runs in {dtype}" if made.get("dtypes") and dtype not in made["dtypes"] else ""


@check(
    "model.context",
    "Context length",
    expected="--max-model-len at most the model's own context",
    why="Positions that the model was never trained on give words without sense; vLLM refuses them unless it is told not to.",
    fix="Lower max-model-len, or use RoPE scaling that the model was made for.",
    needs=("model", "recipe"),
)
def context(facts: Facts) -> Finding:
    most, asked = config(facts, "max_position_embeddings"), longest_asked(facts)
    if not most:
        return skip("the config does not say")
    if asked and asked > most:
        return fail(f"max-model-len {asked}, the model has {most} positions")
    assert facts.recipe is not None
    longest = max((each.longest for each in facts.recipe.workload.classes), default=0)
    limit = asked or most
    if longest > limit:
        return fail(
            f"requests of {longest} tokens, max-model-len {limit}", "raise max-model-len, or shorten the workload's classes"
        )
    return ok(f"{limit} of {most}")


@check(
    "model.quantization",
    "Quantised weights",
    expected="a quantisation that these GPUs have kernels for",
    why="vLLM refuses a quantisation below its capability, or unpacks it before every use. Quantised weights and "
    "FlashAttention do not meet: one is in the linear layers, the other in attention, so int4 weights go with any "
    "FlashAttention build.",
    fix="another checkpoint of the model, or newer GPUs",
    needs=("model", "gpus"),
)
def quantization(facts: Facts) -> Finding:
    assert facts.gpus is not None
    declared = config(facts, "quantization_config") or {}
    method = str(facts.flag("quantization") or declared.get("quant_method") or "")
    low = min((card.capability for card in facts.gpus.cards), default=(99, 0))
    found = f"{method}, and a GPU has compute capability {low[0]}.{low[1]}"
    if low < NEEDS.get(method, (0, 0)):
        return fail(f"{found}: vLLM refuses it below {'.'.join(map(str, NEEDS[method]))}")
    if low < NATIVE.get(method, (0, 0)):
        return warn(f"{found}: unpacked before every use below {'.'.join(map(str, NATIVE[method]))}")
    return ok(method or "none")


@check(
    "model.weights-fit",
    "Weights in memory",
    expected="the weights in the GPUs' share of memory (on a CPU: in main memory)",
    why="Weights that do not fit are found out after minutes of loading, by an out-of-memory error that names a layer.",
    fix="more GPUs, a quantised checkpoint (--quantization fp8 halves it), or a smaller model",
    needs=("model",),
)
def weights_fit(facts: Facts) -> Finding:
    weights, space = there(facts).weights, room(facts)
    if not weights:
        return skip("how large the weights are is not known")
    if space is None and (facts.needs_gpu or facts.host is None):
        return skip(facts.missing.get("gpus", "the GPUs are not known"))
    if space is None:
        assert facts.host is not None
        space = (facts.host.memory, "main memory")
    found = f"{size(weights)} of weights, {size(space[0])} in {space[1]}"
    return ok(found) if weights < space[0] else fail(found)


@check(
    "model.kv-fit",
    "KV cache beside the weights",
    expected="room for one request of max-model-len, and for the requests that are in flight at the target",
    why="vLLM refuses to start when one longest request does not fit; with room for few, requests wait in the queue while "
    "the GPU idles.",
    fix="lower max-model-len, --kv-cache-dtype fp8 (it changes answers a little), more GPUs or smaller weights",
    needs=("model", "recipe"),
)
def kv_fit(facts: Facts) -> Finding:
    each, longest = kv_bytes(facts), longest_asked(facts) or config(facts, "max_position_embeddings")
    space = _kv_room(facts)
    if not each or not isinstance(longest, int) or space is None:
        return skip("weights, GPUs or the shape of the cache are not known")
    tokens = int(max(space, 0) // each)
    found = f"at most {tokens} tokens of {each / 1024:g} KiB"
    if tokens < longest:
        return fail(found, expected=f"{longest} for one request of max-model-len")
    assert facts.recipe is not None
    users, mean = facts.recipe.workload.users or 0, sum(facts.recipe.workload.mean_lengths())
    if users * mean > tokens:
        return warn(f"{found}, {users} users hold {users * mean:.0f}", expected=f"{users * mean:.0f} tokens")
    return ok(f"{found}, {tokens // longest} requests of {longest}")


def _kv_room(facts: Facts) -> float | None:
    """Bytes left for the cache: an upper bound, since activations and graphs take their part too."""
    space, weights = room(facts), there(facts).weights
    if space is not None and weights:
        return space[0] - weights
    told = facts.variables.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(told) * GIB if not facts.needs_gpu and told.isdigit() and int(told) else None


@check(
    "model.disk",
    "Disk for the weights",
    expected="room for the weights in the Hub's cache, where the model has to be fetched",
    why="A full disk ends the download at its last shard; in a container the cache often lies in the image's own layer.",
    fix="HF_HUB_CACHE on a larger disk, or a volume mounted there",
    needs=("model", "host"),
)
def disk(facts: Facts) -> Finding:
    assert facts.host is not None
    cache, weights = facts.host.folders.get("Hub cache"), there(facts).weights
    if there(facts).local or cache is None:
        return ok("nothing has to be fetched")
    if not weights:
        return skip("how large the weights are is not known")
    found = f"{size(weights)} to fetch, {size(cache.free)} free in {cache.path}"
    return ok(found) if cache.free > weights else fail(found)


CHECKS: tuple[Check, ...] = (
    readable,
    files,
    tokenizer,
    remote_code,
    heads,
    head,
    flash_attention,
    context,
    quantization,
    weights_fit,
    kv_fit,
    disk,
)
