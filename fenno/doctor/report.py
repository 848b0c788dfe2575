"""The bundle for a bug report: the results and the facts behind them, with nothing in it that names a person or opens a door."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fenno import secret
from fenno.doctor.document import Document
from fenno.doctor.facts import Facts

# Variables that matter to an engine; all others stay at home.
SHOWN = re.compile(
    r"(?:VLLM|NCCL|CUDA|NVIDIA|HF|TORCH\w*|PYTORCH|TRITON|OMP|MKL|PYTHON\w*|LD|FLASH|FLASHINFER|MAX_JOBS|NVCC|XDG_CACHE|FENNO)(?:_|$)"
)
# What a secret looks like wherever it stands.
PATTERNS = (
    (re.compile(r"\b(?:hf|sk|ghp|gho|glpat|xox[bp])[-_][A-Za-z0-9_-]{8,}"), "<secret>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), r"\1 <secret>"),
    (secret.PASSWORD, r"\1<secret>@"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<mail>"),
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\b(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), "<address>"),
)
# Sets that are long and follow from the version.
COUNTED = {"architectures", "variables", "flags", "gone", "elsewhere"}


def bundle(document: Document, facts: Facts) -> dict[str, Any]:
    """The document and the facts, redacted."""
    known = {field.name: plain(getattr(facts, field.name)) for field in fields(facts) if field.name not in ("variables", "recipe")}
    packages = facts.stack.packages.values() if facts.stack else ()
    if facts.stack:
        known["stack"]["packages"] = sorted(f"{package.name}=={package.version}" for package in packages)
    if facts.engine:
        known["engine"] |= {name: len(getattr(facts.engine, name) or ()) for name in COUNTED}
    known["variables"] = variables(facts.variables)
    known["recipe"] = facts.recipe.model_dump(mode="json") if facts.recipe else None
    told = document.model_dump(mode="json", by_alias=True)
    made: dict[str, Any] = redact({"document": told, "facts": known}, names(facts.variables))
    return made


def plain(value: Any) -> Any:
    """Facts as JSON has them: a pair of GPUs as a key becomes "0-1", a set a sorted list."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {"-".join(map(str, key)) if isinstance(key, tuple) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter; of a secret only that it is set."""
    return {name: "<set>" if secret.is_secret(name) else given[name] for name in sorted(given) if SHOWN.match(name)}


def names(given: Mapping[str, str]) -> dict[str, str]:
    """What stands for this person and this host: home first, since it holds the user's name."""
    home = given.get("HOME") or str(Path.home())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    secrets = {value: "<secret>" for name, value in {**os.environ, **given}.items() if secret.is_secret(name) and len(value) >= 6}
    # Short and common names would tear other words apart.
    persons = {home: "~", socket.gethostname(): "<host>", user: "<user>"}
    return {**secrets, **{text: word for text, word in persons.items() if len(text) >= 4 and text not in ("root", "localhost")}}


def redact(value: Any, persons: Mapping[str, str]) -> Any:
    """The same document with everything personal replaced, in keys too."""
    if isinstance(value, str):
        for text, word in persons.items():
            value = value.replace(text, word)
        for pattern, word in PATTERNS:
            value = pattern.sub(word, value)
        return value
    if isinstance(value, dict):
        return {
            redact(key, persons): "<set>" if secret.is_secret(key) and isinstance(item, str) and item else redact(item, persons)
            for key, item in value.items()
        }
    return [redact(item, persons) for item in value] if isinstance(value, list) else value
