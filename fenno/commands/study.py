"""`fenno study`: studies in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fenno import console, units
from fenno.commands.given import JsonOption, check_prompts, quantity
from fenno.commands.tune import OutOption, tell, tell_begin
from fenno.errors import UsageError

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, export and reproduce studies.")

StudyArgument = Annotated[
    str | None, typer.Argument(metavar="STUDY", help="its folder, or its name or the beginning of it; default: the newest")
]
OUT = Path("fenno-studies")


@group.command("list")
def list_(out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """The studies there are, the newest first, with what each of them found."""
    from fenno.tune import studies

    found = studies.listed(out)
    if not found:
        console.say(f"there is no study in {out}")
    elif not as_json:
        console.table("", studies.HEADER, [studies.row(line) for line in found])
    console.document({"studies": found}, asked=as_json)


@group.command()
def show(name: StudyArgument = None, out: OutOption = OUT, as_json: JsonOption = False) -> None:
    """What a study found: its verdict, the settings, every trial, and what was refused and why."""
    from fenno.tune import studies

    kept = studies.find(out, name)
    trials = kept.trials()
    document = studies.document(kept, trials)
    if not as_json:
        console.say(f"{kept.folder}\n{kept.sentence}", style="bold")
        for line in studies.lines(document):
            console.say(line)
        base = studies.defaults(kept, trials)
        console.table("", studies.TRIALS_HEADER, [studies.told(trial, base) for trial in trials])
        for lost in document["refused"]:
            console.say(f"trial {lost['trial']} {lost['state']}, {lost['changed']}: {lost['reason']}", style="yellow")
    console.document(document, asked=as_json)


@group.command()
def export(
    name: StudyArgument = None,
    to: Annotated[str, typer.Option(help="csv or json")] = "csv",
    out: OutOption = OUT,
) -> None:
    """Print a study's trials, one a row; docs/tuning.md says what the columns are."""
    from fenno.tune import studies

    if to not in ("csv", "json"):
        raise UsageError(f"--to is {to!r}", "it has to be csv or json")
    kept = studies.find(out, name)
    rows = studies.rows(kept, kept.trials())
    if to == "csv":
        print(studies.csv_text(rows), end="")
    else:
        console.result({"study": str(kept.folder), "verdict": kept.verdict, "trials": rows})


@group.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="its folder, or its name or the beginning of it")],
    budget: Annotated[str, typer.Option(help="how long it may take: 15m")] = "15m",
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and prompts")] = 1,
    out: OutOption = OUT,
) -> None:
    """Start what a study found once more and measure it: exit code 0 when it still holds, 3 when it no longer does, 4 when neither
    is sure."""
    from fenno import recipe
    from fenno.screen import Screen
    from fenno.tune import again, studies

    limit = quantity("--budget", units.duration, budget)
    kept = studies.find(out, name)
    chosen = recipe.load(studies.tuned(kept))
    check_prompts(chosen.workload.prompts)
    with Screen() as screen:
        opened = again.begin(chosen, kept, out=kept.folder.parent, budget=limit, seed=seed, events=screen)
        tell_begin(opened)
        verdict = again.once(opened.run, held=True)
    raise typer.Exit(tell(opened, verdict, serve=False))
