"""`fenno doctor`, `fenno explain`: what is wrong, and what went wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fenno import console, documents, errors
from fenno.commands.given import JsonOption, RecipeArgument, choose
from fenno.errors import UsageError


def explain(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="an engine's log, of a server that fenno did not start too")],
) -> None:
    """Name what ended an engine, from its log."""
    from fenno.engine import failures

    if not log.is_file():
        raise UsageError(f"there is no log {log}", "give the path of a vLLM log")
    text = log.read_text(errors="replace")
    found = failures.explain(text)
    if found.name in ("none", "unknown") and "vllm" not in text.lower():
        raise UsageError(f"{log} does not look like a log of vLLM", "give what `vllm serve` printed")
    print(failures.render(found))


def doctor(
    recipe_name: RecipeArgument = None,
    only: Annotated[list[str] | None, typer.Option(help="an id or an area, as often as needed")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="an id or an area to leave out")] = None,
    list_ids: Annotated[bool, typer.Option("--list", help="print the ids of the checks, one a line")] = False,
    explain_id: Annotated[str | None, typer.Option("--explain", help="say what one check looks at, and why")] = None,
    topo_file: Annotated[Path | None, typer.Option(help="judge this `nvidia-smi topo -m` (or NVML as JSON) instead")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="import torch and vLLM, copy between GPUs: a minute")] = False,
    report: Annotated[bool, typer.Option("--report", help="print results and facts, redacted, for a bug report")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="tell what happens to the GPUs until Ctrl-C")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with this host, this stack and this recipe, and the exact fix. Changes nothing."""
    from fenno import recipe
    from fenno.doctor import checks, document, gather, gpufacts, show

    chosen = checks.select(only or (), skip or ())
    if list_ids or explain_id is not None:
        told = chosen if explain_id is None else checks.known(explain_id)
        if as_json:
            console.result({"checks": [document.described(check) for check in told]})
        else:
            print("\n".join(check.id for check in told) if explain_id is None else "\n\n".join(map(show.explain, told)))
        return
    if watch:
        watch_gpus()
        return
    started = time.monotonic()
    recorded = gpufacts.from_file(topo_file) if topo_file else None
    facts = gather.facts(recipe.load(choose(recipe_name)), recorded=recorded, deep=deep)
    results = checks.run(chosen, facts)
    made = document.make(results, facts, time.monotonic() - started)
    if report:
        from fenno.doctor import report as reports

        print(documents.lines(reports.bundle(made, facts)), end="")
        raise typer.Exit(errors.FAILED if made.summary["fail"] else errors.OK)
    if not as_json:
        for line in [*show.lines(results, facts, full=console.verbosity > 0), show.summary(made)]:
            console.say(line, style={"FAIL": "bold red", "warn": "yellow"}.get(line[:4]))
    console.document(made.model_dump(mode="json", by_alias=True), asked=as_json)
    raise typer.Exit(errors.FAILED if made.summary["fail"] else errors.OK)


def watch_gpus() -> None:
    """Tell what happens to the GPUs, with the time, until Ctrl-C."""
    from fenno.doctor import gpufacts, watch

    with watch.kernel_log() as log:
        for line in watch.watch(lambda: gpufacts.ask(20.0)[0], log, 2.0):
            console.say(f"{time.strftime('%H:%M:%S')}  {line}")
