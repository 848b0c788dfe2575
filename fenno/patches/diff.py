"""Strict unified diffs: every line of context must be where the hunk says it is. Bytes in, bytes out; nothing is opened here.

`git apply` would do most of this, but it skips a patch without a word when the files lie inside another repository, follows the
user's git configuration, and is absent from many images that serve models. What is here has no fuzz, and the SHA-256 of its
result is known before it begins (`series.py`), so that a fault in it could refuse a patch, and never write a wrong file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fenno.errors import PatchError

_HUNK = re.compile(rb"@@ -([0-9]{1,9})(?:,([0-9]{1,9}))? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@(?: .*)?\n?")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_NO_NEWLINE = b"\\ No newline at end of file"
# What `git diff` may say of a file before its hunks, and fenno does not do.
_REFUSED = (b"new file", b"deleted file", b"old mode", b"new mode", b"rename ", b"copy ", b"similarity ", b"GIT binary", b"Binary ")
_HINT = "make it with `git diff` between the package as installed and as it should be"


@dataclass(frozen=True)
class Hunk:
    """Lines `old` (with their ends) at line `start` (from 1) become `new`."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class Change:
    """What happens to one file. `path` is as in the diff, without a/ and b/, and not trusted."""

    path: str
    hunks: tuple[Hunk, ...]


def parse(diff: bytes, source: str) -> tuple[Change, ...]:
    """The changes of a diff, at most one a file. `source` is what messages call it. Raises `PatchError`."""
    lines = _LINE.findall(diff)
    changes: list[Change] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith((b"diff --git ", b"index ")) or not lines[at].strip():
            at += 1
            continue
        path, at = _names(lines, at, source)
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith(b"@@"):
            hunk, at = _hunk(lines, at, source)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"{source}: {path} has no hunk", _HINT)
        changes.append(Change(path, tuple(hunks)))
    paths = [change.path for change in changes]
    if not paths or len(set(paths)) < len(paths):
        raise PatchError(f"{source}: " + ("one file is in it twice" if paths else "there is no diff in it"), _HINT)
    return tuple(changes)


def _names(lines: Sequence[bytes], at: int, source: str) -> tuple[str, int]:
    """The path of `--- a/PATH` and `+++ b/PATH`, and the line after them."""
    shown = lines[at].decode(errors="replace").strip()[:80]
    if lines[at].startswith(_REFUSED):
        raise PatchError(f"{source}: {shown!r}: a patch changes the text of installed files, nothing else", _HINT)
    if not lines[at].startswith(b"--- ") or at + 1 == len(lines) or not lines[at + 1].startswith(b"+++ "):
        raise PatchError(f"{source}: {shown!r} is not where a file of a unified diff begins", _HINT)
    old, new = (_path(line, prefix) for line, prefix in ((lines[at], "a/"), (lines[at + 1], "b/")))
    if old != new or not old:
        raise PatchError(f"{source}: {shown!r} is not followed by the same path with b/", _HINT)
    return old, at + 2


def _path(line: bytes, prefix: str) -> str:
    # diff -u writes a tab and a time after the name.
    name = line[4:].rstrip(b"\r\n").partition(b"\t")[0].decode(errors="replace")
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def _hunk(lines: Sequence[bytes], at: int, source: str) -> tuple[Hunk, int]:
    """The hunk whose @@ line is at `at`, and the line after it."""
    head = _HUNK.fullmatch(lines[at])
    where = f"{source}: the hunk {lines[at].decode(errors='replace').strip()[:60]!r}"
    if not head:
        raise PatchError(f"{where} has no readable line numbers", _HINT)
    start, count, _, added = (int(part) if part is not None else 1 for part in head.groups())
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while at < len(lines) and (len(old) < count or len(new) < added or lines[at].startswith(_NO_NEWLINE)):
        kind, line = lines[at][:1], lines[at][1:]
        if lines[at].startswith(_NO_NEWLINE):
            _cut(old, new, lines[at - 1][:1])
        elif kind in (b" ", b"-", b"+"):
            old += [line] if kind != b"+" else []
            new += [line] if kind != b"-" else []
        else:
            raise PatchError(f"{where} has a line that begins with none of space, + and -", _HINT)
        at += 1
    if (len(old), len(new)) != (count, added):
        raise PatchError(f"{where} does not have as many lines as it says", _HINT)
    # Without lines of its own a hunk names the line before it.
    return Hunk(start + (not old), tuple(old), tuple(new)), at


def _cut(old: list[bytes], new: list[bytes], kind: bytes) -> None:
    """Take the newline off the last line on the sides that the line before belongs to."""
    for side, belongs in ((old, kind in (b" ", b"-")), (new, kind in (b" ", b"+"))):
        if belongs and side:
            side[-1] = side[-1].removesuffix(b"\n")


def apply(content: bytes, change: Change, source: str) -> bytes:
    """The content of `change.path` after the change. Raises `PatchError` where a line is not what the diff says."""
    lines = _LINE.findall(content)
    result: list[bytes] = []
    done = 0
    for hunk in change.hunks:
        begin = hunk.start - 1
        if begin < done or tuple(lines[begin : begin + len(hunk.old)]) != hunk.old:
            raise PatchError(f"{source} does not fit {change.path}: line {hunk.start} is not what the patch expects", _HINT)
        result += [*lines[done:begin], *hunk.new]
        done = begin + len(hunk.old)
    return b"".join([*result, *lines[done:]])
