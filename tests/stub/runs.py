"""Load tests as they lie in their folders, written by what writes them, without any traffic."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fenno.load import plan as plans
from fenno.load import record, stored
from fenno.load.client import ClientState, Delay
from fenno.load.plan import Plan
from fenno.load.record import Record
from fenno.load.stored import Asked, Ending
from fenno.recipe import Workload


def answer(number: int, sent: float, *, ttft: float = 0.1, gaps: tuple[float, ...] = (10.0, 30.0), **change: Any) -> Record:
    """A good answer; `gaps` in ms."""
    first, last = sent + ttft, sent + ttft + sum(gaps) / 1e3
    base: dict[str, Any] = {
        **{"id": f"0-{number}", "cls": "short", "arm": "a", "phase": "counted", "scheduled": sent, "sent": sent},
        **{"connected": sent, "headers": sent + 0.01, "first": first, "first_answer": first, "last": last, "end": last + 0.01},
        **{"asked_prompt": 5, "asked_tokens": len(gaps) + 1, "prompt_tokens": 5, "completion_tokens": len(gaps) + 1},
        **{"token_count": len(gaps) + 1, "gaps": array("f", gaps), "status": 200, "outcome": "ok", "error": ""},
    }
    return Record(**{**base, **change})


def failure(number: int, sent: float, **change: Any) -> Record:
    """A request that the server refused with 503."""
    nothing = dict.fromkeys(("first", "first_answer", "last", "prompt_tokens", "completion_tokens"))
    wrong = {"token_count": 0, "status": 503, "outcome": "5xx", "error": 'HTTP 503: busy, "very"'}
    return answer(number, sent, **{**nothing, **wrong, "gaps": array("f"), **change})


def run(
    folder: Path,
    records: Iterable[Record],
    *,
    window: tuple[float, float] = (10.0, 20.0),
    asked: Asked | None = None,
    ended: bool = True,
    **plan: Any,
) -> Path:
    """The folder of a run of these records. `plan` is laid over an open loop of 10 requests a second."""
    way = {} if {"users", "ramp"} & set(plan) else {"rate": 10.0}
    asked_for: dict[str, Any] = {"url": "http://127.0.0.1:8000", "model": "some/model", "workload": Workload(), **way}
    folder.mkdir(parents=True, exist_ok=True)
    made = Plan(**{**asked_for, "warmup": 1.0, "duration": window[1] - window[0], **plan})
    (folder / "plan.json").write_text(plans.dump(made))
    (folder / "records-0.jsonl").write_text("".join(record.dump(one) + "\n" for one in records))
    delay = Delay(p50=0.1, p95=0.2, p99=0.3, max=0.4)
    state = ClientState(phase="done", start=window[0], end=window[1] if ended else None, lag=delay, lateness=delay)
    (folder / "client-0.jsonl").write_text(state.dump() + "\n")
    stored.begin(folder, asked or Asked())
    if ended:
        stored.end(folder, Ending(over=window[1] + 1, ended={"how": "done", "why": ""}))
    return folder
