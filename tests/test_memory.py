"""A memory target is a flag of the start: vLLM takes its share of a GPU whether it needs it or not."""

from dataclasses import replace
from typing import Any

import pytest

from fenno import recipe
from fenno.engine.catalogue import Catalogue, Flag, Identity
from fenno.errors import UsageError
from fenno.machine import Gpu, Machine
from fenno.recipe import Recipe
from fenno.tune import arms, memory, propose
from fenno.tune import space as spaces
from fenno.tune.run import out_of_reach
from fenno.tune.study import Trial

GIB = 2**30


def gpu(index: int, memory: float = 80) -> Gpu:
    return Gpu(index, "GPU", f"GPU-{index}", int(memory * GIB), 0, (9, 0), "580.1")


def host(gpus: int, memory: float = 80) -> Machine:
    return Machine("Linux", "6", "x", 8, 2**36, tuple(gpu(i, memory) for i in range(gpus)), None, "3.11")


def known(platform: str = "cuda", default: float = 0.92) -> Catalogue:
    flags = {memory.FLAG: Flag("float", None, default, False), memory.OTHER: Flag("int", None, None, False)}
    limits = {"max-num-batched-tokens": 8192, "max-num-seqs": 1024}
    return Catalogue(Identity("/v/bin/python", "vllm", "0.24.0", "3.12", "2.11", "/v"), platform, flags, limits)


def asked(target: str | None, flags: str = "{}", restart: str = "{}") -> Recipe:
    text = f"name: one\nengine: {{model: m/m, flags: {flags}}}\nsearch: {{restart: {restart}}}\n"
    return recipe.parse(text + (f"targets: {{memory: {target}}}\n" if target else ""), "here")


# A target, GPUs and the GiB of each, and the share: of an H200, an H100 and an RTX 4090 as NVML has them.
SHARES = [
    ("85%", 1, 140.4, 0.82),
    ("85%", 1, 79.6, 0.81),
    ("85%", 8, 79.6, 0.81),
    ("85%", 1, 24, 0.72),
    ("94%", 1, 140.4, 0.91),
    ("40GiB", 1, 80, 0.46),
    ("40GiB", 2, 80, 0.46),
    ("85%", 0, 0, 0.81),
]


@pytest.mark.parametrize(("target", "gpus", "size", "share"), SHARES)
def test_three_gib_of_a_gpu_and_less_than_a_hundredth_more_are_left_below_its_target(
    target: str, gpus: int, size: float, share: float
) -> None:
    before = asked(target)
    after = memory.within(before, known(), host(gpus, size))
    assert after.engine.flags == {memory.FLAG: share}
    assert memory.remark(before, after)[0].startswith(f"the memory target sets gpu-memory-utilization to {share:g}: ")
    assert spaces.build(after, known()).listed == spaces.build(before, known()).listed, "it is no knob that is drawn"


@pytest.mark.parametrize(("target", "size", "said"), [("1%", 80, "1 %"), ("3GiB", 80, "3.0 GiB"), ("85%", 3.5, "85 %")])
def test_a_target_that_leaves_nothing_is_refused_in_its_own_unit(target: str, size: float, said: str) -> None:
    with pytest.raises(UsageError, match=f"a memory target of {said} leaves an engine no memory"):
        memory.within(asked(target), known(), host(1, size))


def test_bytes_are_shared_by_the_gpus_that_the_engine_uses() -> None:
    before = asked("80GiB", "{tensor-parallel-size: 2}")
    assert memory.within(before, known(), host(4)).engine.flags[memory.FLAG] == 0.46


def test_where_gpus_differ_none_gives_more_than_its_part() -> None:
    mixed = replace(host(2), gpus=(gpu(0, 40), gpu(1, 80)))
    assert memory.within(asked("40GiB"), known(), mixed).engine.flags[memory.FLAG] == 0.46


UNCHANGED: dict[str, tuple[Recipe, Catalogue, int]] = {
    "no target": (asked(None), known(), 1),
    "a CPU": (asked("50%"), known("cpu"), 0),
    "room enough": (asked("97%"), known(), 1),
    "less by default": (asked("85%"), known(default=0.8), 1),
    "a share of its own": (asked("85%", "{gpu-memory-utilization: 0.9}"), known(), 1),
    "bytes of its own": (asked("85%", "{kv-cache-memory-bytes: 1000}"), known(), 1),
    "a knob of the search": (asked("85%", restart="{gpu-memory-utilization: [0.7, 0.8]}"), known(), 1),
    "bytes of GPUs that are on other hosts too": (asked("400GiB", "{tensor-parallel-size: 4}"), known(), 2),
}


@pytest.mark.parametrize("why", UNCHANGED)
def test_a_recipe_that_needs_no_such_flag_stays_as_it_is(why: str) -> None:
    before, catalogue, gpus = UNCHANGED[why]
    after: Any = memory.within(before, catalogue, host(gpus))
    assert after is before
    assert memory.remark(before, after) == []


@pytest.mark.parametrize(
    ("target", "flags", "less"),
    [
        ("85%", "{gpu-memory-utilization: 0.82}", 0.77),
        ("85%", "{gpu-memory-utilization: 0.92}", 0.8),
        ("97%", "{}", 0.87),
        ("40GiB", "{gpu-memory-utilization: 0.46}", 0.41),
    ],
)
def test_over_its_memory_target_an_engine_is_started_with_less_and_nowhere_else(target: str, flags: str, less: float) -> None:
    space = spaces.build(asked(target, flags), known())
    assert (space.restart, space.unlisted) == ({memory.FLAG: (less,)}, (memory.FLAG,))
    point, found = space.defaults, {}
    for name in ("memory", "compute", "overhead", "kv"):
        start = propose.next_restart([propose.Tried(point, 2.0, propose.Limit(name, ""))], space, [point])
        found[name] = start and spaces.plain_flags(start.point, space)
    flag = {memory.FLAG: less}
    assert found == {"memory": flag, "compute": None, "overhead": None, "kv": None}
    assert not [p for arm in ("random", "grid") for p in arms.points(space, arm, seed=1) if p[memory.FLAG] == less]


def test_what_memory_or_the_http_server_holds_back_waits_for_a_start_and_no_more_points_come_before_it() -> None:
    def held(name: str, ruled: propose.Proposal | None = None) -> bool:
        return out_of_reach(Trial(0, {}, "rule", "", "missed", 2.0, 1.0, limit=propose.Limit(name, "")), ruled)

    fewer, wider = propose.Proposal({spaces.CAP: 8}, ""), propose.Proposal({spaces.STREAM: 8}, "")
    assert [held("memory"), held("memory", fewer), held("front end"), held("front end", fewer)] == [True] * 4
    assert [held("front end", wider), held("compute"), held("kv", fewer)] == [False] * 3


@pytest.mark.parametrize("why", ["no target", "a CPU", "bytes of its own", "a knob of the search"])
def test_an_engine_whose_memory_is_not_to_be_changed_is_started_with_no_less(why: str) -> None:
    chosen, catalogue, _ = UNCHANGED[why]
    assert memory.FLAG not in spaces.build(chosen, catalogue).unlisted
