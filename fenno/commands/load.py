"""`fenno loadtest`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, errors, units
from fenno.commands.given import (
    TARGETS,
    AuthorityOption,
    BodyOption,
    EndpointOption,
    HeaderOption,
    JsonOption,
    KeyOption,
    ModelOption,
    PromptsOption,
    RateOption,
    TimeoutOption,
    UsersOption,
    check_prompts,
    choose,
    named,
    parse,
    quantity,
)
from fenno.errors import EngineError, UsageError

if TYPE_CHECKING:
    from fenno.engine.server import Server
    from fenno.load.plan import Plan
    from fenno.recipe import Recipe, Workload


WORKERS_OWN = ("where", "worker", "processes", "header", "api_key_env", "out", "as_json")  # all else comes from its master


def loadtest(
    context: typer.Context,
    where: Annotated[
        str | None, typer.Argument(metavar="RECIPE|URL", help="a recipe, or the address of a server that runs")
    ] = None,
    users: UsersOption = None,
    rate: RateOption = None,
    ramp: Annotated[str | None, typer.Option(help="open loop: requests a second from the window's start to its end: 2:40")] = None,
    trace: Annotated[Path | None, typer.Option(help="open loop: recorded arrivals, Azure's CSV or Mooncake's JSONL")] = None,
    scale: Annotated[float | None, typer.Option(help="replay a trace so many times faster")] = None,
    duration: Annotated[str | None, typer.Option(help="the counted window: 30s")] = None,
    requests: Annotated[int | None, typer.Option(help="count so many requests instead")] = None,
    warmup: Annotated[str, typer.Option(help="before the window: 5s")] = "5s",
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and prompts")] = 1,
    timeout: TimeoutOption = None,
    prompts: PromptsOption = None,
    model: ModelOption = None,
    endpoint: EndpointOption = "completions",
    header: HeaderOption = None,
    api_key_env: KeyOption = None,
    extra_body: BodyOption = None,
    ca_file: AuthorityOption = None,
    processes: Annotated[int, typer.Option(help="client processes; with --worker, each is a worker")] = 1,
    master: Annotated[bool, typer.Option("--master", help="have --workers on other hosts send the load")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="with --master: wait for so many")] = None,
    bind: Annotated[str, typer.Option(help="with --master: where the workers find it")] = "127.0.0.1:5557",
    worker: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="send what that master wants sent")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"for goodput and --find-capacity: {TARGETS}")] = None,
    find_capacity: Annotated[bool, typer.Option("--find-capacity", help="the largest steady rate that meets the targets")] = False,
    budget: Annotated[str, typer.Option(help="how long --find-capacity may take")] = "15m",
    step: Annotated[float, typer.Option(help="the factor between rates of --find-capacity until one is too high")] = 2.0,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="measure how well this host measures at this load")] = False,
    tokens_per_second: Annotated[float | None, typer.Option(help="of the calibration server, for all users together")] = None,
    probe: Annotated[bool, typer.Option(help="ask for one token each second, on a connection of its own")] = True,
    gpu_price: Annotated[float | None, typer.Option(help="dollars an hour of one GPU, for the price of tokens")] = None,
    out: Annotated[Path, typer.Option(help="where raw records are kept")] = Path("fenno-loadtests"),
    as_json: JsonOption = False,
) -> None:
    """Drive real traffic at a recipe's engine or at a URL, and measure it."""
    from fenno.load import job, loadtest

    if worker is not None:
        check_worker(context)
        raise typer.Exit(work_for(worker, out, processes, header or (), api_key_env, where))
    # All that may be wrong with it is found before an engine is started.
    processes, where_bound = led(master, workers, bind, processes, alone=find_capacity or calibrate)
    chosen = job.of_nobody(endpoint) if calibrate and where is None else recipe_of(where, model, endpoint, api_key_env)
    chosen = with_goal(chosen.with_engine(ca_file=str(ca_file.resolve()) if ca_file else None), target, find_capacity)
    folder = out / f"{chosen.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = job.plan(
        chosen,
        users=users,
        rate=rate,
        ramp=ramp,
        trace=str(trace) if trace else None,
        scale=scale,
        duration=parse("--duration", units.duration, duration),
        requests=requests,
        warmup=quantity("--warmup", units.duration, warmup),
        seed=seed,
        arm=folder.name,
        timeout=parse("--timeout", units.duration, timeout),
        prompts=prompts,
        processes=processes,
        bind=where_bound,
        headers=header or (),
        extra_body=extra_body,
    )
    check_capacity(context, step, plan.workload if find_capacity else None)
    limit = quantity("--budget", units.duration, budget)
    if calibrate:
        raise typer.Exit(calibration_of(chosen, plan, folder, tokens_per_second))
    with endpoint_of(chosen, plan, folder) as (running, fitted):
        if find_capacity:
            raise typer.Exit(capacity_of(running, fitted, folder, step, limit))
        document = loadtest.measure(fitted, running, chosen, folder, probing=probe, gpu_price=gpu_price)
    raise typer.Exit(tell_load(document, table=not as_json))


