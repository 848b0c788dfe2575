"""A Grafana dashboard: the engine's metrics beside the recipe's targets, and fenno's last load test where that is scraped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fenno.export import alerts
from fenno.export.service import Service
from fenno.recipe import Latency

SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
JOB = "$job"
WINDOW = "$__rate_interval"
TITLES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2el": "Whole requests"}


def text(service: Service) -> str:
    """The dashboard as Grafana's import and its provisioning take it."""
    panels = [*_latencies(service), *_load(service), *_engine(), *_loadtest()]
    document = {
        "title": f"vLLM: {service.name}",
        "uid": f"fenno-{service.recipe.digest()}",
        "description": f"Made by fenno export from recipe {service.name} ({service.recipe.digest()}).",
        "tags": ["vllm", "fenno"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables(service)},
        "panels": [_placed(panel, index) for index, panel in enumerate(panels)],
    }
    return json.dumps(document, indent=1) + "\n"


def _variables(service: Service) -> list[dict[str, Any]]:
    """Where the metrics are and which of its jobs this is; the recipe's name unless somebody chooses another."""
    chosen = {"text": service.name, "value": service.name}
    query = "label_values(vllm:num_requests_running, job)"
    jobs = {"name": "job", "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "current": chosen}
    return [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}, jobs]


def _placed(panel: dict[str, Any], index: int) -> dict[str, Any]:
    place = {"w": WIDTH, "h": HEIGHT, "x": WIDTH * (index % COLUMNS), "y": HEIGHT * (index // COLUMNS)}
    return {"id": index + 1, "gridPos": place, **panel}


def _panel(title: str, unit: str, queries: dict[str, str], limit: float | None = None, kind: str = "timeseries") -> dict[str, Any]:
    """One panel. `queries`: by legend; `limit`: a target, drawn as a line."""
    steps = [{"color": "green", "value": None}, *([{"color": "red", "value": limit}] if limit is not None else [])]
    defaults: dict[str, Any] = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if kind == "timeseries":
        defaults["custom"] = {"thresholdsStyle": {"mode": "off" if limit is None else "dashed"}}
    return {
        "type": kind,
        "title": title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(65 + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def _latencies(service: Service) -> Iterator[dict[str, Any]]:
    """A panel for each latency that the engine has, with the strictest target on it; a goodput target makes a percentile none."""
    limits = {Latency.of(name): limit for name, limit in service.recipe.targets.percentiles().items()}
    for metric, title in TITLES.items():
        aimed = {of.percentile: limit for of, limit in limits.items() if (of.cls, of.metric) == (None, metric)}
        shown = sorted({50, 95, 99, *aimed})
        queries = {f"P{percentile:g}": alerts.quantile(percentile, metric, JOB, WINDOW) for percentile in shown}
        wanted = ", ".join(f"P{percentile:g} ≤ {limit:g} s" for percentile, limit in sorted(aimed.items()))
        yield _panel(f"{title} ({wanted})" if wanted else title, "s", queries, min(aimed.values(), default=None))


def _load(service: Service) -> Iterator[dict[str, Any]]:
    targets = service.recipe.targets
    yield _panel("Requests", "reqps", {"{{finished_reason}}": _rate("request_success_total", "by (finished_reason)")}, targets.qps)
    tokens = {"prompts": _rate("prompt_tokens_total"), "answers": _rate("generation_tokens_total")}
    yield _panel("Tokens a second", "short", tokens)
    allowed = None if targets.availability is None else 1 - targets.availability
    yield _panel("Requests answered with an error", "percentunit", {"errors": alerts.failures(JOB, WINDOW)}, allowed)


def _engine() -> Iterator[dict[str, Any]]:
    """Where requests are, and what they wait for."""
    counts = {state: f'sum(vllm:num_requests_{state}{{job="{JOB}"}})' for state in ("running", "waiting")}
    yield _panel("Requests in the engine", "short", counts)
    yield _panel("KV cache in use", "percentunit", {"engine {{engine}}": f'vllm:kv_cache_usage_perc{{job="{JOB}"}}'}, 0.95)
    yield _panel("Preemptions a second", "short", {"preemptions": _rate("num_preemptions_total")})
    stages = {stage: _mean(f"request_{stage}_time_seconds") for stage in ("queue", "prefill", "decode")}
    yield _panel("Where a request's time goes, mean", "s", stages)
    hits = f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}"
    yield _panel("Prompt tokens from the prefix cache", "percentunit", {"hits": hits})
    yield _panel("Tokens a step, mean", "short", {"tokens": _mean("iteration_tokens_total")})


def _loadtest() -> Iterator[dict[str, Any]]:
    """What `fenno report --to prometheus` wrote for a textfile collector, whose job is the collector's."""
    late = {"{{class}}": 'fenno_loadtest_ttft_seconds{quantile="0.95"}'}
    yield _panel("Last fenno loadtest: P95 to the first token", "s", late, kind="stat")
    rates = {"completed": "fenno_loadtest_requests_per_second", "within all targets": "fenno_loadtest_goodput_requests_per_second"}
    yield _panel("Last fenno loadtest: requests", "reqps", rates, kind="stat")
    yield _panel("Last fenno loadtest: availability", "percentunit", {"{{class}}": "fenno_loadtest_availability"}, kind="stat")


def _rate(metric: str, by: str = "") -> str:
    return f'sum {by}(rate(vllm:{metric}{{job="{JOB}"}}[{WINDOW}]))'


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / {_rate(f'{histogram}_count')}"
