"""fenno's Grok in bfloat16 beside the float32 reference of the same weights, position by position of given texts.

usage: python benchmarks/grok/bf16.py [--python PY] [--out FILE]    (PY: an engine's interpreter; some two minutes)

The tolerance is one bfloat16 rounding (2^-8) of a typical logit (the reference's standard deviation), of the vocabulary's and of
the routers' alike. A position is clear when the reference's best token leads by more than ten tolerances, and in every layer the
last expert chosen leads the first one left out by as much: there bfloat16 must choose the same token. Where it takes another
expert for one token, later ones see that through attention: so the largest error is given for the positions before that, too.
Two layers with the head tied to the embedding, which makes best tokens lead as in a trained model; one layer with a head of its
own, where they hardly lead.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from beside import ask, host, short, write
from grok_reference import Reference
from logits import prompts

from fenno.engine import checkpoint, dummy

STEP = 2.0**-8
LEAST_CLEAR = 0.8
SIZE = dummy.Size(layers=2, hidden=256, heads=8, kv_heads=2, head=32, expert=512, shared=512)
CONFIGS: dict[str, dict[str, Any]] = {
    "grok2, tied, two layers": dummy.grok2(SIZE, "bfloat16") | {"tie_word_embeddings": True},
    "grok2, one layer": dummy.grok2(SIZE, "bfloat16") | {"num_hidden_layers": 1},
    "grok1, tied, two layers": dummy.grok1(SIZE, "bfloat16"),
}


class Watched(Reference):
    """Keeps by how much each token's routers decided, in typical logits: one [tokens] a layer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.leads: list[torch.Tensor] = []

    def mixture(self, at: str, x: torch.Tensor) -> torch.Tensor:
        router = x @ self.weights[at + "gate.weight"].T
        cap = self.config.get("router_logit_softcapping")
        router = cap * torch.tanh(router / cap) if cap else router
        active = self.config["num_experts_per_tok"]
        best = router.topk(active + 1).values
        self.leads.append((best[:, active - 1] - best[:, active]) / router.std())
        return super().mixture(at, x)


def judge(reference: Watched, logits: torch.Tensor) -> dict[str, Any]:
    """How `logits`, [positions, vocabulary], stand to the reference's."""
    each, routers = [], []
    for tokens in prompts():
        reference.leads = []
        each.append(reference.logits(tokens))
        routers.append(torch.stack(reference.leads).min(0).values)
    right = torch.cat(each)
    best = right.topk(2).values
    decided = [router > 10 * STEP for router in routers]
    clear = ((best[:, 0] - best[:, 1]) / right.std() > 10 * STEP) & torch.cat(decided)
    before = torch.cat([one.int().cumprod(0).bool() for one in decided])
    same = logits.argmax(-1) == right.argmax(-1)
    errors = (logits.log_softmax(-1) - right.log_softmax(-1)).abs()
    return {
        "positions": len(right),
        "clear": short(float(clear.float().mean())),
        "other_argmax_where_clear": int((clear & ~same).sum()),
        "other_argmax_elsewhere": int((~clear & ~same).sum()),
        "tolerance": short(STEP * float(right.std())),
        "log_probability_error": {
            "median": short(float(errors.median())),
            "largest": short(float(errors.max())),
            "largest_where_clear": short(float(errors[clear].max())),
            "largest_with_every_router_clear_so_far": short(float(errors[before].max())),
            "positions_with_every_router_clear_so_far": int(before.sum()),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for release, config in CONFIGS.items():
            checkpoint.make(config, home / release, python=given.python, std=0.05)
        jobs = [{"folder": str(home / release), "options": {"dtype": "bfloat16"}} for release in CONFIGS]
        logits, said = ask(given.python, home, jobs)
        found = {release: judge(Watched(home / release), seen) for release, seen in zip(CONFIGS, logits, strict=True)}
    write(host() | said[0] | {"dtype": "bfloat16", "hidden": SIZE.hidden} | found, given.out)
    right = [one["other_argmax_where_clear"] == 0 and one["clear"] >= LEAST_CLEAR for one in found.values()]
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
