"""From figures to judgements, from trials of rates to a capacity: pure."""

import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fenno import recipe
from fenno.engine.metrics import Metrics
from fenno.load import stats
from fenno.load.record import Record
from fenno.recipe import Scalar, Targets
from fenno.tune import capacity, propose, trial
from fenno.tune.capacity import Bracket
from fenno.tune.judge import Figure, Judgement, judge
from fenno.tune.propose import HELP, UNTOLD, Limit, Load, Roofline, Steps, Tried, by_rule, diagnose, next_restart
from fenno.tune.run import hopeless, out_of_memory
from fenno.tune.space import BUDGET, CAP, POLICY, Space
from fenno.tune.trial import Measured

RATE = Targets(qps=40.0)


@pytest.mark.parametrize(
    ("good", "count", "steady", "state"),
    [
        (100, 100, True, "met"),
        (100, 100, False, "unclear"),
        (199, 200, True, "met"),
        (98, 100, True, "unclear"),
        (80, 100, True, "missed"),
        (0, 100, True, "missed"),
    ],
)
def test_a_rate_is_held_when_what_arrives_is_answered_and_the_queue_is_level(
    good: int, count: int, steady: bool, state: str
) -> None:
    figure = Figure(*(40 * part for part in stats.share(good, count)))
    assert judge(RATE, {"qps": figure}, steady=steady).state == state


def test_a_share_has_the_interval_of_wilson() -> None:
    # R: prop.test(90, 100, correct = FALSE) gives 0.8256343 to 0.9447708.
    assert stats.share(90, 100) == pytest.approx((0.9, 0.8256343, 0.9447708))
    assert stats.share(100, 100)[2] == 1.0
    assert stats.share(0, 7)[:2] == (0.0, 0.0)


@given(share=some.floats(0.15, 500), first=some.floats(0.5, 50), step=some.sampled_from([1.08, 1.25, 2.0]))
def test_bracketing_ends_around_the_true_capacity(share: float, first: float, step: float) -> None:
    true = share * first
    steps: list[tuple[float, bool]] = []
    while (rate := capacity.next_rate(capacity.bracket(steps), first, step)) is not None:
        assert rate not in [r for r, _ in steps]
        steps.append((rate, rate <= true))
        assert len(steps) < 150
    found = capacity.bracket(steps)
    assert found.held <= true < found.lost
    assert found.lost <= found.held * (1 + capacity.PRECISION) * (1 + 1e-9)


def test_a_rate_that_was_lost_below_one_that_was_held_is_no_end() -> None:
    assert capacity.bracket([(8, True), (4, False), (16, False), (12, False)]) == Bracket(8, 12)


def test_a_capacity_that_nothing_holds_is_given_up() -> None:
    steps: list[tuple[float, bool]] = []
    while (rate := capacity.next_rate(capacity.bracket(steps), 8.0)) is not None:
        steps.append((rate, False))
    assert 4 <= len(steps) <= 6
    assert capacity.bracket(steps).held == 0


def test_a_gain_has_the_ends_that_the_brackets_leave_open() -> None:
    assert capacity.gain(Bracket(15, 16), Bracket(10, 12)) == pytest.approx((0.5, 0.25, 0.6))
    assert capacity.gain(Bracket(15, 16), Bracket(0, 12))[0] == math.inf


@pytest.mark.parametrize(
    ("late", "count", "share", "said"),
    [
        (8, 8, 0.5, True),
        (7, 8, 0.5, False),
        (4, 8, 0.05, True),
        (3, 8, 0.05, False),
        (7, 7, 0.05, False),
        (0, 0, 0.05, False),
        (20, 100, 0.05, False),
        (50, 100, 0.05, True),
    ],
)
def test_a_target_is_hopeless_when_half_of_the_requests_alone_are_late_and_chance_does_not_explain_it(
    late: int, count: int, share: float, said: bool
) -> None:
    assert hopeless(late, count, share) is said


def test_a_memory_target_that_is_missed_is_the_limit() -> None:
    targets = Targets.model_validate({"memory": "85%", "qps": 8})
    over = judge(targets, {"qps": Figure(8.0), "memory_share": Figure(0.91)}, steady=True)
    assert out_of_memory(over) == Limit("memory", "memory_share 91.0 %, target 85.0 %: missed")
    assert out_of_memory(judge(targets, {"qps": Figure(8.0), "memory_share": Figure(0.81)}, steady=True)) is None


