"""What fenno's scheduler costs a step: vLLM's own class and the same class under fenno, side by side, on no model at all.

usage: python benchmarks/scheduler/step_cost.py [--out FILE]    (the Python of an engine; about a minute)

256 requests decode and 1,000 wait, or 64 decode and none waits, as on an engine that keeps up; none finishes, so that every step is
the same work, and all have the same limit, so that both run the same ones: other ones lie elsewhere in memory, and that alone
changes a step. Steps of the two are interleaved, so that whatever else the machine does falls on both. Also: one `add_request` into
the queue of 1,000.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SEATS, STEPS, BLOCKS = 256, 400, 20_000
# Running, waiting.
LOADS = ((256, 1000), (64, 0))


def scheduler(cls: type, policy: str, model: Any) -> Any:
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    limits = SchedulerConfig(
        max_model_len=4096, is_encoder_decoder=False, max_num_batched_tokens=2048, max_num_seqs=SEATS, policy=policy
    )
    config = VllmConfig(
        model_config=model, cache_config=CacheConfig(block_size=16, enable_prefix_caching=False), scheduler_config=limits
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


def request(name: str, dice: random.Random) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    prompt = list(range(3, 3 + dice.randint(4, 8)))
    return Request(name, prompt, SamplingParams(max_tokens=3000, ignore_eos=True), None)


def step(scheduler: Any) -> float:
    """One step, schedule and update, in seconds of this thread's processor time: another program on the machine is not in it."""
    from vllm.v1.outputs import ModelRunnerOutput

    started = time.thread_time()
    output = scheduler.schedule()
    spent = time.thread_time() - started
    names = list(output.num_scheduled_tokens)
    answer = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[7] for _ in names])
    started = time.thread_time()
    scheduler.update_from_output(output, answer)
    return spent + time.thread_time() - started


def compare(plain: Any, ours: Any, running: int, waiting: int) -> dict[str, float]:
    """Medians of interleaved steps, and of adding a request, in microseconds; `step_ratio` is the median of neighbours."""
    both = (plain, ours)
    for one in both:
        dice = random.Random(0)
        for number in range(running + waiting):
            one.add_request(request(str(number), dice))
        for _ in range(20):
            step(one)
        assert one.get_request_counts() == (running, waiting)
    steps: tuple[list[float], list[float]] = ([], [])
    adds: tuple[list[float], list[float]] = ([], [])
    for number in range(STEPS):
        for which in (0, 1) if number % 2 else (1, 0):
            steps[which].append(step(both[which]))
        new = [request(f"new{number}", random.Random(number)) for _ in both] if waiting else []
        for which in range(len(new)):
            started = time.thread_time()
            both[which].add_request(new[which])
            adds[which].append(time.thread_time() - started)
    found = {f"{whose}_step_us": middle(values, 1) for whose, values in zip(("plain", "fenno"), steps, strict=True)}
    found["step_ratio"] = round(statistics.median(o / p for p, o in zip(*steps, strict=True)), 4)
    if waiting:
        found |= {f"{whose}_add_us": middle(values, 2) for whose, values in zip(("plain", "fenno"), adds, strict=True)}
    return found


def middle(seconds: list[float], digits: int) -> float:
    return round(statistics.median(seconds) * 1e6, digits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("step_cost.json"))
    out = parser.parse_args().out
    folder = Path(tempfile.mkdtemp())
    os.environ["FENNO_CONTROL"] = str(folder / "control.json")

    import vllm
    from vllm.config import ModelConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    import fenno
    from fenno import control
    from fenno.engine import dummy
    from fenno.vllm_plugin.scheduler import steered

    model = ModelConfig(
        model=str(dummy.make("grok2-small", folder)), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "vllm": vllm.__version__,
        "fenno": fenno.__version__,
        "steps": STEPS,
    }
    for base in (Scheduler, AsyncScheduler):
        # Under fenno the start's policy does not matter: token_aware is compared with vLLM's heap, fcfs with its deque.
        for policy, wanted in (("priority", "token_aware"), ("fcfs", "fcfs")):
            control.write_wanted(folder / "control.json", control.Wanted(2, {"policy": wanted}))
            for running, waiting in LOADS:
                row = compare(scheduler(base, policy, model), scheduler(steered(base), policy, model), running, waiting)
                found[f"{base.__name__} {wanted}, {running} running, {waiting} waiting"] = row
                print(base.__name__, wanted, running, waiting, row, flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
