"""What the server's side of a load test comes to: what it said, where the first token's time went, energy and cost. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fenno.engine import metrics
from fenno.engine.metrics import Histogram, Metrics
from fenno.engine.watch import GpuSample, Seen
from fenno.load.probe import Probe
from fenno.load.requests import Floats, Requests

GAUGES = ("running", "waiting", "kv_cache_usage")
COUNTERS = ("preemptions", "prompt_tokens", "generation_tokens", "requests_finished")


def summarize(seen: Seen, window: tuple[float, float], tokens_per_second: float | None) -> dict[str, Any]:
    """The `server` part of a load test's document: within the window, means and maxima of what goes up and down, growth of what
    only grows, memory, and the GPUs' work. `tokens_per_second`: of completed answers, for the energy of each token."""
    inside = seen.between(*window)
    said = inside.said()
    found: dict[str, Any] = {"samples": len(said), "notes": list(seen.notes)}
    for name in GAUGES:
        found[name] = _mean_and_max(getattr(s.metrics, name) for s in said)
    grown = growth(seen, window)
    if said and grown is None:
        found["notes"].append(
            "the server was started again within the window, or was asked less than twice: nothing is said of growth"
        )
    found |= {name: getattr(grown, name) if grown else None for name in COUNTERS}
    found["prefix_hit_rate"] = metrics.prefix_hit_rate(grown) if grown else None
    found["memory"] = _mean_and_max(inside.memory())
    return {**found, **_gpus(inside, tokens_per_second)}


def growth(seen: Seen, window: tuple[float, float]) -> Metrics | None:
    """What was counted between the first and the last sample of the window; None without two, or across a restart."""
    said = seen.between(*window).said()
    if len(said) < 2:
        return None
    grown = metrics.delta(said[0].metrics, said[-1].metrics)
    return None if any((getattr(grown, name) or 0) < 0 for name in COUNTERS) else grown


def _mean_and_max(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [v for v in values if v is not None]
    return {"mean": round(statistics.fmean(known), 4), "max": max(known)} if known else None


def _gpus(seen: Seen, tokens_per_second: float | None) -> dict[str, Any]:
    """The GPUs that worked: how much each held and did, and its mean power; that of all, and the energy of each token."""
    rows = []
    for index in seen.busy():
        mine = [g for s in seen.gpus for g in s.gpus if g.index == index]
        row: dict[str, Any] = {"index": index, "name": mine[0].name, "memory": _mean_and_max(g.used for g in mine)}
        rows.append({**row, "utilization": _mean_and_max(g.utilization for g in mine), "watts": watts(seen.gpus, index)})
    parts = [row["watts"] for row in rows]
    total = math.fsum(parts) if parts and None not in parts else None
    return {"gpus": rows, "watts": total, "joules_per_token": total / tokens_per_second if total and tokens_per_second else None}


def watts(samples: Sequence[GpuSample], index: int) -> float | None:
    """Mean power of one GPU between the first and the last sample: by its own counter of energy, else by its power over time.

    None where it has neither, or there are not two samples.
    """
    mine = [(s.at, g) for s in samples for g in s.gpus if g.index == index]
    seconds = mine[-1][0] - mine[0][0] if mine else 0.0
    if seconds <= 0:
        return None
    first, last = mine[0][1].energy, mine[-1][1].energy
    if first is not None and last is not None and last > first:
        return (last - first) / seconds
    known = [(at, gpu.power) for at, gpu in mine]
    parts = [(b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(known) if p is not None and q is not None]
    return math.fsum(parts) / seconds if len(parts) == len(known) - 1 else None


def cost(price: float, gpus: int, tokens_per_second: float | None) -> float | None:
    """Dollars for a million answer tokens, at `price` dollars an hour for each of `gpus` GPUs; None without tokens."""
    return price * gpus / 3600 / tokens_per_second * 1e6 if tokens_per_second else None


def first_tokens(requests: Requests, probes: Iterable[Probe], start: float, end: float) -> Floats:
    """TTFT in seconds of every first token that reached this client in [start, end), of whatever phase and outcome: the server
    counts them too. A probe asks for one token, so its answer is its first token."""
    good = np.array([(p.ended, p.asked) for p in probes if not p.error]).reshape(-1, 2)
    at, since = np.concatenate([requests["first"], good[:, 0]]), np.concatenate([requests["sent"], good[:, 1]])
    inside = (start <= at) & (at < end)
    return np.asarray(at[inside] - since[inside])


def reconcile(before: Metrics, after: Metrics, client: Sequence[float] | Floats) -> dict[str, Any] | None:
    """Where the time to the first token goes, in mean ms: from the engine's histograms between two scrapes, and `client`, the
    TTFTs in seconds that the client saw between them. None when either saw none.

    `outside`: client minus engine, that is client, network and HTTP front end. `queue` and `prefill` are of the requests that ended
    between the scrapes, and `engine` of those that began to answer: they are the same requests once a load is level. `rest` is what
    the engine does beside them: reading the prompt, handing requests and tokens from process to process, text from tokens.
    """
    grown = metrics.delta(before, after)
    engine = _mean_ms(grown.time_to_first_token_seconds)
    if engine is None or not len(client) or grown.time_to_first_token_seconds is None:
        return None
    mine = float(np.mean(client)) * 1e3
    queue, prefill = _mean_ms(grown.request_queue_time_seconds), _mean_ms(grown.request_prefill_time_seconds)
    rest = engine - queue - prefill if queue is not None and prefill is not None else None
    parts = {"outside": mine - engine, "queue": queue, "prefill": prefill, "rest": rest}
    counted = round(grown.time_to_first_token_seconds.count)
    found = {"client": mine, "engine": engine, **parts}
    return {
        **{name: None if value is None else round(value, 3) for name, value in found.items()},
        "first_tokens": {"client": len(client), "engine": counted},
        "sentence": _where(mine, parts, len(client), counted),
    }


NAMES = {
    "outside": "in the client, the network and the HTTP front end",
    "queue": "waiting in the engine's queue",
    "prefill": "in prefill",
    "rest": "elsewhere in the engine",
}


def _where(total: float, parts: dict[str, float | None], mine: int, counted: int) -> str:
    """One sentence: the mean, its parts, and the largest of them."""
    if abs(counted - mine) > 0.1 * mine + 2:
        return (
            f"the engine counted {counted} first tokens and this client {mine}: with others' traffic on it, where the time goes "
            "cannot be told"
        )
    known = {name: value for name, value in parts.items() if value is not None}
    if "rest" not in known:
        known["engine"] = total - known["outside"]
    largest = max(known, key=lambda name: known[name])
    said = ", ".join(f"{round(value, 2) + 0.0:.3g} ms {NAMES.get(name, 'in the engine')}" for name, value in known.items())
    share, where = known[largest] / total, NAMES.get(largest, "in the engine")
    whole = f"of {total:.4g} ms to the first token, on average of all {mine} in the window"
    return f"{whole}, {said}; most of it ({share:.0%}) is {where}"


def _mean_ms(histogram: Histogram | None) -> float | None:
    return histogram.mean * 1e3 if histogram is not None and histogram.mean is not None and histogram.count > 0 else None
