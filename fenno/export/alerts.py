"""Alert rules for Prometheus, from the targets and from what a vLLM that is in trouble says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fenno import units
from fenno.export.service import Service
from fenno.export.text import dumped, head
from fenno.recipe import Latency, Targets

# The engine's histogram of each latency, from the request's arrival in the engine. It has none of the longest gap of a request.
HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2el": "vllm:e2e_request_latency_seconds",
}
REQUESTS = 'http_requests_total{{job="{job}",handler=~"/v1/.*"{more}}}'


def text(service: Service) -> str:
    """A file of rules. `job` in them is the service's name: scrape it under that."""
    lines = [
        "In prometheus.yml:",
        f"  rule_files: [{service.name}.rules.yaml]",
        f'  scrape_configs: [{{job_name: {service.name}, static_configs: [{{targets: ["HOST:{service.port}"]}}]}}]',
        *(f"No rule: {what}" for what in left_out(service.recipe.targets)),
    ]
    return head(service, *lines) + dumped({"groups": [group(service)]})


def group(service: Service, job: str | None = None) -> dict[str, Any]:
    """The rules of one service, whose metrics are labelled with `job`, else its name."""
    rules = [*_alive(service, job or service.name), *_targets(service.recipe.targets, job or service.name)]
    return {"name": service.name, "rules": rules}


def quantile(percentile: float, metric: str, job: str, window: str = "5m") -> str:
    """A percentile of one latency, in seconds, as exact as the engine's buckets."""
    return f'histogram_quantile({percentile / 100:g}, sum by (le) (rate({HISTOGRAMS[metric]}_bucket{{job="{job}"}}[{window}])))'


def failures(job: str, window: str = "5m") -> str:
    """The share of requests that the server answered with an error of its own; one that broke off later is not among them."""
    bad, of = REQUESTS.format(job=job, more=',status="5xx"'), REQUESTS.format(job=job, more="")
    return f"sum(rate({bad}[{window}])) / sum(rate({of}[{window}]))"


def left_out(targets: Targets) -> Iterator[str]:
    """Targets for which a server's metrics have nothing, and why."""
    if targets.goodput is not None:
        yield "goodput, and every latency with it: the engine does not know whether one request kept all limits"
    for name in targets.percentiles():
        latency = Latency.of(name)
        if latency.cls:
            yield f"{name}: the engine does not know which class a request is of"
        elif latency.metric not in HISTOGRAMS:
            yield f"{name}: the engine keeps no longest gap of a request"
    if targets.memory is not None:
        yield "memory: the engine does not say it; a GPU exporter does"


def _rule(name: str, expression: str, lasts: str, severity: str, summary: str, what: str) -> dict[str, Any]:
    annotations = {"summary": summary, "description": what}
    return {"alert": name, "expr": expression, "for": lasts, "labels": {"severity": severity}, "annotations": annotations}


def _alive(service: Service, job: str) -> Iterator[dict[str, Any]]:
    of, hang = f'{{job="{job}"}}', max(60, round(service.recipe.serve.hang))
    down = f"up{of} == 0 or absent(up{of})"
    what = "Nothing is served. A start takes minutes: see its log."
    yield _rule("VllmDown", down, "2m", "critical", f"{job} does not answer", what)
    stuck = f"sum(vllm:num_requests_running{of}) > 0 and sum(rate(vllm:generation_tokens_total{of}[{hang}s])) == 0"
    what = f"Requests run and not one token came for {hang} s. It has to be started again."
    yield _rule("VllmHangs", stuck, "1m", "critical", f"{job} gives no tokens", what)
    full = f"sum(increase(vllm:num_preemptions_total{of}[10m])) > 0 and max(vllm:kv_cache_usage_perc{of}) > 0.95"
    what = "Requests are thrown out of the KV cache and computed again: fewer at once, shorter ones, or more memory."
    yield _rule("VllmPreempts", full, "10m", "warning", f"{job} has too little KV cache", what)


def _targets(targets: Targets, job: str) -> Iterator[dict[str, Any]]:
    for name, limit in targets.percentiles().items():
        latency = Latency.of(name)
        if latency.cls is None and latency.metric in HISTOGRAMS:
            alert = f"VllmSlowP{latency.percentile:g}{latency.metric.capitalize()}".replace(".", "_")
            expression = f"{quantile(latency.percentile, latency.metric, job)} > {limit:g}"
            summary = f"{job}: {name} is above {units.show_duration(limit)}"
            what = "The target is missed, measured in the engine and as exactly as its buckets."
            yield _rule(alert, expression, "10m", "warning", summary, what)
    if targets.qps is not None:
        expression = f'sum(rate(vllm:request_success_total{{job="{job}"}}[10m])) > {targets.qps:g}'
        what = f"The targets were set for {targets.qps:g} requests/s."
        yield _rule("VllmAboveRate", expression, "10m", "info", f"{job} has more traffic than its target", what)
    if targets.availability is not None:
        expression = f"{failures(job)} > {1 - targets.availability:.6g}"
        what = f"Fewer than {targets.availability * 100:g} % of the requests are answered."
        yield _rule("VllmErrors", expression, "5m", "critical", f"{job} answers with errors", what)
