"""`fenno recipe`, `fenno init`: recipes listed, shown, checked, and made from a command line."""

from __future__ import annotations

from typing import Annotated

import typer

from fenno import console

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and check recipes.")


@group.command("list")
def recipe_list() -> None:
    """The recipes that ship with fenno."""
    from fenno import recipe

    for name, path in recipe.embedded().items():
        print(f"{name}\t{recipe.load(path).summary}")


@group.command("show")
def recipe_show(name: Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file or an embedded recipe's name")]) -> None:
    """Print a recipe's YAML."""
    from fenno import recipe

    print(recipe.find(name).read_text(encoding="utf-8"), end="")


@group.command("lint")
def recipe_lint(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file or an embedded recipe's name")],
    engine: Annotated[bool, typer.Option(help="check the flags against the installed engine too")] = True,
) -> None:
    """Check a recipe, and its flags and search against the installed engine."""
    from fenno import recipe
    from fenno.engine import catalogue
    from fenno.tune import space

    checked = recipe.load(recipe.find(name))
    if engine and checked.engine.model is not None:
        known = catalogue.read(catalogue.interpreter(checked.engine.python), console.say)
        known.check(checked.engine.flags, name)
        space.build(checked, known)
        console.say(f"{name}: the flags are those of vLLM {known.engine.version}")
    console.say(f"{name}: no mistakes found")


@group.command("schema")
def recipe_schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from fenno import recipe

    print(json.dumps(recipe.schema(), indent=2))


def init(context: typer.Context) -> None:
    """Make a recipe from a command line: fenno init -- vllm serve MODEL --max-model-len 4096"""
    from fenno.engine import convert

    print(convert.to_yaml(convert.from_command(context.args), context.args), end="")
