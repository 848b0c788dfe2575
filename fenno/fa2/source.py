"""The source of a release: fetched or given, its hash checked, unpacked whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fenno import process
from fenno.errors import BuildError, DiskError, UsageError
from fenno.fa2.lattice import units
from fenno.fa2.releases import RELEASES, Release

FETCH_TIMEOUT = 600.0
# Its setup.py runs for the metadata, and would look for a compiler.
FETCH_ENV = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
IMPORTS = re.compile(r"^ *(?:ERROR: *)?(.*(?:[Ee]rror|No matching|No module).*)$", re.MULTILINE)


@dataclass(frozen=True)
class Given:
    """Where the source comes from: `path`, an archive or a folder; a git `url` with its `tag`; or neither, the package index."""

    path: Path | None = None
    url: str | None = None
    tag: str | None = None

    @property
    def release(self) -> str | None:
        """The release that the name of what is given speaks of, if fenno knows it."""
        if self.path is not None and self.path.is_dir():
            return version(self.path)
        name = self.tag or (self.path.name if self.path else "")
        match = re.fullmatch(r"(?:v|flash_attn-)?(\d[\w.]*?)(?:\.tar\.gz)?", name)
        return match[1] if match and match[1] in RELEASES else None


def given(path: Path | None, git: str | None) -> Given:
    """What --source and --git name. Raises `UsageError`."""
    if git is None:
        if path is not None and not path.exists():
            raise UsageError(f"there is no {path}", "give flash-attn's released archive, or a folder with its source")
        return Given(path and path.resolve())
    if path is not None:
        raise UsageError("--source and --git name two sources", "leave one of them out")
    url, _, tag = git.rpartition("@")
    if not url or not tag or ":" in tag:
        raise UsageError(
            f"--git is {git!r}: there is no tag in it", "write it as URL@TAG, such as https://HOST/flash-attention@v2.8.3"
        )
    return Given(url=url, tag=tag)


def origin(release: Release, given: Given, out: Path) -> str:
    """What the manifest says of the source; another one is another wheel. A git tag is fetched for that. Raises `BuildError`."""
    if given.url:
        return f"{given.url}@{given.tag}, commit {commit(clone(given, out))}"
    if given.path is not None and given.path.is_dir():
        return f"folder, sha256 {digest(given.path)}"
    return f"released archive, sha256 {release.sha256}"


def clone(given: Given, out: Path) -> Path:
    """A checkout of a git tag in `out`, with cutlass; what was fetched before stays. Raises `BuildError`."""
    # Without git the import of GitPython is what fails.
    if shutil.which("git") is None:
        raise BuildError("there is no git here", "install it, or give the released archive with --source FILE")
    import git

    name = hashlib.sha256(f"{given.url}@{given.tag}".encode()).hexdigest()[:10]
    target, part = out / f"git-{name}", out / f"git-{name}.part"
    if not target.is_dir():
        shutil.rmtree(part, ignore_errors=True)
        try:
            made = git.Repo.clone_from(str(given.url), part, branch=given.tag, depth=1)
            if (part / ".gitmodules").is_file():
                made.git.submodule("update", "--init", "--depth", "1", "csrc/cutlass")
        except git.GitCommandError as error:
            raise BuildError(
                f"{given.url}@{given.tag} could not be fetched: {reason(str(error.stderr))}",
                "without a network: fetch it elsewhere, and give the folder with --source DIR",
            ) from None
        part.replace(target)
    return target


def reason(stderr: str) -> str:
    """What git says is wrong, as GitPython hands it on."""
    said = [line.strip(" '") for line in stderr.replace("stderr: ", "").splitlines() if line.strip(" '")]
    return next((line for line in said if line.startswith(("fatal", "error"))), said[-1] if said else "git gave no reason")


def commit(checkout: Path) -> str:
    """The commit that is checked out."""
    return process.run(["git", "-C", str(checkout), "rev-parse", "HEAD"]).check("git").stdout.strip()


def requirement(release: Release) -> str:
    """What pip is asked for. With its hash: of a changed archive pip runs nothing."""
    return f"flash-attn=={release.version} --hash=sha256:{release.sha256}\n"


def fetch_command(python: str, wanted: Path, folder: Path) -> list[str]:
    """pip's command for the source archive, with the user's own index and proxy settings."""
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--disable-pip-version-check", "--require-hashes"]
    return [python, "-m", "pip", "download", *options, "--dest", str(folder), "--requirement", str(wanted)]


def fetch(release: Release, python: str, folder: Path) -> Path:
    """The release's archive in `folder`, downloaded unless it is there. Raises `BuildError` when it does not come."""
    archive = folder / f"flash_attn-{release.version}.tar.gz"
    if not archive.is_file():
        wanted = folder / "requirement.txt"
        with writing(folder):
            process.write(wanted, requirement(release))
        done = process.run(fetch_command(python, wanted, folder), timeout=FETCH_TIMEOUT, env=FETCH_ENV)
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise BuildError(
                f"what was downloaded is not flash-attn {release.version} as it was released: it has another sha256",
                "the download was cut off or changed: run it again; should it stay so, look at pip's index and its cache",
            )
        if done.returncode or not archive.is_file():
            errors = IMPORTS.findall(done.stderr)
            raise BuildError(
                f"flash-attn {release.version} could not be fetched: {errors[0].strip() if errors else 'pip gave no reason'}",
                "without a network: download the source archive elsewhere and give it with --source FILE",
            )
    return archive


