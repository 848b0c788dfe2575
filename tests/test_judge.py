"""From figures to judgements, from trials of rates to a capacity: pure."""

import math
import time
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from test_stats import record as answer

from fenno import recipe
from fenno.engine.metrics import Metrics
from fenno.engine.watch import Seen
from fenno.load import figures, stats
from fenno.load.client import ClientState
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.recipe import Recipe, Scalar, Targets
from fenno.tune import capacity, propose, trial, verdict
from fenno.tune.capacity import Bracket, Maximize, Most
from fenno.tune.judge import Figure, Judgement, judge
from fenno.tune.propose import HELP, UNSURE, UNTOLD, Limit, Load, Roofline, Steps, Tried, by_rule, diagnose, next_restart
from fenno.tune.run import allowances, hopeless, out_of_memory
from fenno.tune.space import AGING, BUDGET, CAP, EDGES, POLICY, STREAM, Space, changed
from fenno.tune.study import Trial
from fenno.tune.trial import Measured
from fenno.tune.verdict import Verdict

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


@pytest.mark.parametrize(
    ("good", "count", "state"), [(112, 112, "met"), (111, 112, "unclear"), (335, 336, "met"), (90, 100, "missed")]
)
def test_one_failure_of_a_hundred_is_no_proof_that_an_availability_is_missed(good: int, count: int, state: str) -> None:
    figure = Figure(*stats.share(good, count))
    assert judge(Targets(availability=0.995), {"availability": figure}, steady=True).state == state


def test_a_share_has_the_interval_of_wilson() -> None:
    # R: prop.test(90, 100, correct = FALSE) gives 0.8256343 to 0.9447708.
    assert stats.share(90, 100) == pytest.approx((0.9, 0.8256343, 0.9447708))
    assert stats.share(100, 100)[2] == 1.0
    assert stats.share(0, 7)[:2] == (0.0, 0.0)


@given(share=some.floats(0.15, 500), first=some.floats(0.5, 50), step=some.sampled_from([1.08, 1.25, 2.0]))
def test_bracketing_ends_around_the_true_capacity(share: float, first: float, step: float) -> None:
    true = share * first
    steps: list[tuple[float, float]] = []
    while (rate := capacity.next_rate(capacity.bracket(steps), first, step)) is not None:
        assert rate not in [r for r, _ in steps]
        steps.append((rate, rate if rate <= true else 0.0))
        assert len(steps) < 150
    found = capacity.bracket(steps)
    assert found.held <= true < found.lost
    assert found.lost <= found.held * (1 + capacity.PRECISION) * (1 + 1e-9)


def test_a_rate_that_was_lost_below_one_that_was_held_is_no_end() -> None:
    assert capacity.bracket([(8, 8), (4, 0), (16, 0), (12, 0)]) == Bracket(8, 12, worth=8, least=8)


def test_a_capacity_that_nothing_holds_is_given_up() -> None:
    steps: list[tuple[float, float]] = []
    while (rate := capacity.next_rate(capacity.bracket(steps), 8.0)) is not None:
        steps.append((rate, 0.0))
    assert 4 <= len(steps) <= 6
    assert capacity.bracket(steps).held == 0


def test_a_gain_has_the_ends_that_the_brackets_leave_open() -> None:
    assert capacity.gain(Most("qps", 15, 15, 16), Most("qps", 10, 10, 12)) == pytest.approx((0.5, 0.25, 0.6))
    assert capacity.gain(Most("qps", 15, 15, 16), Most("qps", 0, 0, 12))[0] == math.inf


