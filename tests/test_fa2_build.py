"""From a plan to a wheel, as far as that goes without a GPU: stubs, tools, commands, interruptions, and what can be missing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fa2_made import RELEASE, WHOLE, code_for, stand_in, tree, wheel_of
from stub.waiting import until
from test_fa2 import DEEPSEEK_V2, GROK_2, LLAMA_3_70B, planned

from fenno import machine, process
from fenno.commands import fa2 as command
from fenno.errors import BuildError, DiskError, FennoError
from fenno.fa2 import build, plan, progress, source, stubs, toolchain, wheel
from fenno.fa2.lattice import Unit
from fenno.fa2.plan import STUBS_FILE
from fenno.fa2.source import Given

ORIGIN = source.origin(RELEASE, Given(), Path("/out"))
pytestmark = pytest.mark.scenario
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("nm")), reason="there is no g++ or no nm here")


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
        ({"nvcc": "12.4.131"}, "nvcc is of CUDA 12.4.131 and torch 2.11.0\\+cu130 of CUDA 13.0"),
        ({"nvcc": "12.4.131", "torch_cuda": "12.4"}, "nvcc 12.4.131 cannot compile for sm_120: that takes CUDA 12.8"),
        ({"compiler": None}, "there is no C\\+\\+ compiler"),
        ({"headers": False}, "the headers of Python are missing for PY"),
        ({"absent": ["ninja"]}, "ninja missing under PY"),
    ],
)
def test_what_stands_against_a_build_is_one_sentence(change: dict[str, Any], says: str) -> None:
    found = toolchain.obstacle(dataclasses.replace(WHOLE, **change), "PY", ("80", "120"))
    assert found is not None
    assert re.search(says, str(found))
    assert found.hint


def test_nothing_stands_against_a_build_with_everything() -> None:
    assert toolchain.obstacle(WHOLE, "PY", ("80", "90")) is None


def test_nvidias_packages_stand_in_for_a_compiler_where_they_have_one() -> None:
    without = dataclasses.replace(WHOLE, nvcc=None, cuda_home=None)
    assert toolchain.borrowable(without)
    assert not toolchain.borrowable(WHOLE)
    assert not toolchain.borrowable(dataclasses.replace(without, torch_cuda="12.8"))
    assert not toolchain.borrowable(dataclasses.replace(without, torch_cuda=None))
    assert toolchain.borrow_command(without, "py", Path("/t"))[-7:] == [
        *["--target", "/t", "nvidia-cuda-nvcc==13.0.*", "nvidia-cuda-crt==13.0.*", "nvidia-nvvm==13.0.*"],
        *["nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cccl==13.0.*"],
    ]


def test_a_fetched_compiler_gets_the_names_that_linkers_want_and_is_fetched_once(tmp_path: Path) -> None:
    without = dataclasses.replace(WHOLE, nvcc=None, cuda_home=None)
    fetch = 'while [ "$1" != --target ]; do shift; done; d="$2/nvidia/cu13"; mkdir -p "$d/bin" "$d/lib"'
    python = stand_in(tmp_path / "python", f'{fetch}; touch "$d/bin/nvcc" "$d/lib/libcudart.so.13"')
    home = toolchain.borrow(without, python, tmp_path / "out")
    assert home == tmp_path / "out/cuda-13.0/nvidia/cu13"
    assert (home / "lib64/libcudart.so").resolve().name == "libcudart.so.13"
    assert toolchain.borrow(without, "no such python", tmp_path / "out") == home


def test_a_compiler_that_cannot_be_fetched_is_one_sentence_and_leaves_no_home(tmp_path: Path) -> None:
    without = dataclasses.replace(WHOLE, nvcc=None, cuda_home=None)
    python = stand_in(tmp_path / "python", "echo 'ERROR: no route to host' >&2; exit 1")
    with pytest.raises(BuildError, match="NVIDIA's packages of it could not be fetched: ERROR: no route to host"):
        toolchain.borrow(without, python, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_and_its_environment() -> None:
    assert build.command("py", Path("/dist")) == ["py", str(build.SETUP), "bdist_wheel", "--dist-dir", "/dist"]
    assert build.environment(WHOLE, 6) == {
        **{"MAX_JOBS": "6", "CUDA_HOME": "/usr/local/cuda"},
        **{"TORCH_CUDA_ARCH_LIST": None, "NVCC_APPEND_FLAGS": None},
    }


def test_the_manifest_says_what_doctor_reads_and_what_is_compiled() -> None:
    made = build.manifest(planned(GROK_2), WHOLE, ORIGIN)
    assert (made["softcap"], made["alibi"], made["head_dims"], made["dtypes"]) == (True, False, [128], ["bf16"])
    assert (made["kernels"], made["source"]) == (62, f"released archive, sha256 {RELEASE.sha256}")
    assert made["sources"] == [
        "csrc/flash_attn/src/flash_fwd_split_hdim128_bf16_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_split_hdim128_bf16_causal_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_hdim128_bf16_sm80.cu",
        "csrc/flash_attn/src/flash_fwd_hdim128_bf16_causal_sm80.cu",
        "csrc/flash_attn/flash_api.cpp",
        "fenno_stubs.cpp",
    ]


def test_builds_that_differ_in_anything_do_not_share_a_folder() -> None:
    grok = planned(GROK_2)
    others = [
        (planned(LLAMA_3_70B), WHOLE, ORIGIN),
        (planned(GROK_2, archs=("90",)), WHOLE, ORIGIN),
        (grok, dataclasses.replace(WHOLE, torch="2.12.0+cu130"), ORIGIN),
        (grok, dataclasses.replace(WHOLE, nvcc="13.0.89"), ORIGIN),
        (grok, dataclasses.replace(WHOLE, compiler="g++ 13.1.0"), ORIGIN),
        (grok, WHOLE, "another source"),
    ]
    names = {build.key(build.manifest(*each), each[0]) for each in ((grok, WHOLE, ORIGIN), *others)}
    assert len(names) == 7
    fewer = planned(GROK_2, cores=1)
    assert build.key(build.manifest(fewer, WHOLE, ORIGIN), fewer) in names


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
    found = progress.first_error(f"[1/6] c++ -c x.cpp\n[2/6] nvcc -c y.cu\n{line}\n")
    assert isinstance(found, kind)
    assert says in str(found)


def test_ninja_tells_how_long_each_unit_took() -> None:
    log = "# ninja log v5\n0\t30629\t17960\t/b/csrc/flash_api.o\tf6\n1\t42871\t17960\t/b/csrc/src/flash_fwd_hdim64.o\t5e\n"
    assert progress.compiled(log) == {"flash_api": 30.629, "flash_fwd_hdim64": 42.87}
    assert progress.compiled("# ninja log v5\n") == {}


def test_the_time_left_starts_from_the_plan_and_follows_the_measured_units() -> None:
    estimates = {"a": 100.0, "b": 100.0, "c": 50.0}
    assert progress.left(estimates, {}, 2, 0.0) == 150
    # The first took twice as long as estimated, the mean of the plan counts beside it: the others take nearly twice as long too.
    pace = (200 + 250 / 3) / (100 + 250 / 3)
    assert progress.left(estimates, {"a": 200.0}, 2, 200.0) == pytest.approx(pace * 150 - 200)
    assert progress.left(estimates, {"a": 1.0, "b": 1.0, "c": 1.0}, 2, 9.0) == 0
    # What was there before a build that goes on is neither waited for nor taken as a measure.
    assert progress.left({"c": 50.0}, {"a": 1.0, "b": 1.0}, 2, 10.0) == 40
    # The stubs are through in a third of their estimate; that says little of the device's units.
    assert progress.left({"device": 160.0, "stubs": 9.0}, {"stubs": 3.0}, 2, 3.0) > 140


def test_how_far_a_build_is_is_told_no_finer_than_a_second_and_never_as_nothing_left() -> None:
    assert progress.line(0, 6, 0.2, 163.4) == "0 of 6 units after 1 s, about 2 min 43 s left"
    assert progress.line(1, 6, 43.4, 40.94) == "1 of 6 units after 43 s, about 41 s left"
    assert progress.line(5, 6, 90.0, 0.6) == "5 of 6 units after 1 min 30 s, longer than estimated"
    assert progress.line(5, 6, 90.0, 0.0) == "5 of 6 units after 1 min 30 s, longer than estimated"
    assert progress.line(6, 6, 94.0, 0.0) == "6 of 6 units after 1 min 34 s: linking and packing"


def test_a_build_that_is_tried_again_leaves_alone_what_did_not_change(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    made = build.manifest(planned(GROK_2), WHOLE, ORIGIN)
    build.prepare(tmp_path, planned(GROK_2), made)
    before = (tmp_path / STUBS_FILE).stat().st_mtime_ns
    build.prepare(tmp_path, planned(GROK_2), made)
    assert (tmp_path / STUBS_FILE).stat().st_mtime_ns == before
    assert json.loads((tmp_path / "flash_attn" / build.MANIFEST).read_text())["softcap"] is True


def built(tmp_path: Path, python: str, said: list[str] | None = None, **found: Any) -> build.Built:
    """A build with a stand-in for the interpreter, from the folder `made`."""
    tools = dataclasses.replace(WHOLE, **found)
    says = (said if said is not None else []).append
    return build.build(planned(GROK_2), tools, python, Given(tmp_path / "made"), tmp_path / "out", says)


def test_a_build_that_fails_leaves_its_log_and_no_wheel(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python", "echo '[1/6] c++ -c x.cpp'; echo 'y.cu(3): error: no such thing' >&2; exit 1")
    given = tree(tmp_path / "made")
    with pytest.raises(BuildError, match="y.cu\\(3\\): error: no such thing") as caught:
        built(tmp_path, python)
    log = Path(caught.value.hint.removeprefix("the log is "))
    assert log.is_file()
    assert not list((tmp_path / "out").rglob("*.whl"))
    assert not (given / STUBS_FILE).exists(), "the user's own folder was written to"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_disk_that_is_full_in_the_middle_is_named(tmp_path: Path) -> None:
    tree(tmp_path / "made")
    with pytest.raises(DiskError, match="the disk is full: .*No space left on device"):
        built(tmp_path, stand_in(tmp_path / "python", "/bin/echo x > /dev/full"))


def test_too_little_space_is_said_before_anything_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "made")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(2**40, 2**40 - 2**30, 2**30))
    with pytest.raises(DiskError, match=r"1.0 GiB are free in .*out, a build takes 2"):
        built(tmp_path, "no such python")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]


def test_a_second_build_in_the_same_folder_is_locked_out(tmp_path: Path) -> None:
    tree(tmp_path / "made")
    with build.alone(tmp_path / "out"), pytest.raises(BuildError, match="another fenno is building in .*out"):
        built(tmp_path, "no such python")
    with build.alone(tmp_path / "out"):
        pass


@needs_compiler
def test_a_library_that_is_whole_becomes_a_wheel_that_is_found_again(tmp_path: Path) -> None:
    python, given = stand_in(tmp_path / "python", wheel_of(tmp_path, SM80)), tree(tmp_path / "made")
    said: list[str] = []
    first = built(tmp_path, python, said)
    assert first.wheel.parent.parent == tmp_path / "out"
    again = built(tmp_path, "no such python", said)
    assert (again.wheel, said[-1]) == (first.wheel, f"built before: {first.wheel}")
    (given / "csrc/flash_attn/flash_api.cpp").write_text("// changed")
    python = stand_in(tmp_path / "python", "exit 1")
    with pytest.raises(BuildError):
        built(tmp_path, python)


# In place of the interpreter, for calls of a wheel: nothing is wrong, and all takes as long.
ANSWERS = """
import json, sys
asked = json.load(sys.stdin)
print(json.dumps({"gpu": "a GPU", "torch": "x", "flash_attn": "x", "first_call_ms": {}, "launch_us": {}}))
for case in asked.get("shapes", []):
    times = {name: {"low": 60.0, "median": 60.0, "high": 60.0} for name in [*asked["libraries"], "sdpa"]}
    print(json.dumps({"shape": case, "times": times}))
