"""Experts in plain PyTorch for vLLM 0.24's CPU workers, which load this module by `worker_extension_cls`.

vLLM's own kernel for CPUs is not told which experts a rank has: with expert parallelism it reads past their weights and crashes.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import cpu_fused_moe


class Plain:
    """In place of `CPUFusedMOE`: softmax over all experts, the chosen ones' shares as they are, tanh GELU, and no other rank's."""

    def __init__(self, layer: torch.nn.Module) -> None:
        assert len(layer.w13_weight) < layer.global_num_experts, "every expert is here: no expert parallelism"

    def __call__(self, layer: Any, x: torch.Tensor, grouped: bool, active: int, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        """`x` and the result: [tokens, hidden]; `logits`: [tokens, experts]. The fifth of `rest` says which expert is where."""
        shares, chosen = logits.softmax(-1).topk(active)
        out = torch.zeros_like(x)
        for expert, place in enumerate(rest[4].tolist()):
            if place >= 0:
                row, which = (chosen == expert).nonzero(as_tuple=True)
                gate, up = (x[row] @ layer.w13_weight[place].T).chunk(2, -1)
                made = (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ layer.w2_weight[place].T
                out[row] += shares[row, which, None].to(x.dtype) * made
        return out


cpu_fused_moe.CPUFusedMOE = Plain


class Worker:
    """Adds nothing to vLLM's: that it is asked for loads this module in every worker."""