@given(knee=some.floats(0.05, 50), sharp=some.floats(2, 12), step=some.sampled_from([1.08, 2.0]))
def test_the_rate_of_the_largest_goodput_is_found_below_and_above_the_first(knee: float, sharp: float, step: float) -> None:
    def goodput(rate: float) -> float:
        return rate * math.exp(-((rate / knee) ** sharp))

    most = goodput(knee * sharp ** (-1 / sharp))
    steps: list[tuple[float, float]] = []
    while (rate := capacity.next_rate(found := capacity.bracket(steps), 5.0, step)) is not None:
        assert rate not in [r for r, _ in steps] and len(steps) < 150
        # What is no more than the best so far, or at first than half of the rate, has shown nothing.
        worth = goodput(rate)
        steps.append((rate, worth if worth > (found.worth or rate / 2) else 0.0))
    assert not found.worth or found.worth > 0.9 * most
    assert found.worth or goodput(5.0 / 16) <= 5.0 / 32, "it is given up only where fewer than half are in time at any rate"


def test_what_was_maximised_is_told_with_its_ends() -> None:
    assert str(Most("qps", 8.2, 8.2, 8.8)) == "8.2 to 8.8 requests/s"
    assert str(Most("qps", 8.2, 8.2, math.inf)) == "8.2 requests/s or more"
    assert str(Most("tokens", 1640.4, 1640.4, 1760.0)) == "1,640 to 1,760 output tokens/s"
    assert str(Most("tokens", 1640.4, 1640.4, math.inf)) == "1,640 or more output tokens/s"
    assert str(Most("goodput", 8.1, 7.9, 8.3)) == "a goodput of 8.1 requests/s (7.9 to 8.3)"
    assert Most("qps", 8.2, 8.2, math.inf).as_dict() == {"of": "qps", "value": 8.2, "low": 8.2, "high": None}


GOODPUT = Targets.model_validate({"p95_ttft": "100ms", "goodput": 8, "classes": {"short": {"p99_tpot": "20ms"}}})


@pytest.mark.parametrize(
    ("figure", "steady", "state"),
    [
        (Figure(9.0, 8.1, 9.5), True, "met"),
        (Figure(9.0, 7.9, 9.5), True, "unclear"),
        (Figure(7.0, 6.0, 7.9), True, "missed"),
        (Figure(9.0, 8.1, 9.5), False, "unclear"),
    ],
)
def test_with_a_goodput_target_no_percentile_is_judged_and_a_growing_queue_holds_none(
    figure: Figure, steady: bool, state: str
) -> None:
    targets = GOODPUT.model_copy(update={"qps": 10.0})
    found = judge(targets, {"goodput": figure, "qps": Figure(10.0), "p95_ttft": Figure(5.0)}, steady=steady)
    assert found.state == state and [f.target for f in found.findings] == ["goodput", "qps"]


def test_goodput_is_the_share_that_kept_every_limit_that_concerns_it_times_the_rate() -> None:
    limits = figures.goodput_limits(GOODPUT.latencies())
    good, late = answered(0.05, "short"), answered(0.2, "short")
    slow, broken = answered(0.05, "short", tpot=0.05), replace(answered(0.05, "short"), outcome="truncated")
    assert [trial.goodput_figure([one], limits, 10.0)["goodput"].value for one in (good, late, slow, broken)] == [10, 0, 0, 0]
    assert trial.goodput_figure([answered(0.05, "long", tpot=0.05)], limits, 10.0)["goodput"].value == 10, "of another class"
    assert trial.goodput_figure([], limits, 10.0) == {}
    mixed = trial.goodput_figure([good, good, good, late] * 50, limits, 10.0)["goodput"]
    assert mixed.value == 7.5 and mixed.low is not None and 6.5 < mixed.low < 7.5
    together = trial.goodput_figure([*[good] * 75, *[late] * 50, *[good] * 75], limits, 10.0)["goodput"]
    assert together.value == 7.5 and together.low is not None and together.low < mixed.low - 1, "late ones that follow one another"