print(json.dumps({"done": True}))
"""


@needs_compiler
def test_units_with_stock_flags_are_built_beside_the_wheel_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path / "made")
    (tmp_path / "config.json").write_text(json.dumps(GROK_2))
    (tmp_path / "answers.py").write_text(ANSWERS)
    answer = json.dumps(dataclasses.asdict(WHOLE))
    steps = (
        f"*/toolchain.py) echo '{answer}';; */setup.py) {wheel_of(tmp_path, SM80)};; *) {sys.executable} {tmp_path}/answers.py;;"
    )
    python = stand_in(tmp_path / "bin/python", f'case "$1" in {steps} esac')
    monkeypatch.setattr(machine, "read_gpus", lambda: ([object()], ""))
    asked: dict[str, Any] = {"model": tmp_path, "arch": "sm_80", "jobs": "1", "python": python, "source_path": tmp_path / "made"}
    for _ in range(2):
        command.build_fa2(**asked, out=tmp_path / "out", stock=True, as_json=True)
        told = capsys.readouterr()
        document = json.loads(told.out)
        assert document["verified"]["against_stock"] == {"shapes": 18, "lowest": 1.0, "highest": 1.0}
        assert "the same units with stock flags, to time against: about" in told.err
    made = [json.loads(path.read_text()) for path in (tmp_path / "out").glob(f"*/*/flash_attn/{build.MANIFEST}")]
    trimmed = sorted((each["kernels"], "-DFLASHATTENTION_DISABLE_DROPOUT" in each["nvcc_flags"]) for each in made)
    assert trimmed == [(62, True), (173, False)]
    assert told.err.count("built before") == 2, "the second time"


SM80 = code_for(80)
LACKING = SM80 + "template<class T, int D, bool C> void run_mha_fwd_(T); void x() { run_mha_fwd_<int, 64, true>(0); }"
OF_ANOTHER_TORCH = SM80 + "namespace c10 { void of_another(int); } void x() { c10::of_another(0); }"


@needs_compiler
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (LACKING, "lacks 1 functions of its own, void run_mha_fwd_<int, 64, true> first"),
        (OF_ANOTHER_TORCH, "wants 1 symbols that torch has not, _ZN3c1010of_anotherEi first"),
        ("int x;", "has code for no GPU, and sm_80 was asked for"),
    ],
)
def test_a_library_that_would_not_load_or_run_is_no_wheel(code: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "c10.cpp").write_text("namespace c10 { void known(int) {} }")
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib/libc10.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,--hash-style=gnu", "-o", library, tmp_path / "c10.cpp"], check=True)
    tree(tmp_path / "made")
    with pytest.raises(BuildError, match=says):
        built(tmp_path, stand_in(tmp_path / "python", wheel_of(tmp_path, code)), libraries=str(tmp_path / "lib"))
    assert not list((tmp_path / "out").glob("*/*.whl"))


def test_the_kernels_of_a_library_are_counted_by_their_launchers() -> None:
    listing = """
