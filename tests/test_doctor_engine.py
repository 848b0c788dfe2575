"""What the doctor reads from vLLM's source files is what vLLM says itself, and the whole command on the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_facts import group

from fenno.doctor import checks, document, enginefacts, stackfacts

pytestmark = pytest.mark.engine

ASK = """
import json
from unittest import mock
from vllm.distributed.device_communicators import custom_all_reduce
from vllm import envs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as cpu
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

def reduces(size, joined, peers):
    "What vLLM decides of its custom all-reduce on GPUs that are faked: all joined by NVLink or none, with P2P or without."
    answers = {"is_rocm": False, "is_fully_connected": joined, "get_device_capability": None, "meta_size": 0}
    answers |= {"get_world_size": size, "get_rank": 0, "visible_device_id_to_physical_device_id": 0}
    fake = mock.Mock(**{f"{name}.return_value": answer for name, answer in answers.items()})
    parts = {name: fake for name in ("dist", "ops", "current_platform")} | {"custom_ar": True}
    parts["in_the_same_node_as"] = mock.Mock(return_value=[True] * size)
    parts["_can_p2p"] = mock.Mock(return_value=peers)
    parts["_supports_mnnvl_multimem_reduce_scatter"] = mock.Mock(return_value=False)
    made = object.__new__(custom_all_reduce.CustomAllreduce)
    # Its buffers are on a GPU: they are the first thing after the decision.
    buffers = mock.patch.object(type(made), "create_shared_buffer", mock.Mock(side_effect=MemoryError))
    with mock.patch.multiple(custom_all_reduce, **parts), buffers:
        try:
            made.__init__(None, "cuda:0")
        except MemoryError:
            pass
    return not made.disabled

kinds = [(size, joined, peers) for size in range(2, 9) for joined in (True, False) for peers in (True, False)]
print("said:" + json.dumps({
    "architectures": sorted(ModelRegistry.get_supported_archs()),
    "variables": sorted(name for name in envs.environment_variables if name.startswith("VLLM_")),
    "heads": cpu.get_supported_head_sizes(),
    "blocks": [getattr(size, "base", size) for size in cpu.get_supported_kernel_block_sizes()],
    "lineage": [made.__name__ for made in AsyncScheduler.__mro__],
    "reduces": [[*kind, reduces(*kind)] for kind in kinds],
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, list[Any]]:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("said:"))
    found: dict[str, list[Any]] = json.loads(line.removeprefix("said:"))
    return found


def test_architectures_variables_and_sizes_are_those_that_vllm_lists(said: dict[str, list[Any]]) -> None:
    from fenno.doctor.engine import BLOCKS
    from fenno.doctor.model import CPU_HEADS

    stack, folders = stackfacts.stack(sys.executable, os.environ)
    engine = enginefacts.engine(stack, None, folders)
    assert engine is not None
    # Plugins may register more than the table has.
    assert len(set(said["architectures"]) - engine.architectures) <= len(engine.plugins)
    assert engine.architectures - set(said["architectures"]) == set()
    assert set(said["variables"]) - engine.variables == set()
    assert list(CPU_HEADS) == said["heads"] and [BLOCKS["CPU_ATTN"]] == said["blocks"]
    chain = enginefacts.lineage("vllm.v1.core.sched.async_scheduler.AsyncScheduler", folders)
    assert list(chain) == [name for name in said["lineage"] if name in chain] and chain[:2] == ("AsyncScheduler", "Scheduler")


def test_the_custom_all_reduce_is_predicted_as_vllm_decides_it(said: dict[str, list[Any]]) -> None:
    check = next(check for check in checks.CHECKS if check.id == "topology.all-reduce")
    assert len(said["reduces"]) == 28 and {kind[-1] for kind in said["reduces"]} == {True, False}
    for size, joined, peers, on in said["reduces"]:
        apart = [] if joined else [(a, b) for b in range(size) for a in range(b)]
        ((_, found),) = checks.run([check], group(size, apart, peers=peers))
        assert ("custom all-reduce on" in found.found) == on, (found, size, joined, peers)


def test_the_real_stack_is_well_in_depth(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fenno", "doctor", "cpu-small", "--deep", "--json", "--only", "python", "--only", "engine"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = document.Document.model_validate_json(done.stdout)
    assert [check for check in found.checks if check.status in ("warn", "fail")] == []
    loaded = next(check for check in found.checks if check.id == "engine.plugins-loaded")
    assert "fenno" in loaded.found
