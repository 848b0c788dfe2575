"""What the scripts beside this one share: vLLM's logits of a small random Grok, and how far apart two sets of logits are."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fenno import process
from fenno.engine import plugin

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))


def ask(
    python: str, home: Path, jobs: list[dict[str, Any]], *, timeout: float = 1800, **env: str
) -> tuple[list[torch.Tensor], list[dict[str, str]]]:
    """For each of `jobs` (those of logits.py, but for `out`) the logits, [positions, vocabulary], that vLLM under `python` has, and
    which class of which version computed them. `home` is for its files. Ends the script when vLLM fails."""
    outs = [home / f"{at}.safetensors" for at in range(len(jobs))]
    argv = [python, str(HERE / "logits.py"), json.dumps([job | {"out": str(out)} for job, out in zip(jobs, outs, strict=True)])]
    env = plugin.path(plugin.install(home / "plugin")) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"} | env
    child = process.run(argv, timeout=timeout, env=env, cwd=home)
    if child.returncode:
        raise SystemExit(child.stdout[-6000:] + child.stderr[-6000:])
    prefix = "logits:"
    said = [json.loads(line.removeprefix(prefix)) for line in child.stdout.splitlines() if line.startswith(prefix)]
    found = [load_file(out) for out in outs]
    return [torch.cat([each[str(at)] for at in range(len(each))]) for each in found], said


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """max |difference| / max |other|."""
    return short(float((one - other).abs().max() / other.abs().max()))


def typical(one: torch.Tensor, other: torch.Tensor) -> float:
    """The same for the median position: its max |difference| / max |other| anywhere."""
    return short(float((one - other).abs().amax(-1).median() / other.abs().max()))


def short(number: float) -> float:
    return float(f"{number:.2e}")


def host() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{platform.machine()}, {name}",
        "cores": len(os.sched_getaffinity(0)),
    }


def write(found: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(found, indent=1)
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
