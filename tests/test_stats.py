"""Figures are exact, intervals hold what they say, and looking often does not make a decision wrong."""

import math
import random
import statistics
from array import array
from typing import Any

import numpy as np
import pytest

from fenno.load import figures, job, stats
from fenno.load.plan import Plan
from fenno.load.record import Record, dump, parse
from fenno.load.requests import Requests
from fenno.recipe import Workload


def record(**change: Any) -> Record:
    """A good answer of three tokens: first after 100 ms, gaps of 10 and 30 ms."""
    sent = change.pop("sent", 10.0)
    base: dict[str, Any] = {
        **{"id": "a", "cls": "short", "arm": "0", "phase": "counted", "scheduled": sent, "sent": sent, "connected": sent},
        **{"headers": sent + 0.01, "first": sent + 0.1, "first_answer": sent + 0.1, "last": sent + 0.14, "end": sent + 0.15},
        **{"asked_prompt": 5, "asked_tokens": 3, "prompt_tokens": 5, "completion_tokens": 3, "token_count": 3},
        **{"gaps": array("f", [10.0, 30.0]), "status": 200, "outcome": "ok", "error": ""},
    }
    return Record(**{**base, **change})


def test_a_record_survives_its_line_of_json() -> None:
    one = record(outcome="429", status=429, first=None, error='a "quoted" reason')
    assert parse(dump(one)) == one
    assert "\n" not in dump(one)


def test_latencies_follow_from_the_stamps() -> None:
    one = record()
    assert one.ttft == pytest.approx(0.1)
    assert one.e2el == pytest.approx(0.14)
    assert one.tpot == pytest.approx(0.02)
    assert one.gap == pytest.approx(0.03)


def test_a_failed_request_is_infinitely_late_even_if_it_began_well() -> None:
    one = record(outcome="truncated")
    assert [one.ttft, one.e2el, one.tpot, one.gap] == [math.inf] * 4


@pytest.mark.parametrize(("count", "p", "rank"), [(100, 95, 95), (100, 99, 99), (101, 95, 96), (20, 95, 19), (3, 50, 2)])
def test_percentiles_are_the_nearest_rank(count: int, p: float, rank: int) -> None:
    assert stats.percentile([float(i) for i in range(1, count + 1)], p) == rank


def test_where_nothing_was_answered_first_tokens_came_no_later_in_the_second_half() -> None:
    refused = [record(sent=10 + i / 4, outcome="5xx") for i in range(40)]
    assert figures.steady(Requests.of(refused), (10.0, 20.0)).steady


def itl(records: list[Record]) -> dict[str, float | None]:
    return figures.itl(*figures.Gaps(Requests.of(records)).of())


def test_gaps_that_are_counted_give_the_figures_of_gaps_that_are_kept() -> None:
    rng = random.Random(9)
    for failed in (0, 3, 30):
        answers = [record(gaps=array("f", [rng.lognormvariate(3, 1) for _ in range(rng.randrange(9))])) for _ in range(100)]
        kept = [gap / 1e3 for one in answers for gap in one.gaps] + [math.inf] * failed
        assert itl([*answers, *[record(outcome="5xx")] * failed]) == pytest.approx(figures.figures(np.array(kept)), abs=1e-3)
    assert itl([record(gaps=array("f"))]) == figures.figures(np.array([]))


def test_a_p95_interval_needs_72_values() -> None:
    assert stats.interval([float(i) for i in range(71)], 95) is None
    assert stats.interval([float(i) for i in range(72)], 95) is not None


@pytest.mark.parametrize(("p", "count"), [(95, 100), (95, 400), (50, 40), (99, 500)])
def test_intervals_hold_the_true_percentile_as_often_as_they_say(p: float, count: int) -> None:
    rng, truth, held = random.Random(5), -math.log(1 - p / 100), 0
    for _ in range(400):
        found = stats.interval(sorted(rng.expovariate(1) for _ in range(count)), p)
        assert found is not None
        held += found[0] <= truth <= found[1]
    assert held / 400 >= 0.93  # 95 % or more; 93 % is two standard errors below


def walk(rng: random.Random, count: int, memory: float) -> list[float]:
    """Values that follow one another, each standard normal."""
    value, found = rng.gauss(0, 1), []
    for _ in range(count):
        value = memory * value + math.sqrt(1 - memory * memory) * rng.gauss(0, 1)
        found.append(value)
    return found


def test_values_that_follow_one_another_are_worth_less() -> None:
    rng = random.Random(3)
    free = statistics.mean(stats.worth([rng.random() for _ in range(500)], 95) for _ in range(40))
    bound = statistics.mean(stats.worth(walk(rng, 500, 0.95), 95) for _ in range(40))
    assert free > 400
    assert bound < 150


