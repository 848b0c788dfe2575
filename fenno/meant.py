"""What a person meant who wrote something else, in words for an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path


def key(name: str, keys: Iterable[str]) -> str:
    """The end of a sentence about a key that is not there: of a latency of which half is said, the first token's P95."""
    there = [*keys]
    whole = [key for key in (f"{name}_ttft", f"p95_{name}") if key in there]
    near = whole or difflib.get_close_matches(name, there, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def by_folder(folder: Path) -> str:
    """What to do with a folder that was given for a recipe, by what lies in it."""
    if (folder / "tuned.yaml").is_file():
        return f"the recipe of that study is {folder / 'tuned.yaml'}"
    if (folder / "config.json").is_file():
        return f"make a recipe for that model: fenno init -- vllm serve {folder} > fenno.yaml"
    return "give a recipe's file, or a name from `fenno recipe list`"


def by_words(what: str) -> str:
    """What to do with words that were given for a recipe, by what they look like: an address, a Hub id."""
    if "://" in what:
        return "a server's address is for `fenno loadtest`, `compare` and `soak`; in a recipe it is `engine.url`"
    if re.fullmatch(r"[\w.-]+:[0-9]+(/.*)?", what):
        return f"a server's address is written http://{what}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", what) and not what.endswith((".yaml", ".yml")):
        return f"make a recipe for that model: fenno init -- vllm serve {what} > fenno.yaml"
    return "see `fenno recipe list`"
