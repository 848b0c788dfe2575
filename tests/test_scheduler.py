"""The real V1 scheduler under fenno, without weights: both bases, every policy, anything in any order."""

import importlib.util
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fenno import control
from fenno.control import Wanted
from fenno.engine import dummy
from fenno.vllm_plugin.order import Place

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this Python"),
]

BUDGET, SEQS, BLOCKS, LENGTH = 64, 8, 40, 1024
BASES = ("Scheduler", "AsyncScheduler")
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(base, plain=False, blocks=…): one of vLLM's schedulers, with fenno in front of it unless plain."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from fenno.vllm_plugin.scheduler import steered

    folder = str(dummy.make("grok2-small", tmp_path_factory.mktemp("model")))
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LENGTH)
    bases = {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}
    ours = {name: steered(base) for name, base in bases.items()}

    def build(base: str, plain: bool = False, blocks: int = BLOCKS, budget: int = BUDGET, seqs: int = SEQS) -> Any:
        limits = SchedulerConfig(
            max_model_len=LENGTH,
            is_encoder_decoder=False,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            policy="fcfs",
            enable_chunked_prefill=True,
        )
        cache = CacheConfig(block_size=16, enable_prefix_caching=False)
        config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=limits)
        config.cache_config.num_gpu_blocks = blocks
        # The CPU platform turns it off; nothing in the scheduler itself needs a GPU.
        config.scheduler_config.async_scheduling = base == "AsyncScheduler"
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        return (bases if plain else ours)[base](
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
            hash_block_size=16,
            log_stats=True,
        )

    return build


def request(name: str, prompt: int, answer: int, arrival: float, priority: int = 0) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=list(range(3, 3 + prompt)),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
    )


@dataclass
class Run:
    """A scheduler and what a model would answer it. `depth` steps are in flight at once, as with asynchronous scheduling."""

    scheduler: Any
    depth: int = 1
    tokens: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    flight: list[tuple[Any, Any]] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def add(self, new: Any) -> None:
        self.added[new.request_id] = new.max_tokens
        self.scheduler.add_request(new)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED):
            self.aborted.add(name)

    def schedule(self) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        answer = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        self.flight.append((output, answer))
        return output

    def step(self) -> Any:
        output = self.schedule()
        while len(self.flight) >= self.depth:
            self.update()
        return output

    def update(self) -> None:
        for outputs in self.scheduler.update_from_output(*self.flight.pop(0)).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += len(one.new_token_ids)
                self.finished[one.request_id] += one.finish_reason is not None

    def drain(self, steps: int = 5000) -> None:
        for _ in range(steps):
            if not self.scheduler.requests and not self.flight:
                return
            self.step() if self.scheduler.requests else self.update()
        raise AssertionError(f"{len(self.scheduler.requests)} requests never finished")

    def waiting(self) -> list[Any]:
        from fenno.vllm_plugin import versions

        return versions.waiting(self.scheduler)

    def check_that_each_ran_once(self) -> None:
        for name, answer in self.added.items():
            if name not in self.aborted:
                assert (self.tokens[name], self.finished[name]) == (answer, 1)
            assert self.tokens[name] <= answer


def has_its_token(running: list[Any], number: int) -> bool:
    """Whether it answers, with so few prompts half read in front of it as fenno's own order admits."""
    return not running[number].is_prefill_chunk and sum(one.is_prefill_chunk for one in running[:number]) <= 2