def test_intervals_hold_also_where_values_follow_one_another() -> None:
    rng, truth, naive, right, made = random.Random(11), statistics.NormalDist().inv_cdf(0.95), 0, 0, 0
    for _ in range(120):
        values = walk(rng, 1500, 0.9)
        plain = stats.interval(sorted(values), 95)
        wide = stats.interval(sorted(values), 95, effective=stats.worth(values, 95))
        if plain is None or wide is None:
            continue
        made += 1
        naive += plain[0] <= truth <= plain[1]
        right += wide[0] <= truth <= wide[1]
    assert made > 100
    assert naive / made < 0.85, "the correction would not be needed"
    assert right / made >= 0.88  # about 91 %: how much they follow one another is itself an estimate


@pytest.mark.parametrize(("share", "wrong"), [(0.05, "missed"), (0.051, "met"), (0.06, "met"), (0.04, "missed"), (0.3, "met")])
def test_peeking_after_every_request_decides_wrongly_at_most_as_often_as_alpha(share: float, wrong: str) -> None:
    rng, alpha, mistakes, runs = random.Random(7), 0.1, 0, 200
    for _ in range(runs):
        test = stats.Sequential(target=1.0, p=95, alpha=alpha)
        for _ in range(300):
            if test.update([2.0 if rng.random() < share else 0.5]):
                break
        mistakes += test.decision == wrong
    assert mistakes / runs <= alpha + 2 * math.sqrt(alpha * (1 - alpha) / runs)


def test_clear_cases_are_decided_soon() -> None:
    good, bad = stats.Sequential(1.0, 95), stats.Sequential(1.0, 95)
    assert good.update([0.5] * 110) == "met"
    assert bad.update([0.5, math.inf] * 8) == "missed"
    assert bad.update([0.5] * 10_000) == "missed", "a decision stays"


def test_nothing_is_decided_at_the_edge() -> None:
    test = stats.Sequential(1.0, 95)
    assert test.update(([0.5] * 19 + [2.0]) * 30) is None


def test_a_summary_counts_by_window_and_outcome() -> None:
    records = [record(sent=10.0 + i / 100, cls="short" if i % 4 else "long") for i in range(100)]
    records += [record(sent=10.5, outcome="429"), record(sent=10.6, outcome="cancelled"), record(sent=3.0, phase="warmup")]
    found = figures.summarize(Requests.of(records), (10.0, 12.0), {"ttft": 0.2, "tpot": 0.01})
    assert (found["requests"], found["completed"], found["cancelled"]) == (101, 100, 1)
    assert found["failures"] == {"429": 1}
    assert found["availability"] == pytest.approx(100 / 101)
    assert found["qps"] == 50
    assert found["token_throughput"] == 150
    assert found["goodput"] == 0, "every request misses the 10 ms a token"
    assert found["ttft"]["p95"] == pytest.approx(100)
    assert found["ttft"]["max"] is None, "a failure is infinitely late"
    assert found["classes"]["long"]["requests"] == 25
    assert found["itl"]["p50"] == pytest.approx(30), "half of the gaps are 10 ms, and one failure is beyond all"


def test_latencies_from_the_schedule_hold_the_clients_own_lateness() -> None:
    found = figures.summarize(Requests.of([record(sent=10.0, scheduled=9.75), record(outcome="429", scheduled=9.0)]), (9.0, 12.0))
    for name in ("ttft", "e2el"):
        assert found[f"{name}_scheduled"]["p50"] == pytest.approx((found[name]["p50"] or 0) + 250)
        assert found[f"{name}_scheduled"]["max"] is None, "a failure is infinitely late"


def test_conversations_have_figures_by_turn() -> None:
    later = [record(sent=11.0, first=11.3, turn=2), record(sent=12.0, first=12.5, turn=2)]
    found = figures.summarize(Requests.of([record(), *later]), (10.0, 13.0))["turns"]
    assert list(found) == ["1", "2"]
    assert (found["1"]["ttft"]["max"], found["2"]["ttft"]["p50"]) == (pytest.approx(100), pytest.approx(300))
    assert figures.summarize(Requests.of([record()]), (10.0, 13.0))["turns"] == {}


PLAN = Plan(url="http://127.0.0.1:1", model="m", workload=Workload(), users=1, requests=1)


def mixed(long_ok: int) -> dict[str, Any]:
    """300 short and 100 long requests, of which so many long ones completed; the others were cancelled."""
    records = [record(sent=10 + i / 100, cls="short") for i in range(300)]
    records += [record(sent=10 + i / 100, cls="long", outcome="ok" if i < long_ok else "cancelled") for i in range(100)]
    return figures.summarize(Requests.of(records), (10.0, 14.0))