def recipe_of(where: str | None, model: str | None, endpoint: str, api_key_env: str | None) -> Recipe:
    """The recipe that was named, or one for the address. Raises `UsageError` and `RecipeError`."""
    from fenno import recipe
    from fenno.load import job

    return job.of_url(where, model, endpoint, api_key_env) if where and "://" in where else recipe.load(choose(where))


def led(master: bool, workers: int | None, bind: str, processes: int, *, alone: bool) -> tuple[int, str | None]:
    """How many processes send the load, and where they find this one when they are on other hosts. Raises `UsageError`."""
    if not master:
        if workers is not None:
            raise UsageError("--workers is for --master", "give --processes for several on this host")
        return processes, None
    if workers is None or processes != 1 or alone:
        raise UsageError("--master takes --workers N and one load", "leave out --processes, --find-capacity and --calibrate")
    at = listening(bind)
    console.say(f"waiting for {workers} workers at {at}: on each of their hosts, fenno loadtest --worker HOST:{at.port}")
    return workers, str(at)


def listening(bind: str) -> units.Address:
    """An address of this host at which workers can find it now. Raises `UsageError`."""
    from fenno.engine import server
    from fenno.load import hosts

    at = units.address(f"0.0.0.0{bind[1:]}" if bind.startswith("*") else bind, hosts.PORT)
    try:
        number = str(socket.getaddrinfo(at.bare.encode(), at.port, type=socket.SOCK_STREAM)[0][4][0])  # locust binds to no name
        server.claim_port(at.port, number)
    except (OSError, EngineError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--bind {at}: {said}", "give an address of this host that workers reach, and a free port") from error
    return units.Address(f"[{number}]" if ":" in number else number, at.port)


def check_worker(context: typer.Context) -> None:
    """Raise `UsageError` for what was given beside --worker and would be ignored."""
    others = [param for param in context.command.params if param.name not in (*WORKERS_OWN, "help")]
    if beside := [param.opts[0] for param in others if given(context, param.name or "")]:
        said = " and ".join(beside)
        raise UsageError(f"a worker sends what its master says: --worker goes without {said}", "give that to the master")


def work_for(master: str, out: Path, processes: int, headers: Sequence[str], api_key_env: str | None, to: str | None) -> int:
    """Be a worker of that master until it is through. `to`: the only address for its traffic, if one is named. The exit code."""
    from fenno.load import job, worker

    folder = out / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    known = dict(job.header(text) for text in headers)
    state = worker.work(master, folder, processes=processes, headers=known, api_key_env=api_key_env, to=to, say=console.say)
    mine = [vars(each) for each in state.workers]
    console.result({"ended": state.phase, "sent": state.sent, "workers": mine, "folder": str(folder)})
    return errors.OK


def with_goal(chosen: Recipe, target: list[str] | None, needed: bool) -> Recipe:
    """A recipe with the targets of the command line. Raises `UsageError` when a capacity is `needed` and they give none."""
    chosen = chosen.with_targets(**named(target))
    if needed and not chosen.targets.latencies():
        raise UsageError("--find-capacity needs a latency to keep", "give one, such as --target p95_ttft=800ms")
    if needed and chosen.targets.goodput is not None:
        said = "--find-capacity under a goodput target: a goodput is never more than the rate, so no lower rate would meet it"
        raise UsageError(said, "use fenno tune --maximize goodput, or leave the target out for the rate under the percentiles")
    return chosen


def check_capacity(context: typer.Context, step: float, of: Workload | None) -> None:
    """Raise `UsageError` for a factor by which no rate grows, for traffic whose capacity is no one number, and without
    --find-capacity (`of` is None) for what would be ignored."""
    from fenno.tune import trial

    ignored = [name for name in ("step", "budget") if given(context, name)]
    if ignored and of is None:
        raise UsageError(f"--{ignored[0]} is for --find-capacity", "give both, or neither")
    if not 1 < step < math.inf:
        raise UsageError(f"--step is {step:g}", "it has to be a number of more than 1, such as 1.2")
    if of is not None:
        trial.check_workload(of)


def given(context: typer.Context, name: str) -> bool:
    """Whether the command line says this, be it the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@contextlib.contextmanager
def endpoint_of(chosen: Recipe, plan: Plan, folder: Path) -> Iterator[tuple[Server, Plan]]:
    """A recipe's server while the block lasts, and the plan fitted to it."""
    from fenno.engine import server
    from fenno.load import endpoint, words

    check_prompts(plan.workload.prompts)
    with server.serving(chosen, folder, progress=progress(), headers=plan.headers) as running:
        fitted = endpoint.fitted(dataclasses.replace(plan, url=running.url, model=running.model))
        console.say(f"loading {running.url} ({running.model}): {words.asked(fitted)}")
        yield running, fitted


def progress() -> Callable[[str], None]:
    """Say each stage of a start, with the seconds since the first."""
    started = time.monotonic()
    return lambda stage: console.say(f"  {time.monotonic() - started:5.1f} s  {stage}")


def tell_load(document: dict[str, Any], *, table: bool) -> int:
    """A load test's figures for people, whether it was a measurement, and its document. Returns the exit code."""
    from fenno.load import loadtest, words

    if table:
        console.table("latencies", words.HEADER, words.rows(document))
        for line in words.lines(document):
            console.say(line)
        if document["valid"]:
            console.say("VALID", style="bold green")
    for sentence in document["flags"]:
        console.say(f"mind: {sentence}", style="yellow")
    if document["ended"]["how"] == "gone":
        console.say(f"the server was gone before the end: {document['ended']['why']}", style="bold red")
    if document["ended"]["how"] == "interrupted":
        console.say(f"interrupted: {document['ended']['why']}; the figures are of what there was until then", style="bold red")
    steps = document["next_steps"]
    for number, (reason, step) in enumerate(zip(document["reasons"], steps, strict=True), start=1):
        console.say(f"INVALID: {reason}", style="bold red")
        if step not in steps[number:]:  # of several reasons with one remedy the last has it
            console.say(f"  next: {step}")
    console.result(document)
    return loadtest.exit_code(document)


def calibration_of(chosen: Recipe, plan: Plan, folder: Path, tokens_per_second: float | None) -> int:
    """Measure how well this host measures at a plan's load, print it, and return the exit code."""
    from fenno.load import accuracy, figures

    check_prompts(plan.workload.prompts)
    # As for a load test: 1 ms, or 1 % of the latency that is judged.
    bound = figures.client_bound(chosen.targets.limits().get("p95_ttft"))
    clock = accuracy.timing(plan, tokens_per_second)
    document = accuracy.document(accuracy.calibrate(plan, folder, bound, clock, console.say), bound, folder)
    console.say(document["sentence"], style="bold")
    console.result(document)
    return errors.OK if document["valid"] else errors.INCONCLUSIVE


def capacity_of(running: Server, plan: Plan, folder: Path, step: float, budget: float) -> int:
    """Look for the capacity of an engine within `budget` seconds, print it, and return the exit code. `step`: from rate to rate."""
    from fenno.screen import Screen
    from fenno.tune import find, trial

    recipe = running.recipe
    with Screen() as screen:
        first, deadline = plan.rate or trial.target_rate(recipe), time.monotonic() + budget
        say, watch = screen.say, screen.watch
        found = find.find(recipe, running, plan, folder, first=first, step=step, deadline=deadline, say=say, watch=watch)
    document = find.document(found, recipe)
    console.say(document["sentence"], style="bold")
    console.result({**document, "records": str(folder)})
    return found.exit_code
