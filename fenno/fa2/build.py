"""From a plan to a wheel: what is needed is checked, the source prepared, ninja run, the library looked at.

What decides is pure: obstacles, manifest, command, environment, first error. A build that was stopped goes on where it was, since
its folder is named by all that matters and ninja keeps what is done. A wheel appears there only when all is well.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fenno import process
from fenno.errors import BuildError, DiskError
from fenno.fa2 import source, stubs
from fenno.fa2.plan import JOB_MEMORY, Plan
from fenno.units import show_duration

INSIDE = Path(__file__).parent / "inside"
MANIFEST = "fenno-fa2.json"  # in the wheel's flash_attn folder, where `fenno doctor` reads it
LEAST_DISK = 2 * 2**30  # bytes: the source unpacked, objects, and what nvcc writes in between
# The first toolkit that knows the code of a GPU generation.
SINCE = {"80": (11, 0), "90": (11, 8), "100": (12, 8), "110": (13, 0), "120": (12, 8)}
STEP = re.compile(r"^\[(\d+)/(\d+)\]", re.MULTILINE)
WRONG = re.compile(r"^.*(?:\berror\b\s*:|fatal error|error #|\bKilled\b|died due to signal|No space left|Error:).*$", re.MULTILINE)


@dataclass(frozen=True)
class Toolchain:
    """What an interpreter builds with. `python`: its tag; `abi`: whether its torch has C++11's strings. None: there is none."""

    python: str
    torch: str | None
    torch_cuda: str | None
    abi: bool | None
    cuda_home: str | None
    nvcc: str | None
    compiler: str | None
    absent: list[str]


def look(python: str) -> Toolchain:
    """Ask an interpreter (a few seconds: it imports torch). Raises `BuildError` when it does not answer."""
    done = process.run([python, "-I", str(INSIDE / "toolchain.py")], timeout=120.0)
    try:
        return Toolchain(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise BuildError(f"{python} does not say what it could build with: {last}", "does `import torch` work there?") from None


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
            f"install the toolkit of torch's CUDA {found.torch_cuda}, or pip install nvidia-cuda-nvcc, and set CUDA_HOME",
        )
    if found.nvcc.split(".")[0] != found.torch_cuda.split(".")[0]:
        return BuildError(
            f"nvcc is of CUDA {found.nvcc} and torch {found.torch} of CUDA {found.torch_cuda}: one major version is needed",
            f"set CUDA_HOME to a toolkit of CUDA {found.torch_cuda}",
        )
    old = [arch for arch in archs if tuple(map(int, found.nvcc.split("."))) < SINCE[arch]]
    if old:
        return BuildError(
            f"nvcc {found.nvcc} cannot compile for sm_{old[0]}: that takes CUDA {SINCE[old[0]][0]}.{SINCE[old[0]][1]}",
            "use a newer one",
        )
    if found.compiler is None:
        return BuildError("there is no C++ compiler", "install g++, or name one in CXX")
    if found.absent:
        return BuildError(f"{', '.join(found.absent)} missing under {python}", f"{python} -m pip install {' '.join(found.absent)}")
    return None


def manifest(plan: Plan, found: Toolchain) -> dict[str, Any]:
    """What the wheel says of itself; `fenno doctor` holds models against it, and inside/setup.py builds from it."""
    return {
        "version": plan.release.version,
        "local_version": plan.local_version,
        "head_dims": list(plan.need.sizes),
        "dtypes": list(plan.need.dtypes),
        **{switch: switch not in plan.off for switch in ("softcap", "alibi", "local", "dropout", "uneven_k")},
        "backward": False,
        "archs": [f"sm_{arch}" for arch in plan.archs],
        "sources": ["csrc/flash_attn/flash_api.cpp", stubs.FILE, *(unit.file for unit in plan.units)],
        "cxx_flags": plan.cxx_flags,
        "nvcc_flags": plan.nvcc_flags,
        "built_with": {"torch": found.torch, "cuda": found.nvcc, "abi": found.abi, "python": found.python},
    }


def key(made: dict[str, Any], sha256: str) -> str:
    """A short name of all that decides about the result: two builds that differ in it never share a folder."""
    text = json.dumps([made, sha256], sort_keys=True)
    return f"{made['version']}+{made['local_version']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def command(python: str, wheels: Path) -> list[str]:
    """What builds the wheel; it runs in the source's folder."""
    return [python, str(INSIDE / "setup.py"), "bdist_wheel", "--dist-dir", str(wheels)]


def environment(found: Toolchain, jobs: int) -> dict[str, str | None]:
    """What torch's builder listens to. The flags name the architecture; a list from the environment is not to add to it."""
    return {"MAX_JOBS": str(jobs), "CUDA_HOME": found.cuda_home, "TORCH_CUDA_ARCH_LIST": None, "NVCC_APPEND_FLAGS": None}


