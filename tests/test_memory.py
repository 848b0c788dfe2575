"""A memory target is a flag of the start: vLLM takes its share of a GPU whether it needs it or not."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fenno import machine, recipe
from fenno.engine import plugin
from fenno.engine.catalogue import Catalogue, Flag, Identity
from fenno.engine.server import Server
from fenno.errors import UsageError
from fenno.machine import Gpu, Machine
from fenno.recipe import Recipe
from fenno.tune import memory, output
from fenno.tune import space as spaces
from fenno.tune.bench import Engines, Running

GIB = 2**30


def gpu(index: int) -> Gpu:
    return Gpu(index, "GPU", f"GPU-{index}", 80 * GIB, 0, (9, 0), "580.1")


def host(gpus: int) -> Machine:
    return Machine("Linux", "6", "x", 8, 2**36, tuple(gpu(i) for i in range(gpus)), None, "3.11")


def known(platform: str = "cuda", default: float = 0.92) -> Catalogue:
    flags = {memory.FLAG: Flag("float", None, default, False), memory.OTHER: Flag("int", None, None, False)}
    limits = {"max-num-batched-tokens": 8192, "max-num-seqs": 1024}
    return Catalogue(Identity("/v/bin/python", "vllm", "0.24.0", "3.12", "2.11", "/v"), platform, flags, limits)


def asked(target: str | None, flags: str = "{}", restart: str = "{}") -> Recipe:
    text = f"name: one\nengine: {{model: m/m, flags: {flags}}}\nsearch: {{restart: {restart}}}\n"
    return recipe.parse(text + (f"targets: {{memory: {target}}}\n" if target else ""), "here")


SHARES = [("40GiB", 2, 0.47), ("85%", 1, 0.82)]
SHARES += [("85%", 8, 0.82), ("0.9", 1, 0.87), ("94%", 1, 0.91), ("40GiB", 1, 0.47), ("1%", 0, None)]


@pytest.mark.parametrize(("target", "gpus", "share"), SHARES)
def test_the_engine_takes_three_hundredths_less_than_its_target(target: str, gpus: int, share: float | None) -> None:
    before = asked(target)
    if share is None:
        with pytest.raises(UsageError, match="leaves an engine no memory"):
            memory.within(before, known(), host(gpus))
        return
    after = memory.within(before, known(), host(gpus))
    assert after.engine.flags == {memory.FLAG: share}
    assert memory.remark(before, after)[0].startswith(f"the memory target sets gpu-memory-utilization to {share:g}: ")
    assert spaces.build(after, known()).defaults == spaces.build(before, known()).defaults, "it is no knob of the search"


def test_bytes_are_shared_by_the_gpus_that_the_engine_uses() -> None:
    before = asked("80GiB", "{tensor-parallel-size: 2}")
    assert memory.within(before, known(), host(4)).engine.flags[memory.FLAG] == 0.47
    assert memory.allowed(before, host(4)) == 40 * GIB
    assert memory.allowed(asked("85%"), host(1)) == pytest.approx(68 * GIB)
    assert memory.allowed(asked(None), host(1)) is None and memory.allowed(asked("85%"), host(0)) is None


# What one H200 held when vLLM 0.24.0 was ready and at most under traffic, in bytes, and the cache that vLLM had room for.
READY, PEAK, WHOLE = 139_078_795_264, 140_894_928_896, 150_754_820_096
LOG = "INFO [gpu_worker.py:508] Available KV cache memory: 110.49 GiB\n"


def test_the_cache_that_fits_follows_from_what_the_engine_says_of_its_start() -> None:
    cache = memory.reported(LOG)
    assert cache == int(110.49 * GIB) and memory.reported("INFO loading\n") is None
    assert memory.reported(LOG + LOG.replace("110.49", "98.5")) == int(98.5 * GIB), "the rank that has least"
    for target in (0.85, 0.94, 0.97):
        size = memory.fits(target * WHOLE, READY, cache)
        assert size is not None and size % 2**20 == 0
        assert 0 < target * WHOLE - (PEAK - cache + size) < memory.GROWTH, "the peak that was seen fits, and little is left over"
    assert memory.fits(READY + memory.GROWTH, READY, cache) is None, "right as it is"
    assert memory.fits(20 * GIB, READY, cache) is None, "weights alone are more"


class Started(Engines):
    """Engines that are ready at once; what each was given of memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(asked("85%"), folder, spaces.build(asked("85%"), known()), Silent(), allowed=0.94 * WHOLE)
        self.given: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def _engine(self, name: str, *, flags: Any, **start: object) -> Iterator[Running]:
        self.given.append({k: v for k, v in flags.items() if k in (memory.FLAG, memory.OTHER)})
        (self.folder / "engine.log").write_text("" if memory.OTHER in flags else LOG)
        yield cast(Any, SimpleNamespace(engine=Server(self.recipe, "", "", self.folder, catalogue=known())))


class Silent:
    def say(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def watch(self, share: float, text: str) -> None: ...


@pytest.mark.parametrize(("over", "starts"), [(0, 1), (3 * GIB, 2)])
def test_a_start_that_leaves_no_room_for_traffic_is_made_again_and_later_ones_have_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: int, starts: int
) -> None:
    engines = Started(tmp_path)
    held = [READY + over, READY]
    monkeypatch.setattr(machine, "read_gpus", lambda: ((replace(gpu(0), memory=WHOLE, used=held.pop(0)),), None))
    monkeypatch.setattr(plugin, "loaded", lambda control: None)
    size = memory.fits(0.94 * WHOLE, READY + over, int(110.49 * GIB))
    fitted = {memory.OTHER: size, memory.FLAG: None}
    with engines.wide({}):
        assert engines.given == [{}, fitted][:starts]
    with engines.plain(dict(engines.space.defaults)):
        assert engines.given[-1] == fitted == engines.fitted
    before = memory.within(asked("85%"), known(), host(1))
    tuned = output.tuned(before, engines.space.defaults, engines.space, engines.fitted)
    assert tuned.engine.flags == {memory.OTHER: size}


def test_without_a_memory_target_no_start_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Started(tmp_path)
    engines.allowed = None
    monkeypatch.setattr(plugin, "loaded", lambda control: None)
    monkeypatch.setattr(machine, "read_gpus", lambda: pytest.fail("NVML was asked"))
    with engines.wide({}):
        assert engines.given == [{}] and engines.fitted == {}


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
