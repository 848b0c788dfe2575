"""What can be known to be wrong before an engine is started."""

from __future__ import annotations

from pathlib import Path

from fenno import machine
from fenno.doctor import checks, gather
from fenno.engine import command, server
from fenno.errors import RecipeError
from fenno.recipe import Engine, Recipe

OPEN = ("127.0.0.1", "localhost", "::1")


def check(recipe: Recipe) -> list[str]:
    """Raise `RecipeError` for what would end the start minutes later; returns what a person should know."""
    if (missing := machine.lacking(machine.probe(), recipe.host)) is not None:
        raise RecipeError(f"recipe {recipe.name}: {missing}", "serve it on such a host, or change `host` in the recipe")
    if (fault := server.model_fault(recipe.engine)) is not None:
        raise RecipeError(f"recipe {recipe.name}: {fault}", "`engine.model` is a folder, a Hub id (owner/name), or dummy:NAME")
    return [*doctor(recipe), *exposed(recipe.engine)]


def exposed(engine: Engine) -> list[str]:
    """Who else may use the server, or read its key. Raises `RecipeError` for a key that is not there."""
    key = command.api_key(engine)
    host = str(engine.flags.get("host") or OPEN[0])
    said = []
    if host not in OPEN and key is None:
        said.append(f"it listens on {host} without an API key: whoever reaches this host may use it")
    if engine.api_key_file and Path(engine.api_key_file).expanduser().stat().st_mode & 0o077:
        said.append(f"other users may read the API key in {engine.api_key_file}: chmod 600 it")
    return said


def doctor(recipe: Recipe) -> list[str]:
    """What `fenno doctor` calls a failure for this recipe on this host. Told and not obeyed: the start itself has the last word."""
    if recipe.engine.model is None:
        return []
    results = checks.run(checks.CHECKS, gather.facts(recipe))
    return [
        f"doctor: {check.id}: {finding.found}\n  {finding.fix or check.fix}"
        for check, finding in results
        if finding.status == "fail"
    ]
