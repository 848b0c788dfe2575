"""`fenno compare`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, units
from fenno.commands.given import (
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
    parse,
    quantity,
)

if TYPE_CHECKING:
    from fenno.compare.block import Arm
    from fenno.load.plan import Plan
    from fenno.recipe import Recipe

AvailabilityOption = Annotated[str | None, typer.Option(help="complete and correct answers in time: 99.5%")]
MarginOption = Annotated[str, typer.Option(help="of equivalence: differences surely within it fail nothing; 0: there is none")]
DevicesOption = Annotated[
    list[str] | None,
    typer.Option(help="run recipes side by side, places swapped each round: CUDA_VISIBLE_DEVICES of one, once for each recipe"),
]
JunitOption = Annotated[Path | None, typer.Option(help="write JUnit's XML there")]


def compare(
    names: Annotated[list[str], typer.Argument(metavar="A B [C]", help="recipes or URLs, or folders of stored load tests")],
    rounds: Annotated[int, typer.Option(min=3, help="blocks of each; six or more see small differences")] = 6,
    users: UsersOption = None,
    rate: RateOption = None,
    duration: Annotated[str, typer.Option(help="the counted window of a block: 30s")] = "30s",
    warmup: Annotated[str, typer.Option(help="before each window: 5s")] = "5s",
    seed: Annotated[int, typer.Option(help="of the first round; each has its own, the same for all arms")] = 1,
    timeout: TimeoutOption = None,
    target_availability: AvailabilityOption = None,
    margin: MarginOption = "1%",
    prompts: PromptsOption = None,
    model: ModelOption = None,
    endpoint: EndpointOption = "completions",
    header: HeaderOption = None,
    api_key_env: KeyOption = None,
    extra_body: BodyOption = None,
    ca_file: AuthorityOption = None,
    processes: Annotated[int, typer.Option(help="client processes")] = 1,
    devices: DevicesOption = None,
    junit: JunitOption = None,
    out: Annotated[Path, typer.Option(help="where raw records are kept")] = Path("fenno-comparisons"),
    as_json: JsonOption = False,
) -> None:
    """Say whether B (and C) differ from A: interleaved blocks of the same traffic, tested pair by pair."""
    from fenno.compare import run
    from fenno.compare.block import Making

    target, equivalent = judged(target_availability, margin)
    arms = run.chosen(names, reader(model, endpoint, api_key_env, ca_file))
    places, folder = devices or (), None
    if arms[0].recipe is None:
        run.check_gpus(places, arms)
        found = run.from_disk(arms)
    else:
        sent = {"users": users, "rate": rate, "seed": seed, "prompts": prompts, "processes": processes, "extra_body": extra_body}
        seconds = quantity("--duration", units.duration, duration)
        plan = traffic(arms, places, seconds, warmup, timeout, headers=header or (), **sent)
        folder = out / time.strftime("%Y%m%d-%H%M%S")
        found = run.live(arms, Making(plan, folder, places), rounds, console.say)
    raise typer.Exit(tell(run.document(found, arms, target, folder, equivalent), junit, table=not as_json))


def judged(target_availability: str | None, margin: str) -> tuple[float | None, float]:
    """Shares that are judged by: the availability that must hold, if any, and the margin of equivalence. Raises `UsageError`."""
    margin_of = functools.partial(units.share, or_zero=True)
    return parse("--target-availability", units.share, target_availability), quantity("--margin", margin_of, margin)


def reader(model: str | None, endpoint: str, api_key_env: str | None, ca_file: Path | None) -> Callable[[str], Recipe]:
    """name -> Recipe: of a URL with these, or one that is named."""
    from fenno import recipe
    from fenno.load import job

    authority = str(ca_file.resolve()) if ca_file else None

    def recipe_of(name: str) -> Recipe:
        if "://" not in name:
            return recipe.load(choose(name))
        return job.of_url(name, model, endpoint, api_key_env).with_engine(ca_file=authority)

    return recipe_of


def traffic(arms: Sequence[Arm], gpus: Sequence[str], duration: float, warmup: str, timeout: str | None, **sent: Any) -> Plan:
    """A block's traffic, the same for all arms: the first one's workload and what the call says, as for `job.plan`. Says what
    prompts from a file mean for servers that run already. Raises `UsageError` for what cannot be sent, or run on these GPUs."""
    from fenno.compare import run
    from fenno.load import job

    assert arms[0].recipe is not None
    run.check_gpus(gpus, arms)
    before, limit = quantity("--warmup", units.duration, warmup), parse("--timeout", units.duration, timeout)
    plan = job.plan(arms[0].recipe, duration=duration, warmup=before, timeout=limit, **sent)
    check_prompts(plan.workload.prompts)
    if plan.workload.prompts and any(a.recipe and a.recipe.engine.url for a in arms):
        console.say("mind: prompts from a file are the same for all: one server's arms share its prefix cache", style="yellow")
    return plan


def tell(document: dict[str, Any], junit: Path | None, *, table: bool) -> int:
    """A comparison for people, for a pipeline, and its document. Returns the exit code."""
    from fenno import process
    from fenno.compare import words

    if table:
        console.table("comparison", words.header(document), words.rows(document))
    for line in words.lines(document):
        console.say(line)
    if junit:
        process.write(junit, words.junit(document))
    console.document(document, asked=not table)
    return words.exit_code(document)
