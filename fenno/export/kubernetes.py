"""Kubernetes objects: a Deployment, its Service, the plugin as a ConfigMap, and what Prometheus's operator reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fenno.errors import UsageError
from fenno.export import alerts
from fenno.export.compose import PLUGIN, escaped
from fenno.export.service import SHARED_MEMORY, Service, not_empty
from fenno.export.text import dumped, head

CACHE = "/root/.cache"
AWAY = 5  # seconds until no more requests are sent to a pod that ends; its engine refuses them by then
EVERY = 5  # seconds between probes


def text(service: Service, image: str, *, claim: str | None, own_image: bool, plugin: Mapping[str, str], monitor: bool) -> str:
    """All objects in one file. `claim`: the PersistentVolumeClaim with the model, or for downloads; `plugin`: path -> text of its
    files; `monitor`: with a PodMonitor and the alert rules, which need Prometheus's operator.

    Raises `UsageError` where the pods would not have what the recipe names of this host's disk.
    """
    _readable(service, claim=claim, own_image=own_image)
    objects = [
        *([_config_map(service, plugin)] if plugin else []),
        _deployment(service, image, claim, plugin),
        _service(service),
        *([_pod_monitor(service), _rules(service)] if monitor else []),
    ]
    return head(service, *_steps(service, claim)) + dumped(*objects)


def _readable(service: Service, *, claim: str | None, own_image: bool) -> None:
    if own_image:
        return
    if service.model.startswith("/") and not claim:
        hint = "put the folder on a PersistentVolumeClaim and name it: --claim NAME; or name an --image with the model there"
        raise UsageError(f"pods cannot read {service.model} of this host", hint)
    others = [path for path in service.paths if path != service.model]
    if others:
        raise UsageError(f"pods cannot read {others[0]} of this host, which a flag names", "name an --image that holds it there")


def _steps(service: Service, claim: str | None) -> Iterator[str]:
    yield f"kubectl apply --filename {service.name}.k8s.yaml"
    if service.secrets:
        names = " ".join(f"--from-literal={each.variable}=..." for each in service.secrets)
        yield f"Before that: kubectl create secret generic {service.label} {names}"
    if not claim:
        yield "Every new pod downloads the model again; --claim NAME keeps it on a PersistentVolumeClaim."


def _meta(service: Service, kind: str = "") -> dict[str, Any]:
    return {"name": f"{service.label}{kind}", "labels": {"app.kubernetes.io/name": service.label}}


def _deployment(service: Service, image: str, claim: str | None, plugin: Mapping[str, str]) -> dict[str, Any]:
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": AWAY + service.stop_after,
        "containers": [_container(service, image, claim, plugin)],
        "volumes": [*_volumes(service, claim, plugin)],
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]} if service.gpus else {}),
    }
    spec = {
        "replicas": 1,
        # A second pod beside the first would wait for GPUs that the first one holds.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "progressDeadlineSeconds": service.start_after + 600,
        "selector": {"matchLabels": {"app.kubernetes.io/name": service.label}},
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": service.label}}, "spec": pod},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _meta(service), "spec": spec}


def _container(service: Service, image: str, claim: str | None, plugin: Mapping[str, str]) -> dict[str, Any]:
    made = service.command(plugin_at=PLUGIN)
    return {
        "name": "vllm",
        "image": image,
        "command": [escaped(word) for word in (*not_empty(service.secrets), "vllm", "serve")],
        "args": [escaped(word) for word in service.arguments("0.0.0.0")],
        "env": [
            *({"name": key, "value": escaped(value)} for key, value in made.env.items() if value is not None),
            *({"name": each.variable, "valueFrom": _secret(service, each.variable)} for each in service.secrets),
        ],
        "ports": [{"name": "http", "containerPort": service.port}],
        "resources": _resources(service),
        **_probes(service),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(AWAY)]}}},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": CACHE},
            *([{"name": "model", "mountPath": service.model, "readOnly": True}] if claim and service.model.startswith("/") else []),
            *([{"name": "plugin", "mountPath": PLUGIN, "readOnly": True}] if plugin else []),
        ],
    }


def _secret(service: Service, key: str) -> dict[str, Any]:
    return {"secretKeyRef": {"name": service.label, "key": key}}


def _resources(service: Service) -> dict[str, Any]:
    memory = service.recipe.host.memory
    requests = {"memory": str(memory)} if memory else {}
    return {"requests": requests, **({"limits": {"nvidia.com/gpu": str(service.gpus)}} if service.gpus else {})}


def _probes(service: Service) -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": EVERY, "timeoutSeconds": EVERY}
    return {
        "startupProbe": {**health, "failureThreshold": math.ceil(service.start_after / EVERY)},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": max(3, math.ceil(service.recipe.serve.hang / EVERY))},
    }


def _volumes(service: Service, claim: str | None, plugin: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY}Gi"}}
    local = service.model.startswith("/")
    yield {"name": "cache", **({"emptyDir": {}} if local or not claim else {"persistentVolumeClaim": {"claimName": claim}})}
    if local and claim:
        yield {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    if plugin:
        items = [{"key": _key(path), "path": path} for path in plugin]
        yield {"name": "plugin", "configMap": {"name": f"{service.label}-plugin", "items": items}}


def _config_map(service: Service, plugin: Mapping[str, str]) -> dict[str, Any]:
    data = {_key(path): content for path, content in plugin.items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(service, "-plugin"), "data": data}


def _key(path: str) -> str:
    """A file's path as a key, which has no slashes."""
    return path.replace("/", "..")


def _service(service: Service) -> dict[str, Any]:
    spec = {
        "selector": {"app.kubernetes.io/name": service.label},
        "ports": [{"name": "http", "port": service.port, "targetPort": "http"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(service), "spec": spec}


def _pod_monitor(service: Service) -> dict[str, Any]:
    spec = {
        "jobLabel": "app.kubernetes.io/name",
        "selector": {"matchLabels": {"app.kubernetes.io/name": service.label}},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
    }
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": _meta(service), "spec": spec}


def _rules(service: Service) -> dict[str, Any]:
    spec = {"groups": [alerts.group(service, service.label)]}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": _meta(service), "spec": spec}


def plugin_files(folder: Path) -> dict[str, str]:
    """The plugin in `folder` as paths below it and their text."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
