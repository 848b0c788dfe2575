"""`fenno patch`: patches in installed packages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, errors
from fenno.commands.given import JsonOption

if TYPE_CHECKING:
    from fenno.patches.installed import Installed

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Patches in installed packages: a last resort, kept honest.")


PackagesArgument = Annotated[list[str] | None, typer.Argument(help="packages; default: all that there are patches for")]
PythonOption = Annotated[str | None, typer.Option("--python", help="the interpreter that has them; default: the recipe's")]
SiteOption = Annotated[Path | None, typer.Option("--site", help="a site-packages folder instead")]
PatchFolderOption = Annotated[Path | None, typer.Option("--folder", help="a folder of patches of your own")]
PatchRecipeOption = Annotated[str | None, typer.Option("--recipe", help="a recipe that names `python` or `patches`")]


def patched(
    packages: list[str] | None, python: str | None, site: Path | None, folder: Path | None, recipe_name: str | None
) -> tuple[list[Installed], tuple[Path, ...]]:
    """The installed packages that are meant, and the folders of patches."""
    from fenno import recipe
    from fenno.patches import installed, series, work

    engine = recipe.load(recipe.find(recipe_name)).engine if recipe_name else recipe.Engine(model="none")
    where = work.roots(engine.patches, folder)
    names = packages or series.packages(where)
    if not names:
        console.say("no patches: fenno ships none, and no folder of your own has one (patches/README.md says why)")
        return [], where
    folders = [str(site)] if site else installed.search_path(python or engine.python)
    return [installed.find(name, folders) for name in names], where


def tell_patched(found: list[dict[str, Any]], *, as_json: bool) -> None:
    """The packages and their files for people, and the document."""
    for each in [] if as_json else found:
        console.say(f"{each['package']} {each['version']} in {each['site']}: {each['state']}", style="bold")
        for path, state in each["files"].items():
            console.say(f"  {state:9} {path}")
    console.result({"packages": found})


@group.command("list")
def patch_list(
    packages: PackagesArgument = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """The patches there are: what each does, why, for which versions, and what makes it needless."""
    from fenno import recipe
    from fenno.patches import series, work

    where = work.roots(recipe.load(recipe.find(recipe_name)).engine.patches if recipe_name else None, folder)
    found = [each for name in packages or series.packages(where) for each in work.known(name, where)]
    for each in [] if as_json else found:
        console.say(f"{each['package']} {each['versions']}  {each['patch']}: {each['description']}")
        console.say(f"  why: {each['reason']}\n  upstream: {each['upstream']}\n  superseded by: {each['superseded_by']}")
    if not found:
        console.say("no patches (patches/README.md says why fenno ships none)")
    console.result({"patches": found})


@group.command("check")
def patch_check(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the patches apply to what is installed. Changes nothing."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, folder, recipe_name)
    tell_patched([work.check(each, where) for each in targets], as_json=as_json)


@group.command("apply")
def patch_apply(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the patches in what is installed: all of a package's, or none."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, folder, recipe_name)
    tell_patched([work.apply(each, where) for each in targets], as_json=as_json)


@group.command("status")
def patch_status(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Each file: pristine, patched or drifted. Exit code 1 for what should not stay so."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, folder, recipe_name)
    found = [work.status(each, where) for each in targets]
    tell_patched(found, as_json=as_json)
    raise typer.Exit(errors.OK if all(each["state"] in ("pristine", "patched") for each in found) else errors.FAILED)


@group.command("revert")
def patch_revert(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have every file as its wheel had it."""
    from fenno.patches import work

    targets, _ = patched(packages, python, site, folder, recipe_name)
    tell_patched([work.revert(each) for each in targets], as_json=as_json)


@group.command("verify")
def patch_verify(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the packages are their wheels with their patches, and nothing else. Exit code 1 when not."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, folder, recipe_name)
    found = [work.verify(each, where) for each in targets]
    tell_patched([each for _, each in found], as_json=as_json)
    raise typer.Exit(errors.OK if all(right for right, _ in found) else errors.FAILED)
