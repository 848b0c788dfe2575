"""Looks at the operating system, the driver's files and the CUDA toolkit; a fact that cannot be read is None or empty."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from fenno import machine, process
from fenno.doctor.facts import Driver, Folder, Host
from fenno.errors import ProcessError

CGROUP = Path("/sys/fs/cgroup")
NVIDIA = "0x10de"
BRIDGE = "0x068000"
DISPLAYS = ("0x0300", "0x0302")
DEVICES = Path("/sys/bus/pci/devices")
PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
ACS, REDIRECT = 0x000D, 0x4
LIBRARIES = ("libcudart", "libcublas", "libcudnn", "libnccl")
INFINITE = 2**63 - 1


def read(path: Path | str) -> str:
    """A small file's text without the last newline; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def host(variables: Mapping[str, str]) -> Host:
    """This host as a process with these variables finds it (about 20 ms)."""
    memory = psutil.virtual_memory()
    files, locked = limits()
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        kernel=machine.kernel(),
        release=release(),
        wsl="microsoft" in platform.release().lower(),
        container=container(),
        memory=machine.memory_limit(),
        available=min(memory.available, machine.memory_limit()),
        cores=machine.available_cores(),
        quota=quota(read(CGROUP / "cpu.max")),
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        files=files[0],
        files_hard=files[1],
        locked=locked,
        huge_pages=huge_pages(read("/proc/meminfo")),
        governors=tuple(sorted({read(p) for p in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor")} - {""})),
        nodes={int(p.name[4:]): cpus(read(p / "cpulist")) for p in Path("/sys/devices/system/node").glob("node[0-9]*")},
        affinity=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        numa_balancing=read("/proc/sys/kernel/numa_balancing") not in ("", "0"),
        iommu=iommu(read("/sys/kernel/iommu_groups/0/type")),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        compilers=tuple(name for name in ("cc", "gcc", "clang", *variables.get("CC", "").split()[:1]) if shutil.which(name)),
        folders=folders(variables),
        hub_token=token_file(variables).is_file(),
        libraries=libraries(variables.get("LD_LIBRARY_PATH", "")),
    )


def limits() -> tuple[tuple[int, int], int | None]:
    """The limits of open files (now, and at most) and of locked memory in bytes, None for no limit."""
    try:
        import resource
    except ImportError:
        # Windows has no such limits; host.system says what is wrong there.
        return (INFINITE, INFINITE), None
    soft, hard = (n if n >= 0 else INFINITE for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return (soft, hard), None if locked in (resource.RLIM_INFINITY, INFINITE) else locked


def release() -> str:
    """The distribution as it calls itself: "Ubuntu 22.04.4 LTS"."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', read("/etc/os-release"), re.MULTILINE)
    return found[1] if found else ""


def container() -> str | None:
    """What kind of container this is, by the marks that each kind leaves; None outside."""
    if Path("/.dockerenv").exists():
        return "Docker"
    kind = re.search(r"^container=(\S+)", read("/proc/1/environ").replace("\0", "\n"), re.MULTILINE)
    if Path("/run/.containerenv").exists() or kind:
        return kind[1] if kind else "Podman"
    return "Kubernetes" if "kubepods" in read("/proc/1/cgroup") else None


def quota(text: str) -> float | None:
    """Cores that a cgroup's cpu.max ("200000 100000") allows, or None for no limit."""
    parts = text.split()
    return int(parts[0]) / int(parts[1]) if len(parts) == 2 and parts[0].isdigit() and parts[1].isdigit() else None


def huge_pages(meminfo: str) -> int:
    """Bytes reserved as huge pages, of every size."""
    found = re.search(r"^Hugetlb:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def cpus(text: str) -> frozenset[int]:
    """The numbers in a list such as "0-3,8-11"."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return frozenset(n for low, _, high in spans for n in range(int(low), int(high or low) + 1))


def iommu(kind: str) -> str | None:
    """Whether devices see translated addresses, from the first group's domain type; None without an IOMMU in use."""
    return {"identity": "passthrough", "DMA": "translated", "DMA-FQ": "translated"}.get(kind)


def folders(variables: Mapping[str, str]) -> dict[str, Folder]:
    """The folders an engine with these variables writes to, by what it keeps there."""
    return {use: folder(Path(place)) for use, place in places(variables).items()}


def places(variables: Mapping[str, str]) -> dict[str, Path | str]:
    """Where those folders are."""
    home = Path(variables.get("HOME") or Path.home())
    cache = Path(variables.get("XDG_CACHE_HOME") or home / ".cache")
    hub = variables.get("HF_HUB_CACHE") or Path(variables.get("HF_HOME") or cache / "huggingface") / "hub"
    temporary = variables.get("TMPDIR") or "/tmp"
    return {
        "vLLM's cache": variables.get("VLLM_CACHE_ROOT") or cache / "vllm",
        "Triton's cache": variables.get("TRITON_CACHE_DIR") or home / ".triton",
        "torch's cache": variables.get("TORCHINDUCTOR_CACHE_DIR") or temporary,
        "Hub cache": hub,
        "temporary files": temporary,
    }


def libraries(path: str) -> tuple[str, ...]:
    """The libraries in the folders of a search path that torch brings too."""
    folders = [Path(part).resolve() for part in path.split(":") if part]
    return tuple(str(found) for folder in folders for name in LIBRARIES for found in sorted(folder.glob(f"{name}.so.[0-9]*")))


def token_file(variables: Mapping[str, str]) -> Path:
    """Where the Hub's client keeps its token."""
    home = Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME") or Path.home()) / ".cache") / "huggingface"
    return Path(variables.get("HF_TOKEN_PATH") or Path(variables.get("HF_HOME") or home) / "token")


def folder(path: Path) -> Folder:
    """`path`, or its nearest parent that is there, since that is where it would be made."""
    there = next((place for place in (path, *path.parents) if place.exists()), Path("/"))
    writable = os.access(there, os.W_OK | os.X_OK) and there.is_dir()
    try:
        return Folder(str(path), writable, shutil.disk_usage(there).free)
    except OSError:
        return Folder(str(path), False, 0)


def driver(variables: Mapping[str, str]) -> Driver:
    """What driver and toolkit left in the file system; nvcc is run where there is one."""
    path = nvcc_path(variables)
    return Driver(
        kernel=module_version(read("/proc/driver/nvidia/version")),
        nodes=tuple(sorted(node.name for node in Path("/dev").glob("nvidia*") if not node.is_dir())),
        switches=sum(is_switch(device) for device in DEVICES.glob("*")),
        redirects=redirects(DEVICES),
        fabric_manager=running("nv-fabricmanager"),
        nvcc=nvcc_release(path) if path else None,
        nvcc_path=path,
    )


def module_version(text: str) -> str | None:
    """The version of the NVIDIA kernel module, the closed one or the open one, from /proc/driver/nvidia/version."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)", text)
    return found[1] if found else None


def is_switch(device: Path) -> bool:
    """Whether a PCI device is an NVSwitch: NVIDIA's, and of the class that bridges have which are no PCI bridges."""
    return read(device / "vendor") == NVIDIA and read(device / "class") == BRIDGE


def redirects(devices: Path) -> tuple[str, ...]:
    """The PCIe bridges above NVIDIA's GPUs that send traffic between peers up to the processor (ACS). Only root may read that."""
    gpus = [gpu for gpu in devices.glob("*") if read(gpu / "vendor") == NVIDIA and read(gpu / "class")[:6] in DISPLAYS]
    above = {parent for gpu in gpus for parent in gpu.resolve().parents if PCI.fullmatch(parent.name)}
    return tuple(sorted(bridge.name for bridge in above if redirecting(configuration(bridge))))


def configuration(device: Path) -> bytes:
    try:
        return (device / "config").read_bytes()
    except OSError:
        return b""


def redirecting(config: bytes) -> bool:
    """Whether a device's PCI configuration space has ACS with P2P request redirect on (the extended capability 0x000D)."""
    offset = 0x100
    while 0x100 <= offset <= len(config) - 8:
        head = int.from_bytes(config[offset : offset + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & REDIRECT)
        # The capabilities stand in a list that only goes forward.
        offset = head >> 20 if head >> 20 > offset else 0
    return False


def running(name: str) -> bool:
    """Whether a process of this name runs (as the kernel cuts it: 15 letters)."""
    return any(read(entry / "comm") == name[:15] for entry in numbered(Path("/proc")))


def numbered(folder: Path) -> Iterable[Path]:
    with contextlib.suppress(OSError):
        yield from (entry for entry in folder.iterdir() if entry.name.isdigit())


def nvcc_path(variables: Mapping[str, str]) -> str | None:
    """The nvcc that a build would take: CUDA_HOME's, else the one on the path, else the toolkit's usual place."""
    home = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    usual = str(Path(home) / "bin/nvcc") if home else "nvcc"
    return shutil.which(usual, path=variables.get("PATH")) or (None if home else shutil.which("/usr/local/cuda/bin/nvcc"))


def nvcc_release(path: str) -> str | None:
    """The release that this nvcc names, such as "12.4"."""
    try:
        done = process.run([path, "--version"], timeout=5.0)
    except ProcessError:
        return None
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else None
