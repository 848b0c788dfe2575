"""Where a search measures: an engine is started, set to a point, loaded. The method in `run.py` knows only the two protocols here.

Behind them is a real engine. Tests of the method put a model of one there, which answers at once.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fenno import control as control_file
from fenno.engine import http, live, plugin, server
from fenno.engine.command import Flags
from fenno.engine.server import Server
from fenno.errors import EngineError, LoadError
from fenno.load import endpoint, probe
from fenno.load import run as load
from fenno.load.plan import Plan
from fenno.recipe import Recipe, Scalar
from fenno.tune import quality, trial
from fenno.tune import space as spaces
from fenno.tune.quality import Pass
from fenno.tune.space import BUDGET, CAP, CARRIED, POLICY, SERVERS, Point, Space
from fenno.tune.trial import Measured

# What a start is taken to last, in seconds, until one was seen.
START = 60.0


class Events(Protocol):
    """What a run tells whoever watches."""

    def say(self, text: str) -> None:
        """A step of the run, in a sentence."""

    def stage(self, text: str) -> None:
        """How far an engine's start has come."""

    def watch(self, share: float, text: str) -> None:
        """The share of a trial's longest time that has passed, and what is seen."""


class Seat(Protocol):
    """One engine that runs. Every method raises `EngineError` when it has died."""

    def move(self, point: Point) -> None:
        """Empty it of the trial before and set the live knobs of `point`: applied by every rank and reached."""

    def alone(self) -> list[float]:
        """Seconds to the first token of eight requests, each alone on the engine."""

    def answers(self) -> Sequence[Pass]:
        """What it makes of fixed texts, asked in more than one way. Raises `LoadError` when it does not tell log-probabilities."""

    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        """Traffic at the target rate of `recipe`, judged by its targets. `patience`: warm-up and windows so many times as long."""


class Bench(Protocol):
    """Where engines come from. `start_seconds` is how long the last start took."""

    start_seconds: float

    def now(self) -> float:
        """Seconds of the clock that a study's deadline is on."""

    def sleep(self, seconds: float) -> None:
        """Let so many seconds of it pass."""

    def wide(self, restart: Point) -> AbstractContextManager[Seat]:
        """An engine started wide, with the flags of `restart`, that takes every live knob."""

    def plain(self, point: Point) -> AbstractContextManager[Seat]:
        """The engine as production would start it at `point`."""


@dataclass
class Engines:
    """The real bench: engines of one recipe on this host, their logs and records under `folder`; `deadline` is the study's."""

    recipe: Recipe
    folder: Path
    space: Space
    events: Events
    deadline: float = math.inf
    start_seconds: float = START
    starts: int = 0

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def wide(self, restart: Point) -> Iterator[Running]:
        """Started with fenno's scheduler and a control file."""
        control = self._control("wanted.json")
        control_file.clear(control)
        env = {**plugin.environment(plugin.install(self.folder / "plugin"), control), **spaces.variables_of(restart)}
        flags = {**spaces.wide(self.space), **spaces.flags_of(restart), "scheduler-cls": plugin.SCHEDULER}
        self.events.say("starting the engine wide" + (f" with {spaces.show(restart)}" if restart else ""))
        with self._engine("wide", flags=flags, env=env, control=control) as engine:
            plugin.loaded(control)
            yield engine

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[Running]:
        """Plain flags, and the plugin only where the point has no plain flag."""
        flags, env = serve_flags(point, self.space), spaces.plain_variables(point, self.space)
        if flags.get("scheduler-cls"):
            env |= plugin.environment(plugin.install(self.folder / "plugin"), self._control("confirm.json"))
        with self._engine("confirmation", flags=flags, env=env, control=None) as engine:
            yield engine

    def _control(self, name: str) -> Path:
        """A control file, in a folder that an engine can write its answer to."""
        path = self.folder / "control" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def _engine(self, name: str, *, flags: Flags, **start: object) -> Iterator[Running]:
        self.starts += 1
        # A folder a start: the cause of a death is read from this start's log alone.
        folder = self.folder / "engine" / f"{time.strftime('%H%M%S')}-{self.starts}-{name}"
        with server.serving(self.recipe, folder, flags=flags, progress=self.events.stage, **start) as engine:  # type: ignore[arg-type]
            self.start_seconds = engine.seconds
            if isinstance(asked := {**self.recipe.engine.flags, **flags}.get(SERVERS), int):
                server.check_http_processes(engine, asked)
            self.events.say(f"ready after {engine.seconds:.0f} s")
            fitted = endpoint.fitted(trial.plan_for(self.recipe, engine, arm="fitted", seed=1))
            yield Running(engine, fitted, self.folder, self.events, self.deadline)


