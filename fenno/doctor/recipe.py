"""Checks of the recipe itself: what it pins against what is here, and advice in it that does not do what it is said to do."""

from __future__ import annotations

import json
import re

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Facts
from fenno.doctor.model import soft_cap
from fenno.doctor.stack import satisfies
from fenno.engine.catalogue import GONE
from fenno.plan.fit import UTILIZATION
from fenno.recipe import Recipe

# The first vLLM release with an architecture, where a recipe of fenno's pins one before it.
FIRST = {"Grok1ForCausalLM": (0, 8)}
# Flags that read a changed base, and the key inside --hf-overrides.
ROPE = ("rope-theta", "rope-scaling")


def there(facts: Facts) -> Recipe:
    assert facts.recipe is not None
    return facts.recipe


def steps(facts: Facts, pattern: str) -> list[str]:
    """The recipe's steps in which the pattern is found."""
    return [step for step in there(facts).stack.steps if re.search(pattern, step, re.IGNORECASE)]


def pinned(facts: Facts, name: str) -> tuple[int, ...] | None:
    """The release that the recipe pins a package to; None for a range or no pin."""
    text = there(facts).stack.packages.get(name, "")
    found = re.fullmatch(r"(\d+(?:\.\d+)*)(?:[.+a-z].*)?", text)
    return tuple(map(int, found[1].split("."))) if found else None


@check(
    "recipe.packages",
    "Pinned packages",
    expected="the packages of the recipe's `stack`, in the versions it names",
    why="The recipe's flags, sizes and figures hold for that stack; on another one they are a starting point.",
    fix="Install that stack in an environment of its own, or take the pins out when the recipe was tried on yours.",
    needs=("recipe", "stack"),
)
def packages(facts: Facts) -> Finding:
    wanted = there(facts).stack.packages
    assert facts.stack is not None
    differ = []
    for name, text in wanted.items():
        here = facts.stack.packages.get(re.sub(r"[-_.]+", "-", name).lower())
        if here is None:
            differ.append(f"{name} {text}: not installed")
        elif not _fits(here.version, text):
            differ.append(f"{name} {text}: here {here.version}")
    if not wanted:
        return ok("none")
    return warn("; ".join(differ)) if differ else ok(f"all {len(wanted)}")


def _fits(version: str, wanted: str) -> bool:
    """A bare version means that release, whatever its build; all else is a range as pip writes it."""
    try:
        return satisfies(version, SpecifierSet(f"=={wanted.partition('+')[0]}" if wanted[:1].isdigit() else wanted))
    except InvalidSpecifier:
        return False


@check(
    "recipe.python",
    "Pinned Python",
    expected="the Python of the recipe's `stack`",
    why="Wheels are built for one Python. (That another one breaks scheduling, as is said of 3.11, is not so: vLLM 0.4.2 "
    "has wheels for it.)",
    fix="An environment with that Python, where its packages have no wheels for yours",
    needs=("recipe", "stack"),
)
def python(facts: Facts) -> Finding:
    wanted = there(facts).stack.python
    assert facts.stack is not None
    if wanted is None:
        return ok("none")
    same = facts.stack.python == wanted or facts.stack.python.startswith(wanted + ".")
    return ok(wanted) if same else warn(f"{wanted}: here {facts.stack.python}")


@check(
    "recipe.cuda",
    "Pinned CUDA",
    expected="torch and nvcc of the CUDA release that the recipe's `stack` names",
    why="Modules built with another major release do not load. (Inside one major release they do: that 12.2 does not work "
    "is not so, the official flash-attn 2.5.8 wheels for CUDA 12 were built with it.)",
    fix="torch from the index of that release; the toolkit only where something is built",
    needs=("recipe", "stack"),
)
def cuda(facts: Facts) -> Finding:
    wanted = there(facts).stack.cuda
    assert facts.stack is not None
    if wanted is None:
        return ok("none")
    here = {"torch": facts.stack.torch_cuda, "nvcc": facts.driver.nvcc if facts.driver else None}
    differ = [f"{name} {text}" for name, text in here.items() if text and not text.startswith(wanted)]
    if here["torch"] is None:
        differ.insert(0, "torch without CUDA")
    return warn(f"{wanted}: here {', '.join(differ)}") if differ else ok(wanted)


