"""From a plan to a wheel, as far as that goes without a GPU: the source, the stubs, the commands, and what can be missing."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_fa2 import GROK_2, LLAMA_3_70B, planned

from fenno.errors import BuildError, DiskError, FennoError
from fenno.fa2 import build, source, stubs
from fenno.fa2.build import Toolchain
from fenno.fa2.lattice import Unit, units
from fenno.fa2.plan import CXX_FLAGS, NVCC_FLAGS
from fenno.fa2.releases import RELEASES, Release

WHOLE = Toolchain("cp312", "2.11.0+cu130", "13.0", True, "/usr/local/cuda", "13.0", "/usr/bin/g++", [])
RELEASE = RELEASES["2.8.3.post2"]
# An unpacked source archive of that release, for the tests that compile it.
SOURCE = Path(os.environ.get("FLASH_ATTN_SOURCE", "/nowhere"))
needs_source = pytest.mark.skipif(not (SOURCE / "setup.py").is_file(), reason="FLASH_ATTN_SOURCE names no source of flash-attn")


def tree(folder: Path, version: str = RELEASE.version, without: str = "") -> Path:
    """A folder with the files that a release has, empty."""
    names = [
        "csrc/flash_attn/flash_api.cpp",
        "csrc/cutlass/include/cutlass/cutlass.h",
        *(unit.file for unit in units(RELEASE.heads)),
    ]
    for name in names:
        if name != without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("")
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return folder


def archive(folder: Path, packed: Path) -> Release:
    """A release whose archive is `packed`, made of `folder`."""
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, "flash_attn-x")
    return dataclasses.replace(RELEASE, sha256=hashlib.sha256(packed.read_bytes()).hexdigest())


def test_an_archive_is_checked_unpacked_and_taken_for_what_it_is(tmp_path: Path) -> None:
    known = archive(tree(tmp_path / "made"), tmp_path / "a.tar.gz")
    placed = source.place(known, tmp_path / "a.tar.gz", sys.executable, tmp_path / "work")
    assert placed == tmp_path / "work" / f"flash_attn-{RELEASE.version}"
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [placed.name]
    # A second time it is there, and nothing is fetched or checked again.
    assert source.place(RELEASE, tmp_path / "gone", sys.executable, tmp_path / "work") == placed


def test_a_corrupted_archive_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    known = archive(tree(tmp_path / "made"), tmp_path / "a.tar.gz")
    whole = (tmp_path / "a.tar.gz").read_bytes()
    (tmp_path / "a.tar.gz").write_bytes(whole[:-20])
    with pytest.raises(BuildError, match="is not flash-attn 2.8.3.post2 as it was released"):
        source.place(known, tmp_path / "a.tar.gz", sys.executable, tmp_path / "work")
    assert not (tmp_path / "work").exists()


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
        source.place(RELEASE, tree(tmp_path / "made", **options), sys.executable, tmp_path / "work")
    with pytest.raises(BuildError, match="is not the source of flash-attn"):
        source.place(RELEASE, tmp_path, sys.executable, tmp_path / "work")


needs_compiler = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="there is no g++ or no nm here")


def stand_in(path: Path, text: str) -> str:
    """A program that does what `text` says."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_without_a_network_one_sentence_says_so(tmp_path: Path) -> None:
    python = stand_in(
        tmp_path / "python", "echo 'ERROR: Could not find a version: NewConnectionError: no route to host' >&2; exit 1"
    )
    with pytest.raises(BuildError, match="could not be fetched: .*NewConnectionError") as caught:
        source.fetch(RELEASE, python, tmp_path)
    assert "--source FILE" in caught.value.hint


def test_the_fetch_builds_nothing_and_takes_no_wheel(tmp_path: Path) -> None:
    assert source.fetch_command(RELEASE, "py", tmp_path) == [
        *[
            "py",
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
            "--disable-pip-version-check",
        ],
        *["--dest", str(tmp_path), "flash-attn==2.8.3.post2"],
    ]
    assert source.FETCH_ENV == {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}


