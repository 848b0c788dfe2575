"""What the server's side comes to: from recorded expositions, samples and power to means, growth, parts of the TTFT, J and $."""

import math
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fenno.engine import metrics
from fenno.engine.metrics import Metrics
from fenno.engine.watch import GpuSample, Sample, Seen
from fenno.load import account
from fenno.load.probe import Probe
from fenno.load.record import Record
from fenno.load.requests import Requests
from fenno.machine import Gpu

GIB = 2**30
RECORDED = Path(__file__).with_name("metrics")
CARD = Gpu(0, "Card", "GPU-a", 80 * GIB, 60 * GIB, (9, 0), "580", 90.0, 400.0, None)


class Engine:
    """Counts as vLLM does, and prints it with the library that vLLM prints it with."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
        self.seconds = {n: Histogram(f"vllm:{n}_seconds", "", registry=self.registry, buckets=[0.1, 1.0]) for n in names}
        self.gauges = {n: Gauge(f"vllm:{n}", "", registry=self.registry) for n in ("num_requests_running", "kv_cache_usage_perc")}
        counts = ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens")
        self.counts = {n: Counter(f"vllm:{n}", "", registry=self.registry) for n in counts}

    def serve(self, ttft: float, queue: float, prefill: float) -> None:
        for name, value in zip(self.seconds, (ttft, queue, prefill), strict=True):
            self.seconds[name].observe(value)
        self.counts["prefix_cache_queries"].inc(100)
        self.counts["prefix_cache_hits"].inc(25)
        self.counts["generation_tokens"].inc(10)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def scrape(self) -> Metrics:
        return metrics.parse(self.text())


def record(first: float | None, sent: float, **change: object) -> Record:
    plain = {
        "id": "x",
        "cls": "a",
        "arm": "",
        "phase": "counted",
        "scheduled": sent,
        "sent": sent,
        "connected": sent,
        "headers": sent,
    }
    rest = {
        "first": first,
        "first_answer": first,
        "last": first,
        "end": sent + 1,
        "asked_prompt": 1,
        "asked_tokens": 1,
        "error": "",
    }
    counts = {"prompt_tokens": 1, "completion_tokens": 1, "token_count": 1, "gaps": array("f"), "status": 200, "outcome": "ok"}
    return Record(**{**plain, **rest, **counts, **change})  # type: ignore[arg-type]


def test_the_first_tokens_time_is_told_apart_and_its_largest_part_named() -> None:
    engine = Engine()
    engine.serve(5.0, 4.0, 1.0)  # before the window: must not count
    before = engine.scrape()
    for _ in range(4):
        engine.serve(0.4, 0.3, 0.08)
    found = account.reconcile(before, engine.scrape(), [0.42, 0.44, 0.42, 0.44])
    assert found is not None
    assert {name: found[name] for name in ("client", "engine", "outside", "queue", "prefill", "rest")} == {
        "client": 430.0,
        "engine": 400.0,
        "outside": 30.0,
        "queue": 300.0,
        "prefill": 80.0,
        "rest": 20.0,
    }
    assert found["first_tokens"] == {"client": 4, "engine": 4}
    assert found["sentence"] == (
        "of 430 ms to the first token, on average of all 4 in the window, 30 ms in the client, the network and the HTTP front end, "
        "300 ms waiting in the engine's queue, 80 ms in prefill, 20 ms elsewhere in the engine; most of it (70%) is waiting in the "
        "engine's queue"
    )


def test_a_part_of_nothing_has_no_sign() -> None:
    engine = Engine()
    before = engine.scrape()
    for _ in range(4):
        engine.serve(0.4, 0.3, 0.100001)
    found = account.reconcile(before, engine.scrape(), [0.42, 0.44, 0.42, 0.44])
    assert found is not None and ", 0 ms elsewhere in the engine" in found["sentence"]


def test_a_recording_of_a_real_engine_adds_up() -> None:
    """vLLM 0.32.0 on a CPU before and after six requests for one token, and how long each took until its answer was here."""
    before, after = (metrics.parse((RECORDED / f"{name}.txt").read_text()) for name in ("before", "after"))
    found = account.reconcile(before, after, [0.0843, 0.0398, 0.0358, 0.0369, 0.0371, 0.0367])
    assert found is not None
    assert found["first_tokens"] == {"client": 6, "engine": 6}
    # The differences of the recorded sums, for six requests each.
    assert found["engine"] == pytest.approx((287.609 - 42.219) / 6, abs=0.002)
    assert found["queue"] == pytest.approx((0.278 - 0.064) / 6, abs=0.002)
    assert found["prefill"] == pytest.approx((248.241 - 23.113) / 6, abs=0.002)
    assert found["outside"] == pytest.approx(45.1 - 40.898, abs=0.002)
    assert found["rest"] == pytest.approx(40.898 - 0.036 - 37.521, abs=0.003)
    assert found["sentence"].endswith("is in prefill")
    seen = Seen((Sample(1.0, before), Sample(2.0, after)))
    server = account.summarize(seen, (0.0, 3.0), 1.0)
    assert (server["requests_finished"], server["generation_tokens"], server["preemptions"]) == (6, 6, 0)
    assert server["prefix_hit_rate"] == pytest.approx(1280 / (2175 - 3))


@pytest.mark.parametrize(
    ("ttft", "queue", "prefill", "client", "named"),
    [
        (0.4, 0.0, 0.39, 0.41, "in prefill"),
        (0.1, 0.01, 0.05, 0.9, "in the client, the network and the HTTP front end"),
        (0.9, 0.01, 0.05, 0.91, "elsewhere in the engine"),
    ],
)
def test_wherever_most_of_the_time_goes_is_named(ttft: float, queue: float, prefill: float, client: float, named: str) -> None:
    engine = Engine()
    before = engine.scrape()
    engine.serve(ttft, queue, prefill)
    found = account.reconcile(before, engine.scrape(), [client])
    assert found is not None
    assert found["sentence"].endswith(f"is {named}")


def test_others_traffic_on_the_engine_is_said_instead_of_a_comparison() -> None:
    engine = Engine()
    before = engine.scrape()
    for _ in range(20):
        engine.serve(0.1, 0.0, 0.1)
    found = account.reconcile(before, engine.scrape(), [0.1] * 10)
    assert found is not None
    assert found["sentence"].startswith("the engine counted 20 first tokens and this client 10: ")
    assert account.reconcile(before, before, [0.1]) is None
    assert account.reconcile(Metrics(), Metrics(), [0.1]) is None


def test_an_engine_that_tells_only_its_ttft_is_one_part() -> None:
    engine = Engine()
    before, after = engine.scrape(), (engine.serve(0.3, 0.1, 0.1), engine.scrape())[1]
    only = [replace(m, request_queue_time_seconds=None) for m in (before, after)]
    found = account.reconcile(*only, [0.4])
    assert found is not None
    assert (found["queue"], found["rest"], found["outside"]) == (None, None, 100.0)
    assert found["sentence"].endswith("most of it (75%) is in the engine")


def test_first_tokens_are_those_that_came_between_the_scrapes_in_whatever_phase() -> None:
    records = [
        record(10.5, 10.0, phase="warmup"),
        record(11.0, 10.0, outcome="truncated"),
        record(9.9, 9.0),
        record(12.0, 11.0),
        record(None, 10.0, outcome="headers"),
    ]
    probes = [Probe(10.0, 10.25), Probe(11.0, 11.5, "timed out"), Probe(11.9, 12.1)]
    assert account.first_tokens(Requests.of(records), probes, 10.0, 12.0).tolist() == [0.5, 1.0, 0.25]
    assert account.first_tokens(Requests.of([]), (), 10.0, 12.0).tolist() == []


def test_the_window_has_means_maxima_growth_and_the_hit_rate_of_the_server() -> None:
    engine = Engine()
    engine.counts["num_preemptions"].inc(7)
    samples = []
    for at, running in ((0.0, 99), (1.0, 4), (2.0, 8), (3.0, 6), (9.0, 99)):
        engine.gauges["num_requests_running"].set(running)
        engine.gauges["kv_cache_usage_perc"].set(running / 10)
        samples.append(Sample(at, engine.scrape(), int(at) * GIB))
        engine.serve(0.1, 0.0, 0.1)
        engine.counts["num_preemptions"].inc(2)
    found = account.summarize(Seen(tuple(samples), (), ("a note",)), (0.5, 5.0), 10.0)
    assert found["running"] == {"mean": 6.0, "max": 8}
    assert found["kv_cache_usage"] == {"mean": 0.6, "max": 0.8}
    assert (found["preemptions"], found["generation_tokens"], found["requests_finished"]) == (4, 20, None)
    assert found["prefix_hit_rate"] == 0.25
    assert found["memory"] == {"mean": 2 * GIB, "max": 3 * GIB}
    assert (found["samples"], found["notes"], found["waiting"], found["gpus"]) == (3, ["a note"], None, [])


def test_a_restart_within_the_window_leaves_no_growth_and_a_server_without_metrics_nothing() -> None:
    old, new = Engine(), Engine()
    for _ in range(5):
        old.serve(0.1, 0.0, 0.1)
    restarted = Seen((Sample(1.0, old.scrape()), Sample(2.0, Metrics(), error="refused"), Sample(3.0, new.scrape())))
    found = account.summarize(restarted, (0.0, 5.0), 1.0)
    assert found["generation_tokens"] is None
    assert "started again" in found["notes"][0]
    assert account.growth(restarted, (0.0, 5.0)) is None
    mute = account.summarize(Seen((Sample(1.0, Metrics(), error="404"),), (), ("it says nothing",)), (0.0, 5.0), None)
    assert (mute["running"], mute["preemptions"], mute["samples"], mute["notes"]) == (None, None, 0, ["it says nothing"])


def test_energy_is_power_over_time_or_the_cards_own_counter() -> None:
    # 400 W for 2 s, then a rise to 600 W within 2 s: 800 + 1000 J in 4 s.
    powers = [(1.0, 400.0), (3.0, 400.0), (5.0, 600.0)]
    samples = tuple(GpuSample(at, (replace(CARD, power=power),)) for at, power in powers)
    assert account.watts(samples, 0) == 450
    counted = tuple(GpuSample(at, (replace(CARD, power=1.0, energy=joules),)) for at, joules in ((1.0, 100.0), (5.0, 2100.0)))
    assert account.watts(counted, 0) == 500
    assert account.watts(samples[:1], 0) is None
    silent = (*samples, GpuSample(6.0, (replace(CARD, power=None),)))
    assert account.watts(silent, 0) is None, "a hole in the readings is not bridged"
    found = account.summarize(Seen((), samples), (0.0, 9.0), 900.0)
    assert (found["watts"], found["joules_per_token"]) == (450, 0.5)
    assert found["gpus"][0]["utilization"] == {"mean": 90.0, "max": 90.0}
    assert account.summarize(Seen((), samples), (0.0, 9.0), None)["joules_per_token"] is None


def test_a_million_tokens_cost_what_the_gpus_cost_meanwhile() -> None:
    assert account.cost(3.6, 1, 1000.0) == pytest.approx(1.0)
    assert account.cost(3.6, 8, 1000.0) == pytest.approx(8.0)
    assert account.cost(3.6, 1, None) is None
    assert account.cost(3.6, 1, 0.0) is None
    assert math.isfinite(account.cost(2.5, 1, 1e-3) or math.nan)
