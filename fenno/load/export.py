"""A load test as other programs read it: the keys of `vllm bench serve`, Prometheus's text, a row for each request. Pure, but for
the files that are written."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

from fenno.load import figures
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.load.requests import Floats, Requests
from fenno.load.stored import Stored

BATCH = 20_000  # rows of a Parquet file that are in memory at once
STAMPS = ("scheduled", "sent", "connected", "headers", "first", "first_answer", "last", "end")
LATENCIES = ("ttft", "tpot", "e2el", "gap")
# Arrow's types by column: stamps in seconds from the start of the window, latencies in ms.
COLUMNS: Mapping[str, str] = {
    **{"id": "string", "class": "string", "phase": "string", "turn": "int32"},
    **{"outcome": "string", "status": "int32", "error": "string"},
    **dict.fromkeys(STAMPS, "float64"),
    **dict.fromkeys(("asked_prompt", "asked_tokens", "prompt_tokens", "completion_tokens", "token_count"), "int32"),
    **dict.fromkeys((f"{name}_ms" for name in LATENCIES), "float64"),
}


def row(record: Record, start: float) -> dict[str, Any]:
    """One request. `start`: of the window, on the clock of the stamps. None where there is no such stamp, and for the latencies of
    a request that failed."""
    found: dict[str, Any] = {name: getattr(record, "cls" if name == "class" else name, None) for name in COLUMNS}
    found |= {name: None if found[name] is None else round(found[name] - start, 6) for name in STAMPS}
    for name in LATENCIES:
        seconds = getattr(record, name)
        found[f"{name}_ms"] = None if seconds is None else figures.milliseconds(seconds)
    return found


def write_csv(records: Iterable[Record], start: float, file: TextIO) -> None:
    """A header, and a line for each request. Needs no memory for more than one."""
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(record, start) for record in records)


def write_parquet(records: Iterable[Record], start: float, path: Path) -> None:
    """The same columns, and `itl_ms`: every gap between token events."""
    import pyarrow
    import pyarrow.parquet

    types = {name: getattr(pyarrow, type_)() for name, type_ in COLUMNS.items()} | {"itl_ms": pyarrow.list_(pyarrow.float32())}
    rows = ({**row(record, start), "itl_ms": record.gaps} for record in records)
    schema = pyarrow.schema(types)
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        while batch := list(islice(rows, BATCH)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))


def vllm(run: Stored, document: Mapping[str, Any]) -> dict[str, Any]:
    """What `vllm bench serve --save-result` writes, computed as it does: latencies are of completed requests alone, in ms, with
    percentiles between two values where the rank falls there;
    gaps to the microsecond. `duration` is the window, not the time to the last answer."""
    plan, mine = run.result.plan, figures.counted(run.result.requests)
    good = mine.where(mine.ok)
    backend, seconds = "openai" if plan.endpoint == "completions" else "openai-chat", document["seconds"]
    tokens = document["prompt_tokens"] + document["output_tokens"]
    latencies = {name: _each(getattr(good, name)) for name in ("ttft", "tpot", "e2el")}
    micros, counts, _, _ = figures.Gaps(good).of()
    latencies["itl"] = micros / 1e3, counts
    return {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(run.asked.at)) if run.asked.at else None,
        **{"endpoint_type": backend, "backend": backend, "label": None, "model_id": plan.model, "tokenizer_id": plan.model},
        "num_prompts": len(mine),
        **_traffic(plan, len(mine), seconds),
        "duration": seconds,
        "completed": len(good),
        "failed": len(mine) - len(good),
        "total_input_tokens": document["prompt_tokens"],
        "total_output_tokens": document["output_tokens"],
        "request_throughput": document["qps"],
        "request_goodput": document["goodput"] if run.asked.targets.latencies() else None,
        "output_throughput": document["token_throughput"],
        "total_token_throughput": tokens / seconds if seconds > 0 else None,
        **_peaks(good),
        **{key: value for name, known in latencies.items() for key, value in _as_vllm(name, *known).items()},
    }


def _traffic(plan: Plan, count: int, seconds: float) -> dict[str, Any]:
    """When requests were sent, in vLLM's words: all at once ("inf") unless a rate or the number of users holds them back."""
    shape = {"poisson": 1.0, "gamma": plan.workload.burstiness, "constant": "inf"}[plan.workload.arrival]
    rate = plan.rate or (count / seconds if plan.workload.trace and seconds > 0 else "inf")
    found = {"request_rate": rate, "burstiness": shape if plan.rate else 1.0, "max_concurrency": plan.users}
    if plan.ramp is not None:
        found |= {"ramp_up_strategy": "linear", "ramp_up_start_rps": plan.ramp[0], "ramp_up_end_rps": plan.ramp[1]}
    return found


def _peaks(good: Requests) -> dict[str, float]:
    """The most token events and the most requests in any second, counted from the first request on."""
    if not len(good):
        return {"max_output_tokens_per_s": 0, "max_concurrent_requests": 0}
    sent = good["sent"] - good["sent"].min()
    firsts, ends = sent + good.ttft, (sent + good.e2el).astype(np.int64)
    tokens = np.bincount(firsts.astype(np.int64), minlength=int(ends.max()) + 2)
    for who, counts, gaps in good.gaps():
        upto = np.cumsum(gaps, dtype=np.float64) / 1e3
        before = np.concatenate([[0.0], upto])[np.cumsum(counts) - counts]
        at = np.repeat(firsts[who] - before, counts) + upto
        tokens += np.bincount(at.astype(np.int64), minlength=len(tokens))[: len(tokens)]
    begun, over = (np.bincount(at, minlength=len(tokens)) for at in (sent.astype(np.int64), ends + 1))
    active = np.cumsum(begun - over)
    return {"max_output_tokens_per_s": int(tokens.max()), "max_concurrent_requests": int(active.max())}


