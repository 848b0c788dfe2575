"""The source of a release: fetched or given, its hash checked, unpacked whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from fenno import process
from fenno.errors import BuildError, DiskError
from fenno.fa2.lattice import units
from fenno.fa2.releases import Release

FETCH_TIMEOUT = 600.0
# Its setup.py runs for the metadata, and would look for a compiler.
FETCH_ENV = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}


def fetch_command(release: Release, python: str, folder: Path) -> list[str]:
    """pip's command for the source archive, with the user's own index and proxy settings."""
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--disable-pip-version-check"]
    return [python, "-m", "pip", "download", *options, "--dest", str(folder), f"flash-attn=={release.version}"]


def fetch(release: Release, python: str, folder: Path) -> Path:
    """The release's archive in `folder`, downloaded unless it is there. Raises `BuildError` when it does not come."""
    archive = folder / f"flash_attn-{release.version}.tar.gz"
    if not archive.is_file():
        done = process.run(fetch_command(release, python, folder), timeout=FETCH_TIMEOUT, env=FETCH_ENV)
        if done.returncode or not archive.is_file():
            errors = re.findall(r"^ *(?:ERROR: *)?(.*(?:[Ee]rror|No matching|No module).*)$", done.stderr, re.MULTILINE)
            raise BuildError(
                f"flash-attn {release.version} could not be fetched: {errors[0].strip() if errors else 'pip gave no reason'}",
                "without a network: download the source archive elsewhere and give it with --source FILE",
            )
    return archive


def digest(given: Path) -> str:
    """The sha256 of an archive, or of what a folder compiles and imports."""
    found = hashlib.sha256()
    roots = [given / "csrc/flash_attn", given / "flash_attn"] if given.is_dir() else [given]
    for path in [path for root in roots for path in (sorted(root.rglob("*")) if root.is_dir() else [root]) if path.is_file()]:
        found.update(f"{path.relative_to(given)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def check(archive: Path, release: Release) -> None:
    """Raise `BuildError` unless the archive is the release's, byte for byte."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != release.sha256:
        raise BuildError(
            f"{archive} is not flash-attn {release.version} as it was released: its sha256 is {digest}, not {release.sha256}",
            "the download is incomplete or was changed: delete it and run again",
        )


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive's one folder as `target`; nothing stays under that name when it fails."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with _writing(target):
        part.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            # Early patch releases of Python lack the filter; the archive's hash was checked.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(part)
        next(part.iterdir()).replace(target)
        part.rmdir()


def copy(source: Path, target: Path) -> None:
    """A copy of the user's own source as `target`: fenno writes into it."""
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with _writing(target):
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(".git", "build", "dist", "*.egg-info"))
        part.replace(target)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, shutil.Error) as error:
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"the disk is full: cannot write {target}", "free some space, or choose another --out folder"
            ) from error
        raise DiskError(f"cannot write {target}: {error}", "choose another --out folder") from error


def check_tree(folder: Path, release: Release) -> None:
    """Raise `BuildError` unless a folder holds this release's source, all its units and cutlass."""
    try:
        text = (folder / "flash_attn" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        raise BuildError(f"{folder} is not the source of flash-attn", "give the folder that holds its setup.py") from None
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if not match or match[1] != release.version:
        found = match[1] if match else "unknown"
        raise BuildError(f"{folder} is flash-attn {found}, not {release.version}", f"build that one: --version {found}")
    needed = ["csrc/flash_attn/flash_api.cpp", "csrc/cutlass/include/cutlass/cutlass.h", *(u.file for u in units(release.heads))]
    absent = [name for name in needed if not (folder / name).is_file()]
    if absent:
        raise BuildError(
            f"{folder} lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""),
            "use the released source archive",
        )


def place(release: Release, given: Path | None, python: str, folder: Path) -> Path:
    """The source tree in `folder`, from where it is, an archive or a folder that was given, or the package index."""
    target = folder / f"flash_attn-{release.version}"
    if not target.is_dir():
        if given is not None and given.is_dir():
            check_tree(given, release)
            copy(given, target)
        else:
            archive = given or fetch(release, python, folder)
            check(archive, release)
            unpack(archive, target)
    check_tree(target, release)
    return target
