"""`fenno compare`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, units
from fenno.commands.given import check_prompts, choose, parse

if TYPE_CHECKING:
    from fenno.compare.run import Arm
    from fenno.recipe import Recipe


def compare(
    names: Annotated[list[str], typer.Argument(metavar="A B [C]", help="recipes or URLs, or folders of stored load tests")],
    rounds: Annotated[int, typer.Option(min=3, help="blocks of each; six or more see small differences")] = 6,
    users: Annotated[int | None, typer.Option(help="closed loop: users with one request in flight each")] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: requests a second")] = None,
    duration: Annotated[str, typer.Option(help="the counted window of a block: 30s")] = "30s",
    warmup: Annotated[str, typer.Option(help="before each window: 5s")] = "5s",
    seed: Annotated[int, typer.Option(help="of the first round; each has its own, the same for all arms")] = 1,
    timeout: Annotated[str | None, typer.Option(help="a later answer is a failure: 2s")] = None,
    target_availability: Annotated[str | None, typer.Option(help="complete and correct answers in time: 99.5%")] = None,
    margin: Annotated[str, typer.Option(help="of equivalence: differences surely within it fail nothing; 0: there is none")] = "1%",
    prompts: Annotated[str | None, typer.Option(help="real prompts: ShareGPT JSON or OpenAI batch JSONL")] = None,
    model: Annotated[str | None, typer.Option(help="the model's name at a URL; default: the first it lists")] = None,
    endpoint: Annotated[str, typer.Option(help="at a URL: completions or chat")] = "completions",
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', as often as needed")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="the variable that holds the API key of a URL")] = None,
    extra_body: Annotated[str | None, typer.Option(help="a JSON object laid over every request")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="the certificate authority of https URLs")] = None,
    processes: Annotated[int, typer.Option(help="client processes")] = 1,
    junit: Annotated[Path | None, typer.Option(help="write JUnit's XML there")] = None,
    out: Annotated[Path, typer.Option(help="where raw records are kept")] = Path("fenno-comparisons"),
    as_json: Annotated[bool, typer.Option("--json", help="the JSON document alone, no table")] = False,
) -> None:
    """Say whether B (and C) differ from A: interleaved blocks of the same traffic, tested pair by pair."""
    from fenno.compare import run
    from fenno.load import job

    target, equivalent = parse(units.share, target_availability), units.share(margin, or_zero=True)
    arms = run.chosen(names, reader(model, endpoint, api_key_env, ca_file))
    folder = None
    if arms[0].recipe is None:
        found = run.from_disk(arms)
    else:
        plan = job.plan(
            arms[0].recipe,
            users=users,
            rate=rate,
            duration=units.duration(duration),
            warmup=units.duration(warmup),
            seed=seed,
            timeout=parse(units.duration, timeout),
            prompts=prompts,
            processes=processes,
            headers=header or (),
            extra_body=extra_body,
        )
        check_shared(plan.workload.prompts, arms)
        folder = out / time.strftime("%Y%m%d-%H%M%S")
        found = run.live(arms, plan, rounds, folder, console.say)
    raise typer.Exit(tell(run.document(found, arms, target, folder, equivalent), junit, table=not as_json))


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


def check_shared(prompts: str | None, arms: Sequence[Arm]) -> None:
    """Say what prompts from a file mean for servers that run already. Raises `UsageError` for a file that cannot be read."""
    check_prompts(prompts)
    if prompts and any(a.recipe and a.recipe.engine.url for a in arms):
        console.say("mind: prompts from a file are the same for all: one server's arms share its prefix cache", style="yellow")


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
    console.result(document)
    return words.exit_code(document)
