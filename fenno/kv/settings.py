"""Settings written into a recipe's text and taken out again, so that every other byte stays: comments, order, spacing.

A line that fenno wrote ends with its mark; a line that it stands for is kept below it, as a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fenno.errors import RecipeError

MARK = "  # by fenno patch-kv"
_KEPT = re.compile(r"^( *)# before fenno patch-kv: (.*)$")
SECTIONS = {"flag": "flags", "variable": "env"}


def written(text: str, changes: Iterable[Mapping[str, Any]], source: str) -> str:
    """The recipe's text with the changes in it, in place of those that fenno wrote before. Raises `RecipeError`."""
    text = without(text)
    for change in changes:
        text = _set(text, SECTIONS[change["means"]], change["name"], change["value"], source)
    return text


def present(text: str) -> dict[str, str]:
    """The settings that fenno wrote: name -> value, as text."""
    lines = [line.removesuffix(MARK).strip() for line in text.splitlines() if line.endswith(MARK)]
    return {name: value.strip().strip('"') for name, _, value in (line.partition(":") for line in lines) if value.strip()}


def without(text: str) -> str:
    """The text as it was before."""
    lines = [line for line in text.splitlines(keepends=True) if not line.rstrip("\r\n").endswith(MARK)]
    return "".join(_KEPT.sub(r"\1\2", line.rstrip("\n")) + "\n" * line.endswith("\n") for line in lines)


def _set(text: str, section: str, name: str, value: Any, source: str) -> str:
    engine = _child(yaml.compose(text, Loader=yaml.SafeLoader), "engine")
    if engine is None or engine.flow_style:
        raise RecipeError(f"{source}: `engine` is not written one key a line", "write it so, and fenno can add a line")
    lines = text.splitlines(keepends=True)
    indent = " " * engine.start_mark.column
    shown = f'"{value}"' if section == "env" else value
    inside = _child(engine, section)
    if inside is None:
        new = [f"{indent}{section}:{MARK}\n", f"{indent}  {name}: {shown}{MARK}\n"]
        return "".join([*lines[: engine.start_mark.line], *new, *lines[engine.start_mark.line :]])
    if inside.flow_style or not isinstance(inside, yaml.MappingNode):
        raise RecipeError(f"{source}: `engine.{section}` is not written one key a line", "write it so, and fenno can add a line")
    line = f"{' ' * inside.start_mark.column}{name}: {shown}{MARK}\n"
    old = next((key.start_mark.line for key, _ in inside.value if key.value == name), None)
    at = inside.start_mark.line if old is None else old
    if old is not None:
        before = lines[old].lstrip(" ")
        lines[old] = f"{' ' * inside.start_mark.column}# before fenno patch-kv: {before}"
    return "".join([*lines[:at], line, *lines[at:]])


def _child(node: Any, name: str) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for key, value in pairs if key.value == name), None)
