"""From a plan to a wheel: the source prepared, ninja run, the library looked at.

A build that was stopped goes on where it was, since its folder is named by all that matters and ninja keeps what is done. A wheel
appears there only when all is well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from fenno import process
from fenno.errors import BuildError, DiskError
from fenno.fa2 import progress, source, stubs, tiles, wheel
from fenno.fa2.plan import STUBS_FILE, Plan
from fenno.fa2.source import Given
from fenno.fa2.toolchain import Toolchain

SETUP = Path(__file__).parent / "inside" / "setup.py"
MANIFEST = "fenno-fa2.json"  # in the wheel's flash_attn folder, where `fenno doctor` reads it
SAY_EVERY = 30.0  # seconds
LEAST_DISK = 2 * 2**30  # bytes: the source unpacked, objects, and what nvcc writes in between


@dataclass(frozen=True)
class Built:
    """A wheel and its manifest. `seconds`: wall time; `cpu_seconds`: of all compilers; `units`: those that were compiled now."""

    wheel: Path
    manifest: dict[str, Any]
    seconds: float
    cpu_seconds: float
    units: dict[str, float]


def manifest(plan: Plan, found: Toolchain, origin: str) -> dict[str, Any]:
    """What the wheel says of itself; `fenno doctor` holds models against it, and inside/setup.py builds from it."""
    return {
        "version": plan.release.version,
        "local_version": plan.local_version,
        "source": origin,
        "head_dims": list(plan.need.sizes),
        "dtypes": list(plan.need.dtypes),
        **{switch: switch not in plan.off for switch in ("softcap", "alibi", "local", "dropout", "uneven_k")},
        "backward": False,
        "archs": [f"sm_{arch}" for arch in plan.archs],
        "kernels": plan.kernels,
        "tiles": {tiles.name(unit): [str(tile) for tile in wanted] for unit, wanted in plan.tiles.items()},
        "sources": files(plan),
        "cxx_flags": plan.cxx_flags,
        "nvcc_flags": plan.nvcc_flags,
        "built_with": {
            **{"torch": found.torch, "cuda": found.nvcc, "compiler": found.compiler},
            **{"abi": found.abi, "python": found.python},
        },
    }


def files(plan: Plan) -> list[str]:
    """What is compiled, the longest first: so fewer cores stand idle at the end."""
    estimates = tiles.estimates(plan)
    every = ["csrc/flash_attn/flash_api.cpp", STUBS_FILE, *tiles.sources(plan)]
    return sorted(every, key=lambda path: -estimates.get(PurePath(path).stem, 0.0))


def generated(plan: Plan) -> dict[str, str]:
    """The files that fenno adds to the source, by their path in it."""
    return {STUBS_FILE: stubs.text(plan)} | {path: text for path, text in tiles.sources(plan).items() if text is not None}


def key(made: dict[str, Any], plan: Plan) -> str:
    """A short name of all that decides about the result: two builds that differ in it never share a folder."""
    text = "\n".join([json.dumps(made, sort_keys=True), *generated(plan).values(), SETUP.read_text(encoding="utf-8")])
    return f"{made['version']}+{made['local_version']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def command(python: str, wheels: Path) -> list[str]:
    """What builds the wheel; it runs in the source's folder."""
    return [python, str(SETUP), "bdist_wheel", "--dist-dir", str(wheels)]


def environment(found: Toolchain, jobs: int) -> dict[str, str | None]:
    """What torch's builder listens to. The flags name the architecture; a list from the environment is not to add to it."""
    return {"MAX_JOBS": str(jobs), "CUDA_HOME": found.cuda_home, "TORCH_CUDA_ARCH_LIST": None, "NVCC_APPEND_FLAGS": None}


def prepare(tree: Path, plan: Plan, made: dict[str, Any]) -> None:
    """Write what is generated into the source, if it differs: what is unchanged is not compiled again."""
    texts = {**generated(plan), f"flash_attn/{MANIFEST}": json.dumps(made, indent=1)}
    with source.writing(tree):
        for path, text in texts.items():
            if not (tree / path).is_file() or (tree / path).read_text(encoding="utf-8") != text:
                process.write(tree / path, text)


