"""Changing a running engine: write the next wish, make an idle engine look, wait for every rank's answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fenno import control
from fenno.control import Acknowledgement, Value, Wanted
from fenno.engine import http, metrics
from fenno.errors import EngineError, UsageError

# One that has not looked after twice as long is idle, or in a long step.
PATIENCE_SECONDS = 2 * control.LOOK_SECONDS
POLL_SECONDS = 0.01


def _failed(message: str, hint: str) -> EngineError:
    return EngineError(message, hint, stage="control")


def _answers(path: Path) -> dict[int, Acknowledgement]:
    try:
        return control.read_acknowledgements(path)
    except (OSError, ValueError) as error:
        raise _failed(f"the engine's answer cannot be read: {error}", "start the engine again") from error


def merge(answers: Mapping[int, Acknowledgement]) -> Acknowledgement:
    """One answer for all ranks: the oldest revision, reached when all have, requests and counters added up.

    Ages and caps are the largest, not the sum. `rank`, `pid` and `applied` are the first rank's: all ranks obey one file.
    """
    every = [answers[rank] for rank in sorted(answers)]
    counters: dict[str, float] = {}
    for name, value in ((name, value) for answer in every for name, value in answer.counters.items()):
        largest = name.startswith("cap_") or name.endswith("_seconds")
        counters[name] = max(counters.get(name, value), value) if largest else counters.get(name, 0) + value
    return replace(
        every[0],
        revision=min(answer.revision for answer in every),
        reached=all(answer.reached for answer in every),
        unsupported=tuple(sorted({name for answer in every for name in answer.unsupported})),
        running=sum(answer.running for answer in every),
        waiting=sum(answer.waiting for answer in every),
        counters=counters,
        problem=next((answer.problem for answer in every if answer.problem), ""),
    )


def _wait(
    path: Path, timeout: float, done: Callable[[Acknowledgement], bool], idle: Callable[[], object] = lambda: None
) -> Acknowledgement | None:
    """The merged answer once it is `done`, or None after `timeout`; `idle` is called when nothing has come for a while."""
    started = time.monotonic()
    next_nudge = started + PATIENCE_SECONDS
    while True:
        answer = merge(_answers(path))
        if done(answer):
            return answer
        now = time.monotonic()
        if now - started > timeout:
            return None
        if now > next_nudge:
            idle()
            next_nudge = now + 1.0
        time.sleep(POLL_SECONDS)


def nudge(url: str, timeout: float = 10.0) -> bool:
    """Make an idle engine look at its control file, and forget its prefix cache. Whether the cache was cleared: it is not
    while requests hold blocks. Up to vLLM 0.28 or so the engine does not say, and it counts as cleared.

    Raises `EngineError` (stage `control`).
    """
    try:
        text = http.call(f"{url.rstrip('/')}/reset_prefix_cache", post=True, timeout=timeout)
    except http.Refused as error:
        hint = "is it still running? see its log"
        if error.status == 404:
            hint = "start it with VLLM_SERVER_DEV_MODE=1, which fenno sets by itself for an engine that it starts"
        raise _failed(f"the engine cannot be made to look at its control file: {error}", hint) from error
    return bool(json.loads(text).get("success", True)) if text.startswith("{") else True


def change(url: str, control_path: Path, knobs: Mapping[str, Value], timeout: float = 30.0) -> Acknowledgement:
    """Set `knobs` on the engine at `url`, leaving every other knob as it is; None takes one back to the start's value.

    Returns once every rank has *applied* them; `reached` may come later, as requests finish: see `wait_reached`. Knobs that this
    engine cannot change live are in `unsupported`. Raises `UsageError` for an impossible value and `EngineError` (stage
    `control`) when the engine does not answer within `timeout` seconds.
    """
    answers = _answers(control_path)
    if not answers:
        raise _failed(
            f"no scheduler has ever answered beside {control_path}",
            f"start the engine with fenno's scheduler and {control.VARIABLE}={control_path}",
        )
    try:
        before = control.read_wanted(control_path)
    except (OSError, ValueError):
        before = Wanted(0)
    merged = {name: value for name, value in {**before.knobs, **knobs}.items() if value is not None}
    revision = 1 + max(before.revision, *(answer.revision for answer in answers.values()))
    try:
        control.write_wanted(control_path, Wanted(revision, merged))
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise _failed(f"{control_path} cannot be written: {error.strerror}", "free some space, or see to its folder") from error
    answer = _wait(control_path, timeout, lambda now: now.revision >= revision, lambda: nudge(url, max(10.0, timeout)))
    if answer is None:
        problem = merge(_answers(control_path)).problem or "it did not look"
        raise _failed(f"the engine did not apply {dict(knobs)} within {timeout:g} s: {problem}", "is it still running? see its log")
    return answer


def wait_reached(control_path: Path, timeout: float) -> Acknowledgement:
    """Wait until no rank runs more requests than its cap allows: a lowered cap drains only as requests finish.

    Raises `EngineError` (stage `control`) after `timeout` seconds.
    """
    answer = _wait(control_path, timeout, lambda now: now.reached)
    if answer is None:
        now = merge(_answers(control_path))
        cap = now.applied.get("max_num_active_seqs")
        raise _failed(
            f"{now.running} requests still run {timeout:g} s after the cap was set to {cap}",
            "wait for longer, or stop the load: running requests are never cut off",
        )
    return answer


def drain(url: str, timeout: float = 120.0) -> None:
    """Wait until nothing runs or waits; where the server says nothing of it, a moment. Raises `EngineError` (stage `control`)."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            now = metrics.scrape(url, timeout=10.0)
        except EngineError:
            time.sleep(1.0)
            return
        if not now.running and not now.waiting:
            return
        if time.monotonic() > deadline:
            raise _busy(now, timeout)
        time.sleep(0.05)


def _busy(now: metrics.Metrics, timeout: float) -> EngineError:
    return _failed(
        f"{now.running or 0:g} requests still run and {now.waiting or 0:g} wait after {timeout:g} s",
        "is something else sending requests to this server?",
    )


def settle(url: str, timeout: float = 120.0) -> None:
    """Wait until nothing runs or waits and the prefix cache is empty, so that one trial leaves nothing to the next.

    Raises `EngineError`: stage `control` after `timeout` seconds, stage `load` when the engine has not answered at all by then. An
    API server that has thousands of requests to abort answers nothing for many seconds: that alone is no death.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            now = metrics.scrape(url, timeout=10.0)
            if not now.running and not now.waiting and nudge(url):
                return
        except EngineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.25)
            continue
        if time.monotonic() > deadline:
            raise _busy(now, timeout)
        time.sleep(0.05)
