"""What an engine says about itself, read through its real text format."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fenno.engine import metrics
from fenno.errors import EngineError


def exposition(running: dict[str, float], prompts: list[int], first_tokens: list[float]) -> str:
    """What two engines of one server would print, written by the library that vLLM writes it with."""
    registry = CollectorRegistry()
    gauge = Gauge("vllm:num_requests_running", "", ["engine"], registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry)
    counter = Counter("vllm:prompt_tokens", "", ["engine"], registry=registry)
    histogram = Histogram("vllm:time_to_first_token_seconds", "", ["engine"], buckets=[0.1, 1.0], registry=registry)
    for engine, number in running.items():
        gauge.labels(engine).set(number)
        usage.labels(engine).set(0.25 if engine == "0" else 0.75)
        for tokens in prompts:
            counter.labels(engine).inc(tokens)
        for seconds in first_tokens:
            histogram.labels(engine).observe(seconds)
    return generate_latest(registry).decode()


@contextmanager
def serving(body: str, status: int = 200) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_engines_are_summed_and_the_cache_usage_is_their_mean() -> None:
    found = metrics.parse(exposition({"0": 3, "1": 4}, [10, 20], [0.05, 0.5, 2.0]))
    assert (found.running, found.prompt_tokens, found.kv_cache_usage) == (7, 60, 0.5)
    first = found.time_to_first_token_seconds
    assert first is not None
    assert first.count == 6
    assert first.sum == pytest.approx(5.1)
    assert first.buckets == ((0.1, 2.0), (1.0, 4.0), (float("inf"), 6.0))


def test_a_family_that_is_absent_is_none_and_not_zero() -> None:
    found = metrics.parse(exposition({"0": 1}, [], []))
    assert found.waiting is None
    assert found.preemptions is None
    assert found.e2e_request_latency_seconds is None
    assert metrics.parse("") == metrics.Metrics()


def test_a_difference_subtracts_counts_and_keeps_gauges() -> None:
    before = metrics.parse(exposition({"0": 9}, [5], [0.05]))
    after = metrics.parse(exposition({"0": 2}, [5, 7], [0.05, 0.5]))
    change = metrics.delta(before, after)
    assert (change.running, change.prompt_tokens) == (2, 7)
    assert change.time_to_first_token_seconds is not None
    assert change.time_to_first_token_seconds.buckets == ((0.1, 0.0), (1.0, 1.0), (float("inf"), 1.0))
    assert change.time_to_first_token_seconds.mean == pytest.approx(0.5)
    assert change.waiting is None


@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    first = metrics.parse(exposition({"0": 1}, [], values)).time_to_first_token_seconds
    assert first is not None
    true = sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]
    edges = [0.0, 0.1, 1.0]
    low = max(edge for edge in edges if edge < true)
    high = min([edge for edge in edges if edge >= true], default=1.0)
    found = first.quantile(share)
    assert found is not None
    assert low - 1e-9 <= found <= high + 1e-9


def test_an_empty_histogram_has_no_mean_and_no_quantile() -> None:
    empty = metrics.Histogram(0.0, 0.0, ((0.1, 0.0), (float("inf"), 0.0)))
    assert empty.mean is None
    assert empty.quantile(0.95) is None


def test_the_hit_rate_needs_a_lookup() -> None:
    assert metrics.prefix_hit_rate(metrics.Metrics(prefix_cache_queries=8, prefix_cache_hits=2)) == 0.25
    assert metrics.prefix_hit_rate(metrics.Metrics(prefix_cache_queries=0, prefix_cache_hits=0)) is None
    assert metrics.prefix_hit_rate(metrics.Metrics()) is None


def test_a_scrape_reads_a_real_server() -> None:
    with serving(exposition({"0": 5}, [1], [])) as url:
        assert metrics.scrape(url).running == 5


def test_no_answer_an_error_page_and_another_text_are_engine_errors() -> None:
    with pytest.raises(EngineError, match="did not answer") as error:
        metrics.scrape("http://127.0.0.1:9", timeout=0.5)
    assert error.value.stage == "load"
    with serving("oops", 503) as url, pytest.raises(EngineError, match="503"):
        metrics.scrape(url)
    with pytest.raises(EngineError, match="text format"):
        metrics.parse("<html>hello</html>")