def step_and_check(run: Run) -> None:
    """One step; whatever was admitted went before whatever still waits, and no limit was passed."""
    scheduler = run.scheduler
    ran = len(scheduler.running)
    before = {one.request_id: one for one in run.waiting()}
    answering = [one.request_id for n, one in enumerate(scheduler.running) if has_its_token(scheduler.running, n)]
    output = run.step()
    limits = scheduler._settings.limits
    total = sum(output.num_scheduled_tokens.values())
    assert total == output.total_num_scheduled_tokens <= BUDGET
    assert total <= max(limits.tokens, max(limits.seqs, ran) * scheduler._start.tokens_per_seq)
    admitted = [before[name] for name in output.num_scheduled_tokens if name in before]
    assert len(scheduler.running) <= max(limits.seqs, ran)
    # The step itself may have changed the order: what it was when the step looked is what counts.
    if scheduler._settings.order is None:
        return
    if run.depth == 1 and not limits.long_prefill and not output.preempted_req_ids:
        assert set(answering) <= set(output.num_scheduled_tokens)
    aging = scheduler._settings.order.aging
    still = {one.request_id for one in run.waiting()}
    for first in admitted:
        for other in (before[name] for name in still if name in before):
            if getattr(other, "num_stale_output_tokens", 0) or not isinstance(first.priority, Place):
                continue
            assert (first.priority, first.arrival_time) <= (other.priority, other.arrival_time)
            if first.priority.client == other.priority.client:
                assert first.arrival_time <= other.arrival_time + aging + 1e-6


KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_active_seqs": st.integers(1, 2 * SEQS),
        "max_num_scheduled_tokens": st.integers(1, 2 * BUDGET),
        "long_prefill_token_threshold": st.sampled_from([0, 1, 16, 500]),
        "policy": st.sampled_from(control.POLICIES),
        "class_edges": st.sampled_from(["4,12", "32,128", "8"]),
        "aging_seconds": st.sampled_from([0.5, 5.0, 60.0]),
    },
)
ADD = st.tuples(
    st.just("add"),
    st.integers(1, 200),
    st.one_of(st.integers(1, 20), st.just(150)),
    st.floats(-20, 0),
    st.sampled_from([0, 0, 0, -1, 2]),
)
ACTIONS = st.one_of(
    ADD,
    ADD,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("want"), KNOBS),
    st.tuples(st.just("reset"), st.booleans()),
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(control.VARIABLE, str(tmp_path / "control.json"))
    return tmp_path / "control.json"


def play(run: Run, path: Path, actions: list[tuple[Any, ...]], start: float) -> None:
    revision = 0
    for number, (what, *rest) in enumerate(actions):
        if what == "add":
            prompt, answer, arrival, priority = rest
            run.add(request(f"r{number}", prompt, answer, start + arrival, priority))
        elif what == "step":
            for _ in range(rest[0]):
                if run.scheduler.requests:
                    step_and_check(run)
        elif what == "abort" and run.added:
            run.abort(sorted(run.added)[rest[0] % len(run.added)])
        elif what == "want":
            revision += 1
            control.write_wanted(path, Wanted(revision, rest[0]))
        elif what == "reset":
            run.scheduler.reset_prefix_cache(reset_running_requests=rest[0])
            answer = control.read_acknowledgements(path)[0]
            assert answer.revision == revision
            assert answer.reached == (answer.running <= answer.applied["max_num_active_seqs"])


@pytest.mark.parametrize("base", BASES)
def test_whatever_happens_nobody_is_lost_starved_or_run_twice_and_the_order_holds(make: Make, path: Path, base: str) -> None:
    admitted: Counter[str] = Counter()

    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    @given(actions=st.lists(ACTIONS, min_size=30, max_size=80), blocks=st.sampled_from([16, 40, 400]))
    def check(actions: list[tuple[Any, ...]], blocks: int) -> None:
        path.unlink(missing_ok=True)
        run = Run(make(base, blocks=max(blocks, 25)), depth=2 if base == "AsyncScheduler" else 1)
        play(run, path, actions, time.time())
        run.drain()
        run.check_that_each_ran_once()
        assert not run.waiting()
        assert not run.scheduler.running
        admitted["preemptions"] += run.scheduler._counts["preemptions"]
        admitted["finished"] += sum(run.finished.values())

    check()
    # The property is empty unless the runs really came into these states.
    assert admitted["preemptions"] > 10
    assert admitted["finished"] > 100


