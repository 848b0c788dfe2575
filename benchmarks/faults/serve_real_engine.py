"""Kills the parts of `fenno serve` on the real CPU engine, and ends it with 200 requests in flight; says what was left or lost.

usage: serve_real_engine.py kills|worker|drain    (fenno and its engine under this Python; at most three minutes each)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

IN_FLIGHT, TOKENS = 200, 300


def start(folder: Path, recipe: str = "cpu-small") -> tuple[subprocess.Popen[bytes], Path]:
    said = folder / "said"
    with said.open("ab") as output:
        argv = [sys.executable, "-m", "fenno", "serve", recipe, "--name", "faults"]
        return subprocess.Popen(argv, stderr=output), said


def until(there: Callable[[], object], within: float = 120.0) -> float:
    began = time.monotonic()
    while not there():
        if time.monotonic() - began > within:
            sys.exit("it never came so far")
        time.sleep(0.05)
    return time.monotonic() - began


def ready(said: Path, times: int) -> str:
    until(lambda: said.read_text().count("ready after") >= times or "not started again" in said.read_text())
    if "not started again" in said.read_text():
        sys.exit(said.read_text())
    return said.read_text().rpartition("ready after")[2].split()[2]


def parts(fenno: int) -> dict[str, psutil.Process]:
    """The guard, the API server and the engine core below a `fenno serve`."""
    found = {}
    for process in psutil.Process(fenno).children(recursive=True):
        line = " ".join(process.cmdline())
        names = {"guard.py": "guard", "launch.py serve": "API server", "EngineCore": "core", "VLLM::Worker": "worker"}
        found.setdefault(next((name for words, name in names.items() if words in line), ""), process)
    return found


def alive(processes: list[psutil.Process]) -> int:
    return sum(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def kills(folder: Path) -> None:
    popen, said = start(folder)
    ready(said, 1)
    print("| kill -9 of | reported after | cause that was named | processes before | left of them | ready again after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, name in enumerate(("API server", "core", "guard"), 1):
        there = parts(popen.pid)
        before = psutil.Process(popen.pid).children(recursive=True)
        there[name].kill()
        began = time.monotonic()
        reported = until(lambda n=number: said.read_text().count("starting it again") >= n)
        left = alive(before)
        cause = said.read_text().rpartition("starting it again")[2].partition("(")[2].partition(";")[0]
        ready(said, number + 1)
        print(f"| {name} | {reported:.1f} s | {cause} | {len(before)} | {left} | {time.monotonic() - began:.0f} s |", flush=True)
    before = psutil.Process(popen.pid).children(recursive=True)
    popen.kill()
    gone = until(lambda: alive(before) == 0, 30.0)
    print(f"| fenno | | | {len(before)} | {alive(before)} after {gone:.1f} s | |")
    shown = subprocess.run(
        [sys.executable, "-m", "fenno", "status", "faults", "--json"], capture_output=True, text=True, check=False
    )
    print(f"\nfenno status: exit code {shown.returncode}, {json.loads(shown.stdout)['servers'][0]['phase']}")
    print(subprocess.run([sys.executable, "-m", "fenno", "stop", "faults"], capture_output=True, text=True, check=False).stderr)


def worker(folder: Path) -> None:
    """The same with the model cut in two, so that there are workers; one of them is killed."""
    shown = subprocess.run(
        [sys.executable, "-m", "fenno", "recipe", "show", "cpu-small"], capture_output=True, text=True, check=True
    )
    recipe = folder / "two.yaml"
    recipe.write_text(shown.stdout.replace("  flags:\n", "  flags:\n    tensor-parallel-size: 2\n"))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    popen, said = start(folder, str(recipe))
    ready(said, 1)
    before = psutil.Process(popen.pid).children(recursive=True)
    parts(popen.pid)["worker"].kill()
    reported = until(lambda: "starting it again" in said.read_text())
    cause = said.read_text().rpartition("starting it again")[2].partition("(")[2].partition(";")[0]
    print(f"| a worker | {reported:.1f} s | {cause} | {len(before)} | {alive(before)} | |")
    popen.send_signal(signal.SIGTERM)
    popen.wait(60)
    print(f"ended by SIGTERM during the next start: {len(psutil.Process().children(recursive=True))} processes left")


def ask(url: str, model: str) -> int:
    """How many tokens were answered."""
    body = {"model": model, "prompt": "a word", "max_tokens": TOKENS, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def in_flight(url: str) -> int:
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(x.split()[-1])) for x in lines if x.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
    )


def drain(folder: Path) -> None:
    popen, said = start(folder)
    url = ready(said, 1)
    with urllib.request.urlopen(f"{url}/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    before = psutil.Process(popen.pid).children(recursive=True)
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        answers = [pool.submit(ask, url, model) for _ in range(IN_FLIGHT)]
        until(lambda: in_flight(url) == IN_FLIGHT or any(answer.done() for answer in answers))
        at = in_flight(url)
        popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        complete = sum(not answer.exception() and answer.result() == TOKENS for answer in answers)
        answered = time.monotonic() - began
    code = popen.wait(180)
    errors = sorted({type(answer.exception()).__name__ for answer in answers if answer.exception()})
    print(f"{at} in flight at SIGTERM: {complete} of {IN_FLIGHT} answered completely, the last after {answered:.1f} s {errors}")
    print(f"exit code {code}, everything ended after {time.monotonic() - began:.1f} s, {alive(before)} processes left")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        {"kills": kills, "worker": worker, "drain": drain}[sys.argv[1]](Path(place))
