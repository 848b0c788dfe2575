"""How much more two replicas hold than one, behind what `fenno export --to nginx` and `--to vllm-router` write.

    python benchmarks/replicas/scale.py              # all arms, about six minutes; nginx and vllm-router on the path
    python benchmarks/replicas/scale.py two-nginx    # one of them; the others' figures stay in today's file

A replica is the stub engine of the tests: a step takes 20 ms by the clock and holds 8 requests of 16 tokens, so that one replica
answers 25 requests a second at most and neither of two takes the processor from the other. What is measured is therefore the proxy:
whether it shares the load evenly enough that two queues hold what twice one queue holds. Of each arm there are two load tests:
saturated (32 users a replica, closed loop), which gives the requests a second that it answers, and at 16 requests a second and
replica (open loop, Poisson), which gives the first-token time at two thirds of what it can do.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from fenno.engine import http
from fenno.engine.server import claim_port

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "stub" / "engine.py"
FENNO = [sys.executable, "-m", "fenno"]
COSTS = {"STUB_BASE_MS": "20", "STUB_REQUEST_MS": "0", "STUB_TOKEN_MS": "0"}
ARMS = {"one": (1, None), "one-nginx": (1, "nginx"), "two-nginx": (2, "nginx"), "two-vllm-router": (2, "vllm-router")}
LOADS = {"saturated": ("--users", 32), "at 16 a replica": ("--rate", 16)}
TRIES = 6  # a busy host spoils a window now and then; what is INVALID is measured again
RECIPE: dict[str, Any] = {
    "name": "replicas",
    "workload": {"classes": [{"name": "one", "share": 1, "prompt_tokens": 64, "output_tokens": 16}]},
}


def ready(port: int) -> None:
    """Wait until somebody answers; a minute at most."""
    for _ in range(600):
        with contextlib.suppress(http.Refused):
            http.call(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        time.sleep(0.1)
    sys.exit(f"nobody answers at port {port}")


@contextlib.contextmanager
def running(argv: list[str], port: int, **env: str) -> Iterator[int]:
    child = subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready(port)
        yield port
    finally:
        child.terminate()
        child.wait()


def replica() -> contextlib.AbstractContextManager[int]:
    port = claim_port(None)
    words = ["serve", "model", "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "8"]
    return running([sys.executable, str(STUB), *words], port, **COSTS)


def recipe(folder: Path, engine: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "engine": engine}))
    return path


def proxy(name: str, folder: Path, ports: list[int]) -> contextlib.AbstractContextManager[int]:
    """nginx or vllm-router, from the export's own file."""
    port = claim_port(None)
    behind = [word for each in ports for word in ("--replica", f"127.0.0.1:{each}")]
    made = [*FENNO, "export", str(recipe(folder, {"model": "org/model"})), "--to", name, "--listen", f"127.0.0.1:{port}", *behind]
    text = subprocess.run(made, check=True, capture_output=True, text=True).stdout
    if name != "nginx":
        return running(["sh", "-c", text], port)
    (folder / "replicas.conf").write_text(text)
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
        f" http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;"
        f" fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; include {folder}/replicas.conf; }}"
    )
    return running(["nginx", "-p", str(folder), "-c", str(conf)], port)


def measure(arm: str) -> dict[str, Any]:
    """What one arm answers, and how soon."""
    count, name = ARMS[arm]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [stack.enter_context(replica()) for _ in range(count)]
        port = stack.enter_context(proxy(name, folder, ports)) if name else ports[0]
        asked = recipe(folder, {"url": f"http://127.0.0.1:{port}"})
        return {load: loaded(asked, folder, [option, str(count * value)]) for load, (option, value) in LOADS.items()}


def loaded(asked: Path, folder: Path, how: list[str]) -> dict[str, Any]:
    """The figures of one load test."""
    words = ["loadtest", str(asked), *how, "--duration", "30s", "--json", "--no-probe", "--out", str(folder / "runs")]
    tries, found = 0, {"valid": False}
    while not found["valid"] and tries < TRIES:
        # Arrivals that are not level by chance would not be so again.
        done = subprocess.run([*FENNO, *words, "--seed", str(tries + 1)], stdout=subprocess.PIPE, text=True)
        tries, found = tries + 1, json.loads(done.stdout.splitlines()[-1])
    kept = ("valid", "reasons", "requests", "completed", "failures", "qps", "ttft")
    return {"tries": tries, **{name: found[name] for name in kept if name in found}}


def host() -> dict[str, Any]:
    """What runs this."""
    ask = "import importlib.metadata as m; print(m.version('vllm-router'))"
    router = Path(shutil.which("vllm-router") or "/nowhere").with_name("python")
    version = subprocess.run([router, "-c", ask], capture_output=True, text=True).stdout if router.exists() else ""
    nginx = subprocess.run(["nginx", "-v"], capture_output=True, text=True).stderr if shutil.which("nginx") else ""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "locust": importlib.metadata.version("locust"),
        "nginx": nginx.strip().rpartition("/")[2],
        "vllm-router": version.strip(),
    }


def main(arms: list[str]) -> None:
    now = datetime.now(timezone.utc)
    path = Path(__file__).with_name("results") / f"{now:%Y-%m-%d}.json"
    known = json.loads(path.read_text()) if path.exists() else {"host": host(), "arms": {}}
    for arm in arms or list(ARMS):
        known["arms"][arm] = {"at": datetime.now(timezone.utc).isoformat(timespec="seconds"), **measure(arm)}
        path.write_text(json.dumps(known, indent=1) + "\n")
        print(arm, known["arms"][arm], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
