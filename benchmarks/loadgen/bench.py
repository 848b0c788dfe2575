"""The gates of the load client, measured on this host against the calibration server: `python benchmarks/loadgen/bench.py`.

Each error is paired with the server's log of the same request. With `--own-cores` (root) client and server get a core each and
go before other programs there, so that those on a shared machine are not measured along. Writes results/DATE-HOST.json and .md.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import psutil

from fenno import machine
from fenno.load import accuracy
from fenno.load.accuracy import Accuracy
from fenno.load.calibration import Timing
from fenno.load.plan import Plan
from fenno.recipe import LengthClass, Workload

MIX = Workload()
FIXED = Workload(classes=(LengthClass(name="fixed", share=1.0, prompt_tokens=256, output_tokens=33),))


@dataclasses.dataclass(frozen=True)
class Case:
    """One load, `users` or a `rate`, and what is expected of it: (name, figure in ms, most)."""

    name: str
    users: int | None
    rate: float | None
    workload: Workload
    timing: Timing
    gates: tuple[tuple[str, Callable[[Accuracy], float], float], ...]


CASES = (
    Case(
        "200 streams, the 64/128/512 mix, 25 ms",
        200,
        None,
        MIX,
        Timing(0.1, 0.025),
        (
            ("TTFT error P50", lambda a: a.ttft[0], 0.2),
            ("TTFT error P95", lambda a: a.ttft[1], 1.0),
            ("TTFT error P99", lambda a: a.ttft[2], 2.5),
            ("longest-gap error P99", lambda a: a.gap[2], 3.0),
        ),
    ),
    Case(
        "500 streams, 33 tokens, 11.5 ms",
        500,
        None,
        FIXED,
        Timing(0.1, 0.0115),
        (
            ("TTFT error P95", lambda a: a.ttft[1], 1.5),
            ("TTFT error P99", lambda a: a.ttft[2], 5.0),
            ("longest-gap error P99", lambda a: a.gap[2], 3.0),
        ),
    ),
    # As many tokens a second as 200 streams of the mix.
    Case(
        "60 requests/s, Poisson, the 64/128/512 mix, 25 ms",
        None,
        60.0,
        MIX,
        Timing(0.1, 0.025),
        (
            ("TTFT error P50", lambda a: a.ttft[0], 0.2),
            ("TTFT error P95", lambda a: a.ttft[1], 1.0),
            ("TTFT error P99", lambda a: a.ttft[2], 2.5),
            ("longest-gap error P99", lambda a: a.gap[2], 3.0),
            ("open-loop lateness P99", lambda a: a.lateness[2], 2.0),
        ),
    ),
)

Row = tuple[str, str, str, "bool | None"]  # gate, bar, measured, whether it held


def core_and_rank(line: str) -> tuple[int, int] | None:
    """Where a process belongs, by its command line, and its rank among realtime processes: the server, the client, nobody else."""
    return (0, 10) if "fenno.load.calibration" in line else (1, 10) if "locustfile" in line else None


@contextmanager
def on_own_cores(wanted: bool, place: Callable[[str], tuple[int, int] | None] = core_and_rank) -> Iterator[None]:
    """While the block lasts, move the server to core 0 and the client to core 1 as they appear, before other programs there.

    They are realtime processes: whatever its rank, another program may else finish its turn of 4 ms first. (Where the client fills
    its core, Linux stops such a process for 50 ms in every second.) This process, which looks at the client now and then, goes to
    core 0 for good.
    """
    over = threading.Event()

    def watch() -> None:
        seen: set[int] = set()
        while not over.wait(0.05):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    line = " ".join(child.cmdline())
                    if child.pid in seen or "guard.py" in line or (found := place(line)) is None:
                        continue
                    seen.add(child.pid)
                    os.sched_setaffinity(child.pid, {found[0]})
                    Path(f"/proc/{child.pid}/autogroup").write_text("-20")
                    os.sched_setscheduler(child.pid, os.SCHED_FIFO, os.sched_param(found[1]))

    thread = threading.Thread(target=watch, daemon=True)
    if wanted:
        os.sched_setaffinity(0, {0})
        thread.start()
    yield
    over.set()


def measure(case: Case, seconds: float, warmup: float, endpoint: str) -> Accuracy:
    plan = Plan(
        url="http://replaced", model="calibration", workload=case.workload, users=case.users, rate=case.rate, warmup=warmup,
        duration=seconds, endpoint=endpoint,  # type: ignore[arg-type]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return accuracy.measure(plan, Path(folder), case.timing)


def gates_of(case: Case, found: Accuracy) -> list[Row]:
    rows: list[Row] = [(name, f"<= {most:g} ms", f"{of(found):.3g} ms", of(found) <= most) for name, of, most in case.gates]
    if found.in_flight is not None:
        rows.append(("in flight / users", ">= 99 %", f"{found.in_flight * 100:.2f} %", found.in_flight >= 0.99))
    rows.append(("tokens and answers", "exact", "exact" if found.exact else "not exact", found.exact))
    return [*rows, ("reads left to parse after the window", "", f"{found.backlog:,}", None)]


def host() -> dict[str, object]:
    return {
        "cpu": machine.processor_name(),
        "cores": os.cpu_count(),
        "kernel": machine.kernel(),
        "python": platform.python_version(),
        "locust": importlib.metadata.version("locust"),
        "gevent": importlib.metadata.version("gevent"),
        "fenno": importlib.metadata.version("fenno"),
    }


def table(rows: list[tuple[Case, Accuracy]]) -> str:
    lines = ["| load | tokens/s | requests | gate | bar | measured | |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for case, found in rows:
        for name, bar, value, good in gates_of(case, found):
            verdict = "" if good is None else "held" if good else "**missed**"
            lines.append(
                f"| {case.name} | {found.tokens_per_second:,.0f} | {found.requests} | {name} | {bar} | {value} | {verdict} |"
            )
    return "\n".join(lines)


def write(kind: str, title: str, facts: Mapping[str, object], rows: Sequence[object], text: str) -> None:
    """results/DATE-KIND.json and .md: when and where, the facts, and the rows, as JSON or as the `text` that shows them."""
    now = datetime.now(timezone.utc)
    told = {"date": now.isoformat(timespec="seconds"), "host": host(), **facts}
    path = Path(__file__).with_name("results") / "-".join(filter(None, (f"{now:%Y-%m-%d-%H%M}", kind)))
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    shown = "\n".join(f"- {key}: {value}" for key, value in told.items())
    path.with_suffix(".md").write_text(f"# {title}\n\n{shown}\n\n{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of the window; an answer of 512 tokens takes 13")
    parser.add_argument("--warmup", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--endpoint", default="chat", choices=["chat", "completions"])
    parser.add_argument("--own-cores", action="store_true", help="a core each, before other programs; needs root")
    parser.add_argument("--only", type=int, help="one case, by number from 0")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    before = os.getloadavg()
    rows: list[tuple[Case, Accuracy]] = []
    for case in CASES if args.only is None else [CASES[args.only]]:
        for _ in range(args.repeat):
            with on_own_cores(args.own_cores):
                rows.append((case, measure(case, args.seconds, args.warmup, args.endpoint)))
            print(case.name, rows[-1][1], flush=True)
    text = table(rows)
    print(text)
    if args.no_write:
        return
    facts = {"own_cores": args.own_cores, "seconds": args.seconds, "endpoint": args.endpoint, "load_average_before": before}
    data = [{"case": case.name, **dataclasses.asdict(found)} for case, found in rows]
    write("", "Load client against the calibration server", facts, data, text)


if __name__ == "__main__":
    main()
