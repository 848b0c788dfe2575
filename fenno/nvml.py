"""What NVML says of this host's GPUs, as one JSON line, or with `--every SECONDS` as a line each time until it is ended. Run with
-m in a child process: NVML calls have been seen to end the process that makes them. Without a driver the list is empty and `error`
says why."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes (total, used), compute capability and UUID of every GPU, utilisation in %, power in W, and energy in J
    since its driver was loaded. NVML has to be initialised."""
    import pynvml

    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        found.append(
            {
                "index": index,
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
                "memory": memory.total,
                "used": memory.used,
                "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
                "utilization": _optional(lambda h=handle: pynvml.nvmlDeviceGetUtilizationRates(h).gpu),
                "power": _optional(lambda h=handle: pynvml.nvmlDeviceGetPowerUsage(h) / 1e3),
                "energy": _optional(lambda h=handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),
                "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            }
        )
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _optional(read: Any) -> float | None:
    """Some cards, and most containers, lack a sensor or two."""
    import pynvml

    try:
        return float(read())
    except pynvml.NVMLError:
        return None


def main(every: float | None = None) -> None:
    """Print one line, or one each `every` seconds, stamped on the monotonic clock that all processes of a host share."""
    try:
        import pynvml
    except ImportError as error:
        print(json.dumps({"gpus": [], "error": str(error)}))
        return
    try:
        pynvml.nvmlInit()
        due = time.monotonic()
        while True:
            found = gpus()
            print(json.dumps({"at": time.monotonic(), "gpus": found, "error": None}), flush=True)
            if every is None or not found:
                return
            due = max(due + every, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    except pynvml.NVMLError as error:
        print(json.dumps({"gpus": [], "error": str(error)}), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):  # how it is ended
        main(float(sys.argv[2]) if sys.argv[1:2] == ["--every"] else None)