def test_a_goodput_that_is_out_of_reach_is_told_soon() -> None:
    limits = figures.goodput_limits(GOODPUT.latencies())
    good, late = answered(0.05, "long"), answered(0.2, "long")
    assert trial.hopeless_goodput([good] * 30, limits, 0.9) is None
    found = trial.hopeless_goodput([late] * 30, limits, 0.9)
    assert found and found[0] == "goodput" and "requests did not keep every latency limit" in found[1]
    assert trial.hopeless_goodput([good, good, good, late] * 10, limits, 0.5) is None
    assert trial.hopeless_goodput([], limits, 1.0) is None


def answered(ttft: float, cls: str, tpot: float = 0.01) -> Record:
    """The record of a whole answer of 11 tokens."""
    last = ttft + 10 * tpot
    base = {"id": "1", "cls": cls, "arm": "a", "phase": "counted", "scheduled": 0.0, "sent": 0.0, "connected": 0.0, "headers": 0.0}
    ends = {"first": ttft, "first_answer": ttft, "last": last, "end": last, "gaps": array("f", [tpot * 1e3]), "status": 200}
    counts = {"asked_prompt": 8, "asked_tokens": 11, "prompt_tokens": 8, "completion_tokens": 11, "token_count": 11}
    return Record(**{**base, **ends, **counts}, outcome="ok", error="")  # type: ignore[arg-type]


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


def test_a_verdict_of_an_earlier_version_has_a_rate_and_nothing_that_was_maximised() -> None:
    told = {"outcome": "met", "sentence": "holds", "trial": None, "over": True, "capacity": {"held": 8.0, "lost": 9.0}}
    found = verdict.loads(told)
    assert found.capacity == Bracket(8.0, 9.0) and found.most is None


def test_the_recipe_of_a_winner_asks_for_the_rate_that_was_confirmed_and_of_a_goodput_for_a_step_less() -> None:
    trial_ = Trial(1, {}, "confirmation", "", "met", 1.0, 1.0, rate=16.2)
    found = Verdict("met", "", trial_, capacity=Bracket(16.2, 17.0), most=Most("goodput", 14.5, 13.5, 15.0))
    assert verdict.held_again(found) == pytest.approx({"qps": 15.0, "goodput": 12.5})
    assert verdict.held_again(replace(found, most=Most("tokens", 900.0, 900.0, 950.0))) == {"qps": 16.2}
    assert verdict.held_again(replace(found, most=None)) == {"qps": 16.2}, "as versions before goodput could be looked for"
    assert verdict.held_again(replace(found, capacity=None)) == {}, "its targets are those that were given"


@pytest.mark.parametrize(
    ("targets", "maximize", "found"),
    [
        ({}, None, [("p50_ttft", 0.3, 0.5), ("p95_ttft", 0.8, 0.05)]),
        ({"goodput": 4}, None, [("ttft", 0.8, 0.6)]),
        ({"goodput": 11}, None, [("ttft", 0.8, 0.0)]),
        ({"goodput": 9}, "goodput", [("ttft", 0.8, 0.5)]),
    ],
)
def test_alone_on_the_engine_as_many_may_be_late_as_are_not_part_of_a_goodput(
    targets: dict[str, float], maximize: Maximize | None, found: list[tuple[str, float, float]]
) -> None:
    """Of several percentiles of one latency a goodput has the loosest limit."""
    asked = {"p50_ttft": "300ms", "p95_ttft": "800ms", "p95_tpot": "20ms", "qps": 10, **targets}
    chosen = Recipe.model_validate({"name": "r", "engine": {"url": "http://127.0.0.1:1"}, "targets": asked})
    assert [(name, limit, pytest.approx(share)) for name, limit, share in allowances(chosen, maximize)] == found


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


CAPTURED = Load(running=243, waiting=0, in_flight=243, step_tokens=900, steps=Steps(0.0326, 620, 243, 300), graphs=512)
LAUNCHES = "a step took {} of at most 2048 tokens, and beyond the 512 that CUDA graphs reach to"
LAUNCHES += " the host launches its kernels one by one"
TOOK = ", 32.6 ms of 620 tokens, for which H200 needs at least 4 ms for its bytes and 2 ms for its products"
IDLE, BUSY = Roofline("H200", 0.004, 0.002), Roofline("H200", 0.004, 0.02)


