"""Times the transfer of a recipe's KV cache between two ranks of this host, under the engine's own Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenno import process
from fenno.engine import catalogue
from fenno.errors import EngineError, ProcessError
from fenno.recipe import Recipe

_SCRIPT = str(Path(__file__).parent / "inside" / "bench.py")


def transfers(recipe: Recipe, model: Mapping[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """What `kv/inside/bench.py` reports for a cache of the facts' `model`: seconds, bytes and share of the link by layout.

    Raises `EngineError` where the ranks do not come to an end, with the last line that they said.
    """
    shape = {name: model[key] for name, key in (("layers", "layers"), ("heads", "kv_heads"), ("size", "head_size"))}
    shape |= {"dtype": model["cache_dtype"], "batch": batch, "tokens": tokens}
    argv = [catalogue.interpreter(recipe.engine.python), _SCRIPT, json.dumps(shape)]
    try:
        done = process.run(argv, timeout=600.0, env=dict(recipe.engine.variables))
    except ProcessError as error:
        raise EngineError(f"the transfers cannot be timed: {error}", error.hint) from error
    line = next((text for text in done.stdout.splitlines() if text.startswith("{")), None)
    if line is None:
        last = process.last_line(done.stderr, "they printed nothing")
        raise EngineError(f"the ranks ended early: {last}", "give a smaller --batch or --tokens if memory ran out")
    found: dict[str, Any] = json.loads(line)
    return found
