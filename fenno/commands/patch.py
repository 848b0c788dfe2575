"""`fenno patch`: patches in installed packages, and in source that is about to be built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fenno import console, errors
from fenno.commands.given import JsonOption
from fenno.errors import UsageError

if TYPE_CHECKING:
    from fenno.patches.installed import Installed

HELP = "Patches in installed packages, or in a source before it is built: a last resort, kept honest."
group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)


PackagesArgument = Annotated[list[str] | None, typer.Argument(metavar="PACKAGE", help="default: all that there are patches for")]
PythonOption = Annotated[str | None, typer.Option("--python", help="the interpreter that has them; default: the recipe's")]
SiteOption = Annotated[Path | None, typer.Option("--site", help="a site-packages folder instead")]
SourceOption = Annotated[Path | None, typer.Option("--source", help="an unpacked source archive, in place of what is installed")]
PatchFolderOption = Annotated[Path | None, typer.Option("--folder", help="a folder of patches of your own")]
PatchRecipeOption = Annotated[str | None, typer.Option("--recipe", help="a recipe that names `python` or `patches`")]


def patched(
    packages: list[str] | None,
    python: str | None,
    site: Path | None,
    source: Path | None,
    folder: Path | None,
    recipe_name: str | None,
) -> tuple[list[Installed], tuple[Path, ...]]:
    """The packages that are meant, installed or unpacked, and the folders of patches. Raises `UsageError`."""
    from fenno import recipe
    from fenno.engine import catalogue
    from fenno.patches import installed, series, work

    engine = recipe.load(recipe.find(recipe_name)).engine if recipe_name else recipe.Engine(model="none")
    where = work.roots(engine.patches, folder)
    if source is not None:
        if packages or python or site:
            raise UsageError("--source is one package by itself", "leave out its name, --python and --site")
        return [series.source(source, where)], where
    names = packages or series.packages(where)
    if not names:
        console.say(
            "no patches for installed packages: fenno ships none (patches/README.md says why), and no folder of yours has one"
        )
        return [], where
    folders = [str(site)] if site else installed.search_path(catalogue.interpreter(python or engine.python))
    return [installed.find(name, folders) for name in names], where


def tell_patched(found: list[dict[str, Any]], *, as_json: bool) -> None:
    """The packages and their files for people, and the document."""
    for each in [] if as_json else found:
        console.say(f"{each['package']} {each['version']} in {each['site']}: {each['state']}", style="bold")
        for path, state in each["files"].items():
            console.say(f"  {state:9} {path}")
    console.document({"packages": found}, asked=as_json)


@group.command("list")
def patch_list(
    packages: PackagesArgument = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """The patches there are: what each does, why, for which versions, and what makes it needless."""
    from fenno import recipe
    from fenno.patches import work

    where = work.roots(recipe.load(recipe.find(recipe_name)).engine.patches if recipe_name else None, folder)
    found = work.known(where, packages)
    for each in [] if as_json else found:
        what = f"the source of {each['package']}" if each["source"] else each["package"]
        console.say(f"{what} {each['versions']}  {each['patch']}: {each['description']}")
        console.say(f"  why: {each['reason']}\n  upstream: {each['upstream']}\n  superseded by: {each['superseded_by']}")
    if not found:
        console.say("no patches (patches/README.md says why fenno ships so few)")
    console.document({"patches": found}, asked=as_json)


@group.command("check")
def patch_check(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    source: SourceOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the patches apply to what is installed, or to a source. Changes nothing."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, source, folder, recipe_name)
    tell_patched([work.check(each, where) for each in targets], as_json=as_json)


@group.command("apply")
def patch_apply(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    source: SourceOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have the patches in what is installed, or in a source: all of a package's, or none."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, source, folder, recipe_name)
    tell_patched([work.apply(each, where) for each in targets], as_json=as_json)


@group.command("status")
def patch_status(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    source: SourceOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Each file: pristine, patched or drifted. Exit code 1 for what should not stay so."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, source, folder, recipe_name)
    found = [work.status(each, where) for each in targets]
    tell_patched(found, as_json=as_json)
    raise typer.Exit(errors.OK if all(each["state"] in ("pristine", "patched") for each in found) else errors.FAILED)


@group.command("revert")
def patch_revert(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    source: SourceOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have every file as it was before."""
    from fenno.patches import work

    targets, _ = patched(packages, python, site, source, folder, recipe_name)
    tell_patched([work.revert(each) for each in targets], as_json=as_json)


@group.command("verify")
def patch_verify(
    packages: PackagesArgument = None,
    python: PythonOption = None,
    site: SiteOption = None,
    source: SourceOption = None,
    folder: PatchFolderOption = None,
    recipe_name: PatchRecipeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the packages are as delivered with their patches, and nothing else. Exit code 1 when not."""
    from fenno.patches import work

    targets, where = patched(packages, python, site, source, folder, recipe_name)
    found = [work.verify(each, where) for each in targets]
    tell_patched([each for _, each in found], as_json=as_json)
    raise typer.Exit(errors.OK if all(right for right, _ in found) else errors.FAILED)
