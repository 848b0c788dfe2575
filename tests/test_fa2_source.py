"""Where the source of FlashAttention-2 comes from: an index, an archive, a folder, a git tag; and what can be wrong with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from fa2_made import RELEASE, archive, stand_in, tree

from fenno.errors import BuildError, UsageError
from fenno.fa2 import source
from fenno.fa2.source import Given


def place(release, given: Given, folder: Path, python: str = sys.executable) -> Path:  # type: ignore[no-untyped-def]
    return source.place(release, given, python, folder, folder / "build")


def test_an_archive_is_checked_unpacked_and_taken_for_what_it_is(tmp_path: Path) -> None:
    known = archive(tree(tmp_path / "made"), tmp_path / "a.tar.gz")
    placed = place(known, Given(tmp_path / "a.tar.gz"), tmp_path)
    assert placed == tmp_path / "build" / f"flash_attn-{RELEASE.version}"
    assert sorted(path.name for path in (tmp_path / "build").iterdir()) == [placed.name]
    # A second time it is there, and nothing is fetched or checked again.
    assert place(RELEASE, Given(tmp_path / "gone"), tmp_path) == placed


def test_a_corrupted_archive_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    known = archive(tree(tmp_path / "made"), tmp_path / "a.tar.gz")
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[:-20])
    with pytest.raises(BuildError, match="is not flash-attn 2.8.3.post2 as it was released"):
        place(known, Given(tmp_path / "a.tar.gz"), tmp_path)
    assert not (tmp_path / "build").exists()


def test_a_broken_archive_leaves_no_half_unpacked_source(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"not an archive")
    with pytest.raises(tarfile.TarError):
        source.unpack(tmp_path / "a.tar.gz", tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": "2.8.1"}, "is flash-attn 2.8.1, not 2.8.3.post2"),
        ({"without": "csrc/flash_attn/flash_api.cpp"}, "lacks csrc/flash_attn/flash_api.cpp"),
    ],
)
def test_a_folder_that_is_not_the_release_is_refused(options: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=re.escape(says)):
        place(RELEASE, Given(tree(tmp_path / "made", **options)), tmp_path)
    with pytest.raises(BuildError, match="is not the source of flash-attn"):
        place(RELEASE, Given(tmp_path), tmp_path)


def test_without_a_network_one_sentence_says_so(tmp_path: Path) -> None:
    python = stand_in(
        tmp_path / "python", "echo 'ERROR: Could not find a version: NewConnectionError: no route to host' >&2; exit 1"
    )
    with pytest.raises(BuildError, match="could not be fetched: .*NewConnectionError") as caught:
        source.fetch(RELEASE, python, tmp_path)
    assert "--source FILE" in caught.value.hint


def test_the_fetch_builds_nothing_takes_no_wheel_and_names_the_hash(tmp_path: Path) -> None:
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--disable-pip-version-check", "--require-hashes"]
    wanted = ["py", "-m", "pip", "download", *options, "--dest", str(tmp_path), "--requirement", "r.txt"]
    assert source.fetch_command("py", Path("r.txt"), tmp_path) == wanted
    assert source.requirement(RELEASE) == f"flash-attn==2.8.3.post2 --hash=sha256:{RELEASE.sha256}\n"
    assert source.FETCH_ENV == {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}


@pytest.mark.installs
def test_of_a_corrupted_download_nothing_is_run_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, index = tree(tmp_path / "made"), tmp_path / "index"
    (folder / "setup.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')")
    index.mkdir()
    archive(folder, index / f"flash_attn-{RELEASE.version}.tar.gz")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_EXTRA_INDEX_URL": ""}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match="is not flash-attn 2.8.3.post2 as it was released: it has another sha256"):
        source.fetch(RELEASE, sys.executable, tmp_path / "out")
    assert not (tmp_path / "was run").exists()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["requirement.txt"]


@pytest.mark.parametrize(
    ("path", "git", "says"),
    [
        ("/nowhere/x", None, "there is no /nowhere/x"),
        ("/", "u@v1", "--source and --git name two sources"),
        (None, "https://host/flash-attention", "there is no tag in it"),
        (None, "git@host:group/flash-attention", "there is no tag in it"),
        (None, "https://host/flash-attention@", "there is no tag in it"),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused(path: str | None, git: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        source.given(path and Path(path), git)  # type: ignore[arg-type]


def test_what_is_given_names_its_release(tmp_path: Path) -> None:
    assert source.given(None, "git@host:group/flash-attention@v2.8.3") == Given(url="git@host:group/flash-attention", tag="v2.8.3")
    assert Given(url="u", tag="v2.8.3").release == "2.8.3"
    assert Given(url="u", tag="main").release is None
    assert Given(tmp_path / "flash_attn-2.7.4.post1.tar.gz").release == "2.7.4.post1"
    assert Given(tree(tmp_path / "made", version="2.8.3")).release == "2.8.3"
    assert Given().release is None


def test_without_git_a_tag_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="there is no git here") as raised:
        source.clone(Given(url="https://host/x", tag="v2.8.3"), tmp_path)
    assert "--source" in raised.value.hint


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def committed(folder: Path, *steps: list[str]) -> Path:
    """A git repository of all that lies in a folder, after further steps."""
    person = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "protocol.file.allow=always"]
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], *steps):
        subprocess.run(["git", *person, *step], cwd=folder, check=True, capture_output=True)
    return folder


@needs_git
def test_a_git_tag_comes_with_cutlass_and_its_commit_and_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, value) in enumerate((("protocol.file.allow", "always"), ("advice.detachedHead", "false"))):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    cutlass = tmp_path / "cutlass"
    (cutlass / "include/cutlass").mkdir(parents=True)
    (cutlass / "include/cutlass/cutlass.h").write_text("")
    made = tree(tmp_path / "made")
    shutil.rmtree(made / "csrc/cutlass")
    add = ["submodule", "add", "-q", str(committed(cutlass)), "csrc/cutlass"]
    committed(made, add, ["commit", "-qm", "y"], ["tag", f"v{RELEASE.version}"])
    given = Given(url=str(made), tag=f"v{RELEASE.version}")
    (tmp_path / "out").mkdir()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=made, check=True, capture_output=True, text=True).stdout.strip()
    assert source.origin(RELEASE, given, tmp_path / "out") == f"{made}@v{RELEASE.version}, commit {head}"
    shutil.rmtree(made)
    placed = place(RELEASE, given, tmp_path / "out")
    assert (placed / "csrc/cutlass/include/cutlass/cutlass.h").is_file()
    assert not (placed / ".git").exists()


@needs_git
def test_a_git_source_that_does_not_come_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match=r"made@v9 could not be fetched: fatal: .*v9") as caught:
        source.clone(Given(url=str(committed(tree(tmp_path / "made"))), tag="v9"), tmp_path / "out")
    assert "--source DIR" in caught.value.hint
    with pytest.raises(BuildError, match="nowhere@v9 could not be fetched: fatal: "):
        source.clone(Given(url=str(tmp_path / "nowhere"), tag="v9"), tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if not path.name.endswith(".part")]


def test_a_full_disk_is_named_and_nothing_half_unpacked_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    known = archive(tree(tmp_path / "made"), tmp_path / "a.tar.gz")
    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(source.DiskError, match="the disk is full: cannot write"):
        place(known, Given(tmp_path / "a.tar.gz"), tmp_path)
    assert not (tmp_path / "build" / f"flash_attn-{RELEASE.version}").exists()
    assert [path.name for path in (tmp_path / "build").iterdir()] == [f"flash_attn-{RELEASE.version}.part"]
