"""What this host is: processor, memory and its limits, GPUs. Read-only; NVML is asked in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from fenno import process, units
from fenno.errors import ProcessError
from fenno.recipe import Host


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by NVML. `memory` and `used` in bytes, `power` in W, `utilization` in %, `energy` in J since its driver was loaded;
    None where the card does not say."""

    index: int
    name: str
    uuid: str
    memory: int
    used: int
    capability: tuple[int, int]
    driver: str
    utilization: float | None = None
    power: float | None = None
    energy: float | None = None


@dataclass(frozen=True)
class Machine:
    """One host. `memory` is what a process here may use, in bytes: the machine's, or its cgroup's limit where that is less."""

    system: str
    kernel: str
    processor: str
    cores: int
    memory: int
    gpus: tuple[Gpu, ...]
    gpu_note: str | None
    python: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def probe() -> Machine:
    """Look at this host (about 0.1 s)."""
    gpus, note = read_gpus()
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        kernel=kernel(),
        processor=processor_name(),
        cores=available_cores(),
        memory=memory_limit(),
        gpus=gpus,
        gpu_note=note,
        python=platform.python_version(),
    )


def kernel() -> str:
    """The kernel's version in numbers; what comes behind them names a build, or a host's provider."""
    return platform.release().partition("-")[0]


def lacking(host: Machine, need: Host) -> str | None:
    """What `host` lacks of a recipe's `need`, in a sentence; None when it has everything."""
    large = [gpu for gpu in host.gpus if gpu.memory >= (need.gpu_memory or 0)]
    if need.gpus and len(large) < need.gpus:
        size = f" of {units.show_memory(need.gpu_memory)} or more" if need.gpu_memory else ""
        return f"{need.gpus} GPU(s){size} are needed and {len(large)} found" + (f" ({host.gpu_note})" if host.gpu_note else "")
    if need.memory and host.memory < need.memory:
        return f"{units.show_memory(need.memory)} of memory are needed and {units.show_memory(host.memory)} may be used here"
    return None


def read_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs, and why there are none where there are none. A crash inside NVML is such a reason."""
    try:
        done = process.run(process.module("fenno.nvml"), timeout=20.0)
        facts = json.loads(done.stdout)
    except ProcessError as error:
        return (), str(error)
    except ValueError:
        return (), f"reading NVML ended with exit code {done.returncode}"
    return gpus_of(facts), facts["error"]


def gpus_of(facts: dict[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs of one line of `fenno.nvml`. What all of a day's lines say is kept once."""
    same = ("name", "uuid", "driver")
    return tuple(
        Gpu(**{**g, **{name: sys.intern(g[name]) for name in same}, "capability": tuple(g["capability"])}) for g in facts["gpus"]
    )


def visible(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Those that `CUDA_VISIBLE_DEVICES` names, by index or UUID; all of them when it is not set."""
    if setting is None:
        return tuple(gpus)
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return tuple(gpu for gpu in gpus if any(name == str(gpu.index) or gpu.uuid.startswith(name) for name in names))


def available_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes: the machine's memory, or the limit of a cgroup that this process is in where that is less."""
    limits = [psutil.virtual_memory().total]
    for line in _lines(own) or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            limits += [int(text) for text in _lines(base / folder / name) if text.isdigit()]
    return min(limits)


def _lines(path: Path) -> list[str]:
    """The lines of a small file of the kernel's; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def processor_name() -> str:
    """The processor as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def resident(pids: list[int]) -> int:
    """Bytes of memory that these processes hold, shared pages counted once (PSS where the kernel tells, else RSS)."""
    total = 0
    for pid in pids:
        # A process may end between two questions.
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            try:
                total += psutil.Process(pid).memory_full_info().pss
            except psutil.AccessDenied:
                total += psutil.Process(pid).memory_info().rss
    return total
