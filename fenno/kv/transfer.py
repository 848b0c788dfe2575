"""A KV cache, or some tokens of it, moved between ranks over torch.distributed in one operation.

A part is any view of a cache's tensor: what lies apart in it is packed with one copy and travels as one message. Bytes move,
whatever the dtype is. torch and the standard library only: `fenno patch-kv bench` runs this under an engine's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def send(parts: Sequence[torch.Tensor], peer: int, group: Any = None) -> None:
    """Send each part to rank `peer` as a message of its own, all in one grouped operation. They may be written to afterwards."""
    _together([dist.P2POp(dist.isend, _packed(part), peer, group) for part in parts])


def receive(parts: Sequence[torch.Tensor], peer: int, group: Any = None) -> None:
    """Receive what `send` sent into parts of the same shapes, dtypes and order; `peer` is the rank that sends."""
    packed = [_packed(part, filled=False) for part in parts]
    _together([dist.P2POp(dist.irecv, message, peer, group) for message in packed])
    for part, message in zip(parts, packed, strict=True):
        if not part.is_contiguous():
            part.copy_(message.view(part.dtype).view(part.shape))


def all_gather(part: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Every rank's part, which are of one shape, on every rank: (ranks, *shape of the part)."""
    message = _packed(part)
    gathered = message.new_empty(dist.get_world_size(group) * message.numel())
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # its name before 2.13
    gather(gathered, message, group=group)
    return gathered.view(part.dtype).view(-1, *part.shape)


def _packed(part: torch.Tensor, *, filled: bool = True) -> torch.Tensor:
    """The part's bytes as one message: itself where it lies together, else a copy, or room for one."""
    whole = part if part.is_contiguous() else part.contiguous() if filled else part.new_empty(part.shape)
    return whole.view(-1).view(torch.uint8)


def _together(operations: list[Any]) -> None:
    """Start all of them as one group and wait for all; on a GPU the stream waits, not the host."""
    if len(operations) == 1:
        # A group of one would take the host half as long again.
        only = operations[0]
        only.op(only.tensor, only.peer, only.group).wait()
        return
    for work in dist.batch_isend_irecv(operations):
        work.wait()
