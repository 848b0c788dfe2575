"""What vLLM itself decides about its custom all-reduce on two GPUs, beside what `fenno doctor` predicts.

usage: python benchmarks/kv/all_reduce.py OUT.json [DOCTOR.json]    (two GPUs, a Python with vLLM)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def rank(number: int, meeting: str, out: str) -> None:
    """One rank: begins as vLLM's worker does, and looks at the communicator of its tensor-parallel group."""
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    torch.cuda.set_device(number)
    said: dict[str, Any] = {"vllm": vllm.__version__, "fully_connected": current_platform.is_fully_connected([0, 1])}
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(2, number, f"file://{meeting}", number)
        parallel_state.initialize_model_parallel(2)
    reduce = parallel_state.get_tp_group().device_communicator.ca_comm
    said["custom_all_reduce"] = reduce is not None and not reduce.disabled
    tell(number, out, said)
    part = torch.full((1024,), number + 1.0, dtype=torch.bfloat16, device=torch.device("cuda", number))
    said["used"] = bool(said["custom_all_reduce"] and reduce.should_custom_ar(part))
    summed = parallel_state.get_tp_group().all_reduce(part)
    said["right"] = bool((summed == 3).all())
    tell(number, out, said)
    dist.barrier()


def tell(number: int, out: str, said: dict[str, Any]) -> None:
    if number == 0:
        Path(out).write_text(json.dumps(said) + "\n")
        print(json.dumps(said), flush=True)


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="fenno-reduce-") as folder:
        torch.multiprocessing.start_processes(rank, (f"{folder}/meeting", sys.argv[1]), nprocs=2, start_method="spawn")
    for line in json.loads(Path(sys.argv[2]).read_text())["checks"] if len(sys.argv) > 2 else ():
        if line["id"] == "topology.all-reduce":
            print("fenno doctor:", line["found"], flush=True)


if __name__ == "__main__":
    main()
