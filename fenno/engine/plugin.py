"""How fenno's plugin reaches an engine under another interpreter: a generated folder on its path; nothing is installed there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import fenno
from fenno import control
from fenno.errors import DiskError, EngineError
from fenno.recipe import Engine
from fenno.vllm_plugin import grok_versions

SCHEDULER = "fenno.vllm_plugin.scheduler.TokenAware"
ENTRY_POINT = "[vllm.general_plugins]\nfenno = fenno.vllm_plugin:register\n"


def install(folder: Path) -> Path:
    """Make the plugin's folder anew: the modules that run inside vLLM, and the metadata by which vLLM finds them.

    Returns `folder`, made absolute. Raises `DiskError` when it cannot be written.
    """
    package, source = folder.resolve() / "fenno", Path(fenno.__file__).parent
    metadata = folder.resolve() / f"fenno-{fenno.__version__}.dist-info"
    try:
        for old in (package, *folder.glob("fenno-*.dist-info")):
            shutil.rmtree(old, ignore_errors=True)
        metadata.mkdir(parents=True)
        shutil.copytree(source / "vllm_plugin", package / "vllm_plugin", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "control.py"):
            shutil.copyfile(source / name, package / name)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fenno\nVersion: {fenno.__version__}\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    except OSError as error:
        raise DiskError(f"cannot write the plugin's folder {folder}: {error.strerror}", "choose another folder") from error
    return folder.resolve()


def environment(folder: Path, control_path: Path) -> dict[str, str]:
    """The variables under which an engine loads the plugin in `folder` and obeys the control file at `control_path`.

    VLLM_SERVER_DEV_MODE=1 is what `POST /reset_prefix_cache` needs, by which an idle engine is made to look. It opens more of
    vLLM's development endpoints too: keep such a server on 127.0.0.1.
    """
    return {**path(folder), control.VARIABLE: str(control_path.resolve()), "VLLM_SERVER_DEV_MODE": "1"}


def path(folder: Path) -> dict[str, str]:
    """The variables under which an engine finds the plugin in `folder`, and changes nothing while it runs."""
    behind = os.environ.get("PYTHONPATH")
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        "PYTHONPATH": os.pathsep.join([str(folder.resolve()), *([behind] if behind else [])]),
        **({"VLLM_PLUGINS": f"{allowed},fenno"} if allowed is not None and "fenno" not in allowed.split(",") else {}),
    }


def steering(engine: Engine) -> dict[str, str]:
    """The flag by which an engine has the order of requests that its recipe asks for; none for vLLM's own."""
    return {"scheduler-cls": SCHEDULER} if engine.scheduler == "token_aware" else {}


def brings(model: str) -> bool:
    """Whether an engine needs the plugin to have the model in this folder: a Grok. Of a Hub id nothing is known here."""
    try:
        config = json.loads(Path(model, "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    named = config.get("architectures") if isinstance(config, dict) else None
    return not set(grok_versions.ARCHITECTURES).isdisjoint(named or ())


def loaded(control_path: Path) -> dict[int, str]:
    """Process id -> fenno version, of the engine's processes that really loaded the plugin (vLLM only logs one that fails).

    Raises `EngineError` (stage `control`) when none did, when one loaded another fenno, or when the scheduler is not fenno's.
    """
    try:
        marks, answers = control.read_marks(control_path), control.read_acknowledgements(control_path)
    except (OSError, ValueError) as error:
        raise EngineError(f"what the engine wrote cannot be read: {error}", "start the engine again", stage="control") from error
    strangers = sorted(set(marks.values()) - {fenno.__version__})
    if not marks:
        raise _absent(
            "the engine did not load fenno's plugin",
            "look for 'Failed to load plugin fenno' in its log; is VLLM_PLUGINS set without fenno?",
        )
    if strangers:
        raise _absent(
            f"the engine loaded the plugin of fenno {strangers[0]}, and this is {fenno.__version__}",
            "another fenno is on the engine's path: bring it to the same version or take it away",
        )
    if not answers:
        raise _absent("the engine runs without fenno's scheduler", f"start it with --scheduler-cls {SCHEDULER}")
    return marks


def _absent(message: str, hint: str) -> EngineError:
    return EngineError(message, hint, stage="control", cause="plugin")
