"""Keeps one engine up: start, watch, and after a death wait and start again, or stop and say why."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NoReturn

from fenno import machine, process, units
from fenno.engine import catalogue, command, metrics, server
from fenno.engine.server import Server
from fenno.errors import EngineError
from fenno.recipe import Recipe
from fenno.serve import health, policy, starts, worker
from fenno.serve import hosts as several
from fenno.serve.hosts import Hosts
from fenno.serve.policy import Death
from fenno.serve.state import Place

ROTATE = (16 * 2**20, 5)  # bytes of a log, and how many old ones are kept
MEMORY_WAIT = 120.0


@dataclass(frozen=True)
class Told:
    """How people hear of it: sentences, and the stages of a start, each with the seconds that are left (None: nobody knows)."""

    say: Callable[[str], None]
    stage: Callable[[str, float | None], None]


def flags(recipe: Recipe) -> command.Flags:
    """The flags that `fenno serve` lays over the recipe's: vLLM's own default aborts the requests in flight at once."""
    return {"shutdown-timeout": recipe.engine.flags.get("shutdown-timeout", round(recipe.serve.grace))}


def keep(recipe: Recipe, place: Place, port: int | None, told: Told, hosts: Hosts | None = None) -> NoReturn:
    """Serve `recipe` until somebody interrupts, or until no restart helps: raises the `EngineError` then.

    The port stays the same from start to start: `port`, the recipe's, or a free one. `hosts`: where it is one of several.
    """
    wanted = port or command.port(recipe.engine.flags)
    deaths: list[Death] = []
    with _recorded(place):
        if hosts and hosts.rank:
            place.update(port=server.claim_port(None))  # nobody listens there, and another engine here may have the recipe's
        elif recipe.engine.url is None:
            place.update(port=server.claim_port(wanted, command.address(recipe.engine.flags)))
        while True:
            before = machine.read_gpus()[0]
            death, ready = _life(recipe, place, told, hosts)
            deaths.append(death)
            place.update(deaths=[asdict(each) for each in deaths[-20:]], engine=[])
            step = policy.step(deaths, recipe.serve)
            if step.wait is None:
                raise _last(death, step.why)
            told.say(f"{death.said}\n  {death.hint}")
            told.say(f"starting it again in {units.show_duration(step.wait)} ({death.cause}; {step.why})")
            place.update(phase="waiting", restarts=len(deaths))
            time.sleep(step.wait)
            _wait_for_memory(before, ready, told.say)


def _last(death: Death, why: str) -> EngineError:
    """The error of a server that is not started again."""
    loop = "crash loop" in why
    said = f"{why}; the last time {death.said}" if loop else death.said
    return EngineError(said, death.hint if loop else f"{death.hint}\n  it is not started again: {why}", cause=death.cause)


def _life(recipe: Recipe, place: Place, told: Told, hosts: Hosts | None) -> tuple[Death, tuple[machine.Gpu, ...]]:
    """One engine from its start to its death, and the GPUs as they were when it was ready."""
    ready: float = 0.0
    gpus: tuple[machine.Gpu, ...] = ()
    with _progress(recipe, place, told) as progress:
        try:
            with _engine(recipe, place, progress, hosts) as (running, watch):
                ready, gpus = time.time(), machine.read_gpus()[0]
                progress(starts.READY)
                _announce(recipe, place, running, told)
                with _draining(recipe, place, running, told):
                    watch()
        except EngineError as error:
            lived = time.time() - ready if ready else 0.0
            return Death(time.time(), lived, error.cause, error.again, str(error), error.hint), gpus


@contextlib.contextmanager
def _engine(
    recipe: Recipe, place: Place, progress: Callable[[str], None], hosts: Hosts | None
) -> Iterator[tuple[Server, Callable[[], NoReturn]]]:
    """The engine while the block lasts, and what looks after it until it dies."""
    start = functools.partial(
        server.serving,
        recipe,
        place.folder,
        flags={**flags(recipe), **several.flags(hosts)} if recipe.engine.url is None else None,
        port=place.state.port,
        progress=progress,
        grace=recipe.serve.grace,
        rotate=ROTATE,
    )
    if hosts and hosts.rank:
        with worker.linked(hosts, progress) as link, start(wait=lambda joining: worker.wait(joining, hosts, link)) as running:
            yield running, lambda: worker.watch(running, link)
    else:
        with start() as running:
            yield running, lambda: health.watch(running, recipe.serve.hang)


def _announce(recipe: Recipe, place: Place, running: Server, told: Told) -> None:
    engine = [[pid, born] for pid in running.pids() if (born := process.birth(pid))]
    # A worker has no model's name: nobody asked it.
    url = running.url if running.model else ""
    place.update(phase="ready", ready=time.time(), url=url, model=running.model, engine=engine, on_gpu=running.on_gpu)
    place.remember(recipe)
    told.say(f"ready after {running.seconds:.0f} s: {place.state.service}; Ctrl-C ends it")


@contextlib.contextmanager
def _progress(recipe: Recipe, place: Place, told: Told) -> Iterator[Callable[[str], None]]:
    """What is told of a start and kept of it, so that the next one has an estimate."""
    path = catalogue.cache_folder() / "starts" / f"{recipe.digest()}.json"
    earlier, began, seen = starts.read(path), time.monotonic(), list[tuple[str, float]]()

    def progress(stage: str) -> None:
        seen.append((stage, time.monotonic() - began))
        if stage == starts.READY:
            starts.add(path, seen)
            return
        left = starts.left(earlier, stage)
        place.update(stage=stage, left=left)
        told.stage(stage, left)

    place.update(phase="starting", ready=None, stage="checking flags and port")
    yield progress


@contextlib.contextmanager
def _draining(recipe: Recipe, place: Place, running: Server, told: Told) -> Iterator[None]:
    """Say what goes on while a server that was asked to end still answers."""
    try:
        yield
    except EngineError:
        raise
    except BaseException:
        place.update(phase="draining")
        with contextlib.suppress(EngineError):
            if place.state.url:
                told.say(_in_flight(running, recipe.serve.grace))
        raise


def _in_flight(running: Server, grace: float) -> str:
    now = metrics.scrape(running.url, 5.0)
    count = round((now.running or 0) + (now.waiting or 0))
    allowed = units.show_duration(grace)
    return f"ending: {count} requests in flight have {allowed} to be answered; a second Ctrl-C ends it at once"


@contextlib.contextmanager
def _recorded(place: Place) -> Iterator[None]:
    """The last words of the state file: stopped by somebody, or failed, and why."""
    try:
        yield
    except BaseException as error:
        failed = isinstance(error, Exception)
        place.update(
            phase="failed" if failed else "stopped",
            said=str(error) if failed else "",
            hint=getattr(error, "hint", ""),
            engine=[],
        )
        raise


def _wait_for_memory(before: tuple[machine.Gpu, ...], ready: tuple[machine.Gpu, ...], say: Callable[[str], None]) -> None:
    """Until the GPUs have the memory back that the engine held, or for two minutes. Nothing on a host without GPUs."""
    limit, told = time.monotonic() + MEMORY_WAIT, ""
    while before and (held := policy.held_back(before, ready, machine.read_gpus()[0])):
        if not told:
            say(f"waiting until the memory is back: {held}")
        told = held
        if time.monotonic() > limit:
            say(f"starting all the same: {held}")
            return
        time.sleep(2.0)
