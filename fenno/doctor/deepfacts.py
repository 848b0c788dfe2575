"""What `--deep` tries, in a child process under the engine's interpreter: imports, plugins, copies between GPUs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenno import process
from fenno.doctor.facts import Deep
from fenno.doctor.inside.deep import MARK
from fenno.engine import plugin
from fenno.errors import ProcessError

SCRIPT = str(Path(__file__).parent / "inside" / "deep.py")
LIMIT = 180.0


def deep(executable: str, variables: Mapping[str, str], *, gpus: bool) -> Deep:
    """Try it (10 s and more; with GPUs a second for each pair). fenno's own plugin is put on the path, as at a start."""
    with tempfile.TemporaryDirectory(prefix="fenno-doctor-") as folder:
        env = {**variables, **plugin.path(plugin.install(Path(folder))), "VLLM_LOGGING_LEVEL": "ERROR"}
        try:
            done = process.run([executable, SCRIPT, *(["copies"] if gpus else [])], timeout=LIMIT, env=env)
        except ProcessError as error:
            return Deep(torch=str(error))
    return answered(done.stdout, done.returncode, done.stderr)


def answered(text: str, code: int, error: str) -> Deep:
    """What the child's lines say. One that is missing was not reached: the process ended there."""
    lines = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
    said: dict[str, Any] = dict(json.loads(line) for line in lines)
    last = process.last_line(error)
    ended = f"ended the process (signal {-code})" if code < 0 else f"ended the process ({last})"
    torch = said.get("torch", f"import torch {ended}")
    engine = said.get("engine", f"import vllm {ended}") if torch is None else None
    loaded = said.get("plugins")
    return Deep(
        torch=torch,
        engine=engine,
        plugins=tuple(loaded) if loaded is not None else None,
        copies={pair: (bool(right), float(rate)) for pair, (right, rate) in (said.get("copies") or {}).items()},
    )
