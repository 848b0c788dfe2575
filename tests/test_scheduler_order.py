"""The token-aware order and the limits, without vLLM: arithmetic that can be checked in every corner."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fenno import control
from fenno.control import Acknowledgement
from fenno.vllm_plugin import versions
from fenno.vllm_plugin.limits import Limits, Start, changed, in_force, settings
from fenno.vllm_plugin.order import Order, Work

ROOM = 4000
STEP = 2048
ARRIVAL = 1_790_000_000.0
ORDERS = st.builds(
    Order,
    edges=st.sets(st.integers(1, 5000), min_size=1, max_size=5).map(lambda found: tuple(sorted(found))),
    aging=st.floats(0.01, 600),
)
WORKS = st.builds(Work, st.integers(1, 10**6), st.integers(0, 5000), st.integers(0, 10**6), st.integers(1, 10**6))


def limited(answer: int, generated: int = 0) -> Work:
    return Work(prompt=100, generated=generated, limit=answer, room=ROOM)


@given(order=ORDERS, first=WORKS, second=WORKS, step=st.integers(1, 10**5), gap=st.floats(1e-6, 1e4), base=st.floats(0, 2e9))
def test_nobody_who_arrived_more_than_the_aging_time_later_goes_first(
    order: Order, first: Work, second: Work, step: int, gap: float, base: float
) -> None:
    later = base + order.aging + gap
    assume(later - base > order.aging)
    early, late = order.place(0, base, first, step), order.place(0, later, second, step)
    assert (early.due, base) < (late.due, later)


@given(order=ORDERS, a=st.integers(0, 3000), b=st.integers(0, 3000))
def test_of_two_that_arrive_together_the_one_with_less_left_goes_first(order: Order, a: int, b: int) -> None:
    assume(a < b < min(ROOM, 32 * order.edges[-1]))
    # At time 0 the handicap alone is compared, to the last bit.
    short, long = order.place(0, 0.0, limited(a), STEP), order.place(0, 0.0, limited(b), STEP)
    assert short.group <= long.group
    assert short < long


@given(order=ORDERS, work=WORKS, other=WORKS, client=st.integers(-5, 5), gap=st.floats(0, 1e6))
def test_a_clients_own_priority_comes_before_everything(order: Order, work: Work, other: Work, client: int, gap: float) -> None:
    assert order.place(client, ARRIVAL + gap, work, STEP) < order.place(client + 1, ARRIVAL, other, STEP)


@pytest.mark.parametrize(("tokens", "group"), [(0, 0), (1, 0), (32, 0), (33, 1), (128, 1), (129, 2), (3000, 2)])
def test_the_classes_are_0_to_32_33_to_128_and_129_up(tokens: int, group: int) -> None:
    assert Order().place(0, ARRIVAL, limited(tokens), STEP).group == group


def test_what_a_preempted_request_has_generated_is_no_longer_left() -> None:
    order = Order()
    assert order.place(0, ARRIVAL, limited(200, generated=190), STEP) == order.place(0, ARRIVAL, limited(10), STEP)


@pytest.mark.parametrize("limit", [ROOM, ROOM + 1, 10**9])
def test_without_a_limit_prompts_that_fit_into_a_step_go_by_arrival_alone(limit: int) -> None:
    order = Order()
    places = [order.place(0, ARRIVAL + i, Work(prompt, 0, limit, ROOM), STEP) for i, prompt in enumerate((2000, 7, 300, 1))]
    assert places == sorted(places)
    assert len({place.due - i for i, place in enumerate(places)}) == 1


def test_without_a_limit_a_prompt_of_several_steps_yields_but_not_for_ever() -> None:
    order = Order(aging=3.0)
    long = order.place(0, ARRIVAL, Work(20_000, 0, 10**9, ROOM), STEP)
    assert order.place(0, ARRIVAL + 0.4, Work(100, 0, 10**9, ROOM), STEP) < long
    assert order.place(0, ARRIVAL + 0.51, Work(100, 0, 10**9, ROOM), STEP) > long


def test_who_sets_no_limit_stands_in_the_middle_of_the_last_class() -> None:
    order, unset = Order(), Order().place(0, ARRIVAL, Work(100, 0, 10**9, ROOM), STEP)
    assert order.place(0, ARRIVAL, limited(150), STEP) < unset < order.place(0, ARRIVAL, limited(1000), STEP)


def test_without_a_limit_what_was_generated_tells_the_class() -> None:
    groups = [Order().place(0, ARRIVAL, Work(10, generated, 10**9, ROOM), STEP).group for generated in (1, 32, 33, 128, 129)]
    assert groups == [0, 0, 1, 1, 2]


START = Start(Limits(tokens=2048, seqs=256, long_prefill=0, interval=1), 256, 1, 1, frozenset())


def test_what_is_not_wanted_is_as_at_the_start() -> None:
    found = settings(START, {"max_num_active_seqs": 8, "policy": None})
    assert found.limits == replace(START.limits, seqs=8)
    assert (found.policy, found.order, found.unsupported) == ("token_aware", Order(), ())
    assert settings(START, {"policy": "fcfs"}).order is None
    assert settings(START, {"class_edges": "8,16", "aging_seconds": 2}).order == Order((8, 16), 2.0)
    other = replace(START, order=changed(Order(), {"aging_seconds": 9.0}))
    assert settings(other, {"class_edges": "8,16"}).order == Order((8, 16), 9.0)
    assert settings(other, {"aging_seconds": 5}).order == Order()


def test_knobs_that_this_engine_cannot_change_are_named_and_left() -> None:
    start = replace(START, fixed=frozenset({"prefill_schedule_interval"}))
    found = settings(start, {"prefill_schedule_interval": 4, "a_knob_of_tomorrow": 1, "max_num_active_seqs": 9})
    assert found.unsupported == ("a_knob_of_tomorrow", "prefill_schedule_interval")
    assert found.limits == replace(START.limits, seqs=9)
    assert settings(start, {"prefill_schedule_interval": None}).unsupported == ()


@given(
    tokens=st.integers(1, 10**5),
    seqs=st.integers(1, 10**4),
    running=st.integers(0, 256),
    long_prefill=st.integers(0, 5000),
    compete=st.booleans(),
    policy=st.sampled_from(control.POLICIES),
    per_seq=st.integers(1, 8),
)
def test_the_budget_stays_between_what_running_requests_need_and_what_was_there_at_the_start(
    tokens: int, seqs: int, running: int, long_prefill: int, compete: bool, policy: str, per_seq: int
) -> None:
    start = replace(START, tokens_per_seq=per_seq)
    knobs = {"max_num_scheduled_tokens": tokens, "max_num_active_seqs": seqs, "policy": policy}
    found = in_force(start, settings(start, {**knobs, "long_prefill_token_threshold": long_prefill}), running, compete)
    assert found.seqs <= 256
    assert min(2048, max(found.seqs, running) * per_seq) <= found.tokens <= 2048
    if tokens >= max(found.seqs, running) * per_seq:
        assert found.tokens == min(tokens, 2048)
    if policy != "token_aware" or long_prefill or (not compete and running < 2):
        assert found.long_prefill == long_prefill
        return
    # Two prompts at once leave a token to each of the others who run, and one leaves room for a second.
    prompts = 2 if compete else 1
    others = max(0, running - prompts) * per_seq
    assert found.long_prefill == start.smallest_chunk or prompts * found.long_prefill + others <= found.tokens


def test_a_chunk_is_never_smaller_than_what_moves_a_prompt_on() -> None:
    start = replace(START, smallest_chunk=512)
    found = in_force(start, settings(start, {"max_num_scheduled_tokens": 64, "long_prefill_token_threshold": 16}), 3, True)
    assert (found.tokens, found.long_prefill) == (512, 512)


@pytest.mark.parametrize(
    ("version", "release"), [("0.24.0", (0, 24)), ("0.32.1.dev3+cpu", (0, 32)), ("0.33rc1", (0, 33)), ("dev", None), ("", None)]
)
def test_a_release_is_the_first_two_numbers_of_a_version(version: str, release: tuple[int, int] | None) -> None:
    assert versions.release(version) == release


@pytest.mark.parametrize("version", ["0.24.0", "0.28.1rc1", "0.32.0+cpu", "0.33.9", "0.1.dev1+g12ab", "dev"])
def test_a_known_vllm_passes(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["0.23.4", "0.9.2", "0.34.0", "1.0.0"])
def test_a_vllm_whose_scheduler_nobody_has_read_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=version):
        versions.check(version)


def test_the_plugin_is_found_without_importing_vllm() -> None:
    code = "import sys, fenno.vllm_plugin.scheduler; print([m for m in ('vllm', 'torch', 'prometheus_client') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("gathered", [False, True], ids=["one API server", "several"])
def test_the_counters_of_every_rank_are_in_the_metrics_of_one_api_server_and_of_several(tmp_path: Path, gathered: bool) -> None:
    path = tmp_path / "control.json"
    for rank in (0, 1):
        control.write_acknowledgement(path, Acknowledgement(1, rank, {}, True, counters={"admissions": 3.0 + rank}))
    # As vLLM does it: the registry of this process, or one with a collector of what all processes wrote.
    code = """
