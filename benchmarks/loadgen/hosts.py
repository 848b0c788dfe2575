"""Two workers against one on the calibration server: the same percentiles, twice the streams: `python benchmarks/loadgen/hosts.py`.

A master and its workers are real processes on loopback addresses. The same Poisson arrivals are sent by one worker and by two, in
turn, and then twice as many a second by two. What is compared is the client's percentile of the time to the first token minus the
same percentile of the server's own log of these requests, so that a server that is busier does not count. With `--own-cores` (root)
each worker has a core before other programs there, as on a host of its own; the server has what one of them leaves of its core.
Writes results/DATE-hosts.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from bench import FIXED, host, on_own_cores

from fenno.load import calibration, run, worker
from fenno.load.calibration import Timing
from fenno.load.plan import Plan
from fenno.load.stats import percentile

TIMING = Timing(0.1, 0.025)
BAR = 0.1  # ms
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Load:
    """What so many workers measured at a rate: `streams` at a time; `ttft` and `error` by percentile, P95 of `lateness`: in ms."""

    workers: int
    rate: float
    streams: float
    requests: int
    tokens_per_second: float
    lateness: float
    ttft: dict[str, float]
    error: dict[str, float]
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
        served = server.served()
    state = result.state
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
        ttft={f"p{p}": round(percentile(mine, p), 3) for p in PERCENTILES},
        error={f"p{p}": round(percentile(mine, p) - percentile(true, p), 3) for p in PERCENTILES},
        lag_p95=state.lag.p95,
        cpu=state.cpu,
        uncertainty_ms=max(each.uncertainty_ms for each in state.workers),
    )


def apart() -> Callable[[str], tuple[int, int] | None]:
    """For `on_own_cores`: the first worker to core 1, the second to core 0, where the server comes after it."""
    cores = itertools.cycle((1, 0))

    def place(line: str) -> tuple[int, int] | None:
        if "fenno.load.calibration" in line:
            return 0, 10
        return (next(cores), 20) if "locustfile" in line and "--worker" in line else None

    return place


def table(loads: list[Load]) -> str:
    head = "workers | requests/s | streams | requests | tokens/s | TTFT P50 / P95 / P99 | client's part | late, P95 | clocks within"
    lines = ["Times in ms.", "", f"| {head} |", "|" + " --- |" * 9]
    for load in loads:
        ttft, error = (" / ".join(f"{part[f'p{p}']:.2f}" for p in PERCENTILES) for part in (load.ttft, load.error))
        counts = (load.workers, f"{load.rate:g}", load.streams, load.requests, f"{load.tokens_per_second:,.0f}")
        lines.append(f"| {' | '.join(map(str, (*counts, ttft, error, load.lateness, load.uncertainty_ms)))} |")
    return "\n".join(lines)


def bars(loads: list[Load], rate: float) -> list[str]:
    """The medians of each kind against those of one worker."""

    def median(workers: int, of: float, p: int) -> float:
        return percentile(sorted(load.error[f"p{p}"] for load in loads if (load.workers, load.rate) == (workers, of)), 50)

    said = []
    for of, name in ((rate, "the same streams"), (2 * rate, "twice the streams")):
        apart = {p: median(2, of, p) - median(1, rate, p) for p in PERCENTILES}
        held = all(abs(apart[p]) <= BAR for p in (50, 95))
        figures = ", ".join(f"P{p} {value:+.3f} ms" for p, value in apart.items())
        verdict = "held" if held else "missed"
        said.append(f"two workers with {name}, against one: {figures}; within {BAR} ms at P50 and P95: {verdict}")
    return said


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
        for workers, rate in ((1, args.rate), (2, args.rate), (2, 2 * args.rate)):
            with on_own_cores(args.own_cores, apart()):
                loads.append(measure(workers, rate, args.seconds, args.warmup))
            print(loads[-1], flush=True)
    told = "\n".join(f"- {line}" for line in bars(loads, args.rate))
    print(f"{table(loads)}\n\n{told}")
    if args.no_write:
        return
    now = datetime.now(timezone.utc)
    facts = {"date": now.isoformat(timespec="seconds"), "host": host(), "seconds": args.seconds, "own_cores": args.own_cores}
    facts |= {"load_average_before": before}
    name = Path(__file__).with_name("results") / f"{now:%Y-%m-%d-%H%M}-hosts"
    name.with_suffix(".json").write_text(json.dumps({**facts, "rows": [asdict(load) for load in loads]}, indent=1) + "\n")
    shown = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    name.with_suffix(".md").write_text(f"# Two workers against one\n\n{shown}\n\n{table(loads)}\n\n{told}\n")


if __name__ == "__main__":
    main()
