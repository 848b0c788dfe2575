"""How an engine is started: from a recipe to an argument list and an environment. All but what looks at
fenno's own environment is pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenno.errors import RecipeError
from fenno.recipe import Engine, Recipe, Scalar
from fenno.secret import NAME, WORDS, is_secret

_LAUNCH = str(Path(__file__).parent / "inside" / "launch.py")
DUMMY = "dummy:"
KEY_VARIABLE = "VLLM_API_KEY"
PORT = 8000  # where vLLM listens by itself
Flags = Mapping[str, "Scalar | list[Scalar]"]


@dataclass(frozen=True)
class Command:
    """What to run. `env` is laid over fenno's own environment; nothing secret is ever in `argv`."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)

    def shell(self) -> str:
        """The same as one line for a shell, with the variables in front and secrets left to the shell that runs it."""
        said = {key: value for key, value in self.env.items() if value is not None}
        variables = [f'{key}="${key}"' if is_secret(key, value) else f"{key}={shlex.quote(value)}" for key, value in said.items()]
        return without_secrets(" ".join([*variables, shlex.join(self.argv)]))


def arguments(flags: Flags) -> list[str]:
    """`vllm serve` arguments from flags: true is a switch, false its --no- form, a list is repeated values, null leaves it out."""
    out: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        if value is True:
            out.append(f"--{name}")
        elif value is False:
            out.append(f"--no-{name}")
        elif isinstance(value, list):
            out += [f"--{name}", *map(str, value)]
        else:
            out += [f"--{name}", str(value)]
    return out


def serve(
    recipe: Recipe,
    *,
    executable: str,
    distribution: str,
    model: str,
    port: int,
    flags: Flags | None = None,
    env: Mapping[str, str | None] | None = None,
    config: str | None = None,
) -> Command:
    """The command that serves `recipe` on `port`.

    `flags` are laid over the recipe's own (a null removes one), `env` over its variables. `model` is what vLLM is told to load:
    the recipe's, or the folder of a dummy model. The server listens on 127.0.0.1 unless the recipe's flags say otherwise.
    `config`: a file that holds model and flags as `config` makes them, so that they are not on the command line.
    """
    start = [executable, _LAUNCH] if distribution != "vllm" else [executable, "-m", "vllm.entrypoints.cli.main"]
    # A variable that the recipe leaves to whoever runs fenno is theirs, even one of these.
    quiet = {name: value for name, value in _quiet(model).items() if name not in recipe.engine.env}
    variables = {**quiet, **recipe.engine.variables, **(env or {})}
    told = ["--config", config] if config else [model, *arguments(_flags(recipe, port, flags))]
    return Command((*start, "serve", *told), variables)


def config(recipe: Recipe, *, model: str, port: int, flags: Flags | None = None) -> dict[str, Any]:
    """The same model and flags as keys of a YAML file for `vllm serve --config`.

    A switch that is off is written by its `no-` form: vLLM's reader drops a false whose form it does not know, and it asks the
    parser of `vllm`, which has none of the flags of `vllm serve`.
    """
    named = _flags(recipe, port, flags).items()
    keys = {f"no-{name}" if value is False else name: value is False or value for name, value in named if value is not None}
    return {"model": model, **keys}


def _flags(recipe: Recipe, port: int, flags: Flags | None) -> dict[str, Any]:
    """The recipe's flags with `flags` laid over them, and where the server listens."""
    trusted = {"trust-remote-code": True} if recipe.engine.trust_remote_code else {}
    return {"host": "127.0.0.1", **recipe.engine.flags, **(flags or {}), "port": port, **trusted}


def address(flags: Flags) -> str:
    """Where a server with these flags is reached from this host: 127.0.0.1, unless it listens on one other address alone."""
    host = str(flags.get("host") or "127.0.0.1")
    if host in ("0.0.0.0", "::", "localhost"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def port(flags: Flags) -> int | None:
    """The port that the flags name, if any. Raises `RecipeError` for what is no number."""
    named = flags.get("port")
    try:
        return int(str(named)) if named else None
    except ValueError as error:
        raise RecipeError(f"the flag `port` is {named!r}", "it has to be a number from 1 to 65535") from error


def api_key(engine: Engine) -> str | None:
    """The key that requests need; None where there is none. Raises `RecipeError` for one that was promised and is not there."""
    if engine.api_key_file:
        path = Path(engine.api_key_file).expanduser()
        try:
            key = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"the API key cannot be read from {path}: {error}", "the file holds the key alone") from error
        if not key or any(letter.isspace() for letter in key):
            raise RecipeError(f"{path} does not hold one API key", "it has to be the key alone, on one line")
        return key
    if engine.api_key_env and not os.environ.get(engine.api_key_env):
        raise RecipeError(f"the environment variable {engine.api_key_env} is not set", "it should hold the API key")
    return os.environ[engine.api_key_env] if engine.api_key_env else None


def check_inherited(engine: Engine) -> None:
    """Raise `RecipeError` where a variable is to be inherited, and is not there."""
    if missing := next((name for name, value in engine.env.items() if value is None and name not in os.environ), None):
        raise RecipeError(
            f"the environment variable {missing} is not set", f"`engine.env` leaves it to who runs fenno: export {missing}=..."
        )


def key_variable(engine: Engine) -> str | None:
    """The variable by which a child process gets the key; one from a file is put there first, for this process's children."""
    if engine.api_key_file:
        os.environ[KEY_VARIABLE] = api_key(engine) or ""
        return KEY_VARIABLE
    return engine.api_key_env


def _quiet(model: str) -> dict[str, str | None]:
    """No usage statistics are sent, and a model in a folder never asks the network."""
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    return {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **offline}


def without_secrets(command: str) -> str:
    """A command with its secrets left to the shell that runs it: HF_TOKEN=abc becomes HF_TOKEN="$HF_TOKEN"."""
    value = r"""(?:'[^']*'(?:"'"'[^']*')*|\S+)"""
    command = re.sub(rf"(?<![\w-])({NAME})={value}", r'\1="$\1"', command)
    flag = rf"(--(?:[\w-]+[-_])?((?i:{WORDS})))([ =])(?!--){value}"
    return re.sub(flag, lambda found: f'{found[1]}{found[3]}"${found[2].upper()}"', command)
