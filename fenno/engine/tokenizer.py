"""Grok-2's `tokenizer.tok.json` as the files that transformers and vLLM read: standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenno.engine.dummy import byte_letters
from fenno.errors import DiskError, UsageError

PUBLISHED = "tokenizer.tok.json"
# The only way of splitting that the format names: runs of letters, single digits, runs of signs, white space.
SPLITS = {"V1": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"}
PAD, END, SEPARATOR = "<|pad|>", "<|eos|>", "<|separator|>"
# Read as tokens wherever they stand in a text, beside those that the file names.
ALLOWED = {PAD, END, SEPARATOR, *(f"<|reserved_{n}|>" for n in range(3, 128)), *(f"<|control{n}|>" for n in range(1, 705))}
CHAT_TEMPLATE = (
    "{% set names = {'user': 'Human', 'system': 'System', 'assistant': 'Assistant'} %}"
    "{% for m in messages %}{{ names[m['role']] }}: "
    "{{ m['content'] if m['role'] == 'assistant' else m['content'].strip() }}<|separator|>\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def prepare(folder: Path) -> list[Path]:
    """Write what the tokenizer in `folder` lacks to be read by anyone; returns the files. A `generation_config.json` is kept.

    Raises `UsageError` when there is no tokenizer of that kind in `folder`, `DiskError` when nothing can be written.
    """
    try:
        published = json.loads((folder / PUBLISHED).read_bytes())
        made = files(published)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"there is no {PUBLISHED} in {folder}", "name the folder of Grok-2's files") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / PUBLISHED} cannot be read: {error}", "copy it again from where it came") from error
    written = [folder / name for name in made if name != "generation_config.json" or not (folder / name).exists()]
    try:
        for path in written:
            path.write_text(json.dumps(made[path.name], indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write into {folder}: {error.strerror}", "free some space, or copy the folder") from error
    return written


def files(published: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files, by name. Raises `ValueError` or `KeyError` for what is no such tokenizer."""
    special = {bytes(item["bytes"]).decode("utf-8"): int(item["token"]) for item in published["special_tokens"]}
    ranks = {bytes(item["bytes"]): int(item["token"]) for item in published["regular_tokens"]}
    named = {bytes(text).decode("utf-8") for text in published.get("default_allowed_special", [])}
    split = published.get("pat_str") or SPLITS.get(published.get("word_split", ""))
    if not split:
        raise ValueError(f"it splits words in a way that is not known: {published.get('word_split')!r}")
    if END not in special or SEPARATOR not in special:
        raise ValueError(f"it has no {END} or no {SEPARATOR}")
    return {
        "tokenizer.json": _tokenizer(ranks, special, (ALLOWED | named) & special.keys(), split),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD if PAD in special else END,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        # An answer in a chat ends with the separator, a text with the other.
        "generation_config.json": {"eos_token_id": [special[END], special[SEPARATOR]]},
    }


def _tokenizer(ranks: Mapping[bytes, int], special: Mapping[str, int], read: set[str], split: str) -> dict[str, Any]:
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    added = [
        {"id": special[text], "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text in sorted(read, key=special.__getitem__)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pieces = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [pieces, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            # A piece that is a token is that token, whatever its merges would come to.
            "ignore_merges": True,
            "vocab": {spell(token): rank for token, rank in ranks.items()} | dict(special),
            "merges": [[spell(left), spell(right)] for left, right in merges(ranks)],
        },
    }


def merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, the one with the lowest rank first.

    The published file says only which tokens there are: any two neighbours whose bytes are one are joined, lowest rank first.
    """
    found = [
        (rank, ranks[token[:at]], ranks[token[at:]], token[:at], token[at:])
        for token, rank in ranks.items()
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    return [(left, right) for *_, left, right in sorted(found)]
