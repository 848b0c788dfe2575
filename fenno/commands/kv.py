"""`fenno patch-kv`: layout and block size of the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, errors
from fenno.commands.given import JsonOption, RecipeArgument, choose
from fenno.errors import UsageError

if TYPE_CHECKING:
    from fenno.recipe import Recipe

group = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Layout and block size of the KV cache: plan, apply, revert, verify, bench."
)


@group.command("plan")
def patch_kv_plan(recipe_name: RecipeArgument = None, as_json: JsonOption = False) -> None:
    """Legal layouts and block sizes for a recipe's engine and model, with their bytes, and what is worth changing."""
    from fenno import recipe
    from fenno.kv import plan

    chosen = recipe.load(choose(recipe_name))
    tell_plan(plan.make(asked(chosen), chosen), as_json=as_json)


def asked(chosen: Recipe) -> dict[str, Any]:
    """What a recipe's engine says of its KV cache: vLLM is imported for it, which is said."""
    from fenno.kv import ask

    return ask.facts(chosen, console.say)


def tell_plan(made: dict[str, Any], *, as_json: bool) -> None:
    """A plan for people, and its document."""
    from fenno.kv import words

    if not as_json:
        console.table(words.title(made), words.HEADER, words.rows(made))
        for line in words.lines(made):
            console.say(line)
    console.document(made, asked=as_json)


@group.command("bench")
def patch_kv_bench(
    recipe_name: RecipeArgument = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences in the cache")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of each sequence")] = 256,
    as_json: JsonOption = False,
) -> None:
    """Time one decode step's KV, and a whole cache, moved between two ranks of this host: as one tensor and layer by layer.

    Exit code 1 where other bytes came than were sent."""
    from fenno import recipe
    from fenno.kv import measure, words

    chosen = recipe.load(choose(recipe_name))
    found = measure.transfers(chosen, asked(chosen)["model"], batch, tokens)
    if not as_json:
        title, rows = words.transfers(found)
        console.say(title)
        console.table("KV cache moved", words.TRANSFER_HEADER, rows)
    console.document(found, asked=as_json)
    if fault := words.wrong(found):
        console.say(fault)
        raise typer.Exit(errors.FAILED)


@group.command("verify")
def patch_kv_verify(recipe_name: RecipeArgument = None, as_json: JsonOption = False) -> None:
    """Start the recipe's engine, have it answer, and look for NaN and Inf in its KV cache and logits (exit code 1)."""
    from fenno import recipe
    from fenno.kv import ask, words

    chosen = recipe.load(choose(recipe_name))
    found = ask.canary(chosen, console.say)
    if not as_json:
        for line in words.canary(found):
            console.say(line)
    console.document(found, asked=as_json)
    if found["kv"] or found["logits"]:
        raise typer.Exit(errors.FAILED)


@group.command("apply")
def patch_kv_apply(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE", help="a recipe file of your own")],
    layout: Annotated[str | None, typer.Option(help="this layout instead of the plan's")] = None,
    block_size: Annotated[int | None, typer.Option(help="this block size instead of the plan's")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write what is worth changing, or what is asked for, into a recipe."""
    from fenno import process, recipe
    from fenno.kv import plan, settings

    text = own_recipe(recipe_file)
    before = settings.without(text)
    chosen = recipe.parse(before, str(recipe_file))
    made = plan.make(asked(chosen), chosen)
    changes = made["changes"]
    if layout or block_size:
        refused = plan.refusal(made, layout, block_size)
        if refused:
            raise errors.PatchError(
                f"{made['usual']['backend']} refuses that: {refused}", "`fenno patch-kv plan` lists what is legal"
            )
        changes = plan.asked(made, layout, block_size)
    after = settings.written(before, changes, str(recipe_file))
    recipe.parse(after, str(recipe_file))
    if after != text:
        process.write(recipe_file, after)
    if not changes:
        console.say("; ".join(["nothing is worth changing", *made["why_not"]]))
    for change in [] if as_json else changes:
        console.say(f"{change['name']}: {change['value']} (before: {change['now']}), {change['why']}")
    console.document({"recipe": str(recipe_file), "changes": changes, "changed": after != text}, asked=as_json)


def own_recipe(path: Path) -> str:
    """The text of a recipe that may be written to. Raises `UsageError` for one that ships with fenno."""
    from fenno import recipe

    if not path.is_file():
        shipped = str(path) in recipe.embedded()
        hint = f"copy it first: fenno recipe show {path} > fenno.yaml" if shipped else "give a recipe file"
        raise UsageError(f"there is no file {path} to write into", hint)
    return path.read_text(encoding="utf-8")


@group.command("status")
def patch_kv_status(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE", help="a recipe file of your own")], as_json: JsonOption = False
) -> None:
    """The settings that `apply` wrote into a recipe."""
    from fenno.kv import settings

    found = settings.present(own_recipe(recipe_file))
    if not as_json:
        console.say("\n".join(f"{name}: {value}" for name, value in found.items()) or "nothing in it is of fenno patch-kv")
    console.document({"recipe": str(recipe_file), "settings": found}, asked=as_json)


@group.command("revert")
def patch_kv_revert(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE", help="a recipe file of your own")], as_json: JsonOption = False
) -> None:
    """Take out of a recipe what `apply` wrote; every other byte stays."""
    from fenno import process
    from fenno.kv import settings

    text = own_recipe(recipe_file)
    before = settings.without(text)
    if before != text:
        process.write(recipe_file, before)
    if not as_json:
        console.say("as before" if before != text else "nothing in it is of fenno patch-kv")
    console.document({"recipe": str(recipe_file), "changed": before != text}, asked=as_json)