@pytest.mark.parametrize(
    ("load", "roofline", "name"),
    [
        (CAPTURED, IDLE, "overhead"),
        (CAPTURED, None, "overhead"),
        (CAPTURED, BUSY, "compute"),
        # A full batch and a queue come of steps that are launched slowly, where it is known that they are.
        (replace(CAPTURED, waiting=458, in_flight=701), IDLE, "overhead"),
        (replace(CAPTURED, waiting=458, in_flight=701), None, "sequences"),
        (replace(CAPTURED, running=241, waiting=2), None, "sequences"),
        (replace(CAPTURED, running=120, waiting=2, in_flight=122), None, "overhead"),
        (replace(CAPTURED, running=120, waiting=2, in_flight=122), BUSY, "queue"),
        (replace(CAPTURED, waiting=None, step_tokens=None), IDLE, "overhead"),
        (replace(CAPTURED, server_cpu=1.04), IDLE, "front end"),
    ],
)
def test_steps_beyond_the_cuda_graphs_are_overhead_unless_something_else_is_known_to_bind(
    load: Load, roofline: Roofline | None, name: str
) -> None:
    found = diagnose(load, {BUDGET: 2048, CAP: 256}, roofline)
    assert (found.name, found.graphs) == (name, 512 if name == "overhead" else None)
    if name == "overhead":
        assert found.evidence == LAUNCHES.format(int(load.step_tokens or 620)) + (TOOK if roofline else UNSURE)


@pytest.mark.parametrize(
    ("load", "point"),
    [
        (replace(CAPTURED, graphs=None), {BUDGET: 2048}),
        (replace(CAPTURED, graphs=1024), {BUDGET: 2048}),
        # A prompt that was read in several steps is counted in the last of them.
        (CAPTURED, {BUDGET: 512}),
        (CAPTURED, {CAP: 256}),
    ],
)
def test_steps_within_the_cuda_graphs_or_of_unknown_size_are_what_they_were(load: Load, point: dict[str, Scalar]) -> None:
    assert [diagnose(load, point, roofline).graphs for roofline in (None, IDLE)] == [None, None]
    assert diagnose(load, point) == Limit(UNTOLD, "243 requests ran and 0 waited: steps take long")


GRAPHED = Space(
    {BUDGET: (256, 512, 2048, 8192), CAP: (128, 512, 1024)},
    {BUDGET: 8192, CAP: 1024, "max-cudagraph-capture-size": None, "async-scheduling": None, "stream-interval": 1},
    {"stream-interval": (8,), "max-cudagraph-capture-size": (2048,), "async-scheduling": (True,)},
)


@pytest.mark.parametrize(
    ("budget", "cap", "reach", "found"),
    [
        (8192, 128, 512, {BUDGET: 512, CAP: 128}),
        (8192, 512, 512, {BUDGET: 512, CAP: 512}),
        (8192, 1024, 512, {BUDGET: 512, CAP: 512}),
        (2048, 1024, 300, {BUDGET: 256, CAP: 128}),
        (8192, 1024, 1500, {BUDGET: 512, CAP: 512}),
        (8192, 1024, 128, None),
        (8192, 1024, None, None),
    ],
)
def test_where_steps_are_beyond_the_cuda_graphs_the_first_move_is_the_largest_budget_within_and_no_more_sequences(
    budget: int, cap: int, reach: int | None, found: dict[str, Scalar] | None
) -> None:
    point = {**GRAPHED.defaults, BUDGET: budget, CAP: cap}
    best = Tried(point, 2.0, Limit("overhead", "steps are launched", reach))
    first = by_rule([best], GRAPHED)
    assert propose.inside_graphs(best, GRAPHED) == ({**point, **found} if found else None)
    assert first is not None
    if found:
        assert first.point == {**point, **found}
        assert first.why == "overhead: steps are launched; take no more tokens a step than they reach to"
        then = by_rule([best], GRAPHED, [first.point])
        assert then is not None and then.point not in (point, first.point), "the rules go on where that did not help"
    else:
        assert first.point[BUDGET] == budget and first.point[CAP] != cap


