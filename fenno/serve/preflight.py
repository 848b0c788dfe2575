"""What can be known to be wrong before an engine is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fenno import machine, units
from fenno.doctor import checks, gather
from fenno.doctor.facts import Facts
from fenno.engine import command, server
from fenno.engine.watch import LOCAL
from fenno.errors import RecipeError
from fenno.plan import fit, gpus, make
from fenno.recipe import Engine, Recipe
from fenno.tune import memory

# With one of these the model is not what its config says, not all of it lies on the GPUs, or the engine takes a length that fits.
OTHERWISE = {
    *("cpu-offload-gb", "hf-overrides", "hf-config-path", "load-format=bitsandbytes", "num-gpu-blocks-override"),
    *("max-model-len=auto", "max-model-len=-1"),
}


def check(recipe: Recipe) -> list[str]:
    """Raise `RecipeError` for what would end the start minutes later; returns what a person should know."""
    if (missing := machine.lacking(machine.probe(), recipe.host)) is not None:
        raise RecipeError(f"recipe {recipe.name}: {missing}", "serve it on such a host, or change `host` in the recipe")
    server.check_model(recipe)
    if recipe.engine.model is None:
        return exposed(recipe.engine)
    facts = gather.facts(recipe)
    fitting(recipe, facts)
    return [*doctor(facts), *exposed(recipe.engine)]


def fitting(recipe: Recipe, facts: Facts) -> None:
    """Raise `RecipeError` where weights and one request have no room here, allowances or not: vLLM finds that out after minutes."""
    plan = planned(recipe, facts)
    if plan and plan["impossible"]:
        ways = "; ".join(plan["ways"]) or "no single change: `fenno plan` says what lies where"
        raise RecipeError(f"recipe {recipe.name}: {_too_large(plan)}", f"what would make it fit, each alone: {ways}")


def _too_large(plan: dict[str, Any]) -> str:
    cache, sizes = plan["cache"], (sum(plan["weights"].values()), plan["cache"]["least"], plan["limit"])
    weights, least, limit = map(units.show_memory, sizes)
    what = f"{least} of KV cache (one request has {cache['longest']} tokens)"
    where = f"one {plan['device']['name']}" if plan["device"]["count"] else "main memory"
    return f"{weights} of weights and {what} do not fit into the {limit} that the engine has of {where}"


def planned(recipe: Recipe, facts: Facts) -> dict[str, Any] | None:
    """What `fenno plan` says of the recipe on this host; None where model or device are not known, or cannot be reckoned with."""
    given = {*recipe.engine.flags, *(f"{name}={value}" for name, value in recipe.engine.flags.items())}
    if not (facts.model and facts.model.config) or given & OTHERWISE:
        return None
    cards = facts.gpus.cards if facts.gpus else ()
    if recipe.gpus == 0:
        device, count = gpus.Device("CPU", machine.memory_limit()), 0
    elif cards:
        # Which of them it will be given is not known: what the largest cannot hold none can.
        largest = max(cards, key=lambda card: card.memory)
        device, count = gpus.like(largest.name, largest.memory), recipe.engine.ranks
    else:
        return None
    # Without the share of memory that a target leaves: what is served has the flags' own.
    flags = {memory.FLAG: fit.UTILIZATION, **recipe.engine.flags}
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"flags": flags})})
    version = facts.engine.version if facts.engine else None
    return make.if_known(recipe, facts.model.config, device, count, engine=version)


def exposed(engine: Engine) -> list[str]:
    """Who else may use the server, or read its key. Raises `RecipeError` for a key that is not there."""
    key = command.api_key(engine)
    host = str(engine.flags.get("host") or "127.0.0.1")
    said = []
    if host not in LOCAL and key is None:
        said.append(f"it listens on {host} without an API key: whoever reaches this host may use it")
    if engine.api_key_file and Path(engine.api_key_file).expanduser().stat().st_mode & 0o077:
        said.append(f"other users may read the API key in {engine.api_key_file}: chmod 600 it")
    return said


def doctor(facts: Facts) -> list[str]:
    """What `fenno doctor` calls a failure for this recipe on this host. Told and not obeyed: the start itself has the last word."""
    return [
        f"doctor: {check.id}: {finding.found}\n  {finding.fix or check.fix}"
        for check, finding in checks.run(checks.CHECKS, facts)
        if finding.status == "fail"
    ]