def trace(make: Make, base: str, seed: int, plain: bool, before: list[dict[str, Any]], path: Path) -> list[Any]:
    """What a scheduler does with one fixed, crowded history."""
    dice = random.Random(seed)
    path.unlink(missing_ok=True)
    run = Run(make(base, plain=plain), depth=2 if base == "AsyncScheduler" else 1)
    for revision, knobs in enumerate(before, 1):
        control.write_wanted(path, Wanted(revision, knobs))
        if not plain:
            run.scheduler._look()
    seen = []
    for number in range(40):
        run.add(request(f"r{number}", dice.randint(1, 150), dice.randint(1, 90), 1e9 + number, dice.choice([0, 5])))
        for _ in range(dice.randint(0, 4)):
            output = run.step()
            seen.append((dict(output.num_scheduled_tokens), sorted(output.preempted_req_ids or ())))
        if dice.random() < 0.15:
            run.abort(f"r{dice.randint(0, number)}")
    run.drain()
    return [*seen, dict(run.tokens)]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("before", [[{"policy": "fcfs"}], [{"policy": "token_aware"}, {"policy": "fcfs"}]])
def test_first_come_first_served_under_fenno_is_vllms_own_step_by_step(
    make: Make, path: Path, base: str, before: list[dict[str, Any]]
) -> None:
    for seed in range(5):
        ours = trace(make, base, seed, False, before, path)
        assert ours == trace(make, base, seed, True, [], path)
    assert any(preempted for _, preempted in ours[:-1]), "the history never ran out of memory, and so proves little"


@pytest.mark.parametrize("base", BASES)
def test_the_order_of_admission_is_priority_then_class_then_what_is_left(make: Make, base: str) -> None:
    run, now = Run(make(base, seqs=1, blocks=400)), time.time()
    for name, answer in (("long", 150), ("mid", 100), ("tiny", 3), ("short", 30), ("vip", 200), ("none", LENGTH - 8)):
        run.add(request(name, 8, answer, now, priority=-1 if name == "vip" else 0))
    order = []
    while run.scheduler.requests:
        order += [new.req_id for new in run.step().scheduled_new_reqs]
    assert order == ["vip", "tiny", "short", "mid", "long", "none"]
    run.check_that_each_ran_once()


@pytest.mark.parametrize("base", BASES)
def test_a_long_request_that_has_aged_goes_before_a_newcomer(make: Make, base: str) -> None:
    run, now = Run(make(base, seqs=1)), time.time()
    run.add(request("new", 8, 1, now))
    run.add(request("old", 8, 150, now - 5.001))
    assert [new.req_id for new in run.step().scheduled_new_reqs] == ["old"]
    assert run.scheduler._counts["promotions"] == 1