import prometheus_client
from prometheus_client import multiprocess
from fenno.vllm_plugin import register
register(), register()
prometheus_client.Counter("vllm:mine", "one of vLLM's").inc()
registry = prometheus_client.CollectorRegistry() if GATHERED else prometheus_client.REGISTRY
GATHERED and multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""
    env = {**os.environ, control.VARIABLE: str(path)} | ({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if gathered else {})
    argv = [sys.executable, "-c", code.replace("GATHERED", str(gathered))]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
    assert [line for line in lines if line.startswith("fenno:")] == [
        'fenno:admissions{rank="0"} 3.0',
        'fenno:admissions{rank="1"} 4.0',
    ]
    assert "vllm:mine_total 1.0" in lines


def test_up_to_0_28_a_lower_cap_follows_the_running_requests_down() -> None:
    old = SimpleNamespace(max_num_running_reqs=32, running=[0] * 9, max_num_scheduled_tokens=64, scheduler_config=SimpleNamespace())
    fixed = frozenset({"prefill_schedule_interval"})
    caps = []
    for running in (9, 5, 1):
        old.running = [0] * running
        versions.hold(old, Limits(tokens=48, seqs=2, long_prefill=16, interval=1), fixed)
        caps.append(old.max_num_running_reqs)
    assert caps == [9, 5, 2]
    assert (old.max_num_scheduled_tokens, old.scheduler_config.long_prefill_token_threshold) == (48, 16)
    assert not hasattr(old, "max_num_active_reqs")
    assert not hasattr(old, "local_prefill_interval")


def test_from_0_32_only_the_admission_cap_changes() -> None:
    new = SimpleNamespace(max_num_running_reqs=32, max_num_active_reqs=32, running=[0] * 9, local_prefill_interval=1)
    versions.hold(new, Limits(48, 2, 16, 4), frozenset({"max_num_scheduled_tokens", "long_prefill_token_threshold"}))
    assert (new.max_num_running_reqs, new.max_num_active_reqs, new.local_prefill_interval) == (32, 2, 4)
