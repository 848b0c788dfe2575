"""Asks an installed engine about its KV cache for a recipe, in a child process under the engine's own Python."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fenno import process
from fenno.engine import catalogue, command, failures, plugin, server
from fenno.engine.inside.kvcache import MARK
from fenno.errors import EngineError, ProcessError, RecipeError
from fenno.recipe import Recipe

Say = Callable[[str], None]
REPLICAS = "data-parallel-"
_INSIDE = Path(server.__file__).parent / "inside"


def facts(recipe: Recipe, say: Say = lambda text: None) -> dict[str, Any]:
    """What `engine/inside/kvcache.py` reports for the recipe's model and flags; it takes 10 s and more, which `say` is told.

    Raises `RecipeError` for a server that fenno does not start, and `EngineError` with the cause, or the engine's own words, when
    it refuses.
    """
    begun = "asking this vLLM about its KV cache (it takes ten seconds or more)"
    return _told(recipe, "kvcache.py", 300.0, "the engine cannot be asked about its KV cache", say, begun)


def canary(recipe: Recipe, say: Say = lambda text: None) -> dict[str, Any]:
    """What `engine/inside/canary.py` found in the KV cache and the logits of an engine that was started for it; raises the same."""
    begun = f"starting the engine of {recipe.name}, without its HTTP server"
    return _told(recipe, "canary.py", 1800.0, "the engine's KV cache cannot be looked at", say, begun)


def _told(recipe: Recipe, script: str, limit: float, wanted: str, say: Say, begun: str) -> dict[str, Any]:
    """The one line of JSON that a script prints under the engine's own Python, given the recipe as `vllm serve` would be.

    `begun` is said once there is an engine to ask.
    """
    if recipe.engine.model is None:
        raise RecipeError("this recipe names a server that runs already: its cache is not fenno's to lay out", "give `model`")
    python = catalogue.interpreter(recipe.engine.python)
    catalogue.read(python, say).check(recipe.engine.flags, recipe.name)
    say(begun)
    model = server.model_path(recipe)
    # One replica is asked: an engine without its server would wait for the others, which nobody starts.
    flags = {name: value for name, value in recipe.engine.flags.items() if not name.startswith(REPLICAS)}
    words = [model, *command.arguments(flags)]
    words += ["--trust-remote-code"] if recipe.engine.trust_remote_code else []
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    with tempfile.TemporaryDirectory(prefix="fenno-kv-") as folder:
        known = plugin.path(plugin.install(Path(folder))) if plugin.brings(model) else {}
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        beside = {"PYTHONSAFEPATH": None}  # the scripts import what lies beside them
        # As at a start, where the plugin is laid over the recipe's own path.
        env: dict[str, str | None] = {**quiet, **offline, **recipe.engine.variables, **known, **beside}
        try:
            done = process.run([python, str(_INSIDE / script), *words], timeout=limit, env=env)
        except ProcessError as error:
            raise EngineError(f"{wanted}: {error}", error.hint) from error
    line = next((text for text in done.stdout.splitlines() if text.startswith(MARK)), None)
    if line is None:
        found = failures.explain(done.stderr)
        if found.name not in ("none", "unknown"):
            raise EngineError(f"{wanted}: {found.meaning}", found.remedy, cause=found.name)
        last = process.last_line(done.stderr)
        raise EngineError(f"{wanted}: {last}", f"see `fenno doctor`, or start it: fenno serve {recipe.name}")
    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return answer
