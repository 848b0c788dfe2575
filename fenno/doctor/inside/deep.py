"""Imports torch and vLLM, loads vLLM's plugins, and copies between GPUs: run as a script under the engine's own interpreter.

One JSON line for each thing that was tried, printed before the next is tried: what ends the process costs what comes after it.
Standard library, torch and vllm only.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

MARK = "fenno-deep:"
SIZE, TIMES = 256 * 2**20, 10


def say(what: str, value: Any) -> None:
    print(MARK + json.dumps([what, value]), flush=True)


def imported(name: str) -> str | None:
    """What is wrong with a module, None when it can be imported. A broken one raises whatever it likes."""
    try:
        importlib.import_module(name)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        return f"{type(error).__name__}: {error}"
    return None


def plugins() -> list[str]:
    """The general plugins that vLLM finds and loads here."""
    from vllm.plugins import load_plugins_by_group

    return sorted(load_plugins_by_group("vllm.general_plugins"))


def copies() -> dict[str, tuple[bool, float]]:
    """Each pair of GPUs: whether a copy arrived unchanged, and how many GB a second went over."""
    import torch

    found = {}
    for a in range(torch.cuda.device_count()):
        for b in range(torch.cuda.device_count()):
            if a != b:
                found[f"GPU{a}-GPU{b}"] = copy(torch, a, b)
    return found


def copy(torch: Any, a: int, b: int) -> tuple[bool, float]:
    """Copy a pattern from GPU a to GPU b, compare it there with one made there, and time further copies."""
    made = [torch.arange(SIZE // 8, dtype=torch.int64, device=f"cuda:{n}") * 2654435761 for n in (a, b)]
    target = torch.empty_like(made[1])
    target.copy_(made[0])
    torch.cuda.synchronize(b)
    right = bool(torch.equal(target, made[1]))
    for device in (a, b):
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(TIMES):
        target.copy_(made[0], non_blocking=True)
    for device in (a, b):
        torch.cuda.synchronize(device)
    return right, TIMES * SIZE / (time.perf_counter() - started) / 1e9


def main() -> None:
    broken = imported("torch")
    say("torch", broken)
    if broken is None and "copies" in sys.argv:
        say("copies", copies())
    broken = broken or imported("vllm.entrypoints.cli.serve")
    say("engine", broken)
    if broken is None:
        say("plugins", plugins())


if __name__ == "__main__":
    main()
