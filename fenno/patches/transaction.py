"""Files of a package replaced all or none, whatever happens in between.

What is needed for that lies in `.fenno-patches/PACKAGE` beside the package, in the same file system: the originals, and, while
files are replaced, the new ones, whole and on the disk. Only then does `state.json` get its `next`: from there on the only way
is forward, by renames, which need no space and which the next command goes on with. Before it, nothing has happened. Nothing is
ever written into a file that is there: package managers hard-link installed files to their caches.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fenno.errors import PatchError
from fenno.patches.installed import Installed, sha256

_FOLDER = ".fenno-patches"
_LOCK = ".fenno-patches.lock"


@dataclass(frozen=True)
class State:
    """Which patches are in the files of one version. `files`: path -> SHA-256 with them. `next`: what is being made of it."""

    version: str
    patches: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    next: State | None = None

    def paths(self) -> list[str]:
        """Every file that is patched, or about to be."""
        return sorted({*self.files, *(self.next.files if self.next else ())})


def folder(installed: Installed) -> Path:
    """Where the originals and the state of a package are."""
    return installed.site / _FOLDER / installed.name


def state(installed: Installed) -> State:
    """What is in the package's files, as last written; nothing when the package was installed anew in another version."""
    path = folder(installed) / "state.json"
    try:
        known = _state(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return State(str(installed.version))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PatchError(f"{path} cannot be read: {error}", installed.again) from error
    return known if known.version == str(installed.version) else State(str(installed.version))


def _state(document: dict[str, Any]) -> State:
    coming = document["next"]
    return State(document["version"], tuple(document["patches"]), dict(document["files"]), _state(coming) if coming else None)


def now(installed: Installed, path: str) -> str:
    """The SHA-256 of a file as it is."""
    return sha256(installed.file(path).read_bytes())


def original(installed: Installed, path: str) -> bytes:
    """A file as the wheel had it: the file itself, or what was kept of it. Raises `PatchError` when somebody else changed it."""
    content, pristine = installed.file(path).read_bytes(), installed.record[path]
    if sha256(content) == pristine:
        return content
    if sha256(content) != state(installed).files.get(path):
        raise drifted(installed, path)
    kept = folder(installed) / "originals" / pristine
    content = kept.read_bytes() if kept.is_file() else b""
    if sha256(content) != pristine:
        raise PatchError(f"the original of {path} is not in {kept.parent}", installed.again)
    return content


def drifted(installed: Installed, path: str) -> PatchError:
    """The error for a file that is neither as installed nor as patched."""
    message = f"{installed.site / path} was changed by somebody else: it is neither pristine nor as patched"
    return PatchError(message, installed.again)


@contextlib.contextmanager
def locked(installed: Installed, patience: float = 10.0) -> Iterator[None]:
    """One process at a time patches here. Raises `PatchError` after `patience` seconds, or when nothing can be written."""
    path = installed.site / _LOCK
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        while True:
            try:
                lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise _unwritable(installed, error) from error
            held = contextlib.ExitStack()
            held.callback(os.close, lock)
            if _taken(lock, path):
                stack.push(held)
                break
            held.close()
            if time.monotonic() > deadline:
                raise PatchError(f"another fenno is patching in {installed.site}", "wait for it to end, then try again")
            time.sleep(0.02)
        # Removed while it is held: who waits for it sees that it is not the one at the path any more.
        stack.callback(path.unlink, missing_ok=True)
        yield


def _taken(lock: int, path: Path) -> bool:
    """Whether the lock is this process's now, and still the file at `path`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def put(installed: Installed, patches: tuple[str, ...], contents: Mapping[str, bytes]) -> bool:
    """Have `contents` in the package, and every other file as installed. False when all is so already.

    To be called with the lock, after `finish`. Raises `PatchError`; then nothing has changed.
    """
    known = state(installed)
    goal = {path: contents[path] if path in contents else original(installed, path) for path in {*known.files, *contents}}
    originals = {path: original(installed, path) for path in contents}
    coming = State(known.version, patches, {path: sha256(content) for path, content in contents.items()})
    changed = {path: content for path, content in goal.items() if now(installed, path) != sha256(content)}
    if not changed and coming == known:
        return False
    place = folder(installed)
    try:
        for path, content in originals.items():
            _write(place / "originals" / installed.record[path], content)
        for path, content in changed.items():
            _write(_staged(installed, path), content, like=installed.file(path).stat())
        _write(place / "staged" / "state.json", _text(coming))
        _write(place / "state.json", _text(replace(known, next=coming)))
    except OSError as error:
        if state(installed).next is None:
            tidy(installed)
        raise _unwritable(installed, error) from error
    finish(installed)
    return True


def finish(installed: Installed) -> bool:
    """Go on with what a killed command began, to its end; with nothing to go on with, tidy up. To be called with the lock."""
    known = state(installed)
    coming = known.next
    if coming is None:
        tidy(installed)
        return False
    for path in known.paths():
        goal = coming.files.get(path, installed.record[path])
        found = now(installed, path)
        if found not in (goal, installed.record[path], known.files.get(path)):
            raise drifted(installed, path)
        if found != goal:
            _staged(installed, path).replace(installed.file(path))
            _sync(installed.file(path).parent)
        _remove_bytecode(installed.file(path))
    if coming.files:
        (folder(installed) / "staged" / "state.json").replace(folder(installed) / "state.json")
    else:
        (folder(installed) / "state.json").unlink()
    tidy(installed)
    return True


def tidy(installed: Installed) -> None:
    """Remove what no state needs: files that were never put in place, and, without patches, everything."""
    place = folder(installed)
    shutil.rmtree(place / "staged" if state(installed).files else place, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()


def _staged(installed: Installed, path: str) -> Path:
    return folder(installed) / "staged" / sha256(path.encode())


def _text(made: State) -> bytes:
    return json.dumps(asdict(made), indent=1).encode()


def _write(path: Path, content: bytes, like: os.stat_result | None = None) -> None:
    """A file that is there whole, and on the disk, or not at all; with the mode and the owner of another one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        if like:
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
            with contextlib.suppress(PermissionError):
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync(path.parent)


def _sync(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_bytecode(file: Path) -> None:
    """A compiled copy is checked by time and size alone: that of the file before must go."""
    place = file.parent / "__pycache__"
    if file.suffix == ".py" and place.is_dir() and not place.is_symlink():
        for compiled in place.glob(f"{glob.escape(file.stem)}.*.pyc"):
            compiled.unlink(missing_ok=True)


def _unwritable(installed: Installed, error: OSError) -> PatchError:
    return PatchError(
        f"cannot write in {installed.site}: {error.strerror}; {installed.name} is as it was",
        "patch where the package is installed from, such as the image, or free some space",
    )