0000000000000590 t _GLOBAL__sub_I_tmpxft_flash_fwd_hdim64_bf16
0000000000000000 t __device_stub__ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel(flash::Flash_fwd_params const&)
0000000000000010 t void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, false>(flash::Flash_fwd_params)
0000000000000000 t void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, false>(flash::Flash_fwd_params) [clone .cold]
00000000000001d0 t void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<64, 128>, 1>(flash::Flash_fwd_params)
0000000000000000 W void flash::run_flash_fwd<Flash_fwd_kernel_traits<64, 128> >(flash::Flash_fwd_params&, CUstream_st*)
"""
    assert wheel.kernels(listing) == 2


def words(tmp_path: Path, python: str, *more: str) -> list[str]:
    """fenno's command line for a build from the folder `made`."""
    (tmp_path / "config.json").write_text(json.dumps(GROK_2))
    start = [sys.executable, "-m", "fenno", "build-fa2", "--arch", "sm_80", "--jobs", "1", "--out", str(tmp_path / "out")]
    return [*start, "--model", str(tmp_path), "--python", python, "--source", str(tmp_path / "made"), *more]


def answering(tmp_path: Path, build_step: str, **change: Any) -> str:
    """A stand-in for the interpreter that says what it builds with, and does `build_step` when it is to build."""
    answer = json.dumps(dataclasses.asdict(dataclasses.replace(WHOLE, **change)))
    return stand_in(tmp_path / "bin/python", f"case \"$1\" in */toolchain.py) echo '{answer}';; *) {build_step};; esac")


