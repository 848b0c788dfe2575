"""Real prompts from a file: ShareGPT JSON (a list of conversations) or OpenAI batch JSONL (a request a line)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno.errors import LoadError

_HINT = "expected ShareGPT JSON (a list of {conversations: [{from, value}, ...]}) or OpenAI batch JSONL ({body: {...}} a line)"


@dataclass(frozen=True)
class Prompt:
    """One prompt as chat messages; `output_tokens` where the file says how long the answer may be."""

    messages: list[dict[str, Any]]
    output_tokens: int | None

    def text(self) -> str:
        """The messages' contents, for the completions endpoint."""
        return "\n".join(str(message.get("content", "")) for message in self.messages)


def load(path: Path) -> list[Prompt]:
    """Every prompt of the file. Raises `LoadError` naming the file and the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}", "give a readable file of prompts") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}", _HINT) from error
    found = _share_gpt(path, text) if text.lstrip().startswith("[") else _batch(path, text)
    if not found:
        raise LoadError(f"{path}: no prompt in it", _HINT)
    return found


def _share_gpt(path: Path, text: str) -> list[Prompt]:
    """The first human turn of every conversation; conversations without one are passed over, as in published sets."""
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise LoadError(f"{path}:{error.lineno}: not JSON: {error.msg}", _HINT) from error
    found = []
    for number, conversation in enumerate(conversations, 1):
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            raise LoadError(f"{path}: conversation {number} has no list `conversations`", _HINT)
        human = next((t for t in turns if isinstance(t, dict) and t.get("from") in ("human", "user") and t.get("value")), None)
        if human is not None:
            found.append(Prompt([{"role": "user", "content": str(human["value"])}], None))
    return found


def _batch(path: Path, text: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise LoadError(f"{path}:{number}: not JSON: {error.msg}", _HINT) from error
        body = entry.get("body") if isinstance(entry, dict) else None
        prompt = _of_body(body) if isinstance(body, dict) else None
        if prompt is None:
            raise LoadError(f"{path}:{number}: no `body` with `messages` or a text `prompt`", _HINT)
        found.append(prompt)
    return found


def _of_body(body: dict[str, Any]) -> Prompt | None:
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    output = most if isinstance(most, int) and most > 0 else None
    messages = body.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Prompt(messages, output)
    if isinstance(body.get("prompt"), str):
        return Prompt([{"role": "user", "content": body["prompt"]}], output)
    return None