def first_error(log: str) -> BuildError | DiskError:
    """What a failed build's log says went wrong first."""
    line = next((match[0].strip() for match in WRONG.finditer(log)), None)
    if line is None:
        last = (log.strip() or "it printed nothing").splitlines()[-1]
        return BuildError(f"the build failed and named no error; its last line: {last}")
    if "No space left" in line:
        return DiskError(
            f"the disk is full: {line}", "free some space (TMPDIR too: nvcc writes there), and run it again: it goes on"
        )
    if re.search(r"\bKilled\b|died due to signal 9|signal terminated program", line):
        return BuildError(
            f"a compiler was killed, most likely for want of memory: {line}",
            f"one takes {JOB_MEMORY / 1e9:.1f} GB: run it again with fewer --jobs, and it goes on",
        )
    return BuildError(f"the build failed: {line}")


def progress(log: str) -> tuple[int, int]:
    """How many of ninja's steps are done, by its log."""
    steps = STEP.findall(log)
    return (int(steps[-1][0]), int(steps[-1][1])) if steps else (0, 0)


def left(plan: Plan, elapsed: float, done: int, total: int) -> float:
    """Seconds left: by the plan's estimate until a step is done, then by the pace, whichever is later."""
    return max(plan.wall - elapsed, elapsed / done * (total - done) if done else 0.0)


def prepare(tree: Path, plan: Plan, found: Toolchain) -> None:
    """Write the stubs and the manifest into the source, if they differ: what is unchanged is not compiled again."""
    made = json.dumps(manifest(plan, found), indent=1)
    for path, text in ((tree / stubs.FILE, stubs.text(plan)), (tree / "flash_attn" / MANIFEST, made)):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            process.write(path, text)


def build(plan: Plan, found: Toolchain, python: str, given: Path | None, out: Path, say: Callable[[str], None]) -> Path:
    """Build the wheel, or find it built before. Returns its path; raises `BuildError` or `DiskError` with what went wrong first."""
    folder = out / key(manifest(plan, found), source.digest(given) if given else plan.release.sha256)
    ready = sorted(folder.glob("*.whl"))
    if ready:
        say(f"built before: {ready[0]}")
        return ready[0]
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK:
        raise DiskError(
            f"{free / 2**30:.1f} GiB are free in {folder}, a build takes {LEAST_DISK / 2**30:.0f}", "choose another --out folder"
        )
    tree = source.place(plan.release, given, python, folder)
    prepare(tree, plan, found)
    run(plan, found, python, tree, folder / "build.log", say)
    wheel = next((tree / "dist").glob("*.whl"))
    check_wheel(wheel, folder)
    return wheel.replace(folder / wheel.name)


def run(plan: Plan, found: Toolchain, python: str, tree: Path, log: Path, say: Callable[[str], None]) -> None:
    """Run ninja to its end and say how far it is. Raises the first error."""
    log.unlink(missing_ok=True)
    started, before = time.monotonic(), -1
    with process.running(command(python, tree / "dist"), log=log, env=environment(found, plan.jobs), cwd=tree) as child:
        while child.poll() is None:
            time.sleep(0.5)
            done, total = progress(log.read_text(errors="replace"))
            if done != before:
                elapsed = time.monotonic() - started
                say(f"{done} of {total or len(plan.units) + 2} units, about {show_duration(left(plan, elapsed, done, total))} left")
                before = done
        code = child.wait()
    if code:
        error = first_error(log.read_text(errors="replace"))
        error.hint = f"{error.hint}; the log is {log}" if error.hint else f"the log is {log}"
        raise error


def check_wheel(wheel: Path, folder: Path) -> None:
    """Raise `BuildError` when the library in a wheel lacks a function of its own."""
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.startswith("flash_attn_2_cuda") and name.endswith(".so")), None)
        if name is None:
            raise BuildError(f"{wheel.name} holds no flash_attn_2_cuda library", f"see {folder / 'build.log'}")
        library = Path(archive.extract(name, folder / "check"))
    said = process.run(["nm", "-D", "-C", "--undefined-only", str(library)]).check("nm").stdout
    lost = undefined(said)
    shutil.rmtree(folder / "check")
    if lost:
        raise BuildError(
            f"the library lacks {len(lost)} functions of its own, {lost[0]} first", "tell us: the stubs should have them"
        )


def undefined(listing: str) -> list[str]:
    """The attention functions in `nm -C --undefined-only`'s listing, without their arguments."""
    return re.findall(r"^ *U (void (?:\w+::)?run_mha_\w+<[^>]+>)", listing, re.MULTILINE)


def document(plan: Plan, found: Toolchain, wheel: Path, seconds: float) -> dict[str, Any]:
    """What came of a build, as JSON."""
    return {"wheel": str(wheel), "seconds": round(seconds, 1), "manifest": manifest(plan, found), "toolchain": asdict(found)}
