"""Facts written by hand: a sound host with two H200s, on which every check is well. SYNTHETIC: no such host was recorded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from fenno.doctor.facts import (
    Card,
    Deep,
    Drift,
    Driver,
    Engine,
    Extension,
    Facts,
    Folder,
    Gpus,
    Host,
    Model,
    Package,
    Stack,
    Topology,
)
from fenno.recipe import Recipe

GIB = 2**30
HOST = Host(
    system="Linux",
    machine="x86_64",
    kernel="6.8.0",
    release="Ubuntu 22.04.4 LTS",
    wsl=False,
    container=None,
    memory=512 * GIB,
    available=480 * GIB,
    cores=32,
    quota=None,
    shm_total=256 * GIB,
    shm_free=255 * GIB,
    files=1024,
    files_hard=1048576,
    locked=None,
    huge_pages=0,
    governors=("performance",),
    nodes={0: frozenset(range(16)), 1: frozenset(range(16, 32))},
    affinity=frozenset(range(32)),
    numa_balancing=False,
    iommu="passthrough",
    infiniband=True,
    compilers=("cc", "gcc"),
    folders={"vLLM's cache": Folder("/home/u/.cache/vllm", True, 900 * GIB), "temporary files": Folder("/tmp", True, 50 * GIB)},
    hub_token=True,
)
DRIVER = Driver(
    kernel="580.159.04",
    nodes=("nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"),
    switches=4,
    fabric_manager=True,
    nvcc="13.0",
    nvcc_path="/usr/local/cuda/bin/nvcc",
)
CARD = Card(
    index=0,
    name="NVIDIA H200",
    capability=(9, 0),
    memory=140 * GIB,
    used=GIB // 2,
    compute_mode=0,
    persistence=1,
    mig=0,
    pcie_width=(16, 16),
    pcie_gen=(1, 5),
    numa=0,
    throttle=1,
    links=(1,) * 18,
    uncorrected=0,
    remap=(0, 0, 0, 0),
    power=(700000, 700000),
    fabric=3,
)
GPUS = Gpus("580.159.04", (13, 0), (CARD, replace(CARD, index=1)))
TOPOLOGY = Topology("NVML", (0, 1), {(0, 1): "NV18"}, {(0, 1): True}, {(0, 1): True})
PACKAGES = {
    name: Package(name, version, "/env/lib", *rest)
    for name, version, *rest in [
        (
            "vllm",
            "0.32.0",
            ("torch==2.13.0", "transformers>=5.16", 'six; python_version > "3.11"', "pandas; extra == 'bench'"),
            "<3.15,>=3.11",
        ),
        ("torch", "2.13.0+cu130", ("nvidia-nccl-cu13==2.30.4", "triton==3.9.0", "sympy")),
        ("torchvision", "0.28.0+cu130", ("torch==2.13.0", "numpy")),
        ("nvidia-nccl-cu13", "2.30.4"),
        ("triton", "3.9.0"),
        ("transformers", "5.19.0"),
        ("six", "1.17.0"),
        ("flash-attn", "2.8.3"),
    ]
}
STACK = Stack(
    executable="/env/bin/python",
    python="3.12.4",
    packages=PACKAGES,
    torch_cuda="13.0",
    torch_abi=True,
    extensions={
        "flash_attn": Extension("/env/lib/flash_attn_2_cuda.so", (), ("sm_80", "sm_90")),
        "vLLM": Extension("/env/lib/vllm/_C.abi3.so", (), ("sm_80", "sm_90", "ptx_90")),
    },
    importers={"vLLM": "its own vllm_flash_attn", "transformers": "flash_attn 2.8.3"},
    drift={"vllm": Drift((), (), 12, 5000)},
)
ENGINE = Engine(
    distribution="vllm",
    version="0.32.0",
    platform="cuda",
    architectures=frozenset({"LlamaForCausalLM", "MixtralForCausalLM"}),
    gone={"Grok1ForCausalLM": "0.24.0", "AquilaForCausalLM": "0.24.0"},
    elsewhere={"BartModel": "https://github.com/vllm-project/bart-plugin"},
    variables=frozenset(
        {"VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_PLUGINS", "VLLM_KV_CACHE_LAYOUT", "VLLM_CPU_KVCACHE_SPACE"}
    ),
    layouts=("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
    flags=frozenset({"tensor-parallel-size", "dtype", "max-model-len", "block-size"}),
    plugins=("fenno = fenno.vllm_plugin:register",),
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MODEL = Model("org/model", CONFIG, local=True, weights=141 * 10**9)
FLAGS = {"tensor-parallel-size": 2, "dtype": "bfloat16"}


def recipe(flags: dict[str, Any] | None = None, **parts: Any) -> Recipe:
    """A recipe for two GPUs; `parts` are laid over its sections."""
    engine = {"model": "org/model", "flags": {**FLAGS, **(flags or {})}, **parts.pop("engine", {})}
    host = {"gpus": 2, "gpu_memory": "80GiB", "memory": "64GiB", **parts.pop("host", {})}
    return Recipe.model_validate({"name": "synthetic", "engine": engine, "host": host, **parts})


GOOD = Facts(
    variables={"HOME": "/home/u", "PATH": "/usr/bin"},
    host=HOST,
    driver=DRIVER,
    gpus=GPUS,
    topology=TOPOLOGY,
    recipe=recipe(tested="all of it, on two H200s"),
    stack=STACK,
    engine=ENGINE,
    model=MODEL,
    deep=Deep(plugins=("fenno",), copies={"GPU0-GPU1": (True, 390.0), "GPU1-GPU0": (True, 385.0)}),
)


def host(**changes: Any) -> Facts:
    return replace(GOOD, host=replace(HOST, **changes))


def driver(**changes: Any) -> Facts:
    return replace(GOOD, driver=replace(DRIVER, **changes))


def card(**changes: Any) -> Facts:
    """The second GPU is another."""
    return replace(GOOD, gpus=replace(GPUS, cards=(CARD, replace(CARD, index=1, **changes))))


def joined(cell: str, peer: bool | None, **changes: Any) -> Facts:
    """The two GPUs are connected otherwise."""
    return replace(
        GOOD, topology=Topology("NVML", (0, 1), {(0, 1): cell}, {(0, 1): cell.startswith("NV")}, {(0, 1): peer}), **changes
    )


def asked(flags: dict[str, Any] | None = None, **parts: Any) -> Facts:
    """Another recipe."""
    return replace(GOOD, recipe=recipe(flags, **parts))


def group(size: int, apart: Collection[tuple[int, int]] = (), *, peers: bool = True) -> Facts:
    """`size` GPUs, all pairs NVLink but those."""
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    cells = {pair: "SYS" if pair in apart else "NV12" for pair in pairs}
    joined = Topology("NVML", tuple(range(size)), cells, {p: p not in apart for p in pairs}, dict.fromkeys(pairs, peers))
    return replace(asked({"tensor-parallel-size": size}), topology=joined)


def variables(**changes: str) -> Facts:
    return replace(GOOD, variables={**GOOD.variables, **changes})


def stack(**changes: Any) -> Facts:
    return replace(GOOD, stack=replace(STACK, **changes))


def package(name: str, version: str | None, *requires: str) -> Facts:
    """Another version of one package; None takes it away."""
    found = {key: value for key, value in PACKAGES.items() if key != name}
    return stack(packages=found if version is None else {**found, name: Package(name, version, "/env/lib", requires)})


def engine(**changes: Any) -> Facts:
    return replace(GOOD, engine=replace(ENGINE, **changes))


def model(config: dict[str, Any] | None = None, **changes: Any) -> Facts:
    return replace(GOOD, model=replace(MODEL, config={**CONFIG, **(config or {})}, **changes))


def article(**changes: Any) -> Facts:
    """A recipe that pins and advises."""
    return asked(**{"stack": changes})
