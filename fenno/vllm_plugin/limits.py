"""What a wish means for one engine, as arithmetic: no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fenno import control
from fenno.control import Value
from fenno.vllm_plugin.order import Order


@dataclass(frozen=True)
class Limits:
    """Caps on one scheduler: tokens a step, running requests, tokens of one prompt a step (0: no cap), steps between prefills."""

    tokens: int
    seqs: int
    long_prefill: int
    interval: int


@dataclass(frozen=True)
class Start:
    """What the engine was started with. `fixed`: knobs that it cannot change while it runs; `smallest_chunk`: fewer tokens
    of a prompt than this in one step would never move it on; `order`: what the token-aware order is, where it is wanted."""

    limits: Limits
    most_seqs: int
    tokens_per_seq: int
    smallest_chunk: int
    fixed: frozenset[str]
    order: Order = field(default_factory=Order)


@dataclass(frozen=True)
class Settings:
    """A wish made fit for one engine. `order` is None under vLLM's own policies."""

    limits: Limits
    policy: str
    order: Order | None
    unsupported: tuple[str, ...] = ()


def settings(start: Start, wanted: Mapping[str, Value]) -> Settings:
    """The settings for `wanted` (checked by `control.check`): whatever is not wanted is as at the start."""
    unsupported = {name for name, value in wanted.items() if value is not None} & start.fixed
    unsupported |= {name for name in wanted if name not in control.KNOBS}
    knobs = {name: value for name, value in wanted.items() if value is not None and name not in unsupported}
    limits = Limits(
        tokens=int(knobs.get("max_num_scheduled_tokens", start.limits.tokens)),
        seqs=min(int(knobs.get("max_num_active_seqs", start.limits.seqs)), start.most_seqs),
        long_prefill=int(knobs.get("long_prefill_token_threshold", start.limits.long_prefill)),
        interval=int(knobs.get("prefill_schedule_interval", start.limits.interval)),
    )
    if limits.long_prefill:
        limits = replace(limits, long_prefill=max(limits.long_prefill, start.smallest_chunk))
    policy = str(knobs.get("policy", "token_aware"))
    order = changed(start.order, knobs) if policy == "token_aware" else None
    return Settings(limits, policy, order, tuple(sorted(unsupported)))


def changed(order: Order, knobs: Mapping[str, Value]) -> Order:
    """`order` with those of its parameters that `knobs` (checked) has."""
    edges = control.edges(knobs["class_edges"]) if "class_edges" in knobs else order.edges
    return Order(edges, float(knobs.get("aging_seconds") or order.aging))


def in_force(start: Start, wanted: Settings, running: int, compete: bool) -> Limits:
    """The limits of the next step, with `running` requests; `compete`: more than one prompt can use tokens.

    The budget is never above the start's, for which the engine's buffers were made, and never below a token of every request
    that runs or may run, or some of them would starve. Under the token-aware order one long prompt never holds a whole step that
    others could use: what the others who run need is left to them, and of the rest a half to another prompt. So at most two
    prompts are half read in front of an answer in progress, and it has its token in every step.
    """
    limits = wanted.limits
    least = max(max(limits.seqs, running) * start.tokens_per_seq, start.smallest_chunk)
    tokens = min(start.limits.tokens, max(limits.tokens, least))
    chunk = limits.long_prefill
    if wanted.order and not chunk and (compete or running > 1):
        left = tokens - max(0, running - 1) * start.tokens_per_seq
        chunk = max(left // 2 if compete else left, start.smallest_chunk)
    return replace(limits, tokens=tokens, long_prefill=chunk)
