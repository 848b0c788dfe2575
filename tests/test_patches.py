"""Patches in packages that are really there: wheels unpacked into folders of their own, with their RECORD, and source archives."""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from fenno.errors import PatchError
from fenno.patches import diff, series, transaction, work
from fenno.patches.installed import Installed, find, sha256

NAMES = [f"toy/part{number}.py" for number in range(5)]
OLD = {name: "".join(f"line_{line} = {line}\n" for line in range(30)).encode() + f"# {name}\n".encode() for name in NAMES}
NEW = {name: content.replace(b"line_3 = 3\n", b"line_3 = 33\n").replace(b"line_25 = 25\n", b"") for name, content in OLD.items()}


def install(site: Path, version: str = "1.2", files: dict[str, bytes] = OLD) -> Installed:
    """The package `toy` as an installer leaves it."""
    info = site / f"toy-{version}.dist-info"
    info.mkdir(parents=True)
    meta = {f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: toy\nVersion: {version}\n".encode()}
    rows = [f"{info.name}/RECORD,,"]
    for name, content in {**files, **meta}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={digest},{len(content)}")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    return find("toy", [str(site)])


def unified(name: str, old: bytes, new: bytes) -> str:
    lines = [text.decode().splitlines(keepends=True) for text in (old, new)]
    return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))


def write_patch(
    root: Path,
    old: dict[str, bytes] = OLD,
    new: dict[str, bytes] = NEW,
    *,
    name: str = "010-less.patch",
    versions: str = ">=1,<2",
    body: str | None = None,
    applies_to: str | None = None,
    source: bool = False,
) -> Path:
    """A patch file for the package `toy`."""
    changed = [each for each in old if new[each] != old[each]]
    digests = "".join(f"Sha256: {sha256(old[each])} {sha256(new[each])} {each}\n" for each in changed)
    head = f"Description: fewer lines\nReason: there is no flag\nUpstream: none, it is a toy\nSuperseded-By: nothing yet\n{digests}"
    head += f"Applies-To: {applies_to or 'toy' + versions}\n\n"
    path = root / "toy" / versions / ("source" if source else "") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + (body if body is not None else "".join(unified(each, old[each], new[each]) for each in changed)))
    return path


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, ...]:
    write_patch(tmp_path / "patches")
    return (tmp_path / "patches",)


def contents(site: Path) -> dict[str, bytes]:
    """Every file below a folder, compiled ones left out."""
    files = [path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in files}


def toy(site: Path) -> Installed:
    return find("toy", [str(site)])


def parts(site: Path) -> dict[str, bytes]:
    return {name: (site / name).read_bytes() for name in NAMES}


def test_applied_is_patched_and_reverted_is_every_byte_as_before(site: Path, roots: tuple[Path, ...]) -> None:
    before = contents(site)
    assert work.status(toy(site), roots)["state"] == "pristine"
    assert work.check(toy(site), roots)["would_change"] == NAMES
    assert contents(site) == before
    assert work.apply(toy(site), roots)["state"] == "patched"
    assert parts(site) == NEW
    assert work.verify(toy(site), roots)[0]
    assert work.revert(toy(site))["changed"]
    assert contents(site) == before


def test_applying_twice_changes_nothing_the_second_time(site: Path, roots: tuple[Path, ...]) -> None:
    work.apply(toy(site), roots)
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    assert work.apply(toy(site), roots)["changed"] is False
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*") if path != site} == {
        k: v for k, v in before.items() if k != site
    }


