"""Three claims of the article tried on the torch that is here: that compiling a tokenizer's look-up makes it faster, that
`nested_tensor` makes tensors contiguous without a copy, and that a KV cache overflows under autocast.

    python benchmarks/article/torch_claims.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch

WORDS = {f"token{i}": i for i in range(131_072)}
CALLS, REPEATS = 20_000, 9


def look_up(word: str) -> int:
    return WORDS[word]


def microseconds(call: Callable[[str], int]) -> float:
    """Of one call, as the median of some repeats."""
    call("token7")
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call("token7")
        taken.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(taken)


def nested() -> dict[str, object]:
    parts = [torch.zeros(3, 4), torch.zeros(5, 4)]
    made = torch.nested.nested_tensor(parts)
    parts[0][0, 0] = 1.0
    try:
        shape = str(made.shape)
    except RuntimeError as error:
        shape = str(error).splitlines()[0]
    return {
        "torch.nested_tensor exists": hasattr(torch, "nested_tensor"),
        "a later change of a part is seen": bool(made.unbind()[0][0, 0] == 1.0),
        "shape": shape,
    }


def autocast() -> dict[str, object]:
    """A key beyond float16's range from a bfloat16 layer, as it is and under autocast, here on the CPU in the GPU's usual dtype."""
    usual = torch.get_autocast_dtype("cuda")
    layer, one = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(102_400)
        plain = layer(one)
        with torch.autocast("cpu", dtype=usual):
            cast = layer(one)
    return {"usual on CUDA": str(usual), str(plain.dtype): str(plain.item()), str(cast.dtype): str(cast.item())}


def main() -> None:
    plain, compiled = microseconds(look_up), microseconds(torch.compile(look_up))
    document = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "host": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
        "look-up": {"plain_us": round(plain, 3), "compiled_us": round(compiled, 3), "times_slower": round(compiled / plain, 1)},
        "nested tensor": nested(),
        "autocast": autocast(),
    }
    print(json.dumps(document, indent=1))
    (results := Path(__file__).with_name("results")).mkdir(exist_ok=True)
    (results / "torch.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