@pytest.mark.parametrize(
    ("name", "reach", "unlisted", "order"),
    [
        ("overhead", 512, (), ["max-cudagraph-capture-size", "async-scheduling", "stream-interval"]),
        ("overhead", None, (), ["async-scheduling", "stream-interval", "max-cudagraph-capture-size"]),
        ("compute", None, (), ["stream-interval", "async-scheduling", "max-cudagraph-capture-size"]),
        ("overhead", 512, ("max-cudagraph-capture-size",), ["max-cudagraph-capture-size", "async-scheduling", "stream-interval"]),
        ("compute", None, ("max-cudagraph-capture-size",), ["stream-interval", "async-scheduling"]),
    ],
)
def test_larger_cuda_graphs_are_the_first_start_where_steps_are_beyond_them_and_unless_asked_for_no_start_elsewhere(
    name: str, reach: int | None, unlisted: tuple[str, ...], order: list[str]
) -> None:
    where, seen, found = replace(GRAPHED, unlisted=unlisted), [dict(GRAPHED.defaults)], []
    while (start := next_restart([Tried(dict(where.defaults), 2.0, Limit(name, "", reach))], where, seen)) is not None:
        seen.append(start.point)
        found += [knob for knob in where.restart if start.point[knob] != where.defaults[knob]]
    assert found == order


def test_where_memory_binds_a_step_takes_more_prompt_tokens_and_elsewhere_runs_fewer_requests() -> None:
    here = {**WHERE.defaults, BUDGET: 2048}

    def first(name: str) -> dict[str, Scalar]:
        asked = by_rule([Tried(here, 2.0, Limit(name, ""))], WHERE)
        assert asked
        return asked.point

    assert first("memory bandwidth") == {**here, BUDGET: 8192}
    assert [first(name) for name in ("compute", "overhead", UNTOLD)] == [{**here, CAP: 512}] * 3


ORDERED = Space(
    {POLICY: ("fcfs", "token_aware"), AGING: (1, 5.0, 20), EDGES: ("16,64", "32,128")},
    {POLICY: "fcfs", AGING: 5.0, EDGES: "32,128"},
)


@pytest.mark.parametrize("limit", ["sequences", "budget", "queue"])
def test_parameters_of_the_order_are_tried_where_it_is_on_and_requests_wait(limit: str) -> None:
    def asked(point: dict[str, Scalar], limit: str) -> list[dict[str, Scalar]]:
        seen, found = [point], []
        while (proposal := by_rule([Tried(point, 2.0, Limit(limit, ""))], ORDERED, seen)) is not None:
            seen.append(proposal.point)
            found.append(changed(proposal.point, ORDERED))
        return found

    on = {**ORDERED.defaults, POLICY: "token_aware"}
    others = [{AGING: 1}, {AGING: 20}, {EDGES: "16,64"}]
    assert asked(on, limit) == [{}, *({POLICY: "token_aware", **other} for other in others)]
    assert asked(dict(ORDERED.defaults), limit) == [{POLICY: "token_aware"}], "first come, first served has none"
    assert asked(on, UNTOLD) == [] and asked(on, "memory bandwidth") == [], "nothing waits"


def test_where_the_http_server_binds_larger_stream_intervals_come_before_fewer_requests() -> None:
    where = Space({CAP: (32, 64), STREAM: (1, 4, 16)}, {CAP: 64, STREAM: 1})
    seen, found = [dict(where.defaults)], []
    while (asked := by_rule([Tried(dict(where.defaults), 2.0, Limit("front end", ""))], where, seen)) is not None:
        seen.append(asked.point)
        found.append(changed(asked.point, where))
    assert found == [{STREAM: 4}, {STREAM: 16}, {CAP: 32}]


