"""A load test on several hosts: what master and workers tell each other, and a plan as each host can follow it. Pure but for files.

Messages go over locust's own connection, which nobody encrypts: neither API keys nor the values of headers are sent.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from fenno.errors import UsageError
from fenno.load import plan as plans
from fenno.load.plan import Plan

KIND = "fenno"  # locust's name for all of these messages
PORT = 5557  # locust's own
SUFFIX = r"\.\w+"  # of a file that is sent
TICK = 0.05  # seconds between two looks
PATIENCE = 15  # seconds without a word, counted while this process itself goes on: shared hosts stand still now and then
ALONE = 71  # exit code of a worker whose master is gone


def given(plan: Plan) -> dict[str, Path]:
    """The files that a plan speaks of, by the name that a worker gives its copy: with their suffix where `keep` takes it."""
    named = {"prompts": plan.workload.prompts, "trace": plan.workload.trace, "ca_file": plan.ca_file}
    files = {name: Path(path) for name, path in named.items() if path}
    return {name + (path.suffix if re.fullmatch(SUFFIX, path.suffix) else ""): path for name, path in files.items()}


def keep(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the copies into a worker's folder. Raises `UsageError` for a name that no plan gives, `OSError`."""
    for name, content in files.items():
        if not re.fullmatch(rf"(prompts|trace|ca_file)({SUFFIX})?", name):
            raise UsageError(f"the master sends a file called {name!r}", "is it one that you know?")
        (folder / name).write_bytes(content)


def mine(text: str, folder: Path, headers: Sequence[str], key: str | None, host: str, to: str | None = None) -> Plan:
    """The plan that the master sent, as a worker can follow it: its files lie in `folder`, and headers and the API key are this
    host's own. `host`: the master, as this worker reaches it; `to`: the only address that traffic may go to. Raises `UsageError`
    for what this host was not given, or does not send to where the traffic goes."""
    plan = plans.parse(text, {})
    if missing := sorted(set(json.loads(text)["headers"]) - set(headers)):
        raise UsageError(f"the load test sends the header {missing[0]}, and this worker has none", "give it --header as well")
    if plan.api_key_env and not key:
        raise UsageError("the load test sends an API key, and this worker has none", "give it --api-key-env as well")
    url = seen(plan.url, host)
    if to is not None and to.rstrip("/") != url.rstrip("/"):
        raise UsageError(f"the load test goes to {url}, and this worker's to {to}", "give both the same address")
    if to is None and (key or headers) and not safe(url, host):
        hint = "name that address to this worker too, if you mean it, or have the master name an https:// address"
        raise UsageError(f"the load test goes to {url}, and this worker's key and headers do not go there in plain text", hint)
    copies = {Path(name).stem: str(folder / name) for name in given(plan)}
    workload = plan.workload.model_copy(update={name: copies[name] for name in ("prompts", "trace") if name in copies})
    return replace(plan, url=url, workload=workload, api_key_env=key, ca_file=copies.get("ca_file"))


def seen(url: str, host: str) -> str:
    """The master's address of the server as a worker sees it: what is on the master itself is there for the others too."""
    parts = urlsplit(url)
    if not _loopback(parts.hostname or "") or _loopback(host):
        return url
    shown = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{shown}:{parts.port}" if parts.port else shown))


def safe(url: str, host: str) -> bool:
    """Whether a key may be sent there: nobody reads it on the way, or it does not go farther than to the master."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname == host.lower() or _loopback(parts.hostname or "")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
