"""One recipe as every format needs it: model, flags and variables, secrets, GPUs, what it reads of this host's disk."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from fenno.engine import command, plugin, server
from fenno.engine.catalogue import Catalogue
from fenno.errors import RecipeError, UsageError
from fenno.recipe import Engine, Recipe
from fenno.secret import is_secret
from fenno.serve import keep

SLACK = 15  # seconds that an engine has to end after its last request, before it is killed
SHARED_MEMORY = 16  # GiB that /dev/shm may grow to; what is not used is not taken
WRITTEN = ("download-dir",)  # flags whose folders the engine writes to


@dataclass(frozen=True)
class Secret:
    """A variable whose value is written down nowhere: it comes from `file`, else from the variable `source` of who starts it."""

    variable: str
    file: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Service:
    """`recipe`: with whole paths; `model`: a Hub id or a whole path; `gpus`: 0 on a CPU; `plugin`: whether the engine needs
    fenno's; `version`: of the engine here, None where none was asked."""

    recipe: Recipe
    model: str
    gpus: int
    plugin: bool
    version: str | None = None

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def label(self) -> str:
        """The name for what takes no dots and no leading digit: compose projects, Kubernetes objects."""
        words = re.sub(r"[^a-z0-9]+", "-", self.name).strip("-")[:50].strip("-")
        return words if words[:1].isalpha() else f"vllm-{words}"

    @property
    def port(self) -> int:
        return command.port(self.recipe.engine.flags) or command.PORT

    @property
    def grace(self) -> int:
        """Seconds for the requests in flight at the end."""
        return int(str(keep.flags(self.recipe)["shutdown-timeout"]))

    @property
    def stop_after(self) -> int:
        """Seconds after which an engine that was asked to end is killed."""
        return self.grace + SLACK

    @property
    def start_after(self) -> int:
        """Seconds that a start may take."""
        return math.ceil(self.recipe.engine.ready_timeout)

    @property
    def secrets(self) -> tuple[Secret, ...]:
        engine = self.recipe.engine
        named = {name: Secret(name, source=name) for name in engine.unwritten}
        if engine.api_key_file or engine.api_key_env:
            file = str(Path(engine.api_key_file).expanduser().absolute()) if engine.api_key_file else None
            named[command.KEY_VARIABLE] = Secret(command.KEY_VARIABLE, file, engine.api_key_env)
        return tuple(named.values())

    @property
    def paths(self) -> dict[str, bool]:
        """What the model and the flags name of this host's disk, and whether the engine writes there. Variables are not looked at:
        theirs may mean something else elsewhere."""
        named = [(self.model, False)] if Path(self.model).is_dir() else []
        for flag, value in self.recipe.engine.flags.items():
            texts = value if isinstance(value, list) else [value]
            named += [(path, flag in WRITTEN) for text in texts if isinstance(text, str) for path in _paths(text)]
        return dict(named)

    def command(
        self,
        executable: str = "vllm",
        distribution: str = "vllm",
        *,
        host: str | None = None,
        plugin_at: str | None = None,
        config: str | None = None,
    ) -> command.Command:
        """What to run, without its secrets. `host`: to listen on, where it is not the recipe's; `plugin_at`: the plugin's folder,
        where it will be; `config`: the file that holds `keys`."""
        made = command.serve(
            self.recipe,
            executable=executable,
            distribution=distribution,
            model=self.model,
            port=self.port,
            flags=self.flags if host is None else {**self.flags, "host": host},
            env=self._plugin_env(plugin_at) if self.plugin and plugin_at else {},
            config=config,
        )
        return command.Command(made.argv, {key: value for key, value in made.env.items() if not is_secret(key, value or "")})

    def arguments(self, host: str) -> list[str]:
        """The same after `vllm serve`, for an image, where it listens on `host`."""
        argv = self.command(host=host).argv
        return list(argv[argv.index("serve") + 1 :])

    @property
    def flags(self) -> dict[str, Any]:
        """The flags that are laid over the recipe's: what `fenno serve` would give too."""
        return {**keep.flags(self.recipe), **plugin.steering(self.recipe.engine)}

    def keys(self) -> dict[str, Any]:
        """Model and flags as keys of a file for `vllm serve --config`."""
        return command.config(self.recipe, model=self.model, port=self.port, flags=self.flags)

    def _plugin_env(self, folder: str) -> dict[str, str]:
        """The variables under which the engine finds the plugin, beside what the recipe itself puts there."""
        given = self.recipe.engine.variables
        behind, allowed = given.get("PYTHONPATH"), given.get("VLLM_PLUGINS")
        named = {"VLLM_PLUGINS": f"{allowed},fenno"} if allowed and "fenno" not in allowed.split(",") else {}
        return {"PYTHONPATH": f"{folder}:{behind}" if behind else folder, **named}


