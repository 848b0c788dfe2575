"""Two workers against one on the calibration server: the same percentiles, twice the streams: `python benchmarks/loadgen/hosts.py`.

A master and its workers are real processes on loopback addresses. The same Poisson arrivals are sent by one worker and by two, in
turn, and then twice as many a second by two. What is compared is the client's percentile of the time to the first token minus the
same percentile of the server's own log of these requests, so that a server that is busier does not count. With `--own-cores` (root)
each worker has a core before other programs there, as on a host of its own; the server has what one of them leaves of its core, and
the one worker is measured on either. Writes results/DATE-hosts.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import FIXED, on_own_cores, write

from fenno.load import calibration, run, worker
from fenno.load.calibration import Timing
from fenno.load.plan import Plan
from fenno.load.stats import percentile

TIMING = Timing(0.1, 0.025)
BAR = 0.1  # ms
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Load:
    """What so many workers measured at a rate: `streams` at a time. Times in ms; `lateness` is its P95."""

    workers: int
    rate: float
    streams: float
    requests: int
    tokens_per_second: float
    lateness: float
    measured: list[float]  # TTFTs, sorted; by the client, and by the server's log
    true: list[float]
    lag_p95: float
    cpu: float
    uncertainty_ms: float


def measure(workers: int, rate: float, seconds: float, warmup: float) -> Load:
    with tempfile.TemporaryDirectory() as place, calibration.serving(Path(place), TIMING) as server:
        folder = Path(place)
        with socket.create_server(("127.0.0.2", 0)) as free:
            bind = f"127.0.0.2:{free.getsockname()[1]}"
        plan = Plan(
            url=server.url, model="calibration", endpoint="chat", workload=FIXED, rate=rate, warmup=warmup, duration=seconds,
            processes=workers, bind=bind,
        )  # fmt: skip
        with ThreadPoolExecutor(workers) as pool:
            others = [pool.submit(worker.work, bind, folder / f"worker-{i}") for i in range(workers)]
            result = run.run(plan, folder / "run")
            [other.result() for other in others]
        state, served = result.state, server.served()
        pairs = [(r, served[r.id]) for r in result.records if r.phase == "counted" and r.ok]
    mine = sorted(r.ttft * 1e3 for r, _ in pairs)
    true = sorted((s.writes[0] - s.received) * 1e3 for _, s in pairs)
    writes = sum((state.start or 0) <= at < (state.end or 0) for s in served.values() for at in s.writes)
    return Load(
        workers=workers,
        rate=rate,
        streams=round(state.in_flight_mean, 1),
        requests=len(pairs),
        tokens_per_second=round(writes / seconds, 1),
        lateness=state.lateness.p95,
        measured=mine,
        true=true,
        lag_p95=state.lag.p95,
        cpu=state.cpu,
        uncertainty_ms=max(each.uncertainty_ms for each in state.workers),
    )


def apart(first: int) -> Callable[[str], tuple[int, int] | None]:
    """For `on_own_cores`: the first worker to core `first`, the second to the other. On core 0 the server comes after them."""
    cores = itertools.cycle((first, 1 - first))

    def place(line: str) -> tuple[int, int] | None:
        if "fenno.load.calibration" in line:
            return 0, 10
        return (next(cores), 20) if "locustfile" in line and "--worker" in line else None

    return place


def table(loads: list[Load]) -> str:
    head = "workers | requests/s | streams | requests | tokens/s | TTFT P50 / P95 / P99 | client's part | late, P95 | clocks within"
    lines = ["Times in ms.", "", f"| {head} |", "|" + " --- |" * 9]
    for load in loads:
        ttft = " / ".join(f"{percentile(load.measured, p):.2f}" for p in PERCENTILES)
        error = " / ".join(f"{error_of([load], p):.2f}" for p in PERCENTILES)
        counts = (load.workers, f"{load.rate:g}", load.streams, load.requests, f"{load.tokens_per_second:,.0f}")
        lines.append(f"| {' | '.join(map(str, (*counts, ttft, error, load.lateness, load.uncertainty_ms)))} |")
    return "\n".join(lines)


def error_of(loads: list[Load], p: int) -> float:
    """The client's percentile of all requests of these loads minus the server's, in ms."""
    mine = sorted(value for load in loads for value in load.measured)
    true = sorted(value for load in loads for value in load.true)
    return percentile(mine, p) - percentile(true, p)


def bars(loads: list[Load], rate: float) -> list[str]:
    """All requests of each kind of load against those of one worker."""

    def of_kind(workers: int, of: float) -> list[Load]:
        return [load for load in loads if (load.workers, load.rate) == (workers, of)]

    said = []
    for of, name in ((rate, "the same streams"), (2 * rate, "twice the streams")):
        beyond = {p: error_of(of_kind(2, of), p) - error_of(of_kind(1, rate), p) for p in PERCENTILES}
        held = all(abs(value) <= BAR for value in beyond.values())
        figures = ", ".join(f"P{p} {value:+.3f} ms" for p, value in beyond.items())
        verdict = "held" if held else "missed"
        said.append(f"two workers with {name}, against one: {figures}; all within {BAR} ms: {verdict}")
    return said


def told(load: Load) -> dict[str, Any]:
    """A load for the file: percentiles in place of every request's."""
    row = {name: value for name, value in asdict(load).items() if name not in ("measured", "true")}
    of = {"ttft": lambda p: percentile(load.measured, p), "error": lambda p: error_of([load], p)}
    return row | {name: {f"p{p}": round(value(p), 3) for p in PERCENTILES} for name, value in of.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=110.0, help="requests a second; each is a stream of 0.9 s")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warmup", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--own-cores", action="store_true", help="before other programs; needs root")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    before, loads = os.getloadavg(), []
    for _ in range(args.repeat):
        for workers, rate, first in ((1, args.rate, 1), (2, args.rate, 1), (1, args.rate, 0), (2, 2 * args.rate, 0)):
            with on_own_cores(args.own_cores, apart(first)):
                loads.append(measure(workers, rate, args.seconds, args.warmup))
            print(table(loads[-1:]), flush=True)
    found = "\n".join(f"- {line}" for line in bars(loads, args.rate))
    print(f"{table(loads)}\n\n{found}")
    if args.no_write:
        return
    facts = {"seconds": args.seconds, "own_cores": args.own_cores, "load_average_before": before}
    write("hosts", "Two workers against one", facts, [told(load) for load in loads], f"{table(loads)}\n\n{found}")


if __name__ == "__main__":
    main()
