"""What the checks know: frozen facts of one host, its GPUs, the Python stack, the engine, the model and the recipe.

Nothing here looks at anything: `gather.py` and its helpers fill these in, tests write them by hand. An area that is None was not
gathered; `Facts.missing` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fenno.recipe import Recipe


def none() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Folder:
    """A folder that an engine writes to, or its nearest parent that exists. `free` in bytes."""

    path: str
    writable: bool
    free: int


@dataclass(frozen=True)
class Host:
    """The operating system. Sizes in bytes; `locked` and `quota` are None for no limit.

    `hub_token`: the Hub's token file is there. `libraries`: CUDA, cuDNN and NCCL in the folders of LD_LIBRARY_PATH, links followed.
    """

    system: str
    machine: str
    kernel: str
    release: str
    wsl: bool
    container: str | None
    memory: int
    available: int
    cores: int
    quota: float | None
    shm_total: int | None
    shm_free: int | None
    files: int
    files_hard: int
    locked: int | None
    huge_pages: int
    governors: tuple[str, ...]
    nodes: Mapping[int, frozenset[int]]
    affinity: frozenset[int]
    numa_balancing: bool
    iommu: str | None
    infiniband: bool
    compilers: tuple[str, ...]
    folders: Mapping[str, Folder]
    hub_token: bool = False
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """What the driver and the CUDA toolkit left in the file system. `nvcc` is its release, such as "12.4".

    `redirects`: PCIe bridges above GPUs on which ACS redirects traffic between peers.
    """

    kernel: str | None
    nodes: tuple[str, ...]
    switches: int
    fabric_manager: bool
    nvcc: str | None
    nvcc_path: str | None
    redirects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """One GPU by NVML; None where the card does not say. `throttle`: NVML's bits of reasons for lower clocks."""

    index: int
    name: str
    capability: tuple[int, int]
    memory: int
    used: int | None = None
    compute_mode: int | None = None
    persistence: int | None = None
    mig: int | None = None
    pcie_width: tuple[int, int] | None = None
    pcie_gen: tuple[int, int] | None = None
    numa: int | None = None
    throttle: int | None = None
    links: tuple[int, ...] = ()
    link_errors: int | None = None
    uncorrected: int | None = None
    remap: tuple[int, int, int, int] | None = None
    power: tuple[int, int] | None = None
    fabric: int | None = None


@dataclass(frozen=True)
class Gpus:
    """All GPUs. `cuda`: the newest CUDA that the driver runs, as (major, minor); `crash`: what ended the child that asked NVML."""

    driver: str
    cuda: tuple[int, int]
    cards: tuple[Card, ...]
    crash: str | None = None


@dataclass(frozen=True)
class Topology:
    """Between which GPUs runs what. `cells`: (a, b) with a < b -> NV18, PIX, PXB, PHB, NODE or SYS.

    `nvlink`: what vLLM asks NVML for each pair (P2P capability NVLINK); `peers`: whether P2P reads and writes are reported to work,
    None where only a matrix was given. `source` says where the cells come from.
    """

    source: str
    gpus: tuple[int, ...]
    cells: Mapping[tuple[int, int], str]
    nvlink: Mapping[tuple[int, int], bool]
    peers: Mapping[tuple[int, int], bool | None] = field(default_factory=dict)
    nodes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """One installed distribution. `folder`: the site-packages it lies in."""

    name: str
    version: str
    folder: str
    requires: tuple[str, ...] = ()
    requires_python: str = ""


@dataclass(frozen=True)
class Extension:
    """A compiled module that needs torch.

    `missing`: symbols it wants that torch's libraries lack; `archs`: such as ("sm_80", "ptx_90").
    """

    path: str
    missing: tuple[str, ...]
    archs: tuple[str, ...]


@dataclass(frozen=True)
class Drift:
    """Files of one distribution that differ from its RECORD, and those that are not there. `shared`: those of `changed` that are
    hard links to another place."""

    changed: tuple[str, ...]
    shared: tuple[str, ...]
    linked: int = 0
    files: int = 0
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """What is installed under the engine's interpreter, read from files.

    `doubles`: package -> the folders it is in more than once; `torch_cuda` and `torch_abi` are read from torch's files: the CUDA it
    was built for, and whether it has the C++11 ABI. `importers`: consumer -> the FlashAttention that it would import.
    `manifest`: what a trimmed FlashAttention build says of itself.
    """

    executable: str
    python: str
    packages: Mapping[str, Package]
    doubles: Mapping[str, tuple[str, ...]] = field(default_factory=none)
    headers: bool = True
    torch_cuda: str | None = None
    torch_abi: bool | None = None
    extensions: Mapping[str, Extension] = field(default_factory=none)
    importers: Mapping[str, str] = field(default_factory=none)
    drift: Mapping[str, Drift] = field(default_factory=none)
    manifest: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Engine:
    """The installed vLLM, read from its files. Empty sets where a file was not where it is in the supported versions.

    `gone`: architecture -> the last version that had it; `elsewhere`: architecture -> the plugin that has it now; `flags`: None
    until `fenno recipe lint` or a start has read them; `plugins`: entry points; `scheduler`: the classes that the recipe's
    scheduler class is made of, from itself to the last, or why it was not found; None where the recipe names none.
    """

    distribution: str
    version: str
    platform: str
    architectures: frozenset[str] = frozenset()
    gone: Mapping[str, str] = field(default_factory=none)
    elsewhere: Mapping[str, str] = field(default_factory=none)
    variables: frozenset[str] = frozenset()
    layouts: tuple[str, ...] = ()
    flags: frozenset[str] | None = None
    scheduler: tuple[str, ...] | str | None = None
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model as its files describe it. `weights`: bytes, None when unknown; `local`: whether its files are on this host.

    `pointers`: weight files that are Git LFS pointers; `absent`: shards that the index names and the folder lacks;
    `tokenizers`: its tokenizer's files; `fault`: why a name that can be no Hub id is no model either.
    """

    name: str
    config: Mapping[str, Any]
    local: bool
    weights: int | None = None
    pointers: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ("tokenizer.json",)
    dummy: bool = False
    fault: str = ""


@dataclass(frozen=True)
class Deep:
    """What came of importing and measuring under the engine's interpreter (`--deep`); None where it was not tried."""

    torch: str | None = None
    engine: str | None = None
    plugins: tuple[str, ...] | None = None
    copies: Mapping[str, tuple[bool, float]] = field(default_factory=none)


@dataclass(frozen=True)
class Facts:
    """Everything the checks may look at. `variables`: the environment of the engine, the recipe's laid over fenno's own."""

    variables: Mapping[str, str] = field(default_factory=dict)
    host: Host | None = None
    driver: Driver | None = None
    gpus: Gpus | None = None
    topology: Topology | None = None
    stack: Stack | None = None
    engine: Engine | None = None
    model: Model | None = None
    recipe: Recipe | None = None
    deep: Deep | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def tp(self) -> int:
        """Tensor parallel size: the recipe's flag, else 1."""
        size = self.flag("tensor-parallel-size")
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def needs_gpu(self) -> bool:
        return self.recipe is not None and bool(self.recipe.host.gpus)

    def flag(self, *names: str) -> Any:
        """The recipe's value of the first of these flags that it sets, else None."""
        flags = self.recipe.engine.flags if self.recipe else {}
        return next((flags[name] for name in names if name in flags), None)