def build(plan: Plan, found: Toolchain, python: str, given: Given, out: Path, say: Callable[[str], None]) -> Built:
    """Build the wheel, or find it built before. Raises `BuildError` or `DiskError` with what went wrong first."""
    started = time.monotonic()
    with alone(out):
        made = manifest(plan, found, source.origin(plan.release, given, out))
        folder = out / key(made, plan)
        ready = next(iter(sorted(folder.glob("*.whl"))), None)
        if ready:
            say(f"built before: {ready}")
            return Built(ready, made, time.monotonic() - started, 0.0, {})
        room(out)
        tree = source.place(plan.release, given, python, out, folder)
        prepare(tree, plan, made)
        cpu, units = run(plan, found, python, tree, folder / "build.log", say)
        fresh = next((tree / "dist").glob("*.whl"), None)
        if fresh is None:
            raise BuildError("the build ended well and left no wheel", f"see {folder / 'build.log'}")
        wrong = wheel.fault(wheel.contents(fresh, Path(found.libraries) if found.libraries else None), plan)
        if wrong:
            raise wrong
        return Built(fresh.replace(folder / fresh.name), made, time.monotonic() - started, cpu, units)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A folder while nobody else builds in it; the lock ends with the process. Raises `BuildError`, `DiskError`."""
    with source.writing(folder):
        lock = process.locked(folder / "lock")
    if lock is None:
        raise BuildError(f"another fenno is building in {folder}", "wait for it to end, or choose another --out folder")
    with lock:
        yield


def room(folder: Path) -> None:
    """Raise `DiskError` unless there is space for sources and objects, and where the compilers keep what is in between."""
    for place, word in ((folder, "choose another --out folder"), (Path(tempfile.gettempdir()), "set TMPDIR to another folder")):
        free = shutil.disk_usage(place).free
        if free < LEAST_DISK:
            raise DiskError(f"{free / 2**30:.1f} GiB are free in {place}, a build takes {LEAST_DISK / 2**30:.0f}", word)


def run(
    plan: Plan, found: Toolchain, python: str, tree: Path, log: Path, say: Callable[[str], None]
) -> tuple[float, dict[str, float]]:
    """Run ninja to its end and say how far it is. Returns seconds of CPU time and those of each unit. Raises the first error."""
    log.unlink(missing_ok=True)
    before = timed(tree)
    estimates = tiles.estimates(plan)
    todo = {name: seconds for name, seconds in estimates.items() if name not in before}
    started, spent, said = time.monotonic(), children_cpu(), (-1, -1.0)
    with process.running(command(python, tree / "dist"), log=log, env=environment(found, plan.jobs), cwd=tree) as child:
        while child.poll() is None:
            done, elapsed = timed(tree), time.monotonic() - started
            if (len(done), elapsed // SAY_EVERY) != said:
                said = (len(done), elapsed // SAY_EVERY)
                say(progress.line(len(done), len(estimates), elapsed, progress.left(todo, done, plan.jobs, elapsed)))
            time.sleep(0.5)
        code = child.wait()
    if code:
        error = progress.first_error(log.read_text(errors="replace"))
        error.hint = f"{error.hint}; the log is {log}" if error.hint else f"the log is {log}"
        raise error
    return children_cpu() - spent, {name: seconds for name, seconds in timed(tree).items() if name in todo}


def timed(tree: Path) -> dict[str, float]:
    """What ninja has noted so far in a source's folder."""
    log = next(iter(sorted((tree / "build").glob("*/.ninja_log"))), None)
    return progress.compiled(log.read_text(errors="replace")) if log else {}


def children_cpu() -> float:
    """Seconds of CPU time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def document(found: Toolchain, built: Built) -> dict[str, Any]:
    """What came of a build, as JSON."""
    return {
        "wheel": str(built.wheel),
        "seconds": round(built.seconds, 1),
        "cpu_seconds": round(built.cpu_seconds, 1),
        "units": built.units,
        "manifest": built.manifest,
        "toolchain": asdict(found),
    }