def running(environment: Mapping[str, str], argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(environment))


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_was_interrupted_or_killed_leaves_no_wheel_and_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    tree(tmp_path / "made")
    pid = tmp_path / "pid"
    python = answering(tmp_path, f"touch half-done; echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 1000")
    first = running(os.environ, words(tmp_path, python))
    until(pid.exists)
    child = int(pid.read_text())
    born = process.birth(child)
    first.send_signal(number)
    first.communicate()
    assert first.returncode == (130 if number == signal.SIGINT else -9)
    until(lambda: process.birth(child) != born)
    assert not list((tmp_path / "out").rglob("*.whl"))
    answering(tmp_path, f"test -f half-done && {wheel_of(tmp_path, SM80)}")
    done = subprocess.run(words(tmp_path, python, "--json"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["wheel"]).is_file()


@pytest.mark.parametrize(
    ("change", "options", "code", "says"),
    [
        ({}, ["--arch", "sm_75"], 6, "FlashAttention-2 does not run on sm_75: it needs 8.0 or later"),
        ({"head_dim": 512}, [], 6, "has heads of 512, and FlashAttention-2 has kernels up to 256"),
        (DEEPSEEK_V2, [], 6, "has latent attention: heads of 192 for queries and keys"),
        ({}, ["--jobs", "none"], 2, "--jobs is 'none'"),
        ({}, ["grok2-bf16"], 2, "the recipe grok2-bf16 and --model"),
    ],
)
def test_what_cannot_be_built_is_one_sentence_and_nothing_is_written(
    change: dict[str, Any], options: list[str], code: int, says: str, tmp_path: Path
) -> None:
    tree(tmp_path / "made")
    line = [*words(tmp_path, answering(tmp_path, "exit 1")), *options]
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_3_70B, **change}))
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert [says in line for line in done.stderr.splitlines() if line.startswith("fenno: ")] == [True]
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_one_sentence_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    monkeypatch.setattr(plan, "capacity", lambda: {"cores": 2, "memory": 4_000_000_000})
    with pytest.raises(BuildError, match="one compiler takes 4.3 GB, and 4.0 GB may be used here"):
        command.build_fa2(model=tmp_path, arch="sm_80", jobs="auto", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_cpu_torch_is_one_sentence_and_a_wheel_that_nobody_imports_is_not_built(tmp_path: Path) -> None:
    python = answering(tmp_path, "exit 1", torch="2.13.0+cpu", torch_cuda=None)
    tree(tmp_path / "made")
    done = subprocess.run(words(tmp_path, python), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (6, "")
    assert "is built for CPUs" in done.stderr
    start = [sys.executable, "-m", "fenno", "build-fa2", "--arch", "sm_90", "--out", str(tmp_path / "out")]
    done = subprocess.run([*start, "grok-article-a100x8"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing would import this wheel" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_interpreter_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python", "echo 'ImportError: libcudart.so.13: cannot open shared object file' >&2; exit 1")
    with pytest.raises(BuildError, match="does not say what it could build with: ImportError: libcudart.so.13"):
        toolchain.look(python)