def test_a_winner_whose_tokens_come_in_bunches_says_so() -> None:
    for knob in (STREAM, "stream-interval"):
        where = Space({STREAM: (1, 8)} if knob == STREAM else {}, {knob: 1}, {} if knob == STREAM else {knob: (8,)})
        won, usual = (Trial(0, {knob: interval}, "rule", "", "met", 0.5, 1.0) for interval in (8, 1))
        assert "clients get up to 8 tokens at a time" in verdict.met(won, where, confirmed=True).sentence
        assert "at a time" not in verdict.met(usual, where, confirmed=True).sentence


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


def test_flags_with_which_no_engine_starts_are_not_tried_again_beside_others() -> None:
    flags: dict[str, tuple[Scalar, ...]] = {"api-server-count": (4,), "block-size": (8, 32)}
    where = Space({}, {"api-server-count": 1, "block-size": None}, flags)
    refused = {**where.defaults, "block-size": 8}
    best = {**where.defaults, "api-server-count": 4}
    tried, seen = [Tried(best, 2.0, Limit("compute", ""))], [dict(where.defaults), refused, best]
    found = next_restart(tried, where, seen, [refused])
    assert found and found.point == {"api-server-count": 4, "block-size": 32}
    assert next_restart(tried, where, [*seen, found.point], [refused]) is None
    without = next_restart(tried, where, seen)
    assert without and without.point == {"api-server-count": 4, "block-size": 8}, "one that failed under load may do better so"


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
    log.write_text("Triton autotuning for function _chunk_state_fwd_kernel,\nwith key as (64,),\nfinished after 1.26s")
    assert trial.compiled(log, 0) == ["_chunk_state_fwd_kernel"]
    missed = Measured(Judgement("missed", ()), {}, Load(), True, 1.0)
    spoilt = trial.unspoilt(missed, ["fused_moe_kernel"])
    assert not spoilt.valid and "(fused_moe_kernel)" in spoilt.judgement.notes[0]
    assert trial.unspoilt(missed, []) is missed
    met = replace(missed, judgement=Judgement("met", ()))
    assert trial.unspoilt(met, ["fused_moe_kernel"]) is met


def test_a_trial_that_ends_early_has_a_figure_beyond_the_target_that_it_missed() -> None:
    chosen = recipe.load(recipe.find("cpu-small")).with_targets(p95_ttft="800ms")
    # Two windows: the first one's answers are in time, and then the queue has grown.
    start = time.monotonic() - 12.0
    answers = [answer(sent=start + i / 20, first=start + i / 20 + (0.1 if i < 200 else 1.5)) for i in range(240)]
    plan = Plan(url="http://127.0.0.1", model="m", workload=chosen.workload, rate=20.0, duration=30.0)
    observed = trial._Observed(chosen, plan, graphs=512)
    watch = SimpleNamespace(seen=lambda: Seen())
    judgement = observed.look(answers, ClientState(start=start), watch)  # type: ignore[arg-type]
    assert judgement is not None and judgement.state == "missed" and "stopped early: " in judgement.notes[0]
    late = next(each for each in judgement.findings if each.target == "p95_ttft")
    assert late.state == "missed" and late.figure is not None and late.figure.value > 0.8
    assert observed.measured(judgement, Seen(), 12.0).load.graphs == 512, "what the engine said at its start goes with it"


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


@pytest.mark.parametrize("percentile", [1, 10, 50, 75, 90, 95, 99, 99.9])
def test_so_many_requests_are_counted_that_their_percentile_has_an_interval(percentile: float) -> None:
    values = [float(number) for number in range(trial.counted(percentile))]
    assert stats.interval(values, percentile, trial.LEVEL) is not None
