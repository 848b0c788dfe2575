"""How well this host measures: traffic against the calibration server, every request paired with the server's log of it."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fenno.errors import UsageError
from fenno.load import plan as plans
from fenno.load.calibration import Served, Timing, serving
from fenno.load.client import ClientState
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.load.run import running
from fenno.load.stats import percentile

BEYOND = 10.0  # seconds to measure at each load above the one asked for
MOST = 200_000.0  # tokens a second that are not gone beyond
FASTEST = 0.001  # seconds between two tokens, at least

Figures = tuple[float, float, float, float]  # P50, P95, P99 and the greatest, in ms


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors in ms against the server's log at one load, closed loop (`users`) or open (`rate`).

    `ttft`, `gap` (the longest of a stream): P50, P95, P99 and the greatest. `exact`: whether tokens and answers were counted right.
    """

    users: int | None
    rate: float | None
    tokens_per_second: float
    requests: int
    ttft: Figures
    gap: Figures
    lateness: Figures  # sent after scheduled
    exact: bool
    in_flight: float | None  # closed loop: requests in flight, of the users asked for, as a share
    lag_p95: float
    cpu: float
    backlog: int = 0  # reads whose events were left for later at the end of the window, since the client was never idle

    def lacks(self, bound: float) -> str:
        """Why it does not measure TTFT to within `bound` ms (P95) at this load; "" when it does."""
        if not self.exact:
            return "tokens or answers were not counted right"
        if self.requests < 20:
            return f"only {self.requests} requests could be compared; a longer --duration has more"
        if self.ttft[1] > bound:
            return f"the error is {self.ttft[1]:.3g} ms (P95) / {self.ttft[2]:.3g} ms (P99)"
        if self.in_flight is not None and self.in_flight < 0.99:
            return f"only {self.in_flight:.1%} of the users were kept in flight"
        if self.rate is not None and self.lateness[1] > bound:
            return f"requests were sent {self.lateness[1]:.3g} ms late (P95)"
        return ""


def errors(values: Iterable[float]) -> Figures:
    """P50, P95, P99 and the greatest of errors in seconds, without their sign, in ms."""
    ordered = sorted(abs(value) * 1e3 for value in values) or [math.nan]
    p50, p95, p99 = (round(percentile(ordered, p), 3) for p in (50, 95, 99))
    return p50, p95, p99, round(ordered[-1], 3)


def accuracy(plan: Plan, state: ClientState, records: Sequence[Record], served: Mapping[str, Served]) -> Accuracy:
    """Pair the records of a run with the server's log."""
    started, ended = state.start or 0.0, state.end or 0.0
    counted = [r for r in records if r.phase == "counted"]
    mine = [(r, served[r.id]) for r in counted if r.id in served]
    begun = [(r.first - r.sent, s.writes[0] - s.received) for r, s in mine if r.first is not None and s.writes]
    whole = [(r, s) for r, s in mine if r.ok]
    gaps = [(r.gap or 0.0, max(b - a for a, b in itertools.pairwise(s.writes))) for r, s in whole if len(s.writes) > 1]
    writes = sum(started <= at < ended for s in served.values() for at in s.writes)
    return Accuracy(
        users=plan.users,
        rate=plan.rate,
        tokens_per_second=round(writes / (ended - started), 1) if ended > started else 0.0,
        requests=len(begun),
        ttft=errors(measured - true for measured, true in begun),
        gap=errors(measured - true for measured, true in gaps),
        lateness=errors(r.lateness for r in counted),
        exact=all(r.tokens == r.token_count == len(s.writes) for r, s in whole)
        and all(r.outcome in ("ok", "cancelled") for r in counted),
        in_flight=state.in_flight_mean / plan.users if plan.users else None,
        lag_p95=state.lag.p95,
        cpu=state.cpu,
    )


