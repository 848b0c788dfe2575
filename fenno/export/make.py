"""One export as it is asked for: which format, for which host, with what beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fenno import units
from fenno.engine import catalogue, plugin, server
from fenno.errors import RecipeError, UsageError
from fenno.export import alerts, compose, grafana, kubernetes, replicas, service, systemd, text
from fenno.export.service import Service
from fenno.recipe import Recipe

# What each format is written as, after the recipe's name.
FORMATS = {
    "systemd": ".service",
    "compose": ".compose.yaml",
    "k8s": ".k8s.yaml",
    "vllm-config": ".vllm.yaml",
    "prometheus": ".rules.yaml",
    "grafana": ".dashboard.json",
    "nginx": ".nginx.conf",
    "vllm-router": ".router.sh",
}
PROXIES = ("nginx", "vllm-router")
OPTIONS = {
    "image": ("compose", "k8s"),
    "gpus": ("compose", "k8s"),
    "claim": ("k8s",),
    "monitor": ("k8s",),
    "user": ("systemd",),
    "replica": PROXIES,
    "listen": PROXIES,
}
PLUGIN = "plugin"  # the folder beside the file


@dataclass(frozen=True)
class Asked:
    """`to`: one of `FORMATS`. What is None, False or empty was not given."""

    to: str
    user: str | None = None
    image: str | None = None
    gpus: int | None = None
    claim: str | None = None
    monitor: bool = False
    replica: tuple[str, ...] = ()
    listen: str | None = None

    def check(self) -> None:
        """Raise `UsageError` for a format that there is not, or an option that goes with another."""
        if self.to not in FORMATS:
            raise UsageError(f"--to is {self.to!r}", f"it has to be one of {', '.join(FORMATS)}")
        for option, formats in OPTIONS.items():
            given = getattr(self, option)
            if given not in (None, False, ()) and self.to not in formats:
                raise UsageError(f"--{option} says nothing to {self.to}", f"it goes with --to {' or '.join(formats)}")


def make(recipe: Recipe, asked: Asked, file: Path | None, user: str, say: Callable[[str], None]) -> str:
    """The text of one export. `file`: where it will be, None for standard output; `user`: who asks. Puts the plugin beside `file`
    where the engine needs it as a folder."""
    asked.check()
    known = _engine(recipe, asked, say)
    made = service.of(recipe, known, asked.gpus)
    if asked.to == "prometheus":
        return alerts.text(made)
    if asked.to == "grafana":
        return grafana.text(made)
    if asked.to in PROXIES:
        return _proxy(made, asked)
    _usable(made, asked)
    if asked.to == "k8s":
        image, files = service.image(made, asked.image), _plugin_files(made)
        own = asked.image is not None
        return kubernetes.text(made, image, claim=asked.claim, own_image=own, plugin=files, monitor=asked.monitor)
    beside = _plugin(made, file)
    if asked.to == "compose":
        return compose.text(made, service.image(made, asked.image))
    assert known is not None
    if asked.to == "systemd":
        return systemd.unit(made, known.engine.executable, known.engine.distribution, user=asked.user or user, plugin_at=beside)
    return _config(made, known.engine, file, beside)


def _engine(recipe: Recipe, asked: Asked, say: Callable[[str], None]) -> catalogue.Catalogue | None:
    """The engine here, where the export is for it or for an image of its version."""
    if recipe.engine.model is None or asked.to in ("prometheus", "grafana", *PROXIES):
        return None
    if asked.image:
        say(f"flags are not checked: fenno does not know which vLLM is in {asked.image}")
        return None
    return catalogue.read(catalogue.interpreter(recipe.engine.python), say)


def _proxy(made: Service, asked: Asked) -> str:
    """What stands in front of the replicas. Raises `UsageError` for none, or for what is no address."""
    behind = replicas.addresses(asked.replica, made.port)
    listen = units.address(asked.listen or replicas.LISTEN, made.port)
    return (replicas.nginx if asked.to == "nginx" else replicas.script)(made, behind, listen)


def _usable(made: Service, asked: Asked) -> None:
    """Raise `RecipeError` for a folder that is not here and has to be, and for patches that are here alone."""
    if made.recipe.engine.patches and not asked.image and asked.to in OPTIONS["image"]:
        raise RecipeError("vLLM's own image has none of this recipe's patches", "name one that has them: --image REPOSITORY:TAG")
    elsewhere = asked.to == "k8s" and (asked.claim or asked.image) and made.model.startswith("/")
    if not elsewhere:
        server.check_model(made.recipe)


def _plugin(made: Service, file: Path | None) -> str:
    """Put the plugin beside `file`; returns where it is, or would be."""
    if not made.plugin:
        return ""
    if file is None:
        raise UsageError("this recipe's engine needs fenno's plugin, a folder beside the file", "say where: -o DIR")
    return str(plugin.install(file.parent / PLUGIN))


def _plugin_files(made: Service) -> dict[str, str]:
    if not made.plugin:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        return kubernetes.plugin_files(plugin.install(Path(folder)))


def _config(made: Service, engine: catalogue.Identity, file: Path | None, plugin_at: str) -> str:
    """Keys for `vllm serve --config`; the variables that go with them stand at the top, since such a file has none."""
    name = str(file.resolve()) if file else f"{made.name}{FORMATS['vllm-config']}"
    line = made.command(engine.executable, engine.distribution, plugin_at=plugin_at, config=name)
    secrets = [f"It has to find {', '.join(each.variable for each in made.secrets)} in its environment."] if made.secrets else []
    return text.head(made, line.shell(), *secrets) + text.dumped(made.keys())