def digest(given: Path) -> str:
    """The sha256 of what a folder compiles and imports."""
    found = hashlib.sha256()
    roots = [given / "csrc/flash_attn", given / "flash_attn"]
    for path in [path for root in roots for path in sorted(root.rglob("*")) if path.is_file()]:
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
    with writing(target):
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
    with writing(target):
        shutil.copytree(source, part, ignore=shutil.ignore_patterns(".git", "build", "dist", "*.egg-info"))
        part.replace(target)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """A block that writes under `target`: what goes wrong there is a `DiskError`."""
    try:
        yield
    except (OSError, shutil.Error) as error:
        code = getattr(error, "errno", None)
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"the disk is full: cannot write {target}", "free some space, or choose another --out folder"
            ) from error
        raise DiskError(f"cannot write {target}: {error}", "choose another --out folder") from error


def version(folder: Path) -> str:
    """The release that a folder holds. Raises `BuildError` when it is not flash-attn's source."""
    try:
        text = (folder / "flash_attn" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        raise BuildError(f"{folder} is not the source of flash-attn", "give the folder that holds its setup.py") from None
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return match[1] if match else "unknown"


def check_tree(folder: Path, release: Release) -> None:
    """Raise `BuildError` unless a folder holds this release's source, all its units and cutlass."""
    found = version(folder)
    if found != release.version:
        raise BuildError(f"{folder} is flash-attn {found}, not {release.version}", f"build that one: --version {found}")
    needed = ["csrc/flash_attn/flash_api.cpp", "csrc/cutlass/include/cutlass/cutlass.h", *(u.file for u in units(release.heads))]
    absent = [name for name in needed if not (folder / name).is_file()]
    if absent:
        raise BuildError(
            f"{folder} lacks {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""),
            "use the released source archive",
        )


def place(release: Release, given: Given, python: str, out: Path, folder: Path) -> Path:
    """The source tree in `folder`, from what was given; what is fetched for it stays in `out`. Raises `BuildError`, `DiskError`."""
    target = folder / f"flash_attn-{release.version}"
    if not target.is_dir():
        tree = clone(given, out) if given.url else given.path
        if tree is not None and tree.is_dir():
            check_tree(tree, release)
            copy(tree, target)
        else:
            archive = tree or fetch(release, python, out)
            check(archive, release)
            unpack(archive, target)
    check_tree(target, release)
    return target