WHERE = Space(
    {BUDGET: (2048, 8192), CAP: (128, 256, 512, 1024), POLICY: ("fcfs", "token_aware")}, {BUDGET: 8192, CAP: 1024, POLICY: "fcfs"}
)


def test_an_http_process_that_takes_a_whole_core_is_the_limit_whatever_the_counts_say() -> None:
    agreed = Load(running=177, waiting=0, in_flight=177, engine_ttft=0.4, client_ttft=0.45)
    assert diagnose(agreed, WHERE.defaults).name == UNTOLD
    found = diagnose(replace(agreed, server_cpu=1.04), WHERE.defaults)
    assert found.name == "front end" and "1.04 processor cores" in found.evidence
    assert diagnose(replace(agreed, server_cpu=0.5), WHERE.defaults).name == UNTOLD


@pytest.mark.parametrize(("waiting", "name", "ordered"), [(None, UNTOLD, False), (0.0, UNTOLD, False), (0.03, "queue", True)])
def test_another_order_is_proposed_only_where_requests_wait(waiting: float | None, name: str, ordered: bool) -> None:
    limit = diagnose(Load(running=177, waiting=waiting, step_tokens=900, in_flight=177), WHERE.defaults)
    assert limit.name == name
    tried, orders = [Tried(dict(WHERE.defaults), 2.0, limit)], []
    while (proposal := by_rule(tried, WHERE)) is not None:
        orders.append(proposal.point[POLICY])
        tried.append(Tried(proposal.point, 3.0, limit))
    assert orders and ("token_aware" in orders) is ordered


STEPS = Steps(seconds=0.020, tokens=300, sequences=100, length=400)


@pytest.mark.parametrize(
    ("memory", "compute", "name"),
    [(0.012, 0.003, "memory bandwidth"), (0.004, 0.011, "compute"), (0.006, 0.005, "memory bandwidth"), (0.004, 0.005, "overhead")],
)
def test_what_makes_steps_long_is_what_their_bytes_and_products_need_at_least_or_neither(
    memory: float, compute: float, name: str
) -> None:
    load = Load(running=100, waiting=0, in_flight=100, steps=STEPS)
    found = diagnose(load, WHERE.defaults, Roofline("H200", memory, compute))
    assert found.name == name and found.help
    needs = f"{1e3 * memory:g} ms for its bytes and {1e3 * compute:g} ms for its products"
    assert found.evidence.endswith(f"steps take long, 20 ms of 300 tokens, for which H200 needs at least {needs}")
    assert diagnose(load, WHERE.defaults).name == UNTOLD, "of an unknown GPU, or a CPU, nobody can tell"
    waiting = diagnose(replace(load, waiting=3.0), WHERE.defaults, Roofline("H200", memory, compute))
    assert waiting.name == "queue" and needs in waiting.evidence


def test_where_memory_binds_a_step_takes_more_prompt_tokens_and_elsewhere_runs_fewer_requests() -> None:
    here = {**WHERE.defaults, BUDGET: 2048}

    def first(name: str) -> dict[str, Scalar]:
        asked = by_rule([Tried(here, 2.0, Limit(name, ""))], WHERE)
        assert asked
        return asked.point

    assert first("memory bandwidth") == {**here, BUDGET: 8192}
    assert [first(name) for name in ("compute", "overhead", UNTOLD)] == [{**here, CAP: 512}] * 3


def test_of_every_limit_is_said_what_would_help() -> None:
    assert set(HELP) >= {*propose._MOVES, *propose._RESTARTS}


def test_a_steps_time_is_that_of_the_tokens_that_were_made_however_many_processes_count_steps() -> None:
    made = Metrics(generation_tokens=40_000.0, prompt_tokens=90_000.0, prefix_cache_hits=10_000.0)
    asked = [record(prompt=200, tokens=tokens) for tokens in (10, 90)]
    found = trial.steps(made, 400.0, 10.0, asked)
    assert found == Steps(seconds=0.1, tokens=1200.0, sequences=400.0, length=pytest.approx(0.1 * 205 + 0.9 * 245))
    assert trial.steps(replace(made, prompt_tokens=None), 400.0, 10.0, asked) is None
    assert trial.steps(made, 0.0, 10.0, asked) is None and trial.steps(made, 400.0, 10.0, []) is None


