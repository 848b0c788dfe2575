"""One load test as a person asks for it: a recipe or a URL, how much, how long; and the document that comes of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fenno.engine import command
from fenno.errors import UsageError
from fenno.load import figures
from fenno.load import trace as traces
from fenno.load.client import ClientState
from fenno.load.plan import FORCED, Plan
from fenno.load.run import Result
from fenno.recipe import Engine, Recipe, Targets, Workload

NOTHING = ("no request was counted", "give a longer --duration, or a shorter --warmup")


def of_url(url: str, model: str | None, endpoint: str, api_key_env: str | None) -> Recipe:
    """A recipe for a server that runs already. Raises `UsageError` for what is no address or endpoint."""
    if not re.match(r"https?://[^/]+", url):
        raise UsageError(f"{url!r} is neither a recipe nor an http:// or https:// address", "see `fenno recipe list`")
    if below := re.match(r"(.+?)/v1/.", url):
        raise UsageError(f"{url} is an address below the server's", f"give {below[1]}, and --endpoint completions or chat")
    if endpoint not in ("completions", "chat"):
        raise UsageError(f"--endpoint is {endpoint!r}", "it has to be completions or chat")
    engine = Engine(url=url.rstrip("/").removesuffix("/v1"), served_model=model, api_key_env=api_key_env)
    return Recipe(name="url", engine=engine, workload=Workload.model_validate({"endpoint": endpoint}))


def of_nobody(endpoint: str) -> Recipe:
    """A recipe for the calibration server when none was named: 200 users of the usual mix."""
    return Recipe(
        name="calibration",
        engine=Engine(url="http://127.0.0.1"),
        workload=changed(Workload(), {"users": 200, "endpoint": endpoint}),
    )


def plan(
    recipe: Recipe,
    *,
    users: int | None = None,
    rate: float | None = None,
    ramp: str | None = None,
    trace: str | None = None,
    scale: float | None = None,
    duration: float | None = None,
    requests: int | None = None,
    warmup: float = 5.0,
    seed: int = 1,
    arm: str = "",
    timeout: float | None = None,
    prompts: str | None = None,
    processes: int = 1,
    bind: str | None = None,
    headers: Sequence[str] = (),
    extra_body: str | None = None,
) -> Plan:
    """The traffic: what the call says, else what the recipe's workload says, else one request after the other for 30 s.

    Its address and model are those of the recipe: replace them once the server runs.

    `arm`: another one gives other prompts under the same arrivals, so that no run finds another's in a prefix cache.
    """
    workload, way = _arrivals(recipe.workload, users=users, rate=rate, ramp=ramp, trace=trace)
    given = {"prompts": prompts, "scale": scale}
    workload = changed(workload, {key: value for key, value in given.items() if value is not None})
    if workload.trace:
        duration = _of_trace(workload, warmup, duration)
    return Plan(
        url=recipe.engine.url or "http://127.0.0.1",
        model=recipe.engine.served_model or "",
        endpoint=workload.endpoint,
        workload=workload,
        **way,
        warmup=warmup,
        duration=duration if duration is not None or requests is not None else 30.0,
        requests=requests,
        seed=seed,
        arm=arm,
        timeout=workload.timeout if timeout is None else timeout,
        processes=processes,
        bind=bind,
        api_key_env=command.key_variable(recipe.engine),
        headers=dict(header(text) for text in headers),
        extra_body=body(extra_body),
        ca_file=recipe.engine.ca_file,
    )


def changed(workload: Workload, values: Mapping[str, Any]) -> Workload:
    """The same workload with other values. Raises `UsageError` for an impossible one."""
    try:
        return Workload.model_validate({**workload.model_dump(), **values})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{where}: {first['msg']}" if where else first["msg"].removeprefix("Value error, ")) from error


def _arrivals(workload: Workload, **asked: Any) -> tuple[Workload, dict[str, Any]]:
    """When requests are sent: what the call says, else the workload. The workload without what the call replaced; `Plan`'s part."""
    named = {name: value for name, value in asked.items() if value is not None}
    if len(named) > 1:
        raise UsageError(
            f"{' and '.join(f'--{name}' for name in named)} exclude each other",
            "give one of --rate, --ramp, --trace (open loop) and --users (closed loop)",
        )
    if "ramp" in named:
        named["ramp"] = _ramp(named["ramp"])
    if named:
        workload = changed(workload, {**dict.fromkeys(("users", "rate", "ramp", "trace")), **named})
    way = {"users": workload.users, "rate": workload.rate, "ramp": workload.ramp}
    nothing = not workload.trace and all(value is None for value in way.values())
    return workload, {**way, "users": 1} if nothing else way


def _ramp(text: str) -> tuple[float, float]:
    begin, colon, end = text.partition(":")
    try:
        rates = float(begin), float(end)
    except ValueError:
        rates = (0.0, 0.0)
    if not colon or not all(0 < rate < math.inf for rate in rates):
        raise UsageError(f"--ramp is {text!r}", "write the rates at both ends of the window, such as 2:40")
    return rates


