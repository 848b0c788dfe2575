"""Patch files: patches/<package>/<specifier>/NNN-name.patch, a header in DEP-3's manner and a unified diff, and what they make.
Those for an unpacked source archive lie one folder deeper, in <specifier>/source.

    Description: what it changes
    Reason: why no flag, variable or plugin does it
    Upstream: the change's address there, or why there is none
    Superseded-By: what makes it needless, and since which version; or nothing yet
    Applies-To: vllm>=0.24,<0.25
    Sha256: BEFORE AFTER vllm/some/file.py

An empty line ends the header; there is one `Sha256` for each file of the diff; a line that begins with a space goes on the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from fenno.errors import PatchError
from fenno.patches import diff
from fenno.patches.installed import Installed, sha256, unpacked

FIELDS = ("Description", "Reason", "Upstream", "Superseded-By", "Applies-To", "Sha256")
_NAME = re.compile(r"[0-9]{3}-[A-Za-z0-9._-]+\.patch")
_DIGESTS = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{64}) (\S.*)")
_LIMIT = 4 * 2**20  # bytes; a patch that is larger is a fork


@dataclass(frozen=True)
class Patch:
    """One patch file. `digests`: path -> SHA-256 of the file before and after it."""

    path: Path
    description: str
    reason: str
    upstream: str
    superseded_by: str
    applies_to: Requirement
    digests: dict[str, tuple[str, str]]
    changes: tuple[diff.Change, ...]

    @property
    def name(self) -> str:
        return self.path.name


def read(path: Path) -> Patch:
    """One patch file. Raises `PatchError` naming what is wrong with it."""
    try:
        if not path.is_file() or path.stat().st_size > _LIMIT:
            raise PatchError(f"{path} is no plain file of at most {_LIMIT >> 20} MiB", "a larger change is a fork: install that")
        content = path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path} cannot be read: {error.strerror}", "is the path right?") from error
    head, _, body = content.partition(b"\n\n")
    fields = _fields(head, path)
    if not (_DIGESTS.fullmatch(fields["Sha256"][0]) and all(map(_DIGESTS.fullmatch, fields["Sha256"]))):
        raise PatchError(f"{path}: `Sha256` is not two digests and a path", "Sha256: BEFORE AFTER package/file.py")
    found = [match.groups() for line in fields["Sha256"] if (match := _DIGESTS.fullmatch(line))]
    try:
        applies_to = Requirement(fields["Applies-To"][0])
    except InvalidRequirement as error:
        raise PatchError(f"{path}: `Applies-To` is not a requirement: {error}", "Applies-To: vllm>=0.24,<0.25") from error
    changes = diff.parse(body, str(path))
    digests = {name: (before, after) for before, after, name in found}
    if sorted(digests) != sorted(change.path for change in changes) or len(digests) < len(found):
        raise PatchError(f"{path}: the `Sha256` lines are not those of the diff's files", "one line a file of the diff")
    description, reason, upstream, superseded_by = (" ".join(fields[name]) for name in FIELDS[:4])
    return Patch(path, description, reason, upstream, superseded_by, applies_to, digests, changes)


def _fields(head: bytes, path: Path) -> dict[str, list[str]]:
    """The header by field. Raises `PatchError` for an unknown field, one that is missing, or what is not text."""
    fields: dict[str, list[str]] = {}
    last = ""
    for line in head.decode(errors="replace").split("\n"):
        name, colon, value = line.partition(":")
        if line[:1].isspace() and last:
            fields[last][-1] += " " + line.strip()
            continue
        if not colon or name not in FIELDS:
            raise PatchError(f"{path}: {line[:60]!r} is no field of a patch's header", f"they are {', '.join(FIELDS)}")
        fields.setdefault(name, []).append(value.strip())
        last = name
    missing = next((name for name in FIELDS if not all(fields.get(name, [""]))), None)
    if missing:
        raise PatchError(f"{path}: the header has no `{missing}`", "docs/patches.md says what each field is for")
    return fields


def packages(roots: Iterable[Path], *, source: bool = False) -> list[str]:
    """The packages that the folders of patches have patches for, installed or unpacked."""
    pattern = "*/*/source/*.patch" if source else "*/*/*.patch"
    return sorted({path.relative_to(root).parts[0] for root in roots for path in root.glob(pattern)})


def folders(package: str, roots: Iterable[Path], *, source: bool) -> list[tuple[SpecifierSet, Path]]:
    """The folders of all roots with patches for a package, installed or unpacked, in order.

    Raises `PatchError` for a name that is no specifier.
    """
    found = []
    for path in (path for root in roots for path in sorted((root / package).glob("*")) if path.is_dir()):
        place = path / "source" if source else path
        try:
            found += [(SpecifierSet(path.name), place)] if any(place.glob("*.patch")) else []
        except InvalidSpecifier as error:
            raise PatchError(f"{path.name!r} in {path.parent} is no range of versions", "such as '>=0.24,<0.25'") from error
    return found


def series(installed: Installed, roots: Sequence[Path]) -> tuple[Patch, ...]:
    """The patches for this version: root after root, each in the order of their numbers. Raises `PatchError`.

    Empty only where no root has a patch for the package.
    """
    known = folders(installed.name, roots, source=installed.source)
    matching = [path for specifier, path in known if specifier.contains(installed.version, prereleases=True)]
    if known and not matching:
        ranges = "; ".join(str(specifier) for specifier, _ in known)
        raise PatchError(
            f"the patches for {installed.name} are for {ranges}, and this is {installed.version}",
            "a patch for another version is never tried; see `fenno patch list`",
        )
    return tuple(_fitting(installed, path) for folder in matching for path in sorted(folder.glob("*.patch")))


def source(folder: Path, roots: Sequence[Path]) -> Installed:
    """An unpacked source archive. It has no RECORD: pristine is the file that the first patch of it was made for.

    Raises `PatchError` when it is none, or there is no patch for it.
    """
    found = unpacked(folder)
    patches = series(found, roots)
    if not patches:
        raise PatchError(f"there are no patches for the source of {found.name}", "see `fenno patch list`")
    before = [(path, digests[0]) for patch in patches for path, digests in patch.digests.items()]
    return replace(found, record=dict(reversed(before)))


def _fitting(installed: Installed, path: Path) -> Patch:
    """A patch of a matching folder, which must say the same of itself."""
    if not _NAME.fullmatch(path.name):
        raise PatchError(f"{path} is not called NNN-name.patch", "the number is its place in the series: 010-what.patch")
    patch = read(path)
    same = canonicalize_name(patch.applies_to.name) == canonicalize_name(installed.name)
    if not same or not patch.applies_to.specifier.contains(installed.version, prereleases=True):
        raise PatchError(
            f"{path} applies to {patch.applies_to}, and this is {installed.name} {installed.version}",
            "its header and its folder should name the same versions",
        )
    return patch


def results(installed: Installed, patches: Iterable[Patch], original: Callable[[str], bytes]) -> dict[str, bytes]:
    """The new content of each file, from `original`s that are as RECORD says. Raises `PatchError`; writes nothing."""
    contents: dict[str, bytes] = {}
    for patch in patches:
        for change in patch.changes:
            path = change.path
            content = contents[path] if path in contents else original(path)
            before, after = patch.digests[path]
            if sha256(content) != before:
                raise PatchError(
                    f"{patch.name} was made for another {path} than {installed.name} {installed.version} has",
                    "make the patch anew against that file",
                )
            contents[path] = diff.apply(content, change, patch.name)
            if sha256(contents[path]) != after:
                raise PatchError(f"{patch.name} makes of {path} something else than its header says", "make the header anew")
    return contents
