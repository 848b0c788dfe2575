"""The figures of a load test as people read them: a table of latencies by class, and a line for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fenno import units
from fenno.load.plan import Plan

HEADER = ("ms", "answers", "TTFT p50", "p95", "p99", "TPOT p95", "E2EL p95", "longest gap p95")
COLUMNS = (("ttft", "p50"), ("ttft", "p95"), ("ttft", "p99"), ("tpot", "p95"), ("e2el", "p95"), ("gap", "p95"))


def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each class of the mix, and one for all requests."""
    classes = document["classes"] if len(document["classes"]) > 1 else {}
    return [_row(name, part) for name, part in (*classes.items(), ("all", document))]


def _row(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    figures = [(part.get(metric) or {}).get(p) for metric, p in COLUMNS]
    return (name, f"{part['completed']}/{part['requests']}", *("—" if value is None else f"{value:.1f}" for value in figures))


def lines(document: dict[str, Any]) -> list[str]:
    """A sentence each for throughput, availability, the server, the first token's time, energy and cost."""
    found = [throughput(document), goodput(document), availability(document)]
    found += [hosts(document["client"].get("workers", ())), server(document["server"])]
    found += document["server"]["notes"]
    if document["time_to_first_token"]:
        found.append(document["time_to_first_token"]["sentence"])
    if document.get("cost"):
        found.append(cost(document["cost"]))
    return [line for line in found if line]


def throughput(document: dict[str, Any]) -> str:
    if document["qps"] is None:
        return "no request was counted"
    return f"{document['qps']:.2f} requests/s, {document['token_throughput']:.1f} tokens/s over {document['seconds']:.1f} s"


def goodput(document: dict[str, Any]) -> str:
    """How much of it was within the latency targets; "" where there are none."""
    if not document["targets"] or document["goodput"] is None:
        return ""
    wanted = ", ".join(f"{name} {units.show_duration(limit)}" for name, limit in document["targets"].items())
    return f"{document['goodput']:.2f} requests/s kept every latency target ({wanted})"


def traffic(plan: Plan) -> str:
    """When the requests of a plan are sent."""
    if plan.users is not None:
        return f"closed loop, {plan.users} user{'s' if plan.users > 1 else ''}"
    if plan.ramp is not None:
        return f"open loop, {plan.ramp[0]:g} to {plan.ramp[1]:g} requests/s"
    if plan.rate is not None:
        return f"open loop, {plan.rate:g} requests/s, {plan.workload.arrival} arrivals"
    return f"open loop, {plan.workload.trace} at {plan.workload.scale:g} times its speed"


def asked(plan: Plan) -> str:
    """The same, and for how long."""
    counted = units.show_duration(plan.duration) if plan.duration is not None else f"{plan.requests} requests"
    before = f" after {units.show_duration(plan.warmup)} of warm-up" if plan.warmup else ""
    return f"{traffic(plan)}, {counted}{before}"


def availability(document: dict[str, Any]) -> str:
    """Complete and correct answers, and what the probe found."""
    if not document["requests"]:
        return ""
    said = f"{document['completed']} of {document['requests']} answers complete and correct ({document['availability']:.2%})"
    if document["failures"]:
        said += "; the others: " + ", ".join(f"{count} {outcome}" for outcome, count in document["failures"].items())
    probes = document["probes"]
    if not probes or not probes["asked"]:
        return said
    if not probes["outages"]:
        return f"{said}; no outage by {probes['asked']} probes"
    recovery = document["recovery_seconds"]
    ended = f"the longest over after {recovery:.1f} s" if recovery is not None else "not over at the end"
    return f"{said}; {document['outage_seconds']:.1f} s of outage by {probes['asked']} probes, {ended}"


def hosts(workers: Sequence[dict[str, Any]]) -> str:
    """Who sent the load where it was several hosts, and how well their clocks are known; "" for one host."""
    said = [f"{each['name']}, its clock {each['offset_ms']:+.3f} ms (within {each['uncertainty_ms']:.3f})" for each in workers]
    return f"{len(workers)} workers: {'; '.join(said)}" if said else ""


def server(found: dict[str, Any]) -> str:
    """What the server said of itself; "" when it said nothing."""
    said = []
    for name, word in (("running", "running"), ("waiting", "waiting")):
        if found[name]:
            said.append(f"{found[name]['mean']:.1f} {word} (at most {found[name]['max']:.0f})")
    if found["kv_cache_usage"]:
        said.append(f"KV cache {found['kv_cache_usage']['mean']:.0%} (at most {found['kv_cache_usage']['max']:.0%})")
    if found["preemptions"] is not None:
        said.append(f"{found['preemptions']:.0f} preemptions")
    if found["prefix_hit_rate"] is not None:
        said.append(f"{found['prefix_hit_rate']:.0%} of prompt tokens from the prefix cache")
    if found["memory"]:
        said.append(f"at most {units.show_memory(found['memory']['max'])} of memory")
    if found["watts"] is not None:
        each = f", {found['joules_per_token']:.3g} J a token" if found["joules_per_token"] is not None else ""
        said.append(f"{found['watts']:.0f} W{each}")
    return "server: " + ", ".join(said) if said else ""


def cost(found: dict[str, Any]) -> str:
    if found["dollars_per_million_tokens"] is None:
        return "no tokens, so no price of one"
    return (
        f"${found['dollars_per_million_tokens']:.3f} a million tokens, on {found['gpus']} GPU(s) at ${found['gpu_price']:g} an hour"
    )