def _of_trace(workload: Workload, warmup: float, duration: float | None) -> float:
    """The counted window of a trace: what is left of it after the warm-up, or `duration` if that is less."""
    lasts = traces.seconds(traces.load(Path(workload.trace or "")), workload.scale)
    if lasts <= warmup:
        raise UsageError(
            f"{workload.trace} lasts {lasts:.3g} s at this speed, and the warm-up is {warmup:g} s",
            "use a smaller --warmup or --scale",
        )
    return min(lasts - warmup, duration if duration is not None else math.inf)


def header(text: str) -> tuple[str, str]:
    """ "Name: value" taken apart. Raises `UsageError`."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"{text!r} is not a header", "write it as --header 'Name: value'")
    return name.strip(), value.strip()


def body(text: str | None) -> dict[str, Any]:
    """A JSON object from the command line. Raises `UsageError`."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}", "write it as --extra-body '{\"top_k\": 1}'") from error
    if not isinstance(value, dict):
        raise UsageError("--extra-body is not a JSON object", "write it as --extra-body '{\"top_k\": 1}'")
    return value


def document(result: Result, targets: Targets) -> dict[str, Any]:
    """Every figure of a run, the client's fitness, and whether it is VALID."""
    state = result.state
    window = (state.start or 0.0, state.end or state.start or 0.0)
    counted = bool(result.requests.counted.any())
    even = result.plan.ramp is None and not result.plan.workload.trace  # other traffic is not meant to level
    level = figures.steady(result.requests, window) if counted and even else None
    fit = figures.validity(
        lag_p95=state.lag.p95,
        lateness_p95=state.lateness.p95,
        in_flight_mean=state.in_flight_mean,
        users=result.plan.users,
        think_time=result.plan.workload.think_time,
        target=targets.limits().get("p95_ttft"),
        levelled=level,
        phase=f"{state.phase}: {state.reason}" if state.phase == "lost" else state.phase,
    )
    more = [*([] if counted else [NOTHING]), *clocks(state, result.plan, window[1] - window[0], targets)]
    summary = figures.summarize(result.requests, window, figures.goodput_limits(targets.latencies()))
    return {
        "valid": fit.valid and not more,
        "reasons": [*fit.reasons, *(reason for reason, _ in more)],
        "next_steps": [*fit.steps, *(step for _, step in more)],
        "flags": flags(result.plan, summary),
        **summary,
        "targets": dict(targets.latencies()),
        "client": {
            "lag_ms": vars(state.lag),
            "lateness_ms": vars(state.lateness),
            "cpu": state.cpu,
            "in_flight_mean": state.in_flight_mean,
            "in_flight_asked": state.asked,
            "versions": state.versions,
            "workers": [vars(worker) for worker in state.workers],
        },
        "asked": asked(result.plan),
        "records": str(result.folder),
    }


def clocks(state: ClientState, plan: Plan, seconds: float, targets: Targets) -> list[tuple[str, str]]:
    """Why the hosts' clocks do not do for this load, and what to do: an open loop claims to send on time, and a closed one when its
    window was. Latencies are each of one host's clock, and need no other."""
    worst = max((worker.uncertainty_ms for worker in state.workers), default=0.0)
    bound = figures.client_bound(targets.limits().get("p95_ttft"))
    most = bound if plan.users is None else max(bound, 10.0 * seconds)
    why = f"the hosts' clocks are known to each other within {worst:.3g} ms only, {most:.3g} ms allowed"
    return [(why, "use workers nearer to the master, or a network that is quieter")] if worst > most else []


def flags(plan: Plan, summary: Mapping[str, Any]) -> list[str]:
    """What a reader must know of figures that are valid all the same."""
    found = []
    if plan.workload.ignore_eos and not plan.exact:
        found.append(f"the server refuses {' and '.join(FORCED)}: answers may be shorter than asked for")
    if summary["prompt_mismatch"]:
        share = f"{summary['prompt_mismatch']:.3g}"
        found.append(f"a share of {share} of the prompts had another length, by the server's count, than asked for")
    if summary["mix_p"] is not None and summary["mix_p"] < 0.01:
        dropped = ", ".join(f"{name} {figures['dropped_share']:.1%}" for name, figures in summary["classes"].items())
        found.append(f"the mix of completed requests is not the one that was sent (chi-square, p < 0.01); not completed: {dropped}")
    return found


def asked(plan: Plan) -> dict[str, Any]:
    """What was asked for, in the document's words."""
    load = plan.workload
    recorded = {"trace": load.trace, "scale": load.scale} if load.trace else {}
    ways = {"users": plan.users, "rate": plan.rate, "ramp": plan.ramp, **recorded}
    refused = [name for name in FORCED if name not in plan.forced]
    return {**ways, "seed": plan.seed, "timeout": plan.timeout, "exact_answers": plan.exact, "refused": refused}
