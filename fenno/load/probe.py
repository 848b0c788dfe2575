"""Whether the server answers, asked beside the load by a tiny request each second, on a connection of its own."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenno.engine import http
from fenno.load.plan import Plan

LONGEST = 10.0  # seconds that an answer of one token may take, or the plan's timeout where that is less


@dataclass(frozen=True)
class Probe:
    """One question: when it was asked and over, on the monotonic clock, and what was wrong with the answer; "" for a good one."""

    asked: float
    ended: float
    error: str = ""


@dataclass(frozen=True)
class Outage:
    """From the first question that got no good answer to the next one that did; `recovered` is False when none did any more."""

    start: float
    end: float
    recovered: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


def outages(probes: Sequence[Probe], end: float) -> list[Outage]:
    """Every outage up to `end`, when asking was over."""
    found: list[Outage] = []
    start: float | None = None
    for probe in sorted(probes, key=lambda p: p.asked):
        if probe.error and start is None:
            start = probe.asked
        elif not probe.error and start is not None:
            found.append(Outage(start, probe.asked, True))
            start = None
    return found if start is None else [*found, Outage(start, max(end, start), False)]


def summarize(probes: Sequence[Probe], window: tuple[float, float], end: float) -> dict[str, Any]:
    """Outage seconds within the window, how long the longest outage that touches it lasted (None when it was not over at `end`, and
    without one), and the outages as seconds from the window's start."""
    start, stop = window
    inside = [p for p in probes if start <= p.asked < stop]
    touching = [o for o in outages(probes, end) if o.start < stop and o.end > start]
    longest = max(touching, key=lambda o: o.seconds, default=None)
    return {
        "outage_seconds": round(sum(min(o.end, stop) - max(o.start, start) for o in touching), 3) if inside else None,
        "recovery_seconds": round(longest.seconds, 3) if longest and longest.recovered else None,
        "probes": {
            "asked": len(inside),
            "failed": sum(bool(p.error) for p in inside),
            "outages": [[round(o.start - start, 3), round(o.end - start, 3)] for o in touching],
            "errors": sorted({p.error for p in inside if p.error})[:5],
        },
    }


@dataclass
class Probing:
    """Questions that go out by the clock. What is still open at the end is neither a good nor a bad one."""

    plan: Plan
    file: Path
    interval: float
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Ask at each interval until it is over, whatever became of the questions before."""
        due = time.monotonic()
        while not self._over.is_set():
            threading.Thread(target=self._ask, daemon=True).start()
            due = max(due + self.interval, time.monotonic())
            self._over.wait(due - time.monotonic())

    def stop(self) -> None:
        with self._lock:
            self._over.set()

    def _ask(self) -> None:
        asked = time.monotonic()
        error = ask(self.plan)
        with self._lock, contextlib.suppress(OSError):
            if self._over.is_set():
                return
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(Probe(asked, time.monotonic(), error))) + "\n")


@contextlib.contextmanager
def probing(plan: Plan, folder: Path, interval: float = 1.0) -> Iterator[None]:
    """Ask `plan`'s server each `interval` seconds while the block lasts; what comes of it is in `probes.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "probes.jsonl"
    file.unlink(missing_ok=True)
    probing_ = Probing(plan, file, interval)
    thread = threading.Thread(target=probing_.run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        probing_.stop()
        thread.join()


def read(folder: Path) -> list[Probe]:
    """The questions that `probing` kept in `folder`, as far as they are whole."""
    file = folder / "probes.jsonl"
    whole = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Probe(**json.loads(line)) for line in whole]


def ask(plan: Plan) -> str:
    """Ask for one token. Returns what is wrong with the answer, "" when it is good."""
    asked = {"messages": [{"role": "user", "content": "a"}]} if plan.endpoint == "chat" else {"prompt": "a"}
    body = {"model": plan.model, **asked, "max_tokens": 1, "temperature": 0, **plan.extra_body, "stream": False}
    url = plan.url.rstrip("/").removesuffix("/v1") + plan.path
    timeout = min(LONGEST, plan.timeout)
    try:
        answer = http.call_json(url, body, timeout=timeout, key=plan.api_key(), headers=plan.headers, ca_file=plan.ca_file)
    except http.Refused as error:
        return str(error)
    return "" if answer.get("choices") else f"an answer without choices: {str(answer)[:200]}"