def test_a_class_that_is_dropped_more_than_others_is_noticed() -> None:
    whole, few, half, none = mixed(100), mixed(97), mixed(50), mixed(0)
    assert (whole["mix_p"], whole["classes"]["long"]["dropped_share"]) == (1.0, 0.0)
    assert few["mix_p"] > 0.5
    assert half["mix_p"] < 0.001
    assert half["classes"]["long"]["dropped_share"] == 0.5
    assert half["classes"]["short"]["dropped_share"] == 0.0
    assert half["classes"]["long"]["offered_share"] == 0.25, "cancelled ones were offered"
    assert none["mix_p"] < 1e-9
    assert none["classes"]["long"]["availability"] is None
    assert job.flags(PLAN, whole) == []
    assert "not completed: long 50.0%, short 0.0%" in job.flags(PLAN, half)[0]


@pytest.mark.parametrize(("freedom", "limit"), [(1, 6.635), (2, 9.210), (3, 11.345), (4, 13.277), (9, 21.666)])
def test_chi_square_tails_are_those_of_printed_tables(freedom: int, limit: float) -> None:
    assert stats.chi_square_p(limit, freedom) == pytest.approx(0.01, rel=1e-3)
    assert stats.chi_square_p(0.0, freedom) == 1.0


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    records = [record(), record(first=12.0), record(outcome="5xx")]
    assert figures.summarize(Requests.of(records), (10.0, 11.0), {"ttft": 0.5})["goodput"] == 1
    assert figures.goodput_limits({"p50_ttft": 0.2, "p95_ttft": 0.8, "p99_e2el": 9.0}) == {"ttft": 0.8, "e2el": 9.0}


def stream(rate: float, stay: Any, until: float, seed: int = 1) -> list[Record]:
    rng, now, found = random.Random(seed), 0.0, []
    while now < until:
        now += rng.expovariate(rate)
        end = now + stay(now, rng)
        found.append(record(sent=now, first=now + 0.5 * (end - now), end=end))
    return found


def test_a_steady_stream_is_called_steady() -> None:
    wrong = 0
    for seed in range(50):
        records = stream(10, lambda _, rng: rng.expovariate(1 / 1.5), 40, seed)
        wrong += not figures.steady(Requests.of(records), (10.0, 30.0)).steady
    assert wrong <= 2


def test_a_growing_queue_is_no_steady_stream() -> None:
    for seed in range(20):
        verdict = figures.steady(Requests.of(stream(10, lambda now, _: 0.5 + 0.4 * now, 60, seed)), (5.0, 25.0))
        assert not verdict.steady
        assert "grew" in verdict.reason or "later and later" in verdict.reason


def test_a_second_half_that_failed_is_said_in_words() -> None:
    assert "P50 20 ms in the first half, and half of the second half failed" in figures._grew(np.array([0.02] * 20 + [np.inf] * 20))


def test_a_slow_client_makes_a_run_invalid() -> None:
    good = {"lag_p95": 0.9, "lateness_p95": 0.9, "in_flight_mean": 199.0, "users": 200}
    assert figures.validity(**good).valid  # type: ignore[arg-type]
    assert not figures.validity(**{**good, "lag_p95": 1.1}).valid  # type: ignore[arg-type]
    assert figures.validity(**{**good, "lag_p95": 1.1}, target=0.3).valid  # type: ignore[arg-type]
    assert not figures.validity(**{**good, "in_flight_mean": 197.0}).valid  # type: ignore[arg-type]
    late = figures.validity(**{**good, "lateness_p95": 5.0, "users": None})  # type: ignore[arg-type]
    assert "sent late" in late.reasons[0]


def test_each_reason_why_a_run_is_no_measurement_comes_with_what_to_do_next() -> None:
    growing, falling = (figures.Steady(False, 1.0, 2.0, "it was not level", step) for step in (figures.GROWING, figures.FALLING))
    wrong = {"lag_p95": 9.0, "lateness_p95": 9.0, "in_flight_mean": 1.0, "phase": "gone"}
    for level in (growing, falling):
        for users in (None, 200):
            found = figures.validity(**wrong, users=users, levelled=level)  # type: ignore[arg-type]
            assert len(found.reasons) == 4
            assert len(found.steps) == 4 and all(found.steps)
    assert figures.validity(lag_p95=0.0, lateness_p95=0.0, in_flight_mean=1.0, users=1).steps == ()
    for records in ([], stream(10, lambda now, _: 0.5 + 0.4 * now, 60), stream(10, lambda now, _: max(0.1, 8 - 0.4 * now), 60)):
        assert figures.steady(Requests.of(records), (5.0, 25.0)).step
