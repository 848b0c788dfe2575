"""A small random Grok-2 whose experts' files are cut for eight ranks, loaded by one, two and eight tensor-parallel CPU ranks.

usage: python benchmarks/grok/ranks.py [--python PY] [--ranks N]... [--out FILE]

PY: an interpreter with vLLM's CPU engine, later than 0.28: up to that at least, several ranks say
log-probabilities of a prompt and no logits. Some two minutes and 10 GB for eight ranks on two cores.

Float32 logits of the same prompts as in own.py, from the reference and from one rank's. With four KV heads each is kept by two
of eight ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from beside import apart, ask, host, write
from grok_reference import Reference
from logits import prompts
from own import BAR, CONFIGS

from fenno.engine import checkpoint, dummy
from fenno.vllm_plugin import grok_versions

SIZE = dummy.Size(layers=2, hidden=128, heads=8, kv_heads=4, head=32, expert=256, shared=128)
CAPS = {name: value for name, value in CONFIGS["grok2"].items() if name.endswith("softcapping")}
CONFIG = dummy.grok2(SIZE, "float32") | CAPS
PARTS = 8


def bound(ranks: int) -> dict[str, str]:
    """The variable by which so many CPU ranks share this process's processors."""
    cores = sorted(os.sched_getaffinity(0))
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))} if ranks > 1 else {}


def job(folder: Path, ranks: int) -> dict[str, Any]:
    """How to get the logits of so many ranks."""
    options = {"load_format": grok_versions.LOAD_FORMAT, "tensor_parallel_size": ranks}
    return {"folder": str(folder), "options": options, "env": bound(ranks)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts = given.ranks or [1, 2, PARTS]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for place, parts in (("cut", PARTS), ("whole", 0)):
            checkpoint.make(CONFIG, home / place, python=given.python, std=0.1, seed=1, parts=parts)
        reference = Reference(home / "whole")
        right = torch.cat([reference.logits(tokens) for tokens in prompts()])
        logits, said = ask(given.python, home, [job(home / "cut", count) for count in counts])
    found: dict[str, Any] = host() | {"dtype": "float32", "layers": 2, "files_cut_for": PARTS, "bar": BAR}
    found |= {name: said[0][name] for name in ("vllm", "torch", "model")} | {"positions": len(right)}
    found["ranks"] = {
        str(count): {"from_reference": apart(each, right), f"from_{counts[0]}": apart(each, logits[0])}
        for count, each in zip(counts, logits, strict=True)
    }
    write(found, given.out)
    return 0 if max(each["from_reference"] for each in found["ranks"].values()) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
