"""`fenno soak`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from fenno import console, units
from fenno.commands.compare import AvailabilityOption, DevicesOption, JunitOption, MarginOption, judged, reader, tell, traffic
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
    quantity,
)
from fenno.errors import UsageError


def soak(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE", help="one to three recipes or URLs")],
    each: Annotated[str, typer.Option(help="how long each is measured, all its blocks together: 24h")] = "24h",
    blocks: Annotated[int, typer.Option(min=3, help="into how many blocks that is cut, each after a start of its own")] = 12,
    users: UsersOption = None,
    rate: RateOption = None,
    warmup: Annotated[str, typer.Option(help="before each block: 30s")] = "30s",
    seed: Annotated[int, typer.Option(help="of the first round; each has its own, the same for all recipes")] = 1,
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
    out: Annotated[Path, typer.Option(help="where raw records are kept")] = Path("fenno-soaks"),
    as_json: JsonOption = False,
) -> None:
    """Compare recipes over days, in turn; the same command again goes on where it was ended."""
    from fenno.compare import run
    from fenno.compare import soak as soaks
    from fenno.compare.block import Making

    target, equivalent = judged(target_availability, margin)
    arms = run.chosen(names, reader(model, endpoint, api_key_env, ca_file), least=1)
    if arms[0].recipe is None:
        raise UsageError(f"{names[0]} is a load test that is over", "compare such with `fenno compare`")
    places = devices or ()
    sent = {"users": users, "rate": rate, "seed": seed, "prompts": prompts, "processes": processes, "extra_body": extra_body}
    plan = traffic(arms, places, quantity("--each", units.duration, each) / blocks, warmup, timeout, headers=header or (), **sent)
    folder = soaks.folder_of(arms, plan, blocks, out, places)
    told = functools.partial(run.document, arms=arms, target=target, folder=folder, margin=equivalent)
    found = soaks.soak(arms, Making(plan, folder, places), blocks, console.say, told)
    raise typer.Exit(tell(told(found), junit, table=not as_json))
