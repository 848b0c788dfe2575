"""A compose file: the engine in vLLM's own image, with what it reads of this host's disk where it lies here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fenno.engine import command
from fenno.export.service import SHARED_MEMORY, Secret, Service, from_files
from fenno.export.text import dumped, head

PLUGIN = "/opt/fenno"
SECRETS = "/run/secrets"


def text(service: Service, image: str) -> str:
    """The file. Its plugin, where it needs one, is in the folder `plugin` beside it."""
    lines = [f"docker compose --file {service.name}.compose.yaml up --detach --wait", *_wanted(service)]
    document = {"name": service.label, "services": {"vllm": _vllm(service, image)}, **_top(service)}
    return head(service, *lines) + dumped(document)


def _wanted(service: Service) -> list[str]:
    names = [each.source for each in service.secrets if each.source and not each.file]
    return [f"The shell that starts it has to have {', '.join(names)}."] if names else []


def _vllm(service: Service, image: str) -> dict[str, Any]:
    made = service.command(plugin_at=PLUGIN)
    return {
        "image": image,
        "entrypoint": [escaped(word) for word in (*from_files(service.secrets, SECRETS), "vllm", "serve")],
        "command": [escaped(word) for word in service.arguments("0.0.0.0")],
        "environment": {key: escaped(value) for key, value in made.env.items() if value is not None},
        **({"secrets": [each.variable for each in service.secrets]} if service.secrets else {}),
        "ports": [_published(service)],
        "volumes": _volumes(service),
        # The image's first process would otherwise have to reap what its children leave.
        "init": True,
        "shm_size": f"{SHARED_MEMORY}gb",
        "ulimits": {"memlock": -1, "nofile": 65536, "core": 0},
        "restart": "unless-stopped",
        "stop_grace_period": f"{service.stop_after}s",
        "healthcheck": _healthcheck(service),
        "logging": {"driver": "json-file", "options": {"max-size": "16m", "max-file": "5"}},
        **_devices(service.gpus),
    }


def _published(service: Service) -> str:
    """Where the host listens: where the recipe says. Inside, the engine has to listen to all."""
    host = str(service.recipe.engine.flags.get("host") or "127.0.0.1")
    if host in ("0.0.0.0", "::"):
        return f"{service.port}:{service.port}"
    return f"{command.address({'host': host})}:{service.port}:{service.port}"


def _volumes(service: Service) -> list[Any]:
    """Downloads and compiled kernels outlive the container; a folder that is missing is an error, not an empty folder."""
    named = service.paths
    mounts = {path: (path, not named.get(path, False)) for path in (*named, *_behind(service.model))}
    if service.plugin:
        mounts[PLUGIN] = ("./plugin", True)
    return [
        "cache:/root/.cache",
        *(
            {"type": "bind", "source": source, "target": target, "read_only": locked, "bind": {"create_host_path": False}}
            for target, (source, locked) in mounts.items()
        ),
    ]


def _behind(model: str) -> set[str]:
    """The folders outside a model's own to which its links lead: a downloaded model is a folder of links."""
    folder = Path(model)
    links = [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() else []
    return {str(parent) for path in links if not (parent := path.resolve().parent).is_relative_to(folder)}


def _healthcheck(service: Service) -> dict[str, Any]:
    ask = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{service.port}/health', timeout=5)"
    return {
        "test": ["CMD", "python3", "-c", ask],
        "interval": "10s",
        "timeout": "10s",
        "retries": max(3, math.ceil(service.recipe.serve.hang / 10)),
        "start_period": f"{service.start_after}s",
        "start_interval": "2s",
    }


def _devices(gpus: int) -> dict[str, Any]:
    device = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}} if gpus else {}


def _top(service: Service) -> dict[str, Any]:
    def source(secret: Secret) -> dict[str, str]:
        return {"file": escaped(secret.file)} if secret.file else {"environment": secret.source or secret.variable}

    secrets = {secret.variable: source(secret) for secret in service.secrets}
    return {"volumes": {"cache": {}}, **({"secrets": secrets} if secrets else {})}


def escaped(text: str) -> str:
    """Text in which compose finds no variable. Kubernetes reads the same."""
    return text.replace("$", "$$")