def test_a_second_patch_goes_on_where_the_first_one_ends(site: Path, tmp_path: Path) -> None:
    last = {**NEW, NAMES[0]: NEW[NAMES[0]].replace(b"line_7 = 7\n", b"line_7 = 77\n")}
    write_patch(tmp_path / "ours", NEW, last)
    write_patch(tmp_path / "patches")
    both = (tmp_path / "patches", tmp_path / "ours")
    work.apply(toy(site), both[:1])
    assert work.status(toy(site), both)["state"] == "outdated"
    work.apply(toy(site), both)
    assert parts(site) == last
    assert work.status(toy(site), both)["applied"] == ["010-less.patch", "010-less.patch"]
    # And a patch that was taken out of the series is taken out of the files.
    work.apply(toy(site), both[:1])
    assert parts(site) == NEW
    work.revert(toy(site))
    assert parts(site) == OLD


def test_a_file_that_somebody_edited_is_refused_and_named(site: Path, roots: tuple[Path, ...]) -> None:
    (site / NAMES[2]).write_bytes(OLD[NAMES[2]] + b"print()\n")
    before = contents(site)
    for attempt in (work.check, work.apply):
        with pytest.raises(PatchError, match="part2.py was changed by somebody else"):
            attempt(toy(site), roots)
    assert contents(site) == before
    assert work.status(toy(site), roots)["files"][NAMES[2]] == "drifted"
    assert not work.verify(toy(site), ())[0]


def test_a_file_edited_after_patching_is_drifted_and_revert_says_so(site: Path, roots: tuple[Path, ...]) -> None:
    work.apply(toy(site), roots)
    (site / NAMES[4]).write_bytes(b"")
    assert work.status(toy(site), roots)["state"] == "drifted"
    with pytest.raises(PatchError, match="part4.py was changed by somebody else"):
        work.revert(toy(site))


def test_a_package_installed_anew_is_pristine_and_patched_again(site: Path, roots: tuple[Path, ...]) -> None:
    work.apply(toy(site), roots)
    for name, content in OLD.items():
        (site / name).write_bytes(content)
    assert work.status(toy(site), roots)["state"] == "pristine"
    assert work.apply(toy(site), roots)["state"] == "patched"
    shutil.rmtree(site / "toy-1.2.dist-info")
    install(site, "1.3")
    assert work.status(toy(site), roots)["state"] == "pristine"
    assert work.apply(toy(site), roots)["state"] == "patched"
    work.revert(toy(site))
    assert parts(site) == OLD


def test_a_wrong_version_is_refused(tmp_path: Path, roots: tuple[Path, ...]) -> None:
    with pytest.raises(PatchError, match=r"are for <2,>=1, and this is 2.0"):
        work.apply(install(tmp_path / "site", "2.0"), roots)


def test_a_header_for_another_version_than_its_folder_is_refused(site: Path, tmp_path: Path) -> None:
    write_patch(tmp_path, applies_to="toy>=1.1,<1.2")
    with pytest.raises(PatchError, match="applies to toy<1.2,>=1.1, and this is toy 1.2"):
        work.apply(toy(site), (tmp_path,))


def test_a_patch_made_for_other_content_of_the_same_version_is_refused(site: Path, tmp_path: Path) -> None:
    other = {name: content + b"# other\n" for name, content in OLD.items()}
    write_patch(tmp_path, other, {name: content + b"# more\n" for name, content in other.items()})
    with pytest.raises(PatchError, match="was made for another toy/part0.py than toy 1.2 has"):
        work.apply(toy(site), (tmp_path,))


def test_a_result_that_the_header_does_not_promise_is_refused(site: Path, tmp_path: Path) -> None:
    body = "".join(unified(name, OLD[name], OLD[name] + b"# not this\n") for name in NAMES)
    write_patch(tmp_path, body=body)
    before = contents(site)
    with pytest.raises(PatchError, match="something else than its header says"):
        work.apply(toy(site), (tmp_path,))
    assert contents(site) == before


