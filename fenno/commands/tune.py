"""`fenno tune`, once or as a watch."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fenno import console, units
from fenno.commands.given import RecipeArgument, TargetOption, check_prompts, choose, named, quantity
from fenno.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from fenno.engine.catalogue import Catalogue
    from fenno.plan.gpus import Device
    from fenno.recipe import Recipe
    from fenno.tune.arms import Arm
    from fenno.tune.capacity import Maximize
    from fenno.tune.confirm import Confirm
    from fenno.tune.propose import Steps
    from fenno.tune.run import Reckon
    from fenno.tune.session import Session
    from fenno.tune.space import Point, Space
    from fenno.tune.verdict import Verdict

OutOption = Annotated[Path, typer.Option(help="where studies are kept")]


def tune(
    recipe_name: RecipeArgument = None,
    target_p95: Annotated[str | None, typer.Option(help="first token, 95th percentile: 800ms")] = None,
    target_qps: Annotated[float | None, typer.Option(help="requests a second to hold")] = None,
    max_memory: Annotated[str | None, typer.Option(help="85% or 40GiB")] = None,
    target: TargetOption = None,
    budget: Annotated[str, typer.Option(help="how long it may take: 15m")] = "15m",
    maximize: Annotated[
        str | None, typer.Option(help="under the targets: qps, the largest rate; tokens, output a second; goodput, those in time")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(help="to compare the search with: defaults, random, grid or tpe, each point with a start of its own"),
    ] = None,
    confirm: Annotated[str, typer.Option(help="quick: the winner after a cold start; full: and cold defaults; off")] = "quick",
    seed: Annotated[int, typer.Option(help="of arrivals, lengths, prompts and the sampler")] = 1,
    out: OutOption = Path("fenno-studies"),
    storage: Annotated[
        str | None, typer.Option(help="a database whose study several workers share: sqlite:////shared/f.db, postgresql://HOST/DB")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="the GPUs of this worker: 0,1 (CUDA_VISIBLE_DEVICES)")] = None,
    trials_from: Annotated[str | None, typer.Option(metavar="STUDY", help="try what was best in another study first")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="do not go on with an interrupted study")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done, start nothing")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="change nothing: measure a tuned.yaml again and again, tell when it no longer holds")
    ] = False,
    every: Annotated[str, typer.Option(help="how often --watch measures, from one start to the next")] = "1h",
) -> None:
    """Find the settings under which a recipe meets its targets, or say which target cannot be met here."""
    from fenno import recipe
    from fenno.screen import Screen
    from fenno.tune import confirm as confirms
    from fenno.tune import session, studies
    from fenno.tune import storage as storages

    others: dict[str, object] = {"--maximize": maximize, "--control": control, "--storage": storage, "--fresh": fresh}
    others |= {"--dry-run": dry_run, "--trials-from": trials_from}
    check_options(confirm, maximize, control, others if watch else {})
    if control and trials_from:
        raise UsageError("--control has an order of its own: --trials-from does not go with it", "leave one of them out")
    path = tuned(recipe_name) if watch else choose(recipe_name)
    short: dict[str, object] = {"p95_ttft": target_p95, "qps": target_qps, "memory": max_memory}
    chosen = recipe.load(path).with_targets(**{**short, **named(target)})
    check_prompts(chosen.workload.prompts)
    use_devices(chosen, devices)
    where = storages.address(storage) if storage else None
    wanted, most = cast("Confirm", confirm), cast("Maximize | None", maximize)
    arm = cast("Arm | None", control)
    seconds, pause = quantity("--budget", units.duration, budget), quantity("--every", units.duration, every)
    if watch:
        raise typer.Exit(watched(chosen, path, out=out, seed=seed, budget=seconds, every=pause))
    with Screen() as screen:
        ready = session.ready(chosen, budget=seconds, confirm=wanted, maximize=most, say=screen.say)
        for remark in ready.remarks:
            console.say(f"mind: {remark}", style="yellow")
        first = studies.best_point(studies.find(out, trials_from), ready.space) if trials_from else None
        if dry_run:
            print("\n".join(session.plan(ready, budget=seconds, confirm=wanted, arm=arm)))
            return
        goal = "-".join(filter(None, (f"most-{most}" if most else "", control)))
        opened = session.begin(ready, out=out, seed=seed, fresh=fresh, events=screen, goal=goal, storage=where, first=first)
        opened.document.update({name: value for name, value in (("control", arm), ("maximize", most)) if value})
        tell_begin(opened)
        opened.run.reckon = reckoning(opened.run.recipe, ready.space, ready.known)
        verdict = confirms.tune(opened.run, confirm=wanted, arm=arm)
    raise typer.Exit(tell(opened, verdict, serve=True))


def check_options(confirm: str, maximize: str | None, control: str | None, useless: dict[str, object]) -> None:
    """Raise `UsageError` for values that there are not, and for options that a watch has no use for."""
    if confirm not in ("quick", "full", "off"):
        raise UsageError(f"--confirm is {confirm!r}", "it has to be quick, full or off")
    if maximize not in (None, "qps", "tokens", "goodput"):
        raise UsageError(f"--maximize is {maximize!r}", "it has to be qps, tokens or goodput")
    if control not in (None, "defaults", "random", "grid", "tpe"):
        raise UsageError(f"--control is {control!r}", "it has to be defaults, random, grid or tpe")
    given = next((name for name, value in useless.items() if value), None)
    if given:
        raise UsageError(f"--watch measures a recipe as it is: {given} does not go with it", "leave one of them out")


def use_devices(recipe: Recipe, names: str | None) -> None:
    """Show this worker's engines no other GPUs. Raises `UsageError` where the recipe names some itself."""
    if names is None:
        return
    if "CUDA_VISIBLE_DEVICES" in recipe.engine.env:
        raise UsageError("--devices, and CUDA_VISIBLE_DEVICES in the recipe's `engine.env`", "leave one of them out")
    os.environ["CUDA_VISIBLE_DEVICES"] = names


