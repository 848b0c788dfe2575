"""JSON documents as fenno gives them to other programs, on standard output and in files: their schema first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SCHEMA = 1  # of every document that brings no other: keys may be added; where one changes its meaning or goes, the number does


def line(document: Mapping[str, Any]) -> str:
    """A document as a line of JSON. Numbers that are not finite become null: JSON has none."""
    return json.dumps(_whole(document), separators=(",", ":"), allow_nan=False) + "\n"


def lines(document: Mapping[str, Any]) -> str:
    """The same in lines, for people who read it too."""
    return json.dumps(_whole(document), indent=1, allow_nan=False) + "\n"


def _whole(document: Mapping[str, Any]) -> Any:
    return finite({"schema": SCHEMA, **document})


def finite(value: Any) -> Any:
    """The same as JSON has it, without infinities and NaNs."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