def of(recipe: Recipe, known: Catalogue | None = None, gpus: int | None = None) -> Service:
    """The service of a recipe. `known`: the engine here, whose flags are checked then; `gpus`: where the recipe's are not meant.

    Raises `RecipeError` for what no format can express.
    """
    _exportable(recipe.engine)
    recipe = absolute(recipe)
    model = server.model_path(recipe)
    needed = bool(plugin.steering(recipe.engine)) or plugin.brings(model)
    count = _gpus(recipe, known) if gpus is None else gpus
    service = Service(recipe, model, count, needed, known.engine.version if known else None)
    if known:
        known.check({**recipe.engine.flags, **service.flags}, recipe.name)
    return service


def _exportable(engine: Engine) -> None:
    if engine.model is None:
        raise RecipeError("this recipe's engine is started by somebody else", "there is only `engine.model` to export")
    if engine.flags.get("ssl-certfile"):
        raise RecipeError("an export's probes speak plain HTTP, which `ssl-certfile` ends", "let a proxy in front speak TLS")


def absolute(recipe: Recipe) -> Recipe:
    """The same recipe with whole paths in place of those from the current folder: its model's, and flags' that are there."""
    engine = recipe.engine
    model = str(Path(engine.model).absolute()) if engine.model and Path(engine.model).is_dir() else engine.model
    flags = {name: [*map(_whole, v)] if isinstance(v, list) else _whole(v) for name, v in engine.flags.items()}
    return recipe.model_copy(update={"engine": engine.model_copy(update={"model": model, "flags": flags})})


def _whole(value: Any) -> Any:
    return str(Path(value).absolute()) if isinstance(value, str) and "/" in value and _there(value) else value


def _paths(text: str) -> Iterator[str]:
    """The whole paths in a flag's value that this host has: alone, as NAME=PATH, or inside JSON."""
    yield from (path for path in re.findall(r"""(?:^|(?<=[\s"'=,:]))/[^\s"',]+""", text) if _there(path))


def _there(path: str) -> bool:
    with contextlib.suppress(OSError):  # JSON is too long for a name
        return Path(path).exists()
    return False


def _gpus(recipe: Recipe, known: Catalogue | None) -> int:
    """How many it needs: of a recipe that does not say, what the engine was built for says whether any."""
    return 0 if recipe.host.gpus is None and known and known.platform == "cpu" else recipe.gpus


def image(service: Service, given: str | None) -> str:
    """The image that was given, or the one of the engine's own version. Raises `UsageError` for a version that has none."""
    if given or service.version is None:
        return given or ""
    version = Version(service.version)
    if version.is_prerelease:  # nightly builds too
        raise UsageError(f"vLLM {version} is no release: no image has its number", "name one that has it: --image REPOSITORY:TAG")
    return f"vllm/vllm-openai{'' if service.gpus else '-cpu'}:v{version.public}"


def from_files(secrets: tuple[Secret, ...], folder: str) -> list[str]:
    """What to put in front of a command so that it finds each secret in its variable, from the file of that name in `folder`, which
    the shell expands. An empty one ends the start: an engine whose key is empty asks nobody for one."""
    names = " ".join(secret.variable for secret in secrets)
    each = f'value=$(cat "{folder}/$name"); : "${{value:?$name is empty}}"; export "$name=$value"'
    return _script(f"for name in {names}; do {each}; done") if secrets else []


def not_empty(secrets: tuple[Secret, ...]) -> list[str]:
    """What to put in front of a command whose secrets are in its variables already."""
    tested = " ".join(f'"${{{secret.variable}:?is empty}}"' for secret in secrets)
    return _script(f": {tested}") if secrets else []


def _script(before: str) -> list[str]:
    return ["/bin/sh", "-euc", f'{before}; exec "$@"', "sh"]
