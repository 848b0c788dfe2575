"""A recipe from a command line that somebody already runs: `vllm serve …`, with variables in front, or the older module form."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from fenno.errors import UsageError
from fenno.secret import in_flag, is_secret

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
    "-O": "optimization-level",
    "-cc": "compilation-config",
}
# Where the server listens is fenno's to say, and the key of requests has its own place in a recipe.
_DROPPED = {"host", "port", "api-key"}


def from_command(words: Sequence[str]) -> dict[str, Any]:
    """The recipe as plain data. Raises `UsageError` when the words are not a command that starts vLLM."""
    env, rest = _variables(words)
    python, rest = _program(rest)
    flags, positional = _flags(rest)
    model = flags.pop("model", None) or (positional[0] if positional else None)
    if not isinstance(model, str):
        raise UsageError("the command names no model", "write: fenno init -- vllm serve MODEL --max-model-len 4096")
    trusted = flags.pop("trust-remote-code", False)
    for name in _left_out(flags):
        del flags[name]
    engine: dict[str, Any] = {"model": model, "python": python, "flags": flags, "env": env}
    if trusted:
        engine["trust_remote_code"] = True
    return {
        "name": _name(model),
        "engine": {key: value for key, value in engine.items() if value not in ({}, None)},
        "targets": {"p95_ttft": "800ms", "qps": 1},
    }


def to_yaml(data: dict[str, Any], words: Sequence[str] = ()) -> str:
    """The recipe as a file's text, with lines on what to change, and on which of the command's `words` were left out."""
    head = (
        "# Made by `fenno init`. Set the targets, and `workload` if your traffic is not the default mix (`fenno recipe schema`).\n"
    )
    if "python" not in data["engine"]:
        head += "# vLLM is looked for beside fenno; one that is elsewhere: `engine.python: /path/to/its/python`.\n"
    if left := _left_out(_flags(_program(_variables(words)[1])[1])[0]) if words else []:
        named = ", ".join(f"--{name}" for name in left)
        head += f"# Left out: {named}. See `fenno serve --help`, `engine.api_key_env`, and for a token `engine.env`.\n"
    if inherited := [name for name, value in data["engine"].get("env", {}).items() if value is None]:
        head += f"# Not written down: {', '.join(inherited)}. It has to be in the environment of whoever runs fenno.\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _variables(words: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """The variables in front, secrets without their values, and the words after them."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    env: dict[str, str | None] = {}
    while rest and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env[name] = None if is_secret(name, value) else value
    return env, rest


def _left_out(flags: dict[str, Any]) -> list[str]:
    """Which of the flags are not for a recipe."""
    return sorted(name for name, value in flags.items() if name in _DROPPED or in_flag(name, value))


def _program(words: list[str]) -> tuple[str | None, list[str]]:
    """The interpreter, where the command names one, and the words after `serve`."""
    if words[:2] == ["vllm", "serve"] or (words and words[0].endswith("/vllm") and words[1:2] == ["serve"]):
        return None, words[2:]
    if len(words) >= 3 and "python" in words[0] and words[1] == "-m" and words[2].startswith("vllm.entrypoints"):
        rest = words[3:]
        return (words[0] if "/" in words[0] else None), rest[1:] if rest[:1] == ["serve"] else rest
    raise UsageError(
        f"this does not start vLLM: {shlex.join(words) or '(nothing)'}",
        "write: fenno init -- vllm serve MODEL --max-model-len 4096",
    )


def _flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Flags and positional words. A flag without a value is a switch."""
    flags: dict[str, Any] = {}
    positional: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, equals, value = re.sub(r"^-O(\d)$", r"-O=\1", word).partition("=")
        name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
        values = [value] if equals else []
        while not equals and index < len(words) and not _is_flag(words[index]):
            values.append(words[index])
            index += 1
        if not values and name.startswith("no-"):
            flags[name[3:]] = False
        else:
            flags[name] = True if not values else _value(values[0]) if len(values) == 1 else [_value(v) for v in values]
    return flags, positional


def _is_flag(word: str) -> bool:
    # A negative number is a value.
    return re.match(r"--?[A-Za-z]", word) is not None


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _name(model: str) -> str:
    last = model.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._") or "recipe"
