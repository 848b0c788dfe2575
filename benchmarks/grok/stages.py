"""Grok in pipeline stages on the CPU, without vLLM's engine, which ends there with any model in stages.

usage: python benchmarks/grok/stages.py [--out FILE]     (by an interpreter with vLLM's CPU engine and fenno; a minute on two cores)

Each stage is a process: vLLM's own loader and groups of ranks, fenno's model, and attention in plain PyTorch in place of vLLM's,
which wants an engine's cache. The float32 logits of one prompt from the last stage, beside the reference's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from beside import apart, host, write
from grok_reference import Reference
from logits import prompts
from own import BAR, CONFIGS

from fenno.engine import checkpoint
from fenno.vllm_plugin import grok_versions
from fenno.vllm_plugin.grok_layout import Grok

CUT = "Grok-2, files cut for eight"
# Name -> config, parts of its experts' files.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    CUT: (CONFIGS["grok2"], 8),
    "Grok-2, whole files": (CONFIGS["grok2"], 0),
    "Grok-1, whole files": (CONFIGS["grok1"], 0),
}
LAYERS = 3
TOKENS = prompts()[0]


class Plain(torch.nn.Module):
    """Causal attention over a whole prompt."""

    def __init__(self, grok: Grok) -> None:
        super().__init__()
        self.grok = grok

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values, each [tokens, heads * head]; returns what the queries have."""
        q, k, v = (each.view(len(each), -1, self.grok.head).transpose(0, 1) for each in qkv)
        k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
        scores = self.grok.attention_cap * torch.tanh(q @ k.transpose(1, 2) * self.grok.attention / self.grok.attention_cap)
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


@contextlib.contextmanager
def groups(rank: int, stages: int, home: Path) -> Any:
    """This process as one stage of so many."""
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    init_distributed_environment(stages, rank, f"file://{home / f'stages-{stages}'}", rank, "gloo")
    initialize_model_parallel(1, stages)
    yield
    torch.distributed.barrier()
    cleanup_dist_env_and_memory()


def stage(rank: int, stages: int, folder: Path, load_format: str, out: Path) -> None:
    """One stage; the last writes its logits to `out`."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DIST_IDENT": f"stages{os.getppid()}"}
    # vLLM's loader calls it on the CPU too, where only its engine's worker has made it harmless.
    torch.accelerator.empty_cache = lambda: None
    grok_versions.register()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_pp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model
    from vllm.sequence import IntermediateTensors

    usual = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True}
    options = {"load_format": load_format, "pipeline_parallel_size": stages}
    config = EngineArgs(model=str(folder), **usual, **options).create_engine_config()
    with set_current_vllm_config(config), groups(rank, stages, out.parent), torch.no_grad():
        model = get_model(vllm_config=config)
        for layer in model.model.layers[model.model.start_layer : model.model.end_layer]:
            layer.self_attn.attn = Plain(model.grok)
        group = get_pp_group()
        before = None if group.is_first_rank else IntermediateTensors(group.recv_tensor_dict())
        with set_forward_context(None, config, num_tokens=len(TOKENS)):
            after = model(torch.tensor(TOKENS), torch.arange(len(TOKENS)), before)
        if group.is_last_rank:
            torch.save(model.compute_logits(after), out)
        else:
            group.send_tensor_dict(after.tensors)


def logits(stages: int, folder: Path, load_format: str, home: Path) -> torch.Tensor:
    """[tokens, vocabulary], by so many processes."""
    out = home / "logits"
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=stage, args=(rank, stages, folder, load_format, out)) for rank in range(stages)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise SystemExit(f"{folder.name} in {stages} stages: {[child.exitcode for child in children]}")
    return torch.load(out)


def main() -> int:
    import vllm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = host() | {"vllm": vllm.__version__, "torch": torch.__version__, "dtype": "float32", "layers": LAYERS}
    found |= {"positions": len(TOKENS), "bar": BAR, "from_reference": {}}
    for name, (config, parts) in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            # Past its length the attention temperature is approximated: none here.
            size = {"num_hidden_layers": LAYERS, "attn_temperature_len": 0}
            for place, count in (("whole", 0), ("given", parts)):
                checkpoint.make(config | size, home / place, python=sys.executable, std=0.1, seed=1, parts=count)
            right = Reference(home / "whole").logits(TOKENS)
            load_format = grok_versions.LOAD_FORMAT if parts else "auto"
            found["from_reference"][name] = {
                str(stages): apart(logits(stages, home / "given", load_format, home), right) for stages in (1, 2, LAYERS)
            }
    write(found, given.out)
    worst = max(each for errors in found["from_reference"].values() for each in errors.values())
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
