"""What a build has to work with: torch, the CUDA compiler and the C++ compiler of one interpreter, and what stands against it."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from fenno import process
from fenno.errors import BuildError

SCRIPT = Path(__file__).parent / "inside" / "toolchain.py"
# The first toolkit that knows the code of a GPU generation.
SINCE = {"80": (11, 0), "90": (11, 8), "100": (12, 8), "110": (13, 0), "120": (12, 8)}
# NVIDIA's compiler as packages: those for CUDA 12 and before lack nvcc itself.
NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
FETCH_TIMEOUT = 1200.0


@dataclass(frozen=True)
class Toolchain:
    """What an interpreter builds with. `python`: its tag; `abi`: whether its torch has C++11's strings; `libraries`: the folder of
    torch's own. `nvcc` and `compiler` are versions; `headers`: whether there is a Python.h. None: there is none."""

    python: str
    torch: str | None
    torch_cuda: str | None
    abi: bool | None
    libraries: str | None
    cuda_home: str | None
    nvcc: str | None
    compiler: str | None
    headers: bool
    absent: list[str]


def look(python: str, cuda_home: Path | None = None) -> Toolchain:
    """Ask an interpreter (a few seconds: it imports torch). Raises `BuildError` when it does not answer."""
    named = {"CUDA_HOME": str(cuda_home)} if cuda_home else {}
    done = process.run([python, str(SCRIPT)], timeout=120.0, env={"PYTHONSAFEPATH": "1", **named})
    try:
        return Toolchain(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = process.last_line(done.stderr)
        raise BuildError(f"{python} does not say what it could build with: {last}", "does `import torch` work there?") from None


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def obstacle(found: Toolchain, python: str, archs: tuple[str, ...]) -> BuildError | None:
    """The first thing that stands against a build, or None."""
    if found.torch is None:
        return BuildError(f"there is no torch under {python}", "name the interpreter that will import the wheel: --python PATH")
    if found.torch_cuda is None:
        return BuildError(
            f"torch {found.torch} under {python} is built for CPUs: flash_attn needs the CUDA one it will run with",
            "name the interpreter that will import the wheel: --python PATH",
        )
    if found.nvcc is None:
        return BuildError(
            "there is no CUDA compiler: neither CUDA_HOME, nor nvcc on the PATH, nor NVIDIA's package beside torch",
            f"install the toolkit of torch's CUDA {found.torch_cuda} and set CUDA_HOME",
        )
    if numbers(found.nvcc)[0] != numbers(found.torch_cuda)[0]:
        return BuildError(
            f"nvcc is of CUDA {found.nvcc} and torch {found.torch} of CUDA {found.torch_cuda}: one major version is needed",
            f"set CUDA_HOME to a toolkit of CUDA {found.torch_cuda}",
        )
    old = [arch for arch in archs if numbers(found.nvcc) < SINCE[arch]]
    if old:
        return BuildError(
            f"nvcc {found.nvcc} cannot compile for sm_{old[0]}: that takes CUDA {SINCE[old[0]][0]}.{SINCE[old[0]][1]}",
            "use a newer one",
        )
    if found.compiler is None:
        return BuildError("there is no C++ compiler", "install g++, or name one in CXX")
    if not found.headers:
        return BuildError(f"the headers of Python are missing for {python}", "install them: python3-dev, or python3.12-devel")
    if found.absent:
        return BuildError(f"{', '.join(found.absent)} missing under {python}", f"{python} -m pip install {' '.join(found.absent)}")
    return None


def borrowable(found: Toolchain) -> bool:
    """Whether all that lacks is the CUDA compiler, and NVIDIA has it as packages."""
    return found.nvcc is None and found.torch_cuda is not None and numbers(found.torch_cuda) >= (13, 0)


def borrow_command(found: Toolchain, python: str, target: Path) -> list[str]:
    """pip's command for NVIDIA's compiler in a folder of its own, of the release of torch's CUDA."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    wanted = [f"{name}=={found.torch_cuda}.*" for name in NVCC_PACKAGES]
    return [python, "-m", "pip", "install", *options, "--target", str(target), *wanted]


def borrow(found: Toolchain, python: str, out: Path) -> Path:
    """A CUDA home in `out` made of NVIDIA's packages; the interpreter itself gets nothing installed. Raises `BuildError`."""
    target = out / f"cuda-{found.torch_cuda}"
    home = target / "nvidia" / f"cu{str(found.torch_cuda).partition('.')[0]}"
    if not (home / "bin" / "nvcc").is_file():
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        done = process.run(borrow_command(found, python, part), timeout=FETCH_TIMEOUT)
        made = part / home.relative_to(target)
        if done.returncode or not (made / "bin" / "nvcc").is_file():
            last = process.last_line(done.stderr, "pip gave no reason")
            raise BuildError(
                f"there is no CUDA compiler here, and NVIDIA's packages of it could not be fetched: {last}",
                f"install the toolkit of CUDA {found.torch_cuda} and set CUDA_HOME",
            )
        _link(made)
        part.replace(target)
    return home


def _link(home: Path) -> None:
    """The names that a linker and torch's builder look for: the packages have libcudart.so.13 in lib alone."""
    with contextlib.suppress(FileExistsError):
        (home / "lib64").symlink_to("lib")
    for library in sorted((home / "lib").glob("libcudart.so.*")):
        with contextlib.suppress(FileExistsError):
            (home / "lib" / "libcudart.so").symlink_to(library.name)
