"""What a built wheel holds, by its library's symbols alone: nothing is imported, and neither torch nor a GPU is needed."""

from __future__ import annotations

import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fenno import process
from fenno.elf import Library, torch_lacks
from fenno.errors import BuildError
from fenno.fa2.plan import Plan

KERNEL = re.compile(r"^[0-9a-f]+ [tTwW] (void (?:\w+::)?flash_\w+_kernel<.+>\(.*params\))$", re.MULTILINE)
UNDEFINED = re.compile(r"^ *U (void (?:\w+::)?run_mha_\w+<[^>]+>)", re.MULTILINE)


@dataclass(frozen=True)
class Contents:
    """`undefined`: functions of its own that the library lacks. `lacks`: symbols that torch has not. `archs`: such as ("sm_80",).
    `kernels`: how many device kernels there are, for one architecture."""

    undefined: tuple[str, ...]
    lacks: tuple[str, ...]
    archs: tuple[str, ...]
    kernels: int


def contents(wheel: Path, torch_libraries: Path | None) -> Contents:
    """Look into a wheel. Without torch's libraries nothing is said of them. Raises `BuildError` when it holds no library."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=wheel.parent, prefix="look-") as folder:
        name = next((name for name in archive.namelist() if name.startswith("flash_attn_2_cuda") and name.endswith(".so")), None)
        if name is None:
            raise BuildError(f"{wheel.name} holds no flash_attn_2_cuda library", "see the log of the build")
        path = Path(archive.extract(name, folder))
        listing = process.run(["nm", "-C", str(path)]).check("nm").stdout
        torch = [Library(file) for file in sorted(torch_libraries.glob("lib*.so"))] if torch_libraries else []
        try:
            with Library(path) as library:
                return Contents(undefined(listing), torch_lacks(library, torch), library.archs(), kernels(listing))
        finally:
            for file in torch:
                file.close()


def undefined(listing: str) -> tuple[str, ...]:
    """The attention functions that are wanted in a listing of `nm -C`, without their arguments."""
    return tuple(UNDEFINED.findall(listing))


def kernels(listing: str) -> int:
    """How many device kernels a listing of `nm -C` has; each is a function of the host's code, too, by which it is launched."""
    return len(KERNEL.findall(listing))


def fault(found: Contents, plan: Plan) -> BuildError | None:
    """What is wrong with a library that was built by `plan`, or None."""
    if found.undefined:
        return BuildError(
            f"the library lacks {len(found.undefined)} functions of its own, {found.undefined[0]} first",
            "tell us: the stubs should have them",
        )
    if found.lacks:
        return BuildError(
            f"the library wants {len(found.lacks)} symbols that torch has not, {found.lacks[0]} first: another torch than the "
            "interpreter's own was compiled against",
            "look for a second torch on PYTHONPATH or in CPLUS_INCLUDE_PATH",
        )
    wanted = {f"sm_{arch}" for arch in plan.archs}
    if not wanted <= set(found.archs):
        return BuildError(
            f"the library has code for {', '.join(found.archs) or 'no GPU'}, and {', '.join(sorted(wanted))} was asked for",
            "NVCC_PREPEND_FLAGS or a compiler in place of nvcc may change it",
        )
    return None
