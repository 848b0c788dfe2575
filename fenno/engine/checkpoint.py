"""Small Groks on disk: random weights in the published layout and names, for tests of everything that comes before real ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fenno import process
from fenno.engine import dummy
from fenno.errors import DiskError, UsageError
from fenno.vllm_plugin import grok_layout

_SCRIPT = str(Path(__file__).parent / "inside" / "random_weights.py")
SECONDS = 600.0


CONFIGS = {"grok2": dummy.grok2, "grok1": dummy.grok1}


def make(config: Mapping[str, Any], folder: Path, *, python: str, parts: int = 0, std: float = 0.02, seed: int = 0) -> list[Path]:
    """Write `config`, a byte-level tokenizer and random weights into `folder`; returns the files of weights.

    `parts`: how many tensor-parallel ranks the experts are cut for, 0: one file with whole weights. `std`: the weights'
    standard deviation; norms' factors lie around 1. Raises `UsageError` for sizes that do not go together, for other files of
    weights in `folder`, and for a `python` (that of an engine) without torch or safetensors, `DiskError` when nothing can be
    written, `ProcessError` when the weights cannot be.
    """
    written = dummy.files(dict(config))
    plan = {"folder": str(folder), "dtype": config["torch_dtype"], "std": std, "seed": seed}
    plan["files"] = files(written["config.json"], parts)
    if others := sorted(path.name for path in folder.glob("*.safetensors") if path.name not in plan["files"]):
        raise UsageError(f"{folder} has other weights already: {others[0]}", "choose another folder, or remove them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {folder}: {error.strerror}", "choose another folder, or free some space") from error
    child = process.run([python, "-I", _SCRIPT], timeout=SECONDS, text_input=json.dumps(plan))
    if child.returncode and (lacks := re.search(r"No module named '(torch|safetensors)['.]", child.stderr)):
        hint = "name an interpreter that has torch and safetensors, as your vLLM's does: --python PATH"
        raise UsageError(f"there is no {lacks[1]} under {python}", hint)
    child.check("writing random weights")
    return [folder / name for name in plan["files"]]


def files(config: Mapping[str, Any], parts: int) -> dict[str, list[list[Any]]]:
    """The plan of the files: file -> [name in it, Grok-2's name, whole shape, axis, part, parts] a weight.

    Grok-2's release has a file a kind of weight, and of the experts' kinds one a rank (`-TP-000` and up).
    """
    try:
        grok = grok_layout.read(SimpleNamespace(**config))
    except ValueError as error:
        raise UsageError(f"this is no Grok: {error}", "see docs/grok.md") from error
    spell = grok_layout.first_name if config["model_type"] == "grok-1" else str
    plan: dict[str, list[list[Any]]] = {}
    kinds: dict[str, int] = {}
    for name, weight in grok_layout.weights(grok).items():
        kind = kinds.setdefault(re.sub(r"\.\d+\.", ".", name), len(kinds))
        cut = parts if parts and ".experts." in name else 1
        if weight.axis is not None and weight.shape[weight.axis] % cut:
            raise UsageError(f"{name} cannot be cut into {cut} equal parts", "choose a width that is a multiple, or fewer parts")
        for part in range(cut):
            place = f"{part:03}" if cut > 1 else "common"
            file = f"pytorch_model-{kind:05}-TP-{place}.safetensors" if parts else "model.safetensors"
            plan.setdefault(file, []).append([spell(name), name, list(weight.shape), weight.axis or 0, part, cut])
    return plan