def test_an_editable_install_is_refused(site: Path, roots: tuple[Path, ...]) -> None:
    (site / "toy-1.2.dist-info/direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    with pytest.raises(PatchError, match="editable install"):
        toy(site)


def test_a_package_without_a_record_is_refused(site: Path) -> None:
    (site / "toy-1.2.dist-info/RECORD").unlink()
    with pytest.raises(PatchError, match="no RECORD"):
        toy(site)


def test_a_package_that_is_not_there_is_one_sentence(site: Path) -> None:
    with pytest.raises(PatchError, match="absent is not installed there"):
        find("absent", [str(site)])


def test_inside_another_git_repository_a_patch_is_not_skipped(tmp_path: Path, roots: tuple[Path, ...]) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "repository"], check=True)
    site = tmp_path / "repository/venv/site"
    install(site)
    assert work.apply(toy(site), roots)["state"] == "patched"
    assert parts(site) == NEW


def test_a_cache_that_is_hard_linked_keeps_the_original(tmp_path: Path, site: Path, roots: tuple[Path, ...]) -> None:
    for name in NAMES:
        os.link(site / name, tmp_path / Path(name).name)
    work.apply(toy(site), roots)
    work.revert(toy(site))
    work.apply(toy(site), roots)
    assert {name: (tmp_path / Path(name).name).read_bytes() for name in NAMES} == OLD


def test_mode_bits_survive(site: Path, roots: tuple[Path, ...]) -> None:
    (site / NAMES[0]).chmod(0o755)
    (site / NAMES[1]).chmod(0o640)
    work.apply(toy(site), roots)
    work.revert(toy(site))
    assert [(site / name).stat().st_mode & 0o777 for name in NAMES[:2]] == [0o755, 0o640]


