"""Everything that differs between vLLM 0.24 and 0.33, as far as the scheduler is concerned.

Read from 0.24, 0.26, 0.28, 0.32 and 0.33. None of this is a public interface: other versions are refused.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from fenno.vllm_plugin.limits import Limits, Start
from fenno.vllm_plugin.order import Order

OLDEST, TOO_NEW = (0, 24), (0, 34)

# Requests that wait are in `waiting` and, by version, in a second queue: held back by something else than capacity (to 0.28),
# or already holding KV blocks (from 0.32).
QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting")


def release(version: str) -> tuple[int, int] | None:
    """Of "0.24.0" (0, 24); None for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def supported(version: str) -> bool:
    """Whether fenno knows this vLLM; not so a build from a checkout without its tags ("0.1.dev…", "dev")."""
    found = release(version)
    return found is not None and OLDEST <= found < TOO_NEW


def check(version: str) -> None:
    """Raise `RuntimeError` for a vLLM whose scheduler nobody has read. A build from a checkout ("0.1.dev…", "dev") passes."""
    if not supported(version) and (release(version) or (0, 1)) > (0, 1):
        raise RuntimeError(f"fenno's scheduler knows vLLM 0.24 to 0.33, and this is {version}: start without --scheduler-cls")


def interval_is_live(version: str) -> bool:
    """Whether the scheduler keeps the interval between prompts, so that it can change while the engine runs; before 0.33 the
    engine core does. `start` asks the scheduler itself."""
    return (release(version) or OLDEST) >= (0, 33)


def base_class(vllm_config: Any) -> type[Any]:
    """The scheduler that this vLLM would take by itself: AsyncScheduler or Scheduler, as the resolved configuration says."""
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise RuntimeError("fenno's scheduler does not do diffusion models: start without --scheduler-cls")
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    base: type[Any] = config.get_scheduler_cls()
    return base


def rank(scheduler: Any) -> int:
    """The data-parallel rank; the index stays when vLLM makes each rank of a dense model an engine of its own."""
    return int(scheduler.parallel_config.data_parallel_index)


def queues(scheduler: Any) -> list[str]:
    """The names of the attributes that hold waiting requests in this version."""
    return [name for name in QUEUES if hasattr(scheduler, name)]


def waiting(scheduler: Any) -> list[Any]:
    """All requests that wait, in no order: to go through vLLM's priority queue in order costs a sort of it."""
    found: list[Any] = []
    for name in queues(scheduler):
        queue = getattr(scheduler, name)
        found += getattr(queue, "_heap", queue)
    return found


def start(scheduler: Any, order: Order) -> Start:
    """What `scheduler`, just made, was started with, besides its `order`."""
    config = scheduler.scheduler_config
    per_seq = 1 + scheduler.num_spec_tokens
    # Where state is kept only at block edges a smaller chunk would never move on.
    aligned = getattr(scheduler, "need_mamba_block_aligned_split", False)
    limits = Limits(
        tokens=scheduler.max_num_scheduled_tokens,
        seqs=getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs),
        long_prefill=config.long_prefill_token_threshold,
        interval=getattr(scheduler, "local_prefill_interval", config.prefill_schedule_interval),
    )
    smallest = max(per_seq, scheduler.cache_config.block_size if aligned else 1)
    return Start(limits, scheduler.max_num_running_reqs, per_seq, smallest, frozenset(_fixed(scheduler)), order)


def _fixed(scheduler: Any) -> list[str]:
    """The knobs that this engine cannot change while it runs."""
    config = scheduler.scheduler_config
    # A prompt or a picture that has to be taken whole might never fit into a smaller step.
    whole = not config.enable_chunked_prefill or config.disable_chunked_mm_input
    fixed = ["max_num_scheduled_tokens", "long_prefill_token_threshold"] if whole else []
    # See `interval_is_live`; where ranks go in step the engine core keeps it still.
    if not hasattr(scheduler, "local_prefill_interval") or scheduler.parallel_config.data_parallel_size > 1:
        fixed.append("prefill_schedule_interval")
    return fixed


def hold(scheduler: Any, limits: Limits, fixed: frozenset[str]) -> None:
    """Put `limits` in force for the next step. Called before every step: what is safe depends on how many requests run."""
    if hasattr(scheduler, "max_num_active_reqs"):
        scheduler.max_num_active_reqs = limits.seqs
    else:
        # Every version asserts len(running) <= max_num_running_reqs and ends the engine where it does not hold: so a lower
        # cap follows the running requests down.
        scheduler.max_num_running_reqs = max(limits.seqs, len(scheduler.running))
    if "max_num_scheduled_tokens" not in fixed:
        scheduler.max_num_scheduled_tokens = limits.tokens
    if "long_prefill_token_threshold" not in fixed:
        scheduler.scheduler_config.long_prefill_token_threshold = limits.long_prefill
    if "prefill_schedule_interval" not in fixed:
        scheduler.local_prefill_interval = limits.interval
