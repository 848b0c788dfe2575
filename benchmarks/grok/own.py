"""fenno's Grok forced onto vLLM 0.24 beside 0.24's own: the same random weights, float32 logits on the CPU.

usage: python benchmarks/grok/own.py --python PY [--only grok1|grok2] [--out FILE]

PY: an interpreter with vLLM 0.24; it takes some three minutes a release.

Run it with fenno, torch and safetensors. Every difference that docs/grok.md names can be taken out of one side or the other;
with all of them out the two must agree, and with one left in, what they are apart is what that one does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from beside import apart, ask, host, short, typical, write
from grok_reference import Reference
from logits import prompts

from fenno.engine import checkpoint, dummy
from fenno.vllm_plugin import grok_versions

BAR = 1e-5
SEED = 1
# 0.24's own takes the hidden size over the number of heads for a head's, and caps attention at 30 whatever Grok-1's config says.
SIZE = dummy.Size(layers=2, hidden=128, heads=4, kv_heads=2, head=32, expert=256, shared=128)
CONFIGS: dict[str, dict[str, Any]] = {
    "grok2": dummy.grok2(SIZE, "float32")
    | {
        "attn_logit_softcapping": 2.0,
        "router_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "attn_temperature_len": 32,
    },
    "grok1": dummy.grok1(SIZE, "float32"),
}
# What takes a difference out: of 0.24's own, by its config or its GELU, or of fenno's, by the config.
DIFFERENCES: dict[str, dict[str, dict[str, Any]]] = {
    "grok2": {
        "exact GELU": {"own": {"tanh": True}},
        "caps logits, then multiplies": {"own": {"config": {"final_logit_softcapping": 3.0 / 0.5}}},
        "no attention temperature": {"fenno": {"config": {"attn_temperature_len": 0}}},
    },
    "grok1": {
        "exact GELU": {"own": {"tanh": True}},
        "chosen experts' shares sum to one": {"own": {"config": {"moe_router_renormalize": False}}},
        "router capped at 30": {"own": {"config": {"router_logit_softcapping": 0.0}}},
        "attention's output multiplied once more": {"own": {"config": {"attn_output_multiplier": 1.0}}},
    },
}


def job(folder: Path, whose: str, differences: list[Mapping[str, Any]]) -> dict[str, Any]:
    """How to get the logits of "own" or "fenno" with `differences` taken out."""
    changes = [change.get(whose, {}) for change in differences]
    config = {name: value for change in changes for name, value in change.get("config", {}).items()}
    tanh = any(change.get("tanh") for change in changes)
    env = {grok_versions.FORCE: "1"} if whose == "fenno" else {}
    return {"folder": str(folder), "options": {"hf_overrides": config}, "tanh": tanh, "env": env}


def compare(name: str, python: str, home: Path) -> dict[str, Any]:
    """One release: fenno's against the reference, 0.24's own against fenno's."""
    folder, every = home / name, DIFFERENCES[name]
    checkpoint.make(CONFIGS[name], folder, python=python, std=0.1, seed=SEED)
    # No difference taken out, all, and all but each one.
    kept = {"every": [], "none": [*every.values()]} | {
        one: [change for other, change in every.items() if other != one] for one in every
    }
    wanted = [job(folder, whose, out) for out in kept.values() for whose in ("own", "fenno")]
    jobs = [one for at, one in enumerate(wanted) if one not in wanted[:at]]
    logits, said = ask(python, home, jobs)
    sides = {left: [logits[jobs.index(job(folder, whose, out))] for whose in ("own", "fenno")] for left, out in kept.items()}
    error = {left: {"largest": apart(own, fenno), "median": typical(own, fenno)} for left, (own, fenno) in sides.items()}
    reference = Reference(folder, attn_temperature_len=0)
    right = torch.cat([reference.logits(tokens) for tokens in prompts()])
    return {
        "own": said[0]["model"],
        "fenno": said[1]["model"],
        "vllm": said[0]["vllm"],
        "torch": said[0]["torch"],
        "positions": len(right),
        "router_margin": short(reference.margin),
        "fenno_from_reference": apart(sides["none"][1], right),
        "own_from_fenno": error.pop("every"),
        "own_from_fenno_with_no_difference_left": error.pop("none")["largest"],
        "own_from_fenno_with_one_difference_left": error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--only", choices=CONFIGS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = host() | {"dtype": "float32", "layers": SIZE.layers, "bar": BAR}
    with tempfile.TemporaryDirectory() as folder:
        releases = {name: compare(name, given.python, Path(folder)) for name in ([given.only] if given.only else CONFIGS)}
    write(found | releases, given.out)
    least = ("fenno_from_reference", "own_from_fenno_with_no_difference_left")
    return 0 if max(one[error] for one in releases.values() for error in least) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
