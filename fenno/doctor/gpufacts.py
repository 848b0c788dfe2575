"""From NVML's answers, or a pasted `nvidia-smi topo -m`, to facts. NVML itself is asked in a child process (`inside/nvml.py`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenno import process
from fenno.doctor.facts import Card, Gpus, Topology
from fenno.errors import ProcessError, UsageError

SCRIPT = str(Path(__file__).parent / "inside" / "nvml.py")
ANCESTORS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
CELL = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|INT|X|OK|N/A")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def ask(timeout: float) -> tuple[Gpus | None, Topology | None, str]:
    """The GPUs, how they are connected, and why there are none where there are none."""
    try:
        done = process.run([sys.executable, SCRIPT], timeout=timeout)
    except ProcessError as error:
        return None, None, f"NVML: {error}"
    return answered(done.stdout, done.returncode)


def answered(text: str, code: int) -> tuple[Gpus | None, Topology | None, str]:
    """What the child's lines say: the last document it finished, and what it was at when it ended early."""
    documents = [line for line in text.splitlines() if line.startswith("{")]
    crash = None
    if code:
        asked = [line.removeprefix("asking ") for line in text.splitlines() if line.startswith("asking ")]
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        crash = f"{asked[-1] if asked else 'loading NVML'} ended the process that asked ({ended})"
    if not documents:
        return None, None, crash or "NVML said nothing"
    document = json.loads(documents[-1])
    if document.get("error"):
        return None, None, f"NVML: {document['error']}"
    return gpus(document, crash), topology(document, "NVML"), ""


def gpus(document: Mapping[str, Any], crash: str | None = None) -> Gpus:
    """Facts from a document of NVML's answers, as `inside/nvml.py` prints it."""
    cuda = int(document["cuda"])
    return Gpus(document["driver"], (cuda // 1000, cuda % 1000 // 10), tuple(map(card, document["gpus"])), crash)


def card(found: Mapping[str, Any]) -> Card:
    """One GPU. An answer that is text is an error's name: that card does not say."""
    say: dict[str, Any] = {
        key: None if isinstance(value, str) and key not in ("name", "uuid") else value for key, value in found.items()
    }
    return Card(
        index=say["index"],
        name=say["name"],
        capability=tuple(say["cc"]),
        memory=say["mem"],
        used=say.get("used"),
        compute_mode=say.get("compute_mode"),
        persistence=say.get("persistence"),
        mig=(say.get("mig") or [None])[0],
        pcie_width=_pair(say.get("pcie_width")),
        pcie_gen=_pair(say.get("pcie_gen")),
        numa=say.get("numa"),
        throttle=say.get("throttle"),
        links=tuple(state for state in say.get("nvlink_active") or () if isinstance(state, int)),
        link_errors=say.get("link_errors"),
        uncorrected=say.get("uncorrected"),
        remap=tuple(say["remap"]) if say.get("remap") else None,
        power=_pair(say.get("power")),
        fabric=say.get("fabric"),
    )


def _pair(values: Any) -> tuple[int, int] | None:
    return (values[0], values[1]) if isinstance(values, list) and len(values) == 2 else None


def topology(document: Mapping[str, Any], source: str) -> Topology:
    """How the GPUs are connected, from NVML's answers for each pair."""
    links = {g["index"]: sum(1 for state in g.get("nvlink_active") or () if state == 1) for g in document["gpus"]}
    pairs = {(p["a"], p["b"]): p for p in document.get("pairs", ()) if p["a"] < p["b"]}
    nvlink = {key: pair["p2p"].get("nvlink") == 0 for key, pair in pairs.items()}
    return Topology(
        source=source,
        gpus=tuple(g["index"] for g in document["gpus"]),
        cells={key: _cell(pair, links, nvlink[key]) for key, pair in pairs.items()},
        nvlink=nvlink,
        peers={key: pair["p2p"].get("read") == 0 and pair["p2p"].get("write") == 0 for key, pair in pairs.items()},
        nodes={g["index"]: g["numa"] for g in document["gpus"] if isinstance(g.get("numa"), int)},
    )


def _cell(pair: Mapping[str, Any], links: Mapping[int, int], nvlink: bool) -> str:
    """With switches every link of a GPU leads to every other GPU: the fewer links of the two count."""
    if nvlink:
        return f"NV{pair.get('links') or min(links[pair['a']], links[pair['b']])}"
    return ANCESTORS.get(pair["ancestor"], "?")


def from_file(path: Path) -> tuple[Topology, Gpus | None]:
    """A recorded topology: NVML's answers as JSON, or the text of `nvidia-smi topo -m`. Raises `UsageError` for anything else."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "give a file with the output of `nvidia-smi topo -m`") from error
    if not text.lstrip().startswith("{"):
        return matrix(text, path.name), None
    try:
        document = json.loads(text)
        return topology(document, path.name), gpus(document)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what NVML answered: {error!r}", "fenno doctor --report prints such a document") from error


def matrix(text: str, source: str) -> Topology:
    """The matrix of `nvidia-smi topo -m`: columns by tabs or runs of spaces, colours and a legend are left out."""
    lines = [ANSI.sub("", line).strip() for line in text.splitlines()]
    words = [line.split() for line in lines if line.startswith("GPU")]
    header = next((row for row in words if len(row) > 1 and not CELL.fullmatch(row[1])), [])
    rows = {int(row[0][3:]): row[1:] for row in words if len(row) > 1 and CELL.fullmatch(row[1]) and row[0][3:].isdigit()}
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    if not rows or set(rows) != set(columns):
        raise UsageError(f"{source} holds no matrix of GPUs", "give the output of `nvidia-smi topo -m`, header line included")
    cells = {}
    for a, row in rows.items():
        for b, cell in zip(columns, row, strict=False):
            if not CELL.fullmatch(cell):
                raise UsageError(f"{source}: GPU{a} to GPU{b} is {cell!r}", "this is not a word of `nvidia-smi topo -m`")
            if a < b:
                cells[a, b] = cell
    nvlink = {pair: cell.startswith("NV") for pair, cell in cells.items()}
    return Topology(source, tuple(columns), cells, nvlink, dict.fromkeys(cells))
