"""Small stand-ins for what a build of FlashAttention-2 is made of: sources, archives, interpreters, wheels."""

from __future__ import annotations

import dataclasses
import hashlib
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

from fenno.fa2.lattice import units
from fenno.fa2.releases import RELEASES, Release
from fenno.fa2.toolchain import Toolchain

RELEASE = RELEASES["2.8.3.post2"]
WHOLE = Toolchain("cp312", "2.11.0+cu130", "13.0", True, None, "/usr/local/cuda", "13.0.88", "g++ 12.2.0", True, [])


def tree(folder: Path, version: str = RELEASE.version, without: str = "") -> Path:
    """A folder with the files that a release has, empty."""
    names = [
        "csrc/flash_attn/flash_api.cpp",
        "csrc/cutlass/include/cutlass/cutlass.h",
        *(unit.file for unit in units(RELEASE.heads)),
    ]
    for name in names:
        if name != without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder


def archive(folder: Path, packed: Path) -> Release:
    """A release whose archive is `packed`, made of `folder`."""
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, f"flash_attn-{RELEASE.version}")
    return dataclasses.replace(RELEASE, sha256=hashlib.sha256(packed.read_bytes()).hexdigest())


def stand_in(path: Path, text: str) -> str:
    """A program that does what `text` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def wheel_of(folder: Path, code: str) -> str:
    """Shell text that makes dist/x.whl with a library compiled from `code`."""
    (folder / "x.cpp").write_text(code)
    library = folder / "flash_attn_2_cuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, folder / "x.cpp"], check=True)
    with zipfile.ZipFile(folder / "x.whl", "w") as made:
        made.write(library, library.name)
    return f"mkdir -p dist && cp {folder / 'x.whl'} dist/"


# A library with machine code for one architecture and nothing else: one fat binary of one empty image, as nvcc lays it out.
def code_for(arch: int) -> str:
    return f"""
extern const unsigned char code[] __attribute__((section(".nv_fatbin"), used)) = {{
    0x50,0xed,0x55,0xba, 1,0, 16,0, 32,0,0,0,0,0,0,0,
    2,0, 1,1, 32,0,0,0, 0,0,0,0,0,0,0,0, 0,0,0,0,0,0,0,0, 0,0,0,0, {arch},0,0,0 }};
"""
