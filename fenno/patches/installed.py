"""A package as it was delivered: where it lies, its version, and the SHA-256 of every file, from its wheel's RECORD; or an unpacked
source archive, of which nothing is known but that."""

from __future__ import annotations

import base64
import binascii
import csv
import email
import hashlib
import importlib.metadata
import json
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from fenno import process
from fenno.errors import PatchError, ProcessError

_SDIST = "pip download --no-deps --no-binary :all: PACKAGE==VERSION, unpack it, and give that folder"
_PATH = "import sys, json; print(json.dumps(sys.path))"


@dataclass(frozen=True)
class Installed:
    """One distribution below the folder `site`. `record`: path below `site` -> SHA-256 in hex. `source`: it is an unpacked source
    archive, not a package to be imported."""

    name: str
    version: Version
    site: Path
    record: Mapping[str, str]
    source: bool = False

    @property
    def again(self) -> str:
        """How to have it pristine again."""
        install = f"install it again: pip install --force-reinstall --no-deps {self.name}=={self.version}"
        return "unpack its source archive again" if self.source else install

    def file(self, path: str) -> Path:
        """The file behind a path that is not trusted. Raises `PatchError` unless it is a plain file of this package."""
        parts = PurePosixPath(path).parts
        outside = not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path
        if outside or path != "/".join(parts) or parts[0].endswith(".dist-info") or path not in self.record:
            raise PatchError(f"{path!r} is not a file of {self.name} {self.version}", "a patch changes only those")
        below = self.site
        for part in parts:
            below = below / part
            if below.is_symlink():
                raise PatchError(f"{below} is a symbolic link", "fenno writes through none; install the package as plain files")
        if not (below.exists() and stat.S_ISREG(below.lstat().st_mode)):
            raise PatchError(f"{below} is missing, or no plain file", self.again)
        return below


def search_path(python: str | None) -> list[str]:
    """Where the interpreter `python` (None: this one) imports from. Raises `PatchError`."""
    if python is None or python == sys.executable:
        return list(sys.path)
    try:
        done = process.run([python, "-c", _PATH], timeout=30.0, cwd=Path("/")).check(f"asking {python} where it imports from")
    except ProcessError as error:
        raise PatchError(str(error), "--python is the interpreter that has the package") from error
    return [entry for entry in json.loads(done.stdout.splitlines()[-1]) if entry]


def find(package: str, folders: Sequence[str]) -> Installed:
    """The first `package` in `folders` (as in sys.path). Raises `PatchError` when it is not there, or not from a wheel."""
    name = canonicalize_name(package)
    for folder in folders:
        for info in sorted(Path(folder).glob("*.dist-info")):
            if canonicalize_name(info.name.removesuffix(".dist-info").rpartition("-")[0]) == name:
                return _read(name, info)
    other = next(iter(importlib.metadata.distributions(name=package, path=list(folders))), None)
    if other is not None:
        raise PatchError(f"{package} was not installed from a wheel: there is no RECORD to tell what is pristine", _wheel(package))
    raise PatchError(f"{package} is not installed there", "name the interpreter that has it: --python PATH")


def unpacked(folder: Path) -> Installed:
    """A source archive unpacked in `folder`, by its PKG-INFO; no file of it is known. Raises `PatchError` when it is none."""
    try:
        fields = email.message_from_string((folder / "PKG-INFO").read_text(encoding="utf-8"))
        name, version = canonicalize_name(fields["Name"] or "", validate=True), Version(fields["Version"] or "")
    except (OSError, ValueError) as error:
        raise PatchError(f"{folder} is no unpacked source archive: its PKG-INFO cannot be read ({error})", _SDIST) from None
    return Installed(name, version, folder.resolve(), {}, source=True)


def _wheel(package: str) -> str:
    return f"install it from a wheel: pip install --force-reinstall --no-deps {package}"


def _read(package: str, info: Path) -> Installed:
    try:
        version = Version(info.name.removesuffix(".dist-info").rpartition("-")[2])
        origin = info / "direct_url.json"
        url = json.loads(origin.read_text(encoding="utf-8")) if origin.exists() else {}
        rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
        record = {row[0]: _hex(row[1]) for row in rows if len(row) == 3 and row[1].startswith("sha256=")}
    except FileNotFoundError:
        raise PatchError(f"{package} has no RECORD: nothing tells what is pristine", _wheel(package)) from None
    except (OSError, ValueError, csv.Error, InvalidVersion, binascii.Error) as error:
        raise PatchError(f"the metadata of {package} in {info} cannot be read: {error}", _wheel(package)) from error
    folder = url.get("dir_info") if isinstance(url, dict) else None
    if isinstance(folder, dict) and folder.get("editable"):
        raise PatchError(f"{package} is an editable install: its files are a source checkout", "change that checkout instead")
    return Installed(package, version, info.parent, record)


def _hex(digest: str) -> str:
    return base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "==").hex()


def sha256(content: bytes) -> str:
    """The digest in hex, as `sha256sum` prints it."""
    return hashlib.sha256(content).hexdigest()
