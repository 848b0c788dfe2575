"""What setuptools runs in place of flash-attn's own setup.py: the sources and flags of a plan, in the source's folder.

Runs under the interpreter that the wheel is for. Everything it does stands in fenno-fa2.json beside it.
"""

import json
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension


class LongestFirst(BuildExtension):  # type: ignore[misc]
    """Compiles in the order of the sources that it was given, where setuptools would sort them by name."""

    def build_extension(self, ext: CUDAExtension) -> None:
        order, compiled = list(ext.sources), self.compiler.compile

        def ordered(sources: list[str], *more: Any, **named: Any) -> Any:
            return compiled(sorted(sources, key=order.index), *more, **named)

        self.compiler.compile = ordered
        super().build_extension(ext)


def main() -> None:
    here = Path.cwd()
    made = json.loads((here / "flash_attn" / "fenno-fa2.json").read_text(encoding="utf-8"))
    extension = CUDAExtension(
        name="flash_attn_2_cuda",
        sources=made["sources"],
        extra_compile_args={"cxx": made["cxx_flags"], "nvcc": made["nvcc_flags"]},
        include_dirs=[str(here / path) for path in ("csrc/flash_attn", "csrc/flash_attn/src", "csrc/cutlass/include")],
    )
    setup(
        name="flash_attn",
        version=f"{made['version']}+{made['local_version']}",
        description="FlashAttention-2, built for one model by fenno",
        license_files=["LICENSE"],
        packages=find_packages(include=["flash_attn", "flash_attn.*"]),
        package_data={"flash_attn": ["fenno-fa2.json"]},
        ext_modules=[extension],
        cmdclass={"build_ext": LongestFirst},
        install_requires=["torch", "einops"],
    )


if __name__ == "__main__":
    main()