@check(
    "recipe.system",
    "Pinned system",
    expected="the distribution of the recipe's `stack`",
    why="Wheels ask for a C library of some age and for nothing else of a distribution: another one that is newer does.",
    fix="None is needed where the packages install.",
    needs=("recipe", "host"),
)
def system(facts: Facts) -> Finding:
    wanted = there(facts).stack.system
    assert facts.host is not None
    if wanted is None:
        return ok("none")
    return ok(wanted) if wanted in facts.host.release else warn(f"{wanted}: here {facts.host.release or facts.host.system}")


@check(
    "recipe.soft-cap",
    "Soft cap in the pinned FlashAttention",
    expected="flash-attn 2.6 or later for a model with a soft cap (Grok, Gemma 2)",
    why="Before 2.6 flash-attn has no soft cap: the attention of such a model is computed without it, and its answers are others.",
    fix="Pin flash-attn>=2.6, with the soft cap compiled in.",
    needs=("recipe", "model"),
)
def soft_cap_version(facts: Facts) -> Finding:
    version, cap = pinned(facts, "flash-attn"), soft_cap(facts)
    if version is None:
        return ok("no flash-attn is pinned")
    if cap and version < (2, 6):
        return fail(f"flash-attn {there(facts).stack.packages['flash-attn']}, and the model's soft cap is {cap:g}")
    return ok(there(facts).stack.packages["flash-attn"])


@check(
    "recipe.engine-version",
    "The model in the pinned vLLM",
    expected="a vLLM that has the recipe's model",
    why="The pinned release does not know the model's architecture at all: nothing else in the recipe can be true of it.",
    fix="Pin a release that has the model; for Grok that is any from 0.8 to 0.24.",
    needs=("recipe", "model"),
)
def engine_version(facts: Facts) -> Finding:
    version = pinned(facts, "vllm")
    wanted = (facts.model.config.get("architectures") or []) if facts.model else []
    if version is None:
        return ok("no vLLM is pinned")
    late = [name for name in wanted if version < FIRST.get(name, (0,))]
    text = there(facts).stack.packages["vllm"]
    return fail(f"vLLM {text} has no {late[0]}") if late else ok(text)


@check(
    "recipe.old-flags",
    "Flags that no supported vLLM has",
    expected="flags of vLLM 0.24 or later",
    why="`vllm serve` refuses them. The order of waiting requests, for one, was never a `--scheduler-policy`, in no release.",
    fix="fenno recipe lint says what each has become",
    needs=("recipe",),
)
def old_flags(facts: Facts) -> Finding:
    old = [name for name in there(facts).engine.flags if name in GONE]
    return fail(f"--{', --'.join(old)}", GONE[old[0]]) if old else ok("none")


@check(
    "recipe.memory-rule",
    "Memory target and utilisation",
    expected="gpu-memory-utilization below the memory target",
    why="vLLM takes that share of the GPU at its start, for weights and KV cache together, whether it needs it or not: "
    "with 0.9 no target of 85 % can be met. Raising it when memory is short takes more, and 0.9 was the default already.",
    fix="gpu-memory-utilization at the target or below, or --kv-cache-memory-bytes",
    needs=("recipe",),
)
def memory_rule(facts: Facts) -> Finding:
    share, target = facts.flag("gpu-memory-utilization"), there(facts).targets.memory
    if target is None or target > 1 or not facts.needs_gpu:
        return ok("no target for a share of GPU memory")
    taken = share if isinstance(share, float) else UTILIZATION
    return (
        fail(f"{taken:.0%} is taken, {target:.0%} is the target")
        if taken > target
        else ok(f"{taken:.0%} for a target of {target:.0%}")
    )


@check(
    "recipe.rope-base",
    "RoPE base",
    expected="the model's own RoPE base",
    why="Another base turns every position by other angles: the model answers as one that was never trained, and not a "
    "microsecond faster. Keys with two bases in one cache cannot be compared at all.",
    fix="Drop it; fenno never changes what a model answers.",
    needs=("recipe",),
)
def rope_base(facts: Facts) -> Finding:
    flags = there(facts).engine.flags
    found = [f"--{name} {flags[name]}" for name in ROPE if name in flags]
    found += ["--hf-overrides with rope_theta"] if "rope_theta" in _overrides(facts) else []
    found += steps(facts, r"rope[_-]?(?:theta|base)")
    return fail(found[0]) if found else ok("the model's own")


