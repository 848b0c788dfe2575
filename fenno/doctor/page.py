"""The pages of docs/doctor, one an area, made from the checks: `python -m fenno.doctor.page docs/doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

from fenno.doctor.checks import CHECKS

AREAS = {
    "host": "The operating system",
    "driver": "Driver and CUDA toolkit",
    "gpu": "GPUs",
    "topology": "What connects the GPUs",
    "python": "The Python stack",
    "engine": "The engine",
    "model": "The model",
    "recipe": "The recipe",
    "env": "Environment variables",
}
NOTE = "<!-- made by `python -m fenno.doctor.page docs/doctor`; do not edit -->"


def pages() -> dict[str, str]:
    """Every page by its file's name."""
    areas = [area for area in AREAS if any(check.area == area for check in CHECKS)]
    return {f"{area}.md": page(area) for area in areas}


def page(area: str) -> str:
    """The page of one area: a heading for each check, since links lead there."""
    parts = [f"# {AREAS[area]}: `{area}.*`", NOTE]
    for check in CHECKS:
        if check.area == area:
            needs = f" Skipped without: {', '.join(check.needs)}." if check.needs else ""
            parts += [f"## {check.id}", f"{check.title}. Expected: {check.expected}.{needs}", check.why, f"**Do:** {check.fix}"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
