"""What the doctor reads from vLLM's source files is what vLLM says itself, and the whole command on the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fenno.doctor import document, enginefacts, stackfacts

pytestmark = pytest.mark.engine

ASK = """
import json
from vllm import envs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as cpu
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
print("said:" + json.dumps({
    "architectures": sorted(ModelRegistry.get_supported_archs()),
    "variables": sorted(name for name in envs.environment_variables if name.startswith("VLLM_")),
    "heads": cpu.get_supported_head_sizes(),
    "blocks": [getattr(size, "base", size) for size in cpu.get_supported_kernel_block_sizes()],
    "lineage": [made.__name__ for made in AsyncScheduler.__mro__],
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("said:"))
    found: dict[str, list[str]] = json.loads(line.removeprefix("said:"))
    return found


def test_architectures_variables_and_sizes_are_those_that_vllm_lists(said: dict[str, list[str]]) -> None:
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


def test_the_real_stack_is_well_in_depth(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fenno", "doctor", "cpu-small", "--deep", "--json", "--only", "python", "--only", "engine"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = document.Document.model_validate_json(done.stdout)
    assert [check for check in found.checks if check.status in ("warn", "fail")] == []
    loaded = next(check for check in found.checks if check.id == "engine.plugins-loaded")
    assert "fenno" in loaded.found