def tuned(name: str | None) -> Path:
    """The recipe to watch: of a study's folder the tuned one. Raises `UsageError` for a study that found none."""
    from fenno.tune import studies

    return studies.tuned(studies.load(Path(name))) if name is not None and Path(name).is_dir() else choose(name)


def watched(chosen: Recipe, path: Path, *, out: Path, seed: int, budget: float, every: float) -> int:
    """Measure a recipe every so many seconds until Ctrl-C, tell each time whether it holds, and return the exit code."""
    from fenno.screen import Screen
    from fenno.tune import again, studies

    seen: list[Verdict] = []
    with Screen() as screen:
        of = studies.beside(path)
        opened = again.begin(chosen, of, out=out, budget=budget, seed=seed, events=screen)
        tell_begin(opened)
        console.say(f"a look every {units.show_duration(every)}, until Ctrl-C")
        try:
            for look in again.looks(opened.run, held=of is not None, every=every, budget=budget):
                seen.append(look)
                screen.say(f"{time.strftime('%H:%M:%S')}  {look.sentence}", style=None if look.outcome == "met" else "bold red")
        except Interrupted:
            if not seen:
                raise
    return tell(opened, again.summed(seen), serve=False)


def tell_begin(opened: Session) -> None:
    """Where a study's records lie, with whom it is shared, and for settings measured again what is not as when they were found."""
    console.say(f"study: {opened.place.folder}" + (" (interrupted before, going on)" if opened.place.resumed else ""))
    if shared := opened.document.get("storage"):
        console.say(f"shared with every worker on {shared['name']} in {shared['url']}")
    for difference in opened.document.get("differences", []):
        console.say(f"mind: {difference}", style="yellow")


def plannable(chosen: Recipe, known: Catalogue) -> tuple[dict[str, Any], int | None, Device, int] | None:
    """What a plan is made of: the model's config, the bytes of its files, this host's GPUs and how many of them. None where one of
    these is not known, and for an engine of a CPU, whatever GPUs are beside it."""
    from fenno.commands.plan import hardware, model_config

    try:
        return None if known.platform == "cpu" else (*model_config(chosen), *hardware(chosen, None, None))
    except UsageError:
        return None


def roofline(chosen: Recipe, space: Space, point: Point, known: Catalogue) -> dict[str, Any] | None:
    """The most output tokens a second that this host's GPUs allow at a point, as `fenno plan` reckons them: `rate` with `batch`
    sequences at once, `by` memory or compute. None where model or GPU are not known."""
    from fenno.plan import make
    from fenno.tune import output

    chosen = output.tuned(chosen, point, space)
    if (found := plannable(chosen, known)) is None:
        return None
    config, files, device, count = found
    made = make.if_known(chosen, config, device, count, files, known.engine.version)
    bounds = made["bounds"] if made else {}
    return {**bounds["many"], "batch": bounds["batch"]} if "many" in bounds else None


def reckoning(chosen: Recipe, space: Space, known: Catalogue) -> Reckon:
    """What a step takes this host's GPUs at least, at any point and on as many of them as it takes, as `fenno plan` reckons; model
    and GPUs are looked at once."""
    from fenno.plan import make
    from fenno.tune import output
    from fenno.tune.propose import Roofline

    if (found := plannable(chosen, known)) is None:
        return lambda steps, point: None
    config, _, device, count = found

    def reckon(steps: Steps, point: Point) -> Roofline | None:
        seen = {"tokens": steps.tokens, "batch": steps.sequences, "length": steps.length}
        there = output.tuned(chosen, point, space)
        least = make.step(there, config, device, count and there.gpus, known.engine.version, **seen)
        return Roofline(device.name, least.memory, least.compute) if least else None

    return reckon


def tell(opened: Session, verdict: Verdict, *, serve: bool) -> int:
    """A study's verdict and files for people, and its document. Returns the exit code. `serve`: say how to serve what it found."""
    from fenno.report import page
    from fenno.tune import session

    run, point = opened.run, verdict.trial.point if verdict.trial else {}
    if (bound := roofline(run.recipe, run.space, point, opened.known)) is not None:
        opened.document["roofline"] = bound
    document = session.finish(opened, verdict, page.tune)
    console.say(verdict.sentence, style="bold")
    if helped := document.get("helped"):
        console.say(helped)
    if verdict.outcome != "met" and (limit := document.get("limit")):
        console.say(f"what holds it back: {limit['name']} ({limit['evidence']})")
        if limit["help"]:
            console.say(f"what would help: {limit['help']}")
    console.say(f"report: {document['report']}")
    if serve and "serve" in document:
        console.say(f"serve it: fenno serve {shlex.quote(document['tuned'])}\n  or: {document['serve']}")
        console.say(f"for vllm serve --config: {document['config']}")
    console.result(document)
    return verdict.exit_code
