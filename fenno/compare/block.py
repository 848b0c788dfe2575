"""One block of one arm, or of several at once: engines from a cold start, the same traffic at each, a document of each."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fenno import process
from fenno.engine import command, server
from fenno.engine.server import Server
from fenno.errors import DiskError, EngineError, Interrupted, LoadError
from fenno.load import endpoint, figures, loadtest, stored
from fenno.load.plan import Plan
from fenno.load.stored import Stored
from fenno.recipe import Recipe

PIECES = 10  # blocks that a stored run is cut into
PAUSES = (5.0, 30.0)  # seconds after a first and a second try that failed
DYING = 5.0  # seconds within which the end of a server is seen that answers nothing any more
ENDED = "-ended-"  # in the name of what there is of a block that was ended within it

Documents = dict[str, dict[str, Any]]  # of the arms, by name


@dataclass(frozen=True)
class Arm:
    """One side of a comparison, called "A", "B" or "C": a recipe (of a URL too), or the folder of a stored run."""

    name: str
    what: str
    recipe: Recipe | None = None
    folder: Path | None = None


@dataclass
class Making:
    """What the blocks of one comparison have in common. `fitted`: the plan as an arm's endpoint takes it, asked once.

    `gpus`: where the arms run side by side, one place an arm, each as `CUDA_VISIBLE_DEVICES` spells it. They go round with
    `measured`, the rounds that count so far: what one place is better at is in all arms alike whenever these are a multiple of the
    arms. A round that is made up for has the places of the one that was left out.
    """

    plan: Plan
    folder: Path
    gpus: Sequence[str] = ()
    measured: int = 0
    fitted: dict[str, Plan] = field(default_factory=dict)

    def place(self, arm: Arm, number: int) -> Path:
        return self.folder / f"{number + 1:03d}-{arm.name}"

    def devices(self, arms: Sequence[Arm]) -> list[dict[str, str | None]]:
        """The environment of each arm's engine in the next round."""
        count = len(self.gpus)
        return [{"CUDA_VISIBLE_DEVICES": self.gpus[(i + self.measured) % count]} if count else {} for i in range(len(arms))]


def kept(arms: Sequence[Arm], making: Making, number: int, say: Callable[[str], None]) -> Documents:
    """The documents of blocks that an earlier call made, or else of blocks made now. What there is of one that was ended within it
    is moved aside. What fails and may succeed later is tried three times. Raises `DiskError`."""
    places = {arm.name: making.place(arm, number) for arm in arms}

    def anew() -> Documents:
        for place in places.values():
            with writing(place):
                if place.exists():
                    place.rename(place.with_name(f"{place.name}{ENDED}{time.time_ns():x}"))
        return make(arms, making, number)

    with writing(making.folder):
        if all((place / "block.json").exists() for place in places.values()):
            return {name: json.loads((place / "block.json").read_text(encoding="utf-8")) for name, place in places.items()}
    found = patiently(anew, say)
    for name, place in places.items():
        with writing(place):
            if found[name]["requests"]:
                found[name]["halves"] = pieces(stored.read(place), found[name]["client"], 2)
            process.write(place / "block.json", json.dumps(found[name]))
    return found


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Around what reads and writes files and does nothing else. Raises `DiskError`."""
    try:
        yield
    except OSError as error:
        hint = "free some space, and give the same command again, or choose another --out folder"
        raise DiskError(f"cannot keep {place}: {error.strerror or error}", hint) from error


def patiently(anew: Callable[[], Documents], say: Callable[[str], None]) -> Documents:
    """A run of days does not end because a GPU's memory was not free again yet, or because a load client died."""
    for pause in PAUSES:
        try:
            return anew()
        except (EngineError, LoadError) as error:
            if isinstance(error, EngineError) and error.again == "no":
                raise
            say(f"{error}; again in {pause:g} s")
            time.sleep(pause)
    return anew()


def make(arms: Sequence[Arm], making: Making, number: int) -> Documents:
    """One load test of each of these arms, of all at the same time. Raises `Interrupted` for what was cut short, when its records
    and its ending are on disk, and `LoadError` where there was no traffic though the server lives."""
    found: Documents = {}
    with contextlib.ExitStack() as stack:
        servers = _started(arms, making, number, stack)
        ends = [_begun(arm, running, making, number, stack) for arm, running in zip(arms, servers, strict=True)]
        for arm, end in zip(arms, ends, strict=True):
            found[arm.name] = end(_interrupted(found))
    if _interrupted(found):
        raise Interrupted
    return found


