"""The KV cache. `fenno.kv.ContiguousCache` needs torch and transformers (the extra `kv`), and is imported when it is asked for."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "ContiguousCache":
        from fenno.kv.contiguous import ContiguousCache

        return ContiguousCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
