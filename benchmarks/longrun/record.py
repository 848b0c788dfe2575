"""72 hours of records through the real recording path in minutes: `python benchmarks/longrun/record.py`.

Two child processes do what a load client does with streams that have ended (sender.py), as fast as they can; this process waits for
them as `fenno loadtest --processes 2` does, and packs meanwhile. What they hold in memory is looked at all the time. Then `fenno
report` is timed, as a process of its own, beside the server's samples and the probes of 72 hours; its percentiles are compared with
those that were put in. Writes results/DATE.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
from sender import RATE, START

from fenno import machine, process
from fenno.engine import watch
from fenno.engine.metrics import Histogram, Metrics
from fenno.load import plan as plans
from fenno.load import stored
from fenno.load.plan import Plan
from fenno.load.run import LoadRun
from fenno.load.stored import Asked, Ending
from fenno.recipe import Workload

SENDERS = 2
SENDER = Path(__file__).with_name("sender.py")


@dataclass
class Held:
    """Resident bytes of both processes, each with the share of the records that were there."""

    shares: list[float] = field(default_factory=list)
    sender: list[int] = field(default_factory=list)
    fenno: list[int] = field(default_factory=list)

    def growth(self, held: list[int]) -> float:
        """From the second tenth of the records to the last: the largest of each, as a share."""
        early = max(value for share, value in zip(self.shares, held, strict=True) if 0.1 <= share < 0.2)
        late = max(value for share, value in zip(self.shares, held, strict=True) if share >= 0.9)
        return late / early - 1


@contextmanager
def looking(run: LoadRun, count: int) -> Iterator[Held]:
    """Look at both processes while the block lasts."""
    over, found = threading.Event(), Held()

    def look() -> None:
        while not over.wait(0.2):
            with suppress(psutil.Error):
                senders = [child for child in psutil.Process().children(recursive=True) if child.cmdline()[1:2] == [str(SENDER)]]
                held = [child.memory_info().rss for child in senders]
                if held and (done := run.client().done):
                    found.shares.append(done / count)
                    found.sender.append(max(held))
                    found.fenno.append(psutil.Process().memory_info().rss)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield found
    over.set()
    thread.join()


def record(folder: Path, count: int, processes: int) -> tuple[Held, float]:
    """Have `count` requests recorded, by so many processes. What was held meanwhile, and the seconds it took."""
    plan = Plan(url="http://127.0.0.1:1", model="m", workload=Workload(), rate=RATE, duration=count / RATE)
    (folder / "plan.json").write_text(plans.dump(plan))
    stored.begin(folder, Asked(at=time.time(), probed=True))
    began = time.monotonic()
    argv = [sys.executable, str(SENDER), str(folder), str(count), str(processes)]
    with process.running(argv, log=folder / "client.log") as child:
        run = LoadRun(plan, folder, child)
        with looking(run, count) as held:
            run.wait()
    stored.end(folder, Ending(over=START + count / RATE, ended={"how": "done", "why": ""}))
    return held, time.monotonic() - began


def beside(folder: Path, count: int) -> None:
    """What a server says of itself and a probe finds each second of so long a run."""
    seconds = math.ceil(count / RATE)
    with (folder / "server.jsonl").open("w") as server, (folder / "probes.jsonl").open("w") as probes:
        for second in range(seconds):
            at, done = START + second, 42.7 * second
            histogram = Histogram(done / 4, done, ())
            metrics = Metrics(
                running=4.0, waiting=0.0, kv_cache_usage=0.2, preemptions=0.0, prompt_tokens=256 * done, generation_tokens=3 * done,
                requests_finished=done, time_to_first_token_seconds=histogram, request_queue_time_seconds=histogram,
            )  # fmt: skip
            server.write(watch.dump(watch.Sample(at, metrics, 2**30)) + "\n")
            probes.write(json.dumps({"asked": at, "ended": at + 0.05, "error": ""}) + "\n")


def report(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """`fenno report` of it: seconds, the most it held, exit code; what it printed."""
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "fenno", "report", str(folder), *arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    seconds, code = round(time.monotonic() - began, 1), os.waitstatus_to_exitcode(status)
    return {"seconds": seconds, "peak_mib": used.ru_maxrss // 1024, "code": code}, said


def exact(document: dict[str, Any], count: int) -> bool:
    """Whether percentiles are those that were put in, to the microsecond: every TTFT from 50 ms on is there once."""
    place = {p: max(0, math.ceil(count * p / 100) - 1) for p in (50, 95, 99)}
    ttft = all(document["ttft"][f"p{p}"] == round((50_000 + at) / 1e3, 3) for p, at in place.items())
    return ttft and (document["requests"], document["completed"]) == (count, count)


def recorded(folder: Path, count: int) -> None:
    """Have it recorded in `folder`, with what that took in recorded.json."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()
    held, seconds = record(folder, count, SENDERS)
    beside(folder, count)
    found = {
        "requests": count,
        "recorded_in_seconds": round(seconds, 1),
        "load_average_before": before,
        "bytes_a_request": round(sum(path.stat().st_size for path in folder.glob("records-*")) / count, 1),
        "growth": {"sender": round(held.growth(held.sender), 4), "fenno": round(held.growth(held.fenno), 4)},
        "held_mib": {"sender": middle(held.sender), "fenno": middle(held.fenno)},
    }
    (folder / "recorded.json").write_text(json.dumps(found))


def told(folder: Path) -> dict[str, Any]:
    """What lies in `folder`, and what telling it takes."""
    found = json.loads((folder / "recorded.json").read_text())
    before = os.getloadavg()
    document, said = report(folder, "--to", "json")
    page, text = report(folder, "--to", "html")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": {"cpu": machine.processor_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("locust", "gevent", "pyarrow", "numpy")},
        **found,
        "percentiles_exact": exact(json.loads(said), found["requests"]),
        "report_json": {**document, "load_average_before": before},
        "report_html": {**page, "bytes": len(text)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=11_000_000, help="11,000,000: 72 hours at 42.7 requests a second")
    parser.add_argument("--folder", type=Path, help="keep what is recorded there, or tell again what lies there already")
    parser.add_argument("--record-only", action="store_true", help="into --folder; it is told by another call")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "recorded.json").exists():
            recorded(folder, args.requests)
        if args.record_only:
            return
        found = told(folder)
    print(json.dumps(found, indent=1))
    if not args.no_write:
        results = Path(__file__).with_name("results")
        results.mkdir(exist_ok=True)
        (results / f"{datetime.now(timezone.utc):%Y-%m-%d-%H%M}.json").write_text(json.dumps(found, indent=1) + "\n")


def middle(held: list[int]) -> int:
    return round(statistics.median(held) / 2**20)


if __name__ == "__main__":
    main()
