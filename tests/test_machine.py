"""A recipe says what it needs of a host, and a host that lacks it is told apart before anything starts."""

from dataclasses import replace

import pytest

from fenno import machine
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
