"""What a running engine says about itself at `/metrics`: scraped, parsed, and the difference between two scrapes.

Names are vLLM's (`vllm:num_requests_running`, …). Counts are summed over engines (one a data-parallel rank), the cache usage
is their mean. A family that this version does not have is None: absent is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from fenno.engine import http
from fenno.errors import EngineError


@dataclass(frozen=True, slots=True)
class Histogram:
    """`sum` (of all observations), `count`, and cumulative counts by upper edge: ((0.1, 3.0), …, (inf, 9.0))."""

    sum: float
    count: float
    buckets: tuple[tuple[float, float], ...]

    @property
    def mean(self) -> float | None:
        """The mean observation, or None without one."""
        return self.sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The `share` quantile, linear inside its bucket: as coarse as the engine's buckets, for a glance and not a verdict.

        None without observations; the last finite edge when it lies above that.
        """
        wanted = share * self.count
        for (low, below), (high, within) in pairwise(((0.0, 0.0), *self.buckets)):
            if within >= wanted and within > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (within - below)
        return None

    def __sub__(self, earlier: Histogram) -> Histogram:
        before = dict(earlier.buckets)
        buckets = tuple((edge, number - before.get(edge, 0.0)) for edge, number in self.buckets)
        return Histogram(self.sum - earlier.sum, self.count - earlier.count, buckets)


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape. Gauges: running, waiting (requests), kv_cache_usage (0..1). The rest has grown since the engine's start:
    counters of requests or tokens, seconds of processor that the one HTTP process took (absent where there are several), and
    histograms in seconds (iteration_tokens_total: tokens a step)."""

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    requests_finished: float | None = None
    process_cpu_seconds: float | None = None
    time_to_first_token_seconds: Histogram | None = None
    request_queue_time_seconds: Histogram | None = None
    request_prefill_time_seconds: Histogram | None = None
    request_decode_time_seconds: Histogram | None = None
    iteration_tokens_total: Histogram | None = None
    e2e_request_latency_seconds: Histogram | None = None


GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
}
COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
    "vllm:request_success": "requests_finished",
    "process_cpu_seconds": "process_cpu_seconds",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "time_to_first_token_seconds",
    "vllm:request_queue_time_seconds": "request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "request_decode_time_seconds",
    "vllm:iteration_tokens_total": "iteration_tokens_total",
    "vllm:e2e_request_latency_seconds": "e2e_request_latency_seconds",
}


def _histogram(samples: Iterable[tuple[str, dict[str, str], float]]) -> Histogram | None:
    """All engines and labels of one family added up; None when the family has no sample."""
    total, count, buckets, seen = 0.0, 0.0, dict[float, float](), False
    for suffix, labels, value in samples:
        seen = True
        if suffix == "_sum":
            total += value
        elif suffix == "_count":
            count += value
        elif suffix == "_bucket":
            edge = float(labels["le"])
            buckets[edge] = buckets.get(edge, 0.0) + value
    return Histogram(total, count, tuple(sorted(buckets.items()))) if seen else None


def parse(text: str) -> Metrics:
    """`Metrics` from an exposition in Prometheus's text format. Raises `EngineError` (stage `load`) when it is not one."""
    found: dict[str, float | Histogram | None] = {}
    try:
        for family in text_string_to_metric_families(text):
            # The parser takes "_total" off a counter's name, and a histogram keeps its own.
            if family.name in HISTOGRAMS:
                samples = ((s.name.removeprefix(family.name), s.labels, s.value) for s in family.samples)
                found[HISTOGRAMS[family.name]] = _histogram(samples)
            elif family.name in COUNTERS or family.name in GAUGES:
                values = [s.value for s in family.samples if not s.name.endswith("_created")]
                name = COUNTERS.get(family.name) or GAUGES[family.name]
                if values:
                    found[name] = math.fsum(values) / (len(values) if name == "kv_cache_usage" else 1)
    except (ValueError, KeyError) as error:
        raise EngineError(
            f"/metrics is not in Prometheus's text format: {error}", "is this a vLLM server?", stage="load"
        ) from error
    return Metrics(**found)  # type: ignore[arg-type]


def scrape(
    url: str, timeout: float = 2.0, ca_file: str | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> Metrics:
    """`Metrics` of the server at `url` (its root, such as http://127.0.0.1:8000), which has `timeout` seconds to answer.
    `ca_file`: the certificate authority of an https address.

    Raises `EngineError` (stage `load`) when it does not, or answers something else.
    """
    try:
        text = http.call(url.rstrip("/") + "/metrics", timeout=timeout, headers=headers, ca_file=ca_file)
    except http.Refused as error:
        raise EngineError(str(error), "is the engine still running? see its log", stage="load") from error
    return parse(text)


def delta(before: Metrics, after: Metrics) -> Metrics:
    """What happened between two scrapes: counters and histograms subtracted, gauges as in `after`.

    None where either scrape has none. An engine that was restarted in between gives negative counts: do not compare across a
    restart.
    """
    changed: dict[str, float | Histogram | None] = {}
    for field in fields(Metrics):
        old, new = getattr(before, field.name), getattr(after, field.name)
        grows = field.name not in GAUGES.values()
        changed[field.name] = (new - old if old is not None and new is not None else None) if grows else new
    return Metrics(**changed)  # type: ignore[arg-type]


def prefix_hit_rate(change: Metrics) -> float | None:
    """The share (0..1) of the prompt tokens looked up that the prefix cache had; None when nothing was looked up."""
    queries, hits = change.prefix_cache_queries, change.prefix_cache_hits
    return hits / queries if queries and hits is not None else None