def _interrupted(found: Documents) -> bool:
    return any(document["ended"]["how"] == "interrupted" for document in found.values())


def _started(arms: Sequence[Arm], making: Making, number: int, stack: contextlib.ExitStack) -> list[Server]:
    """The arms' servers, all started at once, when each is ready."""
    ports: list[int | None] = [None]
    while len(ports) < len(arms):
        ports = [*{server.claim_port(None) for _ in arms}]
    servers = []
    for arm, env, port in zip(arms, making.devices(arms), ports, strict=True):
        assert arm.recipe is not None
        its: dict[str, Any] = {"env": env, "port": port, "headers": making.plan.headers, "wait": lambda _: None}
        servers.append(stack.enter_context(server.serving(arm.recipe, making.place(arm, number), **its)))
    for running in servers:
        if running.child is not None:
            server.until_ready(running)
    return servers


def _begun(arm: Arm, running: Server, making: Making, number: int, stack: contextlib.ExitStack) -> Callable[[bool], dict[str, Any]]:
    """Traffic to one arm; gives what waits for its end, as `loadtest.begun` does."""
    assert arm.recipe is not None
    place = making.place(arm, number)

    def gone(error: LoadError) -> dict[str, Any]:
        making.fitted.pop(arm.name, None)  # what a dying server takes says nothing
        if not (why := _death(running)):
            raise error
        return _unanswered(why)

    try:
        plan = _plan(arm, running, making, number)
        end = stack.enter_context(loadtest.begun(plan, running, arm.recipe, place, probing=False))
    except LoadError as error:
        found = gone(error)
        return lambda _: found

    def told(now: bool) -> dict[str, Any]:
        try:
            return end(now)
        except LoadError as error:
            return gone(error)

    return told


def _plan(arm: Arm, running: Server, making: Making, number: int) -> Plan:
    """The round's traffic for one arm, with prompts that nobody saw before. Raises as `endpoint.fitted` does."""
    assert arm.recipe is not None
    if arm.name not in making.fitted:
        key, authority = command.key_variable(arm.recipe.engine), arm.recipe.engine.ca_file
        its = replace(making.plan, url=running.url, model=running.model, api_key_env=key, ca_file=authority)
        making.fitted[arm.name] = endpoint.fitted(its)
    name = making.place(arm, number).name
    before = len(list(making.folder.glob(f"{name}{ENDED}*")))  # such a block's prompts may be in a prefix cache
    prompts = f"{making.folder.name}-{name}" + (f"-{before}" if before else "")
    return replace(making.fitted[arm.name], url=running.url, seed=making.plan.seed + number, arm=prompts)


def _death(running: Server) -> str:
    """Why the server has ended, or is ending; nothing where it lives. Its port is closed before its end can be seen."""
    limit = time.monotonic() + DYING
    while running.child is not None and time.monotonic() < limit:
        try:
            running.check("load")
        except EngineError as error:
            return str(error)
        time.sleep(0.1)
    return ""


def _unanswered(why: str) -> dict[str, Any]:
    """The document of a block whose server died when it was ready, before it had answered anything."""
    nothing = {"requests": 0, "completed": 0, "availability": 0.0, "classes": {}}
    return {**nothing, "ended": {"how": "gone", "why": why}, "reasons": [f"its server ended before the first answer: {why}"]}


def pieces(whole: Stored, client: dict[str, Any], count: int = PIECES) -> list[dict[str, Any]]:
    """One stored run as so many blocks: the figures of each piece of its window, and the server's memory in it."""
    result, seen = whole.result, whole.seen
    start, end = result.state.start or 0.0, result.state.end or 0.0
    edges = [start + (end - start) * i / count for i in range(count + 1)]
    mine = figures.counted(result.requests)
    found = []
    for low, high in pairwise(edges):
        memory = seen.between(low, high).memory()
        part = figures.summarize(mine.where((low <= mine["scheduled"]) & (mine["scheduled"] < high)), (low, high))
        found.append({**part, "server": {"memory": {"max": max(memory)} if memory else None}, "client": client})
    return found