@dataclass
class Running:
    """A real engine, and a plan that fits it; raw records of every trial under `folder`/trials. `carried`: the live knobs that
    requests have in their bodies, as `move` was told last."""

    engine: Server
    fitted: Plan
    folder: Path
    events: Events
    deadline: float = math.inf
    carried: Mapping[str, Scalar] = field(default_factory=dict)

    def move(self, point: Point) -> None:
        if self.engine.control is None:
            live.drain(self.engine.url)
            return
        # The scheduler's own default is token-aware: a space without that knob has to say what the engine's is.
        limits = {knob: value for knob, value in point.items() if knob not in CARRIED}
        wanted = {POLICY: self.engine.recipe.engine.scheduler or "fcfs", **limits}
        self.carried = {knob: value for knob, value in point.items() if knob in CARRIED}
        try:
            live.settle(self.engine.url)
            answer = live.change(self.engine.url, self.engine.control, wanted)
            live.wait_reached(self.engine.control, timeout=30.0)
        except EngineError:
            # One that has died says why in its log.
            self.engine.check("control")
            raise
        clipped = [knob for knob in (BUDGET, CAP) if knob in wanted and answer.applied.get(knob) != wanted[knob]]
        other = [*(knob for knob in answer.unsupported if knob in wanted), *clipped]
        if other:
            raise LoadError(
                f"this engine does not take {other[0]}={wanted[other[0]]} while it runs", "leave it out of `search.live`"
            )

    def alone(self) -> list[float]:
        warmup = min(1.0, self.engine.recipe.search.warmup)
        plan = replace(self.fitted, arm="alone", rate=None, users=1, warmup=warmup, duration=None, requests=8)
        records = load.run(plan, self.folder / "trials" / "alone").records
        return [r.ttft for r in records if r.phase == "counted" and r.ok]

    def answers(self) -> Sequence[Pass]:
        return quality.ask(self.engine)

    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        base = replace(self.fitted, extra_body={**self.fitted.extra_body, **self.carried})
        plan = trial.at_rate(base, recipe, arm=arm, seed=seed, patience=patience)
        found = trial.measure(recipe, self.engine, plan, self.folder / "trials" / arm, self.events.watch)
        if found.judgement.state == "missed" and found.summary.get("failures"):
            until_answer(self.engine, min(self.deadline, time.monotonic() + 2 * self.fitted.timeout))
        return found


def until_answer(engine: Server, deadline: float) -> None:
    """Return once an engine that has left requests unanswered answers one more, if only by refusing it.

    Raises `EngineError` where it hangs: still no answer at `deadline`, on the monotonic clock. One that has thousands of requests
    to abort answers nothing for many seconds, and does not hang.
    """
    while True:
        try:
            server.one_token(engine, timeout=probe.LONGEST)
            return
        except http.Refused as error:
            engine.check("load")
            over = time.monotonic() >= deadline
            # With 500 answers a server whose core has just died, too; it ends soon.
            if error.status is not None and (over or error.status < 500):
                return
            if over:
                why = f"the engine hangs: a request alone on it was not answered ({error})"
                raise EngineError(why, f"see {engine.log}", stage="load") from error
        time.sleep(0.25)


def serve_flags(point: Point, space: Space) -> dict[str, Scalar | list[Scalar]]:
    """The flags of the smallest change that gives `point` at a start."""
    flags = spaces.plain_flags(point, space)
    # Said in any case: the recipe may ask for fenno's scheduler where the point does without.
    if POLICY in point:
        flags["scheduler-cls"] = plugin.SCHEDULER if point[POLICY] == "token_aware" else None
    return flags