def test_every_function_of_the_release_is_compiled_or_raises() -> None:
    made = planned(GROK_2)
    text = stubs.text(made)
    defined = re.findall(r"^template<> void (run_mha_\w+<[^>]+>)", text, re.MULTILINE)
    assert len(defined) == len(set(defined)) == made.stock_units - len(made.units) == 68
    assert not [name for name in defined if name.startswith("run_mha_fwd") and "bfloat16_t, 128," in name]
    assert text.count("lacks the backward pass") == 24


def test_a_stub_says_what_is_missing_and_how_to_build_it() -> None:
    made = planned(LLAMA_3_70B)
    found = Unit("fwd", 64, "fp16", True)
    assert found in stubs.missing(made)
    assert stubs.sentence(made, found) == (
        "flash_attn 2.8.3.post2+fenno.bf16.hd128.sm80 has head sizes 128 in bf16 and lacks the forward pass of head size 64 in "
        "fp16, causal; build it with: fenno build-fa2 --model DIR --dtype float16, DIR being the folder of a model with that "
        "head size"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": None}, "there is no torch under PY"),
        ({"torch": "2.13.0+cpu", "torch_cuda": None}, "torch 2.13.0\\+cpu under PY is built for CPUs"),
        ({"nvcc": None}, "there is no CUDA compiler"),
        ({"nvcc": "12.4"}, "nvcc is of CUDA 12.4 and torch 2.11.0\\+cu130 of CUDA 13.0"),
        ({"nvcc": "12.4", "torch_cuda": "12.4"}, "nvcc 12.4 cannot compile for sm_120: that takes CUDA 12.8"),
        ({"compiler": None}, "there is no C\\+\\+ compiler"),
        ({"absent": ["ninja"]}, "ninja missing under PY"),
    ],
)
def test_what_stands_against_a_build_is_one_sentence(change: dict[str, Any], says: str) -> None:
    found = build.obstacle(dataclasses.replace(WHOLE, **change), "PY", ("80", "120"))
    assert found is not None
    assert re.search(says, str(found))
    assert found.hint


def test_nothing_stands_against_a_build_with_everything() -> None:
    assert build.obstacle(WHOLE, "PY", ("80", "90")) is None


def test_the_command_and_its_environment() -> None:
    assert build.command("py", Path("/dist")) == ["py", str(build.INSIDE / "setup.py"), "bdist_wheel", "--dist-dir", "/dist"]
    assert build.environment(WHOLE, 6) == {
        **{"MAX_JOBS": "6", "CUDA_HOME": "/usr/local/cuda"},
        **{"TORCH_CUDA_ARCH_LIST": None, "NVCC_APPEND_FLAGS": None},
    }


def test_the_manifest_says_what_doctor_reads_and_what_is_compiled() -> None:
    made = build.manifest(planned(GROK_2), WHOLE)
    assert (made["softcap"], made["alibi"], made["head_dims"], made["dtypes"]) == (True, False, [128], ["bf16"])
    assert made["sources"] == [
        "csrc/flash_attn/flash_api.cpp",
        "fenno_stubs.cpp",
        "csrc/flash_attn/src/flash_fwd_hdim128_bf16_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_hdim128_bf16_causal_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_split_hdim128_bf16_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_split_hdim128_bf16_causal_sm80.cu",
    ]


def test_builds_that_differ_in_anything_do_not_share_a_folder() -> None:
    made = build.manifest(planned(GROK_2), WHOLE)
    others = [
        build.manifest(planned(LLAMA_3_70B), WHOLE),
        build.manifest(planned(GROK_2, archs=("90",)), WHOLE),
        build.manifest(planned(GROK_2), dataclasses.replace(WHOLE, torch="2.12.0+cu130")),
    ]
    names = {build.key(each, RELEASE.sha256) for each in (made, *others)} | {build.key(made, "another source")}
    assert len(names) == 5
    assert build.key(build.manifest(planned(GROK_2, cores=1), WHOLE), RELEASE.sha256) in names


