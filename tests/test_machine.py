"""A recipe says what it needs of a host, and a host that lacks it is told apart before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from fenno import machine
from fenno.doctor import hostfacts
from fenno.machine import Gpu
from fenno.recipe import Host

GIB = 2**30
HOST = replace(machine.probe(), memory=8 * GIB, gpus=(), gpu_note="no driver")
GPU = Gpu(0, "X", "u", 80 * GIB, 0, (9, 0), "580")


@pytest.mark.parametrize(
    ("gpus", "need", "said"),
    [
        ((), Host(), None),
        ((), Host(memory=8 * GIB), None),
        ((), Host(memory=9 * GIB), "9.0 GiB of memory are needed and 8.0 GiB"),
        ((), Host(gpus=1), "1 GPU(s) are needed and 0 found (no driver)"),
        ((GPU,), Host(gpus=1, gpu_memory=70 * GIB), None),
        ((GPU,), Host(gpus=1, gpu_memory=90 * GIB), "1 GPU(s) of 90.0 GiB or more are needed and 0 found"),
        ((GPU,), Host(gpus=2), "2 GPU(s) are needed and 1 found"),
    ],
)
def test_what_a_host_lacks_is_one_sentence(gpus: tuple[Gpu, ...], need: Host, said: str | None) -> None:
    found = machine.lacking(replace(HOST, gpus=gpus), need)
    assert found is None if said is None else found is not None and found.startswith(said)


def test_the_kernel_is_told_by_its_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.8.0-1016-somecloud")
    assert machine.kernel() == machine.probe().kernel == hostfacts.host({}).kernel == "6.8.0"


def test_the_memory_limit_is_the_least_of_the_cgroups_around_this_process(tmp_path: Path) -> None:
    own = tmp_path / "own"
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    own.write_text("0::/a/b\n")
    (folder / "memory.max").write_text("max\n")
    total = machine.memory_limit(tmp_path, own)
    (tmp_path / "a/memory.max").write_text("1000000\n")
    assert machine.memory_limit(tmp_path, own) == 1_000_000 < total
    # The first version of cgroups, in a container that sees the host's path and its own files.
    own.write_text("5:cpu:/\n4:memory:/docker/x\n0::/\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("2000000\n")
    assert machine.memory_limit(tmp_path, own) == 2_000_000
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.memory_limit(tmp_path, own) == total
    assert machine.memory_limit(tmp_path / "none", tmp_path / "none") == total
