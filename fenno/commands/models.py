"""`fenno model`: small random models, and Grok-2's tokenizer made readable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fenno import console
from fenno.errors import UsageError

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make small random models, and Grok-2's tokenizer readable.")


@group.command("dummy")
def model_dummy(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="grok2 or grok1")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where to write it; the same files there are written over")],
    layers: Annotated[int, typer.Option(min=1)] = 2,
    hidden: Annotated[int, typer.Option(min=32)] = 128,
    heads: Annotated[int, typer.Option(min=1, help="query heads")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1)] = 2,
    head: Annotated[int, typer.Option(min=2, help="size of one head")] = 32,
    expert: Annotated[int, typer.Option(min=1, help="width of an expert")] = 256,
    shared: Annotated[int, typer.Option(min=1, help="width of grok2's MLP beside the experts")] = 512,
    parts: Annotated[
        int | None, typer.Option(min=0, help="ranks the experts are cut for; 0: one file [grok2: 8, grok1: 0]")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    std: Annotated[float, typer.Option(min=0.0, help="standard deviation of the weights")] = 0.02,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    python: Annotated[str, typer.Option(help="an interpreter with torch and safetensors, as an engine's is")] = sys.executable,
) -> None:
    """Write a Grok with random weights, under the names and in the files of the published ones."""
    from fenno.engine import catalogue, checkpoint, dummy

    if kind not in checkpoint.CONFIGS or dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"there is no {kind} in {dtype}", "grok2 or grok1; float32, bfloat16 or float16")
    size = dummy.Size(layers, hidden, heads, kv_heads, head, expert, shared)
    cut = parts if parts is not None else 8 if kind == "grok2" else 0
    config = checkpoint.CONFIGS[kind](size, dtype)
    interpreter = catalogue.interpreter(python)
    written = checkpoint.make(config, folder, python=interpreter, parts=cut, std=std, seed=seed)
    console.result({"folder": str(folder), "files": len(written), "bytes": sum(path.stat().st_size for path in written)})


@group.command("prepare")
def model_prepare(folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder with Grok-2's tokenizer.tok.json")]) -> None:
    """Make Grok-2's tokenizer one that vLLM reads, with its chat template."""
    from fenno.engine import tokenizer

    console.result({"written": [str(path) for path in tokenizer.prepare(folder)]})
