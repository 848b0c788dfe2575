"""What `fenno patch` does: list, check, apply, status, revert, verify, each for one package in one site-packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fenno.errors import PatchError
from fenno.patches import transaction
from fenno.patches.installed import Installed, sha256
from fenno.patches.series import Patch, folders, packages, read, results, series


def shipped() -> Path:
    """Where the patches lie that ship with fenno: inside the wheel, or at the top of a source checkout."""
    packaged = Path(str(resources.files("fenno"))) / "data" / "patches"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "patches"


def roots(*more: str | Path | None) -> tuple[Path, ...]:
    """The folders of patches: fenno's own, then those that are given. Raises `PatchError` for one that is not there."""
    given = [Path(each).expanduser() for each in more if each]
    missing = next((each for each in given if not each.is_dir()), None)
    if missing:
        raise PatchError(f"there is no folder of patches {missing}", "it holds <package>/<specifier>/NNN-name.patch")
    return (shipped(), *given)


def check(installed: Installed, where: Sequence[Path]) -> dict[str, Any]:
    """What `apply` would do, without doing it. Raises the `PatchError` that `apply` would raise."""
    if transaction.state(installed).next is not None:
        raise PatchError(
            f"a command on {installed.name} was interrupted between two files", "`fenno patch apply` or `revert` mends that"
        )
    patches = series(installed, where)
    contents = results(installed, patches, lambda path: transaction.original(installed, path))
    would = sorted(path for path in contents if transaction.now(installed, path) != sha256(contents[path]))
    return {**status(installed, where), "would_change": would}


def apply(installed: Installed, where: Sequence[Path]) -> dict[str, Any]:
    """Have the series in the package, from the files as installed. Raises `PatchError`; then nothing has changed."""
    with transaction.locked(installed):
        transaction.finish(installed)
        patches = series(installed, where)
        contents = results(installed, patches, lambda path: transaction.original(installed, path))
        changed = transaction.put(installed, tuple(patch.name for patch in patches), contents)
    return {**status(installed, where), "changed": changed}


def revert(installed: Installed) -> dict[str, Any]:
    """Every file of the package as its wheel had it. Raises `PatchError` for a file that somebody else changed."""
    with transaction.locked(installed):
        finished = transaction.finish(installed)
        changed = transaction.put(installed, (), {})
    return {**status(installed, ()), "changed": changed or finished}


def status(installed: Installed, where: Sequence[Path]) -> dict[str, Any]:
    """How each file is that the series or an earlier command touches, and what it comes to. Changes nothing."""
    applied = transaction.state(installed)
    patches = series(installed, where) if where else ()
    wanted = {path: after for patch in patches for path, (_, after) in patch.digests.items()}
    files = {path: _file(installed, path, applied, wanted) for path in sorted({*wanted, *applied.paths()})}
    return {
        "package": installed.name,
        "version": str(installed.version),
        "site": str(installed.site),
        "state": _sum(files, applied, wanted),
        "patches": [patch.name for patch in patches],
        "applied": list(applied.patches),
        "files": files,
    }


def _file(installed: Installed, path: str, applied: transaction.State, wanted: dict[str, str]) -> str:
    """ "pristine", "patched" or "drifted"."""
    try:
        found = transaction.now(installed, path)
    except PatchError:
        return "drifted"
    coming = applied.next.files if applied.next else {}
    if found == installed.record[path]:
        return "pristine"
    return "patched" if found in (applied.files.get(path), wanted.get(path), coming.get(path)) else "drifted"


def _sum(files: dict[str, str], applied: transaction.State, wanted: dict[str, str]) -> str:
    """The package in one word: interrupted, drifted, pristine, patched, or outdated: not as the series is now."""
    if applied.next is not None:
        return "interrupted"
    if "drifted" in files.values():
        return "drifted"
    if "patched" not in files.values():
        return "pristine"
    return "patched" if "pristine" not in files.values() and applied.files == wanted else "outdated"


def verify(installed: Installed, where: Sequence[Path]) -> tuple[bool, dict[str, Any]]:
    """Whether the package is what the series makes of it, and all its other Python files are as installed."""
    found = status(installed, where)
    others = [path for path in installed.record if path.endswith(".py") and ".." not in path and path not in found["files"]]
    drifted = {path: "drifted" for path in others if _file(installed, path, transaction.State(""), {}) == "drifted"}
    right = found["state"] == ("patched" if found["patches"] else "pristine") and not drifted
    return right, {**found, "files": {**found["files"], **drifted}, "verified": right}


def known(where: Sequence[Path], names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Every patch there is for these packages, None for all, whatever version it is for."""
    return [
        _said(str(versions), read(path), source)
        for source in (False, True)
        for name in names or packages(where, source=source)
        for versions, place in folders(name, where, source=source)
        for path in sorted(place.glob("*.patch"))
    ]


def _said(versions: str, patch: Patch, source: bool) -> dict[str, Any]:
    return {
        "patch": patch.name,
        "package": patch.applies_to.name,
        "source": source,
        "versions": versions,
        "description": patch.description,
        "reason": patch.reason,
        "upstream": patch.upstream,
        "superseded_by": patch.superseded_by,
        "files": sorted(patch.digests),
    }
