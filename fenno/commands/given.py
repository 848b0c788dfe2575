"""What several commands are given: recipes, targets, quantities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fenno import console, errors
from fenno.errors import UsageError

RecipeArgument = Annotated[str | None, typer.Argument(metavar="RECIPE", help="a recipe file or an embedded recipe's name")]
TARGETS = "p95_ttft=800ms, p99_gap=1s, short:p95_ttft=300ms (a class), goodput=30; as often as needed"
TargetOption = Annotated[list[str] | None, typer.Option(help=TARGETS)]

UsersOption = Annotated[int | None, typer.Option(help="closed loop: users with one request in flight each")]
RateOption = Annotated[float | None, typer.Option(help="open loop: requests a second")]
TimeoutOption = Annotated[str | None, typer.Option(help="a later answer is a failure: 2s")]
PromptsOption = Annotated[str | None, typer.Option(help="real prompts: ShareGPT JSON or OpenAI batch JSONL")]
ModelOption = Annotated[str | None, typer.Option(help="the model's name at a URL; default: the first it lists")]
EndpointOption = Annotated[str, typer.Option(help="at a URL: completions or chat")]
HeaderOption = Annotated[list[str] | None, typer.Option(help="'Name: value', as often as needed")]
KeyOption = Annotated[str | None, typer.Option(help="the variable that holds the API key of a URL")]
BodyOption = Annotated[str | None, typer.Option(help="a JSON object laid over every request")]
AuthorityOption = Annotated[Path | None, typer.Option(help="the certificate authority of https URLs")]
JsonOption = Annotated[bool, typer.Option("--json", help="the JSON document alone")]


def choose(name: str | None) -> Path:
    """The recipe file that was named, else ./fenno.yaml, else the embedded one for this host, said in one line."""
    from fenno import recipe

    if name is not None:
        return recipe.find(name)
    if Path("fenno.yaml").is_file():
        console.say("recipe: ./fenno.yaml")
        return Path("fenno.yaml")
    console.say("recipe: cpu-small (embedded; no recipe was named and there is no ./fenno.yaml)")
    return recipe.find("cpu-small")


def named(targets: list[str] | None) -> dict[str, str]:
    """ "short:p95_ttft=300ms", as often as given, by name. Raises `UsageError`."""
    return pairs("--target", targets, "p95_ttft=800ms, or short:p95_ttft=300ms for one class")


def pairs(option: str, texts: Sequence[str] | None, such_as: str) -> dict[str, str]:
    """An option NAME=VALUE, as often as given, by name. Raises `UsageError` for what is not so, and for a name given twice."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise UsageError(f"{option} is {text!r}", f"write it as NAME=VALUE: {such_as}")
        if name in found:
            raise UsageError(f"{option} {name} is given twice: {found[name]} and {value}", "leave one of them out")
        found[name] = value
    return found


def quantity(option: str, reader: Callable[[object], float], text: str) -> float:
    """An option's value as people write it. Raises `UsageError` that names the option."""
    try:
        return reader(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}", error.hint) from error


def parse(option: str, reader: Callable[[object], float], text: str | None) -> float | None:
    """The same, or None when the option was not given."""
    return None if text is None else quantity(option, reader, text)


def check_prompts(path: str | None) -> None:
    """Raise `UsageError` for a file of prompts that cannot be read."""
    from fenno.load import prompts

    try:
        prompts.load(Path(path)) if path else None
    except errors.LoadError as error:
        raise UsageError(str(error), error.hint) from error