def record(prompt: int, tokens: int) -> Record:
    stamps = dict.fromkeys(("scheduled", "sent", "connected", "headers", "first", "first_answer"), 1.0)
    counts = {"asked_prompt": prompt, "asked_tokens": tokens, "prompt_tokens": prompt, "completion_tokens": tokens}
    rest: dict[str, Any] = {"token_count": tokens, "gaps": array("f"), "status": 200, "outcome": "ok", "error": ""}
    return Record(id="1", cls="short", arm="", phase="counted", last=2.0, end=2.0, **stamps, **counts, **rest)


@pytest.mark.parametrize(("waiting", "said"), [(0, "0"), (0.03, "0.03"), (0.994, "0.99"), (1.4, "1"), (150, "150"), (1234, "1234")])
def test_how_many_waited_is_told_in_digits(waiting: float, said: str) -> None:
    limit = diagnose(Load(running=177, waiting=waiting, in_flight=177 + waiting), WHERE.defaults)
    assert limit.evidence == f"177 requests ran and {said} waited: steps take long"


def test_of_flags_that_need_a_start_those_that_the_limit_names_come_first_and_then_those_that_compile_nothing() -> None:
    flags: dict[str, tuple[Scalar, ...]] = {"compilation-config": ("{}",)}
    flags |= {"enable-prefix-caching": (False,), "api-server-count": (4,)}
    where = Space({}, {"compilation-config": None, "enable-prefix-caching": True, "api-server-count": 1}, flags)

    def order(limit: str) -> list[str]:
        seen, changed = [dict(where.defaults)], []
        while (start := next_restart([Tried(dict(where.defaults), 2.0, Limit(limit, ""))], where, seen)) is not None:
            seen.append(start.point)
            changed += [knob for knob in flags if start.point[knob] != where.defaults[knob]]
        return changed

    assert order("front end") == ["api-server-count", "enable-prefix-caching", "compilation-config"]
    assert order("compute") == ["enable-prefix-caching", "api-server-count", "compilation-config"]


COMPILING = """\
INFO 11-30 15:10:08 [jit_monitor.py:60] Kernel JIT monitor activated — Triton JIT compilations during inference will be logged.
WARNING 11-30 15:10:12 [jit_monitor.py:106] Triton kernel JIT compilation during inference: _compute_slot_mapping_kernel. This
WARNING 11-30 15:10:20 [jit_monitor.py:106] Triton kernel JIT compilation during inference: fused_moe_kernel. This causes a
"""


def test_a_trial_during_which_a_kernel_was_compiled_has_missed_nothing(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert trial.compiled(log, 0) == []
    log.write_text(COMPILING)
    assert trial.compiled(log, 0) == ["_compute_slot_mapping_kernel", "fused_moe_kernel"]
    assert trial.compiled(log, log.read_bytes().index(b"15:10:20")) == ["fused_moe_kernel"], "what was compiled before is done"
    missed = Measured(Judgement("missed", ()), {}, Load(), True, 1.0)
    spoilt = trial.unspoilt(missed, ["fused_moe_kernel"])
    assert not spoilt.valid and "(fused_moe_kernel)" in spoilt.judgement.notes[0]
    assert trial.unspoilt(missed, []) is missed
    met = replace(missed, judgement=Judgement("met", ()))
    assert trial.unspoilt(met, ["fused_moe_kernel"]) is met


def test_a_trial_during_which_the_host_stood_still_has_missed_nothing() -> None:
    def still(longest: float, target: str) -> float:
        return trial.standstill(longest, embedded.with_targets(p95_ttft=target))

    embedded = recipe.load(recipe.find("cpu-small"))
    assert [still(seconds, "800ms") for seconds in (0.05, 0.5, 2.5)] == [0.0, 0.0, 2.5]
    assert (still(2.5, "10s"), still(6.0, "10s")) == (0.0, 6.0), "a target of ten seconds bears more"
    assert (still(0.1, "1ms"), still(0.6, "1ms")) == (0.0, 0.6), "a target of no time at all is missed on a busy host, too"
    missed = Measured(Judgement("missed", ()), {}, Load(), True, 1.0)
    spoilt = trial.unspoilt(missed, [], 2.5)
    assert not spoilt.valid and "stood still for 2.5 s" in spoilt.judgement.notes[0]
    met = replace(missed, judgement=Judgement("met", ()))
    assert trial.unspoilt(met, [], 2.5) is met