def test_stale_bytecode_is_removed(site: Path, roots: tuple[Path, ...]) -> None:
    cache = site / "toy/__pycache__"
    cache.mkdir()
    stale = [cache / f"part0.cpython-{tag}.pyc" for tag in ("310", "311", "311.opt-1")]
    for path in [*stale, cache / "part00.cpython-311.pyc"]:
        path.touch()
    work.apply(toy(site), roots)
    assert list(cache.iterdir()) == [cache / "part00.cpython-311.pyc"]


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../outside.py",
        "toy/../../outside.py",
        "toy-1.2.dist-info/RECORD",
        "toy/new.py",
        "toy//part0.py",
        "./toy/part0.py",
    ],
)
def test_only_files_of_the_wheel_are_ever_written(path: str, site: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_bytes(OLD[NAMES[0]])
    write_patch(tmp_path / "bad", {path: OLD[NAMES[0]]}, {path: NEW[NAMES[0]]})
    with pytest.raises(PatchError, match="is not a file of toy 1.2|no plain file"):
        work.apply(toy(site), (tmp_path / "bad",))
    assert (tmp_path / "outside.py").read_bytes() == OLD[NAMES[0]]


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_out_of_the_package_is_not_followed(folder: bool, site: Path, tmp_path: Path, roots: tuple[Path, ...]) -> None:
    linked = site / ("toy" if folder else NAMES[1])
    elsewhere = linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(elsewhere)
    with pytest.raises(PatchError, match="is a symbolic link"):
        work.apply(toy(site), roots)
    assert elsewhere.is_dir() if folder else elsewhere.read_bytes() == OLD[NAMES[1]]
    assert not list(site.glob(".fenno*"))


def test_two_processes_at_once_end_with_one_result(site: Path, roots: tuple[Path, ...]) -> None:
    children = [forked(lambda: work.apply(toy(site), roots)) for _ in range(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert work.status(toy(site), roots)["state"] == "patched"
    assert parts(site) == NEW


def test_a_lock_that_is_held_is_waited_for_and_then_named(site: Path) -> None:
    with transaction.locked(toy(site)):
        child = forked(lambda: transaction.locked(toy(site), patience=0.1).__enter__())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert not list(site.glob(".fenno*"))


def forked(work: Callable[[], object]) -> int:
    """The pid of a child that does `work` and exits with 0, or 3 for a `PatchError`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except PatchError:
        code = 3
    finally:
        os._exit(code)


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child that gets SIGKILL at its `step`th line in fenno or pathlib. False when it ended before that."""
    left = step

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def traced() -> None:
        sys.settrace(trace)
        work()

    return os.waitstatus_to_exitcode(os.waitpid(forked(traced), 0)[1]) == -signal.SIGKILL


def steps(work: Callable[[], object]) -> int:
    """How many lines `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def check_kills(tmp_path: Path, roots: tuple[Path, ...], points: int, seed: int) -> None:
    """SIGKILL at random points of apply and revert: a half state is named, and the next command ends it."""
    draw = random.Random(seed)
    site = tmp_path / "site"
    original = contents(site)
    length = steps(lambda: work.apply(toy(site), roots)), steps(lambda: work.revert(toy(site)))
    halves = killed = 0
    for point in range(points):
        reverting = point % 2 == 1
        if reverting:
            work.apply(toy(site), roots)
        step = draw.randrange(1, length[reverting])
        # How many lines a run has varies a little: one that was over before its kill is a whole state as well.
        killed += killed_at(step, lambda: work.revert(toy(site)) if reverting else work.apply(toy(site), roots))  # noqa: B023
        now = work.status(toy(site), roots)
        mixed = parts(site) not in (OLD, NEW)
        halves += mixed
        assert now["state"] in (("interrupted",) if mixed else ("interrupted", "pristine", "patched")), step
        assert set(now["files"].values()) <= {"pristine", "patched"}, step
        # The next command ends it, whichever it is.
        if draw.random() < 0.5:
            work.apply(toy(site), roots)
            assert parts(site) == NEW, step
            assert work.status(toy(site), roots)["state"] == "patched"
        work.revert(toy(site))
        assert contents(site) == original, step
    assert halves or points < 50
    assert killed >= 0.9 * points


def test_killed_anywhere_it_ends_whole_at_the_next_command(site: Path, roots: tuple[Path, ...], tmp_path: Path) -> None:
    check_kills(tmp_path, roots, points=16, seed=1)


@pytest.mark.scenario
def test_killed_at_a_hundred_points_it_ends_whole_at_the_next_command(site: Path, roots: tuple[Path, ...], tmp_path: Path) -> None:
    check_kills(tmp_path, roots, points=100, seed=2)


def test_between_two_files_status_says_interrupted_and_check_refuses(site: Path, roots: tuple[Path, ...]) -> None:
    done = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal done
        done += event == "call" and frame.f_code.co_name == "_remove_bytecode"
        if done == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return None

    def traced() -> None:
        sys.settrace(trace)
        work.apply(toy(site), roots)

    os.waitpid(forked(traced), 0)
    found = work.status(toy(site), roots)
    assert found["state"] == "interrupted"
    assert sorted(found["files"].values()) == ["patched"] * 3 + ["pristine"] * 2
    with pytest.raises(PatchError, match="interrupted between two files"):
        work.check(toy(site), roots)
    work.revert(toy(site))
    assert parts(site) == OLD


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own; skipped where none may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("room", [0, 4096, 12288, 24576, 40960])
def test_on_a_full_disk_nothing_changes(small: Path, roots: tuple[Path, ...], room: int) -> None:
    site = small / "site"
    install(site)
    before = contents(site)
    free = os.statvfs(small)
    (small / "filler").write_bytes(b"x" * (free.f_bavail * free.f_bsize - room))
    with pytest.raises(PatchError, match="No space left on device; toy is as it was"):
        work.apply(toy(site), roots)
    assert contents(site) == before
    (small / "filler").unlink()
    assert work.apply(toy(site), roots)["state"] == "patched"
    (small / "filler").write_bytes(b"x" * (os.statvfs(small).f_bavail * free.f_bsize))
    with pytest.raises(PatchError, match="No space left on device"):
        work.revert(toy(site))
    assert work.status(toy(site), roots)["state"] == "patched"
    (small / "filler").unlink()
    work.revert(toy(site))
    assert contents(site) == before


def test_a_read_only_place_is_one_sentence(small: Path, roots: tuple[Path, ...]) -> None:
    install(small / "site")
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with pytest.raises(PatchError, match="cannot write in .*: Read-only file system; toy is as it was"):
        work.apply(toy(small / "site"), roots)
    assert work.check(toy(small / "site"), roots)["would_change"] == NAMES


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "there is no diff in it"),
        ("--- a/toy/part0.py\n+++ b/toy/part0.py\n", "has no hunk"),
        ("--- a/toy/part0.py\n+++ b/toy/part1.py\n@@ -1 +1 @@\n-a\n+b\n", "not followed by the same path"),
        ("--- a/toy/part0.py\n+++ b/toy/part0.py\n@@ -1,2 +1 @@\n-a\n+b\n", "not have as many lines"),
        ("--- a/toy/part0.py\n+++ b/toy/part0.py\n@@ -x +1 @@\n-a\n+b\n", "no readable line numbers"),
        ("--- a/toy/part0.py\n+++ b/toy/part0.py\n@@ -1,2 +1,2 @@\n-a\n+b\n*c\n", "begins with none of"),
        ("--- /dev/null\n+++ b/toy/part0.py\n@@ -0,0 +1 @@\n+b\n", "not followed by the same path"),
        ("diff --git a/x b/x\nnew file mode 100644\n", "nothing else"),
        ("diff --git a/x b/x\nGIT binary patch\n", "nothing else"),
    ],
)
def test_a_malformed_diff_is_one_sentence(body: str, says: str) -> None:
    with pytest.raises(PatchError, match=says):
        diff.parse(body.encode(), "a patch")


SETUP = {"setup.py": b"flags = []\nprint(flags)\n"}
WITH_FLAGS = {"setup.py": b"flags = []\nflags = ['-arch']\nprint(flags)\n"}
INSERTED = "--- a/setup.py\n+++ b/setup.py\n@@ -1,0 +2 @@\n+flags = ['-arch']\n"


def unpack(folder: Path, version: str = "1.2") -> Path:
    """A source archive of `toy`, unpacked."""
    folder.mkdir()
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: Toy\nVersion: {version}\n\nName: not this\n")
    (folder / "setup.py").write_bytes(SETUP["setup.py"])
    return folder


@pytest.fixture
def for_source(tmp_path: Path) -> tuple[Path, ...]:
    write_patch(tmp_path / "patches", SETUP, WITH_FLAGS, body=INSERTED, source=True)
    return (tmp_path / "patches",)


def test_a_source_is_patched_before_it_is_built_and_reverted_is_every_byte_as_before(
    tmp_path: Path, for_source: tuple[Path, ...]
) -> None:
    folder = unpack(tmp_path / "toy-1.2")
    before = contents(folder)
    assert work.check(series.source(folder, for_source), for_source)["would_change"] == ["setup.py"]
    assert work.apply(series.source(folder, for_source), for_source)["state"] == "patched"
    assert (folder / "setup.py").read_bytes() == WITH_FLAGS["setup.py"]
    assert work.apply(series.source(folder, for_source), for_source)["changed"] is False
    assert work.verify(series.source(folder, for_source), for_source)[0]
    assert work.revert(series.source(folder, for_source))["changed"]
    assert contents(folder) == before


def test_a_file_of_a_source_is_pristine_as_the_first_of_its_patches_finds_it(tmp_path: Path, for_source: tuple[Path, ...]) -> None:
    last = {"setup.py": WITH_FLAGS["setup.py"] + b"print()\n"}
    write_patch(for_source[0], WITH_FLAGS, last, name="020-more.patch", source=True)
    folder = unpack(tmp_path / "toy-1.2")
    work.apply(series.source(folder, for_source), for_source)
    assert (folder / "setup.py").read_bytes() == last["setup.py"]
    work.revert(series.source(folder, for_source))
    assert (folder / "setup.py").read_bytes() == SETUP["setup.py"]


def test_patches_of_a_source_are_not_those_of_what_is_installed(site: Path, tmp_path: Path, for_source: tuple[Path, ...]) -> None:
    assert series.packages(for_source) == []
    assert work.apply(toy(site), for_source)["files"] == {}
    write_patch(for_source[0])
    assert sorted(work.check(toy(site), for_source)["files"]) == NAMES
    assert list(series.source(unpack(tmp_path / "toy-1.2"), for_source).record) == ["setup.py"]
    assert [(each["source"], each["files"]) for each in work.known(for_source, None)] == [(False, NAMES), (True, ["setup.py"])]


def test_a_source_that_is_another_one_is_refused(tmp_path: Path, for_source: tuple[Path, ...]) -> None:
    with pytest.raises(PatchError, match="is no unpacked source archive"):
        series.source(tmp_path, for_source)
    with pytest.raises(PatchError, match="there are no patches for the source of toy"):
        series.source(unpack(tmp_path / "a"), ())
    with pytest.raises(PatchError, match=r"are for <2,>=1, and this is 2\.0"):
        series.source(unpack(tmp_path / "b", "2.0"), for_source)
    folder = unpack(tmp_path / "c")
    (folder / "setup.py").write_bytes(b"print()\n")
    with pytest.raises(PatchError, match="setup.py was changed by somebody else") as caught:
        work.apply(series.source(folder, for_source), for_source)
    assert caught.value.hint == "unpack its source archive again"


def test_every_patch_that_ships_fits_its_folder_and_quotes_no_line_of_upstreams() -> None:
    found = sorted(work.shipped().rglob("*.patch"))
    assert found
    for path in found:
        patch, above = series.read(path), path.parent.parent if path.parent.name == "source" else path.parent
        assert (patch.applies_to.name, patch.applies_to.specifier) == (above.parent.name, SpecifierSet(above.name))
        assert not [hunk for change in patch.changes for hunk in change.hunks if hunk.old]
    assert len(work.known((work.shipped(),), None)) == len(found), "one lies where no command finds it"


TEXT = st.lists(st.sampled_from(["a", "b", "", "\r", "é", " x", "-y", "+z"]), max_size=12).map("\n".join)


@pytest.mark.scenario
@settings(max_examples=150)
@given(old=TEXT, new=TEXT, context=st.integers(0, 4))
def test_what_git_makes_of_two_files_turns_one_into_the_other(old: str, new: str, context: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "git"
    for side, text in (("a", old), ("b", new)):
        (folder / side).mkdir(parents=True, exist_ok=True)
        (folder / side / "f").write_bytes(text.encode())
    command = ["git", "diff", "--no-index", f"-U{context}", "--no-prefix", "--text", "a/f", "b/f"]
    made = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout
    if made:
        (change,) = diff.parse(made, "git's")
        assert diff.apply(old.encode(), change, "git's") == new.encode()


def fuzzed(seed: bytes) -> st.SearchStrategy[bytes]:
    """A patch file with pieces cut out, doubled, or put in its place, or anything at all."""
    piece = st.sampled_from(
        [b"../", b"/", b"\0", b"\n", b"\n\n", b"@@", b"--- a/", b"+++ b/", b"toy/part0.py", b"../../x", b"-", b"\xff"]
    )

    def edit(edits: list[tuple[int, int, bytes]]) -> bytes:
        content = seed
        for at, length, put in edits:
            begin = at % (len(content) + 1)
            content = content[:begin] + put + content[begin + length :]
        return content

    edits = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 40), piece | st.binary(max_size=8)), min_size=1, max_size=6)
    return edits.map(edit) | st.binary(max_size=300)


def check_fuzz(tmp_path: Path, examples: int) -> None:
    site = tmp_path / "box" / "site"
    package = install(site)
    path = write_patch(tmp_path / "patches")
    before = contents(tmp_path / "box")

    @settings(max_examples=examples, database=None)
    @given(content=fuzzed(path.read_bytes()))
    def fuzz(content: bytes) -> None:
        path.write_bytes(content)
        try:
            work.apply(package, (tmp_path / "patches",))
        except PatchError as error:
            assert str(error)
        else:
            assert parts(site) == NEW
            work.revert(package)
        assert contents(tmp_path / "box") == before

    fuzz()


def test_a_patch_file_that_is_rubbish_never_writes_outside_and_never_ends_in_a_traceback(tmp_path: Path) -> None:
    check_fuzz(tmp_path, examples=300)


@pytest.mark.scenario
@pytest.mark.timeout(300)
def test_ten_thousand_patch_files_that_are_rubbish(tmp_path: Path) -> None:
    check_fuzz(tmp_path, examples=10_000)


def fenno(*words: object) -> tuple[int, dict[str, Any], str]:
    """A command's exit code, its document and what it says."""
    command = [sys.executable, "-m", "fenno", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr


@pytest.mark.scenario
def test_a_team_carries_its_patches_in_a_recipe(tmp_path: Path, roots: tuple[Path, ...]) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    install(site)
    recipe = tmp_path / "team.yaml"
    recipe.write_text(f"name: team\nengine:\n  model: m\n  python: {venv}/bin/python\n  patches: {roots[0]}\n")
    before = contents(site)
    near = ["--python", os.path.relpath(venv / "bin" / "python", Path(__file__).parents[1]), "--folder", roots[0]]
    code, document, told = fenno("patch", "status", "toy", *near)
    assert (code, document["packages"][0]["state"]) == (0, "pristine"), told
    for verb, state in (("apply", "patched"), ("revert", "pristine")):
        code, document, told = fenno("patch", verb, "--recipe", recipe)
        assert (code, document["packages"][0]["state"]) == (0, state), told
        assert parts(site) == (NEW if verb == "apply" else OLD)
    assert contents(site) == before


@pytest.mark.scenario
def test_the_commands_take_a_source(tmp_path: Path, for_source: tuple[Path, ...]) -> None:
    folder = unpack(tmp_path / "toy-1.2")
    states = []
    for verb in ("check", "apply", "status", "verify", "revert"):
        code, document, told = fenno("patch", verb, "--source", folder, "--folder", for_source[0])
        assert code == 0, told
        states.append(document["packages"][0]["state"])
    assert states == ["pristine", "patched", "patched", "patched", "pristine"]
    assert (folder / "setup.py").read_bytes() == SETUP["setup.py"]
    code, _, told = fenno("patch", "apply", "toy", "--source", folder, "--folder", for_source[0])
    assert code == 2
    assert "--source is one package by itself" in told


@pytest.mark.scenario
def test_the_commands_and_their_exit_codes(site: Path, roots: tuple[Path, ...]) -> None:
    where = ("toy", "--site", site, "--folder", roots[0])
    code, document, told = fenno("patch", "list", "--folder", roots[0])
    assert (code, [each["patch"] for each in document["patches"] if each["package"] == "toy"]) == (0, ["010-less.patch"])
    assert "there is no flag" in told
    states = []
    for verb in ("check", "apply", "status", "verify", "revert", "status"):
        code, document, told = fenno("patch", verb, *where)
        assert code == 0, told
        states.append(document["packages"][0]["state"])
    assert states == ["pristine", "patched", "patched", "patched", "pristine", "pristine"]
    assert fenno("patch", "verify", *where)[0] == 1
    (site / NAMES[0]).write_bytes(b"")
    assert fenno("patch", "status", *where)[0] == 1
    code, _, told = fenno("patch", "apply", *where, "--json")
    assert code == 6
    assert "part0.py was changed by somebody else" in told
