"""A study from its beginning to its files: opened or resumed, run, and left in a folder that says everything about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fenno import documents, machine, process, units
from fenno.engine import catalogue, command, plugin, server
from fenno.errors import DiskError, RecipeError, UsageError
from fenno.machine import Machine
from fenno.recipe import Recipe, Targets
from fenno.tune import bench as benches
from fenno.tune import confirm as confirms
from fenno.tune import memory, output, trial
from fenno.tune import run as runs
from fenno.tune import space as spaces
from fenno.tune import storage as storages
from fenno.tune import verdict as verdicts
from fenno.tune.arms import Arm
from fenno.tune.capacity import Maximize
from fenno.tune.confirm import Confirm
from fenno.tune.judge import judge
from fenno.tune.space import Space
from fenno.tune.study import Study, Trial, shared_name
from fenno.tune.verdict import Verdict

Say = Callable[[str], None]
Page = Callable[[Mapping[str, Any], Sequence[Trial], Recipe, spaces.Space], str]


@dataclass(frozen=True)
class Session:
    """An open study. `document` is what is known before it runs: host, versions, seed, date."""

    run: runs.Run
    known: catalogue.Catalogue
    host: Machine
    place: output.Place
    document: dict[str, Any]
    lock: TextIO


def alone(folder: Path) -> TextIO:
    """A file whose lock says that this process runs the study; it ends with the process. Raises `UsageError`, `DiskError`."""
    try:
        lock = process.locked(folder / "running.lock")
    except OSError as error:
        raise DiskError(f"cannot keep a study in {folder}: {error.strerror}", "choose another --out folder") from error
    if lock is None:
        hint = "wait for its end, start one of its own by --fresh, or give both the same --storage"
        raise UsageError(f"another fenno runs the study in {folder}", hint)
    return lock


@dataclass(frozen=True)
class Ready:
    """All that is known, and was found to be right, before anything is started or written. `deadline` is on the monotonic clock;
    `remarks` are what a person should know; `maximize` as of `Run`."""

    recipe: Recipe
    known: catalogue.Catalogue
    space: Space
    host: Machine
    deadline: float
    remarks: tuple[str, ...]
    maximize: Maximize | None = None


def ready(
    recipe: Recipe, *, budget: float, confirm: Confirm = "quick", maximize: Maximize | None = None, say: Say = lambda text: None
) -> Ready:
    """Look at everything that could end a study of `recipe` minutes later. `budget` in seconds of wall time, from now on.

    Raises `UsageError`, `RecipeError` and, for an engine that cannot be asked, `EngineError`.
    """
    deadline = time.monotonic() + budget
    if budget <= 0:
        raise UsageError(f"the budget is {budget:g} s", "it has to be more than nothing, such as --budget 15m")
    recipe = aimed(recipe, maximize)
    host = machine.probe()
    # Names of another kind (MIG) are the driver's to understand.
    host = replace(host, gpus=machine.visible(host.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")) or host.gpus)
    if (missing := machine.lacking(host, recipe.host)) is not None:
        raise RecipeError(f"recipe {recipe.name}: {missing}", "run it on such a host, or change `host` in the recipe")
    server.check_model(recipe)
    command.api_key(recipe.engine)
    command.check_inherited(recipe.engine)
    known, space = runs.known_space(recipe, say)
    fitted = memory.within(recipe, known, host)
    if fitted is not recipe:
        space = spaces.build(fitted, known, host.cores)
    remarks = (*memory.remark(recipe, fitted), *spaces.remark(recipe), *short(budget, trial.seconds_needed(recipe), confirm))
    return Ready(fitted, known, space, host, deadline, remarks, maximize)


def aimed(recipe: Recipe, maximize: Maximize | None) -> Recipe:
    """The recipe with the rate that is tried first. Raises `UsageError` when its targets give nothing to look for."""
    if recipe.targets.goodput is not None and not recipe.targets.latencies():
        raise UsageError("a goodput target needs a latency to keep", "give one, such as --target p95_ttft=800ms")
    if not maximize:
        if not judge(recipe.targets, {}, steady=True).findings:
            raise UsageError(f"recipe {recipe.name} has no targets", "give some, such as --target-p95 800ms --target-qps 40")
        return recipe
    if not recipe.targets.latencies():
        raise UsageError("--maximize needs a latency to keep", "give one, such as --target p95_ttft=800ms")
    if recipe.targets.goodput is not None and maximize != "goodput":
        said = f"--maximize {maximize} under a goodput target: with one, the latency targets' percentiles are not judged"
        raise UsageError(said, "use --maximize goodput, or leave the target out")
    # That the rate is held is one of the targets at every rate; how much goodput has to be shown follows from it.
    first = trial.target_rate(recipe)
    return recipe.with_targets(qps=first, goodput=first / 2 if maximize == "goodput" else None)


def short(budget: float, trial_seconds: float, confirm: Confirm) -> list[str]:
    """That a budget is less than what the shortest study with a verdict takes, in a sentence; nothing for one that may do."""
    cold = confirms.STARTS[confirm]
    starts, trials = 1 + cold, 1 + cold
    least = starts * benches.START + trials * trial_seconds
    if budget >= least:
        return []
    takes = f"{_count(starts, 'start')} and {_count(trials, 'trial')} take about {units.show_duration(least)}"
    return [f"the budget of {units.show_duration(budget)} may end before a verdict: {takes}, a minute a start until one was seen"]


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def begin(
    ready: Ready,
    *,
    out: Path,
    seed: int,
    fresh: bool,
    events: runs.Events,
    goal: str = "",
    storage: str | None = None,
    first: spaces.Point | None = None,
) -> Session:
    """Open a study under `out`, or the interrupted one of the same recipe that lies there. `goal`: what is looked for and how,
    where it is not the targets alone. `storage`: a database in which workers on several GPUs or hosts have one study of this goal.
    `first`: a point to begin with, after the defaults.

    Raises `UsageError` for a study that another fenno runs, and `DiskError`.
    """
    recipe, space = ready.recipe, ready.space
    document = output.facts(recipe, ready.known, ready.host, seed, space)
    if storage is None:
        place = output.place(out, recipe, document, fresh, goal)
        lock = alone(place.folder)
        study = Study(place.folder, space, seed)
    else:
        name = shared_name(storage, output.key(recipe, document, goal), fresh)
        place = output.Place(out / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", resumed=False)
        lock = alone(place.folder)
        study = joined(Study(place.folder, space, seed, storage, name), document)
        document["storage"] = {"url": storages.shown(storage), "name": name}
    head = f"The recipe of the study in this folder, with its targets. fenno {document['fenno']}, {document['date']}"
    output.write(place.folder, {"recipe.yaml": output.recipe_yaml(recipe, head), output.BEGUN: documents.lines(document)})
    bench = benches.Engines(any_port(recipe) if storage else recipe, place.folder, space, events, ready.deadline)
    run = runs.Run(recipe, space, study, seed, ready.deadline, events, bench, first, maximize=ready.maximize)
    return Session(run, ready.known, ready.host, place, document, lock)


def joined(study: Study, document: Mapping[str, Any]) -> Study:
    """`study`, in a database that others may have begun it in. Raises `UsageError` where their figures cannot stand beside ours."""
    if not output.alike(study.begun(document), documents.finite(document)):
        said = "the workers on this study have another engine, other values or other hardware than there are here"
        raise UsageError(said, "workers share a study on hosts alike; --fresh begins one of its own")
    return study


def any_port(recipe: Recipe) -> Recipe:
    """`recipe` without a port: of several workers on one host each finds a free one."""
    flags = {name: value for name, value in recipe.engine.flags.items() if name != "port"}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"flags": flags})})


def show(targets: Targets) -> str:
    """What must hold, as people write it."""
    said = [f"{name} {units.show_duration(limit)}" for name, limit in targets.latencies().items()]
    said += [f"goodput {targets.goodput:g}"] if targets.goodput is not None else []
    said += [f"qps {targets.qps:g}"] if targets.qps is not None else []
    said += [f"memory {units.show_memory(targets.memory)}"] if targets.memory is not None else []
    said += [f"availability {targets.availability * 100:.4g} %"] if targets.availability is not None else []
    return ", ".join(said) or "none"


SOUGHT: dict[Maximize, str] = {
    "qps": "the largest rate under the targets",
    "tokens": "the most output tokens a second under the targets",
    "goodput": "the most requests a second that each keep every latency limit",
}


def plan(ready: Ready, *, budget: float, confirm: Confirm, arm: Arm | None = None) -> list[str]:
    """What a study would do, in sentences; nothing is started."""
    recipe, space, known = ready.recipe, ready.space, ready.known
    start = server.prepare(recipe, flags={**spaces.wide(space), "scheduler-cls": plugin.SCHEDULER})
    rate, cold = trial.target_rate(recipe), confirms.STARTS[confirm]
    sought = f"{SOUGHT[ready.maximize]}, from {rate:g} requests/s on" if ready.maximize else "settings that meet the targets"
    after = f"of which {_count(cold, 'cold start')} with plain flags at the end" if cold else "no cold start at the end"
    instead = [f"in place of the search: {arm}, each point after a start of its own with plain flags"] if arm else []
    return [
        f"engine: {known.engine.distribution} {known.engine.version} on {known.platform}, defaults {spaces.show(space.defaults)}",
        f"start: {start.command.shell()}",
        f"looked for: {sought}",
        f"targets: {show(recipe.targets)}",
        f"traffic: open loop, {rate:g} requests/s, about {trial.seconds_needed(recipe):.0f} s a trial",
        f"live knobs: {', '.join(f'{knob} {list(values)}' for knob, values in space.values.items())}",
        f"restart knobs: {', '.join(f'{knob} {list(values)}' for knob, values in space.restart.items()) or 'none'}",
        *instead,
        f"budget: {units.show_duration(budget)}, {after}",
    ]


def finish(session: Session, verdict: Verdict, page: Page) -> dict[str, Any]:
    """Write what the study leaves, and return the document for standard output. `page` makes the report's HTML."""
    run, folder = session.run, session.place.folder
    trials = run.study.trials()
    document = {**verdicts.document(verdict, run.space, trials), "study": str(folder), **session.document}
    document["report"] = str(folder / "report.html")
    files: dict[str, str] = {}
    if verdict.outcome == "met" and verdict.trial is not None:
        tuned = output.tuned(run.recipe, verdict.trial.point, run.space)
        tuned = tuned.with_targets(**verdicts.held_again(verdict))
        without = output.without_fenno(tuned, session.known, folder)
        document |= {"tuned": str(folder / output.TUNED), "serve": without.serve, "config": str(folder / output.CONFIG)}
        head = f"Made by `fenno tune`, {document['date']}: {verdict.sentence}"
        files[output.CONFIG] = output.comment(f"{head}\nServe it: {without.serve_config}") + without.config
        files[output.TUNED] = output.recipe_yaml(tuned, head)
        files["serve.sh"] = f"#!/bin/sh\n# {verdict.sentence}\nexec env {document['serve']}\n"
    files["report.html"] = page(document, trials, run.recipe, run.space)
    # Last: this file is what says that the study is over.
    if verdict.over:
        files[output.DONE] = documents.lines(document)
    output.write(folder, files)
    return document
