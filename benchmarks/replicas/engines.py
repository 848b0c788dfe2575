"""Two real CPU engines as replicas behind the nginx that `fenno export` writes, and what it costs that one of them is killed.

    python benchmarks/replicas/engines.py            # about four minutes on two cores; needs nginx on the path

Each replica is `fenno serve cpu-small --detach`. Streams come through the proxy in a closed loop; in the middle of them every
process of one engine is killed at once. What failed is held against what that engine had in flight, as its own metrics and nginx's
choice say; `fenno serve` starts it again, and a second load test says whether it takes its share again. Writes
results/DATE-engines.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scale import FENNO, host, proxy, ready, recipe

from fenno.engine import http
from fenno.engine.server import claim_port

NAMES = ("replica-a", "replica-b")
USERS, SECONDS, KILL_AFTER = 6, 40, 22
SUCCESS = re.compile(r"^vllm:request_success_total\{.*\} ([\d.e+]+)$", re.MULTILINE)
RUNNING = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([\d.e+]+)$", re.MULTILINE)


def total(port: int, which: re.Pattern[str]) -> int:
    """The sum of the series of an engine."""
    text = http.call(f"http://127.0.0.1:{port}/metrics", timeout=10)
    return round(sum(float(value) for value in which.findall(text)))


@contextlib.contextmanager
def served(name: str) -> Iterator[int]:
    """A real engine, kept up by fenno; its port."""
    port = claim_port(None)
    subprocess.run([*FENNO, "serve", "cpu-small", "--detach", "--name", name, "--port", str(port)], check=True)
    try:
        yield port
    finally:
        subprocess.run([*FENNO, "stop", name], check=True)


def known(name: str) -> dict[str, Any]:
    """What `fenno status` says of a server."""
    done = subprocess.run([*FENNO, "status", "--json"], stdout=subprocess.PIPE, text=True)
    return next(each for each in json.loads(done.stdout)["servers"] if each["name"] == name)


def load(asked: Path, folder: Path, seed: int) -> subprocess.Popen[str]:
    """A load test of `SECONDS`, begun."""
    words = ["loadtest", str(asked), "--users", str(USERS), "--duration", f"{SECONDS}s", "--warmup", "5s", "--seed", str(seed)]
    command = [*FENNO, *words, "--json", "--no-probe", "--out", str(folder / "runs")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def figures(child: subprocess.Popen[str]) -> dict[str, Any]:
    found = json.loads(child.communicate()[0].splitlines()[-1])
    kept = ("valid", "reasons", "requests", "completed", "failures", "qps", "availability", "errors")
    return {name: found[name] for name in kept if name in found}


def shares(ports: list[int], before: list[int]) -> list[int]:
    return [total(port, SUCCESS) - was for port, was in zip(ports, before, strict=True)]


def killed(asked: Path, folder: Path, ports: list[int]) -> dict[str, Any]:
    """A load test in which the first replica is killed."""
    child = load(asked, folder, 2)
    time.sleep(KILL_AFTER)
    mine = [total(port, RUNNING) for port in ports]
    for process in known(NAMES[0])["engine"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], signal.SIGKILL)
    at = time.monotonic()
    found = figures(child)
    while known(NAMES[0])["phase"] != "ready" or not known(NAMES[0])["healthy"]:
        time.sleep(1)
    return {"in flight before": mine, **found, "ready again after, s": round(time.monotonic() - at, 1)}


def main() -> None:
    now, found = datetime.now(timezone.utc), {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(served(name)) for name in NAMES]
        port = stack.enter_context(proxy("nginx", folder, ports))
        ready(port)
        asked = recipe(folder, {"url": f"http://127.0.0.1:{port}"})
        for arm in ("both", "one killed", "both again"):
            before = [total(each, SUCCESS) for each in ports]
            if arm == "one killed":
                found[arm] = killed(asked, folder, ports)
            else:
                found[arm] = {**figures(load(asked, folder, 1)), "answered by each": shares(ports, before)}
            print(arm, found[arm], flush=True)
    path = Path(__file__).with_name("results") / f"{now:%Y-%m-%d}-engines.json"
    document = {"at": now.isoformat(timespec="seconds"), "host": host(), "users": USERS, "seconds": SECONDS, "found": found}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