@pytest.mark.parametrize("base", BASES)
def test_one_long_prompt_leaves_half_of_a_step_to_others_and_has_all_of_it_alone(make: Make, base: str) -> None:
    run = Run(make(base))
    run.add(request("long", 400, 2, time.time()))
    assert run.step().num_scheduled_tokens == {"long": BUDGET}
    for number in range(3):
        run.add(request(f"s{number}", 10, 2, time.time() + number))
    assert run.step().num_scheduled_tokens == {"long": BUDGET // 2, "s0": 10, "s1": 10, "s2": 10}
    # Alone among the prompts again, it leaves those behind it the tokens of their answers.
    assert run.step().num_scheduled_tokens == {"long": BUDGET - 3, "s0": 1, "s1": 1, "s2": 1}


@pytest.mark.parametrize("base", BASES)
def test_a_prompt_shares_no_step_with_those_that_wait_for_a_seat(make: Make, base: str) -> None:
    run = Run(make(base, seqs=2))
    run.add(request("answers", 10, 100, time.time()))
    run.step()
    run.add(request("long", 400, 2, time.time()))
    for number in range(3):
        run.add(request(f"s{number}", 10, 150, time.time() + number))
    run.step()
    assert run.step().num_scheduled_tokens == {"answers": 1, "long": BUDGET - 1}


@pytest.mark.parametrize("base", BASES)
def test_clients_that_set_no_limit_are_served_as_first_come_first_served_would(make: Make, base: str) -> None:
    def served(policy: str) -> list[Any]:
        run, steps = Run(make(base, plain=policy == "fcfs", blocks=400)), []
        dice = random.Random(4)
        for number in range(40):
            prompt = dice.randint(1, BUDGET // 2)
            # What vLLM fills in where a client says nothing; the answers end before, by themselves.
            run.add(request(f"r{number}", prompt, LENGTH - prompt, 1e9 + number))
            steps.append(dict(run.step().num_scheduled_tokens))
            if dice.random() < 0.3:
                run.abort(sorted(run.scheduler.requests)[0])
        return steps

    assert served("token_aware") == served("fcfs")


@pytest.mark.parametrize("base", BASES)
def test_the_preempted_one_is_the_last_in_the_order(make: Make, base: str) -> None:
    run, now = Run(make(base, blocks=18, seqs=3)), time.time()
    for name, answer in (("long", 190), ("short", 60), ("mid", 100)):
        run.add(request(name, 40, answer, now))
    victims: list[str] = []
    while "short" in run.scheduler.requests:
        victims += sorted(run.step().preempted_req_ids or ())
        for waiting in (one for one in run.waiting() if one.num_preemptions):
            # What it has generated is no longer left: it stands where a shorter request would.
            assert waiting.priority == run.scheduler._place(waiting)
            assert waiting.priority.due < now + run.scheduler._settings.order.aging * (2 + 1 - 128 / 190) / 3
    assert victims[:1] == ["long"]
    run.drain()
    run.check_that_each_ran_once()


@pytest.mark.parametrize("base", BASES)
def test_a_cap_far_below_what_runs_lets_it_finish_and_admits_nobody_above_it(make: Make, path: Path, base: str) -> None:
    run = Run(make(base, blocks=400))
    for number in range(20):
        run.add(request(f"r{number}", 5, 10 + number, time.time()))
    run.step()
    assert len(run.scheduler.running) == SEQS
    control.write_wanted(path, Wanted(1, {"max_num_active_seqs": 2, "max_num_scheduled_tokens": 1}))
    counts = []
    run.step()
    answer = control.read_acknowledgements(path)[0]
    assert (answer.revision, answer.reached, answer.applied["max_num_active_seqs"]) == (1, False, 2)
    while run.scheduler.requests:
        ran = [one.request_id for one in run.scheduler.running if one.num_tokens < one.num_prompt_tokens + one.max_tokens]
        # A budget of one token was wanted: whoever runs gets one all the same.
        assert base == "AsyncScheduler" or set(ran) <= set(run.step().num_scheduled_tokens)
        run.step()
        counts.append(len(run.scheduler.running))
    assert counts[0] > 2
    assert all(after <= max(2, before) for before, after in pairwise(counts))
    assert counts.count(2) > 10
    assert control.read_acknowledgements(path)[0].reached
    run.check_that_each_ran_once()


def test_the_wrong_base_is_never_taken(make: Make) -> None:
    from fenno.vllm_plugin import versions

    for base in BASES:
        assert versions.base_class(make(base).vllm_config).__name__ == base


def test_vllm_finds_it_by_the_name_on_the_command_line(make: Make) -> None:
    config = make("AsyncScheduler").vllm_config
    config.scheduler_config.scheduler_cls = "fenno.vllm_plugin.scheduler.TokenAware"
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=make("Scheduler").kv_cache_config,
        structured_output_manager=None,
        block_size=16,
        hash_block_size=16,
    )
    assert [base.__name__ for base in type(scheduler).__mro__[1:3]] == ["Steered", "AsyncScheduler"]


def test_the_control_file_is_found_through_the_environment_and_a_broken_one_changes_nothing(make: Make, path: Path) -> None:
    path.write_text(json.dumps({"schema": 1, "revision": 4, "knobs": {"policy": "fcfs", "max_num_active_seqs": 3}}))
    scheduler = make("Scheduler")
    answer = control.read_acknowledgements(path)[0]
    assert (answer.revision, answer.applied["policy"], answer.applied["max_num_active_seqs"]) == (4, "fcfs", 3)
    path.write_text("{")
    scheduler.schedule()
    broken = control.read_acknowledgements(path)[0]
    assert (broken.revision, broken.applied) == (4, answer.applied)
    assert broken.problem


@pytest.fixture(autouse=True)
def _no_control(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(control.VARIABLE, raising=False)
    # These schedulers make a step in less time than passes between two looks.
    monkeypatch.setattr(control, "LOOK_SECONDS", 0.0)
    yield