LOG = "[1/6] c++ -c x.cpp\n[2/6] nvcc -c y.cu\n"


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        (
            "y.cu(3): error: identifier is undefined\nninja: build stopped",
            BuildError,
            "the build failed: y.cu(3): error: identifier",
        ),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", BuildError, "most likely for want of memory"),
        ("c++: fatal error: Killed signal terminated program cc1plus", BuildError, "most likely for want of memory"),
        ("fatal error: cannot write: No space left on device", DiskError, "the disk is full"),
        ("it stops here", BuildError, "named no error; its last line: it stops here"),
    ],
)
def test_the_first_error_of_a_log_is_the_one_that_is_shown(line: str, kind: type[FennoError], says: str) -> None:
    found = build.first_error(f"{LOG}{line}\n")
    assert isinstance(found, kind)
    assert says in str(found)


def test_progress_is_what_ninja_says_and_time_left_starts_from_the_plan() -> None:
    made = planned(GROK_2)
    assert build.progress(LOG) == (2, 6)
    assert build.progress("no step yet") == (0, 0)
    assert build.left(made, 10.0, 0, 0) == pytest.approx(made.wall - 10)
    assert build.left(made, 900.0, 3, 6) == pytest.approx(900)


def test_a_build_that_is_tried_again_leaves_alone_what_did_not_change(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    build.prepare(tmp_path, planned(GROK_2), WHOLE)
    before = (tmp_path / stubs.FILE).stat().st_mtime_ns
    build.prepare(tmp_path, planned(GROK_2), WHOLE)
    assert (tmp_path / stubs.FILE).stat().st_mtime_ns == before
    assert json.loads((tmp_path / "flash_attn" / build.MANIFEST).read_text())["softcap"] is True


FAILS = "echo '[1/6] c++ -c x.cpp'; echo 'y.cu(3): error: no such thing' >&2; exit 1"


def test_a_build_that_fails_leaves_its_log_and_no_wheel(tmp_path: Path) -> None:
    python, given = stand_in(tmp_path / "python", FAILS), tree(tmp_path / "made")
    said: list[str] = []
    with pytest.raises(BuildError, match="y.cu\\(3\\): error: no such thing") as caught:
        build.build(planned(GROK_2), WHOLE, python, given, tmp_path / "out", said.append)
    log = Path(caught.value.hint.removeprefix("the log is "))
    assert log.is_file()
    assert not list((tmp_path / "out").rglob("*.whl"))
    assert not (given / stubs.FILE).exists(), "the user's own folder was written to"


def wheel_of(tmp_path: Path, code: str) -> str:
    """Shell text that makes dist/x.whl with a library compiled from `code`."""
    (tmp_path / "x.cpp").write_text(code)
    library = tmp_path / "flash_attn_2_cuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "x.cpp"], check=True)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as made:
        made.write(library, library.name)
    return f"mkdir -p dist && cp {tmp_path / 'x.whl'} dist/ && echo '[6/6] link'"


@needs_compiler
def test_a_library_that_is_whole_becomes_a_wheel_that_is_found_again(tmp_path: Path) -> None:
    python, given = stand_in(tmp_path / "python", wheel_of(tmp_path, "int x;")), tree(tmp_path / "made")
    said: list[str] = []
    wheel = build.build(planned(GROK_2), WHOLE, python, given, tmp_path / "out", said.append)
    assert wheel.parent.parent == tmp_path / "out"
    again = build.build(planned(GROK_2), WHOLE, "no such python", given, tmp_path / "out", said.append)
    assert (again, said[-1]) == (wheel, f"built before: {wheel}")
    (given / "csrc/flash_attn/flash_api.cpp").write_text("// changed")
    assert build.key(build.manifest(planned(GROK_2), WHOLE), source.digest(given)) != wheel.parent.name


@needs_compiler
def test_a_library_that_lacks_a_function_of_its_own_is_no_wheel(tmp_path: Path) -> None:
    code = "template<class T, int D, bool C> void run_mha_fwd_(T); void x() { run_mha_fwd_<int, 64, true>(0); }"
    python, given = stand_in(tmp_path / "python", wheel_of(tmp_path, code)), tree(tmp_path / "made")
    with pytest.raises(BuildError, match="lacks 1 functions of its own, void run_mha_fwd_<int, 64, true>"):
        build.build(planned(GROK_2), WHOLE, python, given, tmp_path / "out", lambda line: None)
    assert not list((tmp_path / "out").glob("*/*.whl"))


def test_a_cpu_torch_is_one_sentence_and_a_wheel_that_nobody_imports_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GROK_2))
    answer = json.dumps(dataclasses.asdict(dataclasses.replace(WHOLE, torch="2.13.0+cpu", torch_cuda=None)))
    python = stand_in(tmp_path / "python", f"echo '{answer}'")
    words = [sys.executable, "-m", "fenno", "build-fa2", "--arch", "sm_90", "--out", str(tmp_path / "out")]
    done = subprocess.run([*words, "--model", str(tmp_path), "--python", python], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (6, "")
    assert "is built for CPUs" in done.stderr
    done = subprocess.run([*words, "grok-article-a100x8"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing would import this wheel" in done.stderr
    assert not (tmp_path / "out").exists()


@needs_source
def test_the_flags_are_those_of_the_releases_own_setup() -> None:
    assigned = {
        target.id: node.value
        for node in ast.walk(ast.parse((SOURCE / "setup.py").read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert ast.literal_eval(assigned["nvcc_flags"]) == list(NVCC_FLAGS)
    named = re.findall(r"csrc/flash_attn/src/flash_\w+\.cu", (SOURCE / "setup.py").read_text())
    assert set(named) == {unit.file for unit in units(RELEASE.heads)}
    assert CXX_FLAGS == ("-O3", "-std=c++17")


def host_command(file: Path, target: Path, extra: Path) -> list[str]:
    """What compiles one C++ file of the extension against the torch of this interpreter, a CPU one too."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("there is no torch here")
    torch = Path(spec.origin).parent / "include"
    cuda = next((path for path in (Path("/usr/local/cuda/include"),) if (path / "cuda.h").is_file()), None)
    if cuda is None:
        pytest.skip("there are no CUDA headers here")
    # The CPU torch has the headers that say "CUDA", but for the one that the build writes.
    (extra / "c10/cuda/impl").mkdir(parents=True, exist_ok=True)
    (extra / "c10/cuda/impl/cuda_cmake_macros.h").write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    folders = [SOURCE / "csrc/flash_attn", SOURCE / "csrc/flash_attn/src", SOURCE / "csrc/cutlass/include", torch]
    folders += [torch / "torch/csrc/api/include", cuda, Path(sysconfig.get_path("include")), extra]
    flags = [flag for flag in planned(GROK_2).cxx_flags if not flag.startswith(("-O", "-std"))]
    options = ["-std=c++20", "-O0", "-fPIC", "-DTORCH_EXTENSION_NAME=flash_attn_2_cuda", *flags]
    return ["g++", *options, *(f"-I{folder}" for folder in folders), "-c", str(file), "-o", str(target)]


def symbols(listing: str, kind: str) -> set[str]:
    found = re.findall(rf"^(?:[0-9a-f]+)? *{kind} (void (?:\w+::)?run_mha_\w+<[^>]+>)", listing, re.MULTILINE)
    return set(found)


@needs_source
@pytest.mark.installs
@pytest.mark.timeout(400)
def test_the_stubs_define_what_the_trimmed_units_leave_undefined(tmp_path: Path) -> None:
    made, stub = planned(GROK_2), tmp_path / stubs.FILE
    stub.write_text(stubs.text(made))
    for file, name in ((stub, "stubs.o"), (SOURCE / "csrc/flash_attn/flash_api.cpp", "api.o")):
        subprocess.run(host_command(file, tmp_path / name, tmp_path / "extra"), check=True)
    listing = [
        subprocess.run(["nm", "-C", tmp_path / name], capture_output=True, text=True, check=True).stdout
        for name in ("api.o", "stubs.o")
    ]
    wanted, defined = symbols(listing[0], "U"), symbols(listing[1], "T")
    assert len(wanted) == 72
    assert wanted - defined == {stubs.symbol(unit, made) for unit in made.units}
    assert defined - wanted == set()