def _overrides(facts: Facts) -> str:
    value = facts.flag("hf-overrides")
    return value if isinstance(value, str) else json.dumps(value)


@check(
    "recipe.gpu-mode",
    "Steps that change GPUs",
    expected="no step that resets GPUs or changes their compute mode",
    why="Compute mode 3 lets one process alone use a GPU, so that vLLM's second worker or its P2P test fails; it does not "
    "turn NVLink on, and neither does a reset, which ends every process on the card.",
    fix="Drop the step; `nvidia-smi nvlink -s` shows the links, topology.all-reduce what vLLM makes of them.",
    needs=("recipe",),
)
def gpu_mode(facts: Facts) -> Finding:
    found = steps(facts, r"nvidia-smi\b.*(?:\s-r\b|--gpu-reset|\s-c\s*\d|--compute-mode)")
    return fail(found[0]) if found else ok("none")


@check(
    "recipe.tokenizer",
    "Compiled tokenizer",
    expected="no torch.compile on a tokenizer",
    why="The id of a token is looked up in a dictionary, or in Rust: torch.compile only puts its guards in front of that.",
    fix="Drop the step; a slow tokenizer is a slow class: use the model's fast one.",
    needs=("recipe",),
)
def compiled_tokenizer(facts: Facts) -> Finding:
    found = steps(facts, r"torch\.compile\(.*(?:tokeni[sz]er|token_to_id)")
    return warn(found[0]) if found else ok("none")


@check(
    "recipe.build-command",
    "Build command of flash-attn",
    expected="FLASH_ATTN_CUDA_ARCHS for the architecture, and pip with --no-build-isolation",
    why="setup.py has neither --cuda_version nor --arch and ends with `option not recognized`; --no-build-isolation is pip's.",
    fix="FLASH_ATTN_CUDA_ARCHS=80 pip install --no-build-isolation flash-attn (2.7.3 or later), or fenno build-fa2",
    needs=("recipe",),
)
def build_command(facts: Facts) -> Finding:
    found = steps(facts, r"setup\.py\b.*(?:--cuda_version|--arch|--no-build-isolation|--enable-fused-softmax)")
    return warn(found[0]) if found else ok("none")


@check(
    "recipe.arguments",
    "Arguments that do not exist",
    expected="arguments that transformers and vLLM have",
    why="An argument that transformers does not know reaches the model's constructor and ends in a TypeError; the server "
    "module of early vLLM is gone.",
    fix="Drop it: vLLM's cache is paged and needs no such switch; the server is `vllm serve`.",
    needs=("recipe",),
)
def arguments(facts: Facts) -> Finding:
    found = steps(facts, r"kv_cache_contiguous|scheduler_policy\s*=|vllm\.entrypoints\.api_server|torch\.nested_tensor")
    return warn(found[0]) if found else ok("none")


@check(
    "recipe.training-steps",
    "Steps of training",
    expected="nothing of training in a recipe for serving",
    why="Gradient checkpointing and autocast act where gradients are computed; vLLM uses neither, so turning them off "
    "changes nothing.",
    fix="Drop the step.",
    needs=("recipe",),
)
def training_steps(facts: Facts) -> Finding:
    found = steps(facts, r"gradient_checkpointing|autocast")
    return warn(found[0]) if found else ok("none")


@check(
    "recipe.tested",
    "What was run of this recipe",
    expected="a recipe that says what of it was run, and where",
    why="A recipe that nobody ran is a guess, however exact its numbers look.",
    fix="Run it, and write down in `tested` on what.",
    needs=("recipe",),
)
def tested(facts: Facts) -> Finding:
    text = there(facts).tested
    if not text:
        return skip("a recipe of your own: it says nothing")
    return warn(text) if re.match(r"(?:nothing|not)\b", text) else ok(text)


CHECKS: tuple[Check, ...] = (
    tested,
    packages,
    python,
    cuda,
    system,
    engine_version,
    soft_cap_version,
    old_flags,
    memory_rule,
    rope_base,
    gpu_mode,
    compiled_tokenizer,
    build_command,
    arguments,
    training_steps,
)