Counted = tuple[Floats, NDArray[np.int64]]  # different values, ascending, and how often each is there


def _each(seconds: Floats) -> Counted:
    known = np.sort(seconds[~np.isnan(seconds)]) * 1e3
    return known, np.ones(len(known), np.int64)


def _as_vllm(name: str, values: Floats, counts: NDArray[np.int64]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles as numpy has them; 0 of nothing."""
    if not len(values):
        values, counts = np.zeros(1), np.ones(1, np.int64)
    mean = float(np.average(values, weights=counts))
    spread = math.sqrt(float(np.average((values - mean) ** 2, weights=counts)))
    found = {f"mean_{name}_ms": mean, f"median_{name}_ms": _between(values, counts, 0.5), f"std_{name}_ms": spread}
    return found | {f"p{p}_{name}_ms": _between(values, counts, p / 100) for p in (90, 95, 99)}


def _between(values: Floats, counts: NDArray[np.int64], share: float) -> float:
    """The quantile, linear between the two values that it lies between."""
    upto = np.cumsum(counts)
    place = (int(upto[-1]) - 1) * share
    low = math.floor(place)
    below, above = (float(values[np.searchsorted(upto, min(at, int(upto[-1]) - 1), side="right")]) for at in (low, low + 1))
    return below + (above - below) * (place - low)


def prometheus(document: Mapping[str, Any], model: str) -> str:
    """The figures in Prometheus's text format, for a textfile collector or a push gateway. What is not known is left out; a latency
    that falls on a failed request is +Inf."""
    registry = CollectorRegistry()
    registry.register(_Told([*_latencies(document), *_counts(document), *_gauges(document, model)]))
    return str(generate_latest(registry), "utf-8")


class _Told:
    """Families that are told as they are."""

    def __init__(self, families: Sequence[Any]) -> None:
        self.families = families

    def collect(self) -> Iterator[Any]:
        yield from self.families


def _latencies(document: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    """A family for each latency, in seconds, by class and quantile."""
    for name in (*LATENCIES, "itl"):
        family = GaugeMetricFamily(f"fenno_loadtest_{name}_seconds", f"{name} by class and quantile", labels=["class", "quantile"])
        for cls, part in _parts(document):
            late = part["completed"] < part["requests"]
            for percentile in ("p50", "p95", "p99"):
                value = part[name][percentile]
                if value is not None or late:
                    family.add_metric([cls, f"{int(percentile[1:]) / 100:g}"], math.inf if value is None else value / 1e3)
        yield family


def _counts(document: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    """What is counted of each class, and failures by outcome."""
    for name, words in (("requests", "counted"), ("completed", "ended well"), ("availability", "ended well, as a share")):
        family = GaugeMetricFamily(f"fenno_loadtest_{name}", f"requests: {words}", labels=["class"])
        for cls, part in _parts(document):
            if part[name] is not None:
                family.add_metric([cls], part[name])
        yield family
    family = GaugeMetricFamily("fenno_loadtest_failures", "requests that failed, by outcome", labels=["outcome"])
    for outcome, count in document["failures"].items():
        family.add_metric([outcome], count)
    yield family


def _parts(document: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    return {**document["classes"], "all": document}.items()


def _gauges(document: Mapping[str, Any], model: str) -> Iterator[GaugeMetricFamily]:
    """Single figures, of client and server."""
    yield InfoMetricFamily("fenno_loadtest", "what was measured", {"model": model, "records": document["records"]})
    server, lag = document["server"], document["client"]["lag_ms"]["p95"]
    of = {name: server[name] or {} for name in ("running", "waiting", "kv_cache_usage", "memory")}
    figures = {
        "valid": (document["valid"], "whether this was a measurement"),
        "window_seconds": (document["seconds"], "the counted window"),
        "requests_per_second": (document["qps"], "completed requests"),
        "goodput_requests_per_second": (document["goodput"], "completed requests that kept every latency target"),
        "output_tokens_per_second": (document["token_throughput"], "answer tokens of completed requests"),
        "client_lag_seconds": (lag / 1e3, "P95 of how late the client's own loop came round"),
        "outage_seconds": (document["outage_seconds"], "time in outages, by the probe"),
        "server_running_mean": (of["running"].get("mean"), "requests running, by the server"),
        "server_waiting_mean": (of["waiting"].get("mean"), "requests waiting, by the server"),
        "server_kv_cache_usage_max": (of["kv_cache_usage"].get("max"), "the KV cache, as a share"),
        "server_memory_max_bytes": (of["memory"].get("max"), "memory held"),
        "server_preemptions": (server["preemptions"], "within the window"),
        "server_prefix_hit_ratio": (server["prefix_hit_rate"], "prompt tokens from the prefix cache, of those looked up"),
        "server_watts": (server["watts"], "mean power of the GPUs"),
    }
    for name, (value, words) in figures.items():
        if value is not None:
            yield GaugeMetricFamily(f"fenno_loadtest_{name}", words, float(value))
