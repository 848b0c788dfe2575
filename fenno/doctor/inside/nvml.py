"""What NVML says of all GPUs and pairs of them: run as a script in a child process, prints JSON lines.

An NVML call has been seen to end its process with a segmentation fault. So each risky question is announced (`asking …`), the
document is printed before the questions that are only nice to have, and printed again with their answers. An answer that is text is
the name of NVML's error. Standard library and pynvml alone.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml as nv

# pynvml has a tuple here by mistake; nvml.h says 0 to 4.
P2P = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}


def say(question: Callable[[], Any]) -> Any:
    """The answer, or the name of NVML's error."""
    try:
        return question()
    except nv.NVMLError as error:
        return type(error).__name__


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def links(handle: Any) -> list[Any]:
    """The state of every NVLink the card has, 1 for up."""
    states = [say(partial(nv.nvmlDeviceGetNvLinkState, handle, link)) for link in range(nv.NVML_NVLINK_MAX_LINKS)]
    return [state for state in states if isinstance(state, int)]


def gpu(index: int, handle: Any) -> dict[str, Any]:
    """One card, in the words of the recorded documents. Bytes, mW."""
    width = (nv.nvmlDeviceGetCurrPcieLinkWidth, nv.nvmlDeviceGetMaxPcieLinkWidth)
    gen = (nv.nvmlDeviceGetCurrPcieLinkGeneration, nv.nvmlDeviceGetMaxPcieLinkGeneration)
    power = (nv.nvmlDeviceGetPowerManagementLimit, nv.nvmlDeviceGetPowerManagementDefaultLimit)
    return {
        "index": index,
        "name": text(nv.nvmlDeviceGetName(handle)),
        "cc": list(nv.nvmlDeviceGetCudaComputeCapability(handle)),
        "mem": nv.nvmlDeviceGetMemoryInfo(handle).total,
        "used": nv.nvmlDeviceGetMemoryInfo(handle).used,
        "compute_mode": say(lambda: nv.nvmlDeviceGetComputeMode(handle)),
        "persistence": say(lambda: nv.nvmlDeviceGetPersistenceMode(handle)),
        "mig": say(lambda: list(nv.nvmlDeviceGetMigMode(handle))),
        "pcie_gen": say(lambda: [ask(handle) for ask in gen]),
        "pcie_width": say(lambda: [ask(handle) for ask in width]),
        "power": say(lambda: [ask(handle) for ask in power]),
        "numa": numa(handle),
        "throttle": say(lambda: nv.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "uncorrected": say(lambda: nv.nvmlDeviceGetTotalEccErrors(handle, 1, 0)),
        "remap": say(lambda: list(nv.nvmlDeviceGetRemappedRows(handle))),
        "nvlink_active": links(handle),
    }


def numa(handle: Any) -> Any:
    """The NUMA node, by NVML or else by what the kernel says of the PCI device; an error's name where neither knows."""
    node = say(partial(nv.nvmlDeviceGetNumaNodeId, handle))
    address = say(lambda: text(nv.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:])
    try:
        kernel = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        kernel = -1
    return kernel if isinstance(node, str) and kernel >= 0 else node


def pair(a: int, b: int, handles: list[Any]) -> dict[str, Any]:
    x, y = handles[a], handles[b]
    p2p = {name: say(partial(nv.nvmlDeviceGetP2PStatus, x, y, i)) for name, i in P2P.items()}
    return {"a": a, "b": b, "ancestor": say(lambda: nv.nvmlDeviceGetTopologyCommonAncestor(x, y)), "p2p": p2p}


def fabric(handle: Any) -> int:
    """The state of this card in the NVLink fabric: 0 not supported, 1 not started, 2 in progress, 3 completed."""
    info = nv.c_nvmlGpuFabricInfo_t()
    nv.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return int(info.state)


def link_errors(handle: Any) -> Any:
    """Replays, recoveries and checksum errors on all NVLinks of a card so far; an error's name where none are counted."""
    kinds = range(nv.NVML_NVLINK_ERROR_DL_CRC_DATA + 1)
    every = [(link, kind) for link in range(nv.NVML_NVLINK_MAX_LINKS) for kind in kinds]
    counts = [say(partial(nv.nvmlDeviceGetNvLinkErrorCounter, handle, link, kind)) for link, kind in every]
    numbers = [count for count in counts if isinstance(count, int)]
    return sum(numbers) if numbers else counts[0]


def main() -> None:
    try:
        nv.nvmlInit()
    except nv.NVMLError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print("asking for the GPUs", flush=True)
    handles = [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]
    document: dict[str, Any] = {
        "driver": text(nv.nvmlSystemGetDriverVersion()),
        "cuda": nv.nvmlSystemGetCudaDriverVersion_v2(),
        "gpus": [gpu(index, handle) for index, handle in enumerate(handles)],
    }
    print("asking how the GPUs are connected", flush=True)
    numbers = range(len(handles))
    document["pairs"] = [pair(a, b, handles) for a in numbers for b in numbers if a != b]
    print(json.dumps(document), flush=True)
    for index, handle in enumerate(handles):
        print(f"asking for the fabric state of GPU {index}", flush=True)
        document["gpus"][index]["fabric"] = say(partial(fabric, handle))
        print(f"asking for the link errors of GPU {index}", flush=True)
        document["gpus"][index]["link_errors"] = link_errors(handle)
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
