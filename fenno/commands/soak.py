"""`fenno soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fenno import console, units
from fenno.commands.compare import check_shared, reader, tell
from fenno.commands.given import parse
from fenno.errors import UsageError


def soak(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="one to three recipes or URLs")],
    each: Annotated[str, typer.Option(help="how long each is measured, all its blocks together: 24h")] = "24h",
    blocks: Annotated[int, typer.Option(min=3, help="into how many blocks that is cut, each after a start of its own")] = 12,
    users: Annotated[int | None, typer.Option(help="closed loop: users with one request in flight each")] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: requests a second")] = None,
    warmup: Annotated[str, typer.Option(help="before each block: 30s")] = "30s",
    seed: Annotated[int, typer.Option(help="of the first round; each has its own, the same for all recipes")] = 1,
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
    out: Annotated[Path, typer.Option(help="where raw records are kept")] = Path("fenno-soaks"),
    as_json: Annotated[bool, typer.Option("--json", help="the JSON document alone, no table")] = False,
) -> None:
    """Compare recipes over days, in turn; the same command again goes on where it was ended."""
    from fenno.compare import run
    from fenno.compare import soak as soaks
    from fenno.load import job

    target, equivalent = parse(units.share, target_availability), units.share(margin, or_zero=True)
    arms = run.chosen(names, reader(model, endpoint, api_key_env, ca_file), least=1)
    if arms[0].recipe is None:
        raise UsageError(f"{names[0]} is a load test that is over", "compare such with `fenno compare`")
    plan = job.plan(
        arms[0].recipe,
        users=users,
        rate=rate,
        duration=units.duration(each) / blocks,
        warmup=units.duration(warmup),
        seed=seed,
        timeout=parse(units.duration, timeout),
        prompts=prompts,
        processes=processes,
        headers=header or (),
        extra_body=extra_body,
    )
    check_shared(plan.workload.prompts, arms)
    folder = soaks.folder_of(arms, plan, blocks, out)

    def told(found: run.Blocks) -> dict[str, object]:
        return run.document(found, arms, target, folder, equivalent)

    found = soaks.soak(arms, plan, blocks, folder, console.say, told)
    raise typer.Exit(tell(told(found), junit, table=not as_json))
