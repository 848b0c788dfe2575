"""One load test from both sides: the traffic, and beside it the server's own figures and a probe; the document of all of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fenno import errors
from fenno.engine import watch
from fenno.engine.server import Server
from fenno.engine.watch import Seen
from fenno.errors import EngineError, Interrupted
from fenno.load import account, endpoint, job, probe, run, stored
from fenno.load.plan import Plan
from fenno.load.probe import Probe
from fenno.load.run import Result
from fenno.load.stored import Asked, Ending, Stored
from fenno.recipe import Recipe


def measure(
    plan: Plan, server: Server, recipe: Recipe, folder: Path, *, probing: bool = True, gpu_price: float | None = None
) -> dict[str, Any]:
    """Run `plan` against `server` and account for it. `folder` gets the records, the server's samples and the probes; `gpu_price`:
    dollars an hour of one GPU. An interruption ends it early and well, and its document says so. Raises as `run.run` does."""
    with begun(plan, server, recipe, folder, probing=probing, gpu_price=gpu_price) as end:
        return end(False)


@contextlib.contextmanager
def begun(
    plan: Plan, server: Server, recipe: Recipe, folder: Path, *, probing: bool = True, gpu_price: float | None = None
) -> Iterator[Callable[[bool], dict[str, Any]]]:
    """The same, begun: with it several run at once. Gives what waits for its end, or ends it now as an interruption does, and
    returns its document; to be called within the block, once."""
    endpoint.check(plan)
    asked = Asked(at=time.time(), targets=recipe.targets, gpu_price=gpu_price, probed=probing, visible=watch.visible(server))
    stored.begin(folder, asked)
    with contextlib.ExitStack() as stack:
        looking = stack.enter_context(watch.watching(server, folder, keep=False))
        if probing:
            stack.enter_context(probe.probing(plan, folder))
        load = stack.enter_context(run.running(plan, folder))

        def end(now: bool) -> dict[str, Any]:
            try:
                result, interrupted = (load.stop() if now else load.wait()), now
            except Interrupted:
                result, interrupted = load.stop(), True
            over = time.monotonic()
            stack.close()
            seen, probes = looking.seen(), probe.read(folder) if probing else None
            ended = Ending(over=over, ended=ending(result, server, interrupted), notes=seen.notes)
            stored.end(folder, ended)
            return document(Stored(asked=asked, result=result, seen=seen, probes=probes, ending=ended))

        yield end


def document(run_: Stored) -> dict[str, Any]:
    """All there is to say of a load test, whether it has just ended or was read from its folder."""
    asked = run_.asked
    found = job.document(run_.result, asked.targets) | beside(run_.result, run_.seen, run_.probes, run_.ending.over)
    found["ended"] = dict(run_.ending.ended)
    found["at"] = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(asked.at)) if asked.at else None
    if asked.gpu_price is not None:
        gpus = len(found["server"]["gpus"]) or 1
        dollars = account.cost(asked.gpu_price, gpus, found["token_throughput"])
        found["cost"] = {"dollars_per_million_tokens": dollars, "gpus": gpus, "gpu_price": asked.gpu_price}
    return found


def beside(result: Result, seen: Seen, probes: Sequence[Probe] | None, over: float) -> dict[str, Any]:
    """What was seen beside the traffic, for the document. `probes`: None when none were sent. `over`: when asking was over."""
    start = result.state.start or 0.0
    window = (start, result.state.end or start)
    seconds = window[1] - window[0]
    requests = result.requests
    tokens = int(requests.tokens[requests.counted & requests.ok].sum())
    said = seen.between(*window).said()
    found: dict[str, Any] = {
        "server": account.summarize(seen, window, tokens / seconds if seconds > 0 else None),
        "time_to_first_token": None,
    }
    if len(said) > 1 and account.growth(seen, window) is not None:
        mine = account.first_tokens(requests, probes or (), said[0].at, said[-1].at)
        found["time_to_first_token"] = account.reconcile(said[0].metrics, said[-1].metrics, mine)
    nothing = {"outage_seconds": None, "recovery_seconds": None, "probes": None}
    return found | (nothing if probes is None else probe.summarize(probes, window, over))


def ending(result: Result, server: Server, interrupted: bool = False) -> dict[str, str]:
    """How the run ended: "done", "stopped", "interrupted", or "gone" when the server was no longer there, and why: from the
    engine's log where there is one."""
    try:
        server.check("load")
    except EngineError as error:
        return {"how": "gone", "why": str(error)}
    if interrupted:
        return {"how": "interrupted", "why": "somebody ended the load test before its time"}
    return {"how": result.state.phase, "why": result.state.reason}


def exit_code(document: dict[str, Any]) -> int:
    """By cause: the engine's when it was gone, that of an interruption, else by whether this was a measurement."""
    if document["ended"]["how"] == "gone":
        return errors.ENGINE
    if document["ended"]["how"] == "interrupted":
        return errors.INTERRUPTED
    return errors.OK if document["valid"] else errors.INCONCLUSIVE