def measure(plan: Plan, folder: Path, clock: Timing) -> Accuracy:
    """Run a plan against a calibration server (`plan.url` is replaced); ended with its window, undrained. Raises as
    `run.running` does."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(folder, clock) as server:
        with running(replace(plan, url=server.url, model="calibration", api_key_env=None), folder / "run") as load:
            while load.client().phase != "drain" and not load.poll():
                time.sleep(0.05)
            backlog = load.client().backlog
            result = load.stop()
        time.sleep(0.1)  # the server notes the connections that were closed
        return replace(accuracy(plan, result.state, result.records, server.served()), backlog=backlog)


def timing(plan: Plan, tokens_per_second: float | None, ttft: float = Timing.ttft) -> Timing:
    """The clock at which a server gives the users of `plan` so many tokens a second together; the usual one for None.

    Raises `UsageError` for a load that these users cannot have, and for an open loop, whose rate says it already.
    """
    if tokens_per_second is None:
        return Timing(ttft)
    mean = statistics.fmean(request.output_tokens for request in itertools.islice(plans.requests(plan), 2000))
    if plan.users is None:
        raise UsageError("--tokens-per-second is for a closed loop (--users)", "in an open loop --rate and the lengths say it")
    cycle = plan.users * mean / tokens_per_second - plan.workload.think_time
    itl = (cycle - ttft) / max(1.0, mean - 1)
    if itl < FASTEST:
        most = plan.users * mean / (ttft + plan.workload.think_time + FASTEST * (mean - 1))
        raise UsageError(
            f"{plan.users} users cannot take {tokens_per_second:g} tokens a second here, {most:.0f} at most", "give more"
        )
    return Timing(ttft, itl)


def calibrate(
    plan: Plan, folder: Path, bound: float, clock: Timing, say: Callable[[str], None] = lambda text: None
) -> list[Accuracy]:
    """Measure this host at the load of `plan`, then at twice that, and so on until the error passes `bound` ms (P95).

    Raises `UsageError` for a load that is neither users nor a steady rate.
    """
    if plan.users is None and plan.rate is None:
        raise UsageError("--calibrate needs a steady load", "give --users or --rate")
    found: list[Accuracy] = []
    while not found or (not found[-1].lacks(bound) and found[-1].tokens_per_second * 2 <= MOST):
        if found:
            plan = replace(
                plan, users=plan.users and plan.users * 2, rate=plan.rate and plan.rate * 2, duration=BEYOND, requests=None
            )
        load = f"{plan.users} users" if plan.users else f"{plan.rate:g} requests/s"
        found.append(measure(plan, folder / str(plan.users or plan.rate), clock))
        last = found[-1]
        error = f"TTFT error {last.ttft[1]:.3g} ms (P95) / {last.ttft[2]:.3g} ms (P99)"
        say(f"{load}, {last.tokens_per_second:,.0f} tokens/s: {last.lacks(bound) or error}")
    return found


def sentence(found: Sequence[Accuracy], bound: float) -> str:
    """What a calibration says, in words. The first measurement is of the load that was asked for."""
    first = found[0]
    if why := first.lacks(bound):
        load = f"at your load, {first.tokens_per_second:,.0f} tokens/s"
        return f"this host cannot measure TTFT to within {bound:g} ms (P95) {load}: {why}"
    most = max(a.tokens_per_second for a in found if not a.lacks(bound))
    return (
        f"this host measures TTFT to within {first.ttft[1]:.2g} ms (P95) / {first.ttft[2]:.2g} ms (P99) at your load, "
        f"up to {most:,.0f} tokens/s"
    )


def document(found: Sequence[Accuracy], bound: float, folder: Path) -> dict[str, Any]:
    """A calibration for programs. `valid`: whether the load that was asked for can be measured."""
    rows = [{**asdict(a), "lacks": a.lacks(bound)} for a in found]
    return {
        "valid": not rows[0]["lacks"],
        "sentence": sentence(found, bound),
        "bound_ms": bound,
        "loads": rows,
        "records": str(folder),
    }
