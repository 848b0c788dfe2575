"""fenno's Grok beside vLLM 0.24's own, in tokens a second: all engines on one GPU at once, of which one works at a time.

usage: python benchmarks/grok/throughput.py RESULTS [--python PY] [--site26 DIR] [--quantization fp8] [--seconds S] [--start S]
           [--only own|fenno|fenno-0.26 ...] [--small]

PY: an interpreter with vLLM 0.24. DIR: a folder with vLLM 0.26, laid before what PYTHONPATH has; where there is none that engine
is left out. `--seconds`: for the rounds, `--start`: for the starts, after which it goes on with the engines that are up.
`--small`: a rehearsal with a tiny model, on a CPU too. RESULTS gets throughput.json, written anew after each round, and the log of
each engine.

Run it with fenno. The model is `dummy:grok2-12b`, its weights random. In each round each engine does each workload once, and
every second round has the engines in the other order; before the first, each does each once, uncounted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fenno import machine
from fenno.engine import dummy, plugin
from fenno.vllm_plugin import grok_versions

SIDES = ("own", "fenno", "fenno-0.26")
BAR = 0.95
GIB = 2**30
WORKLOADS = {
    "mixed": {"sequences": 256, "prompt": 512, "answer": 128},
    "prompts": {"sequences": 128, "prompt": 960, "answer": 1},
    "answers": {"sequences": 256, "prompt": 32, "answer": 256},
    "few": {"sequences": 8, "prompt": 32, "answer": 128},
}
# Sizes of captured graphs are a few, for the start's sake: the sequences of a workload come and go together.
OPTIONS: dict[str, Any] = {
    **{"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
    **{"kv_cache_memory_bytes": 14 * GIB, "gpu_memory_utilization": 0.3},
    # Each kernel that is compiled during a pass is named in the log, with the time.
    "jit_monitor_verbose": True,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]},
}
SMALL = {
    name: {"sequences": 8, "prompt": each["prompt"] // 8, "answer": -(-each["answer"] // 32)} for name, each in WORKLOADS.items()
}
SMALL_OPTIONS: dict[str, Any] = {
    **{"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 1024},
    "enforce_eager": True,
}


class Engine:
    """One engine in a child process. `failed` says why it is out, once it is."""

    def __init__(self, side: str, child: subprocess.Popen[str], log: Path) -> None:
        self.side, self.child, self.log = side, child, log
        self.about: dict[str, Any] = {}
        self.failed = ""

    def answer(self, until: float) -> Any:
        """Its next answer, by `until` on the monotonic clock; None where there is none, and then it is out."""
        assert self.child.stdout is not None
        # Its own children may hold the pipe open when it has ended.
        while not (ready := select.select([self.child.stdout], [], [], 0.5)[0]) and self.child.poll() is None:
            if time.monotonic() > until:
                break
        line = self.child.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        why = "no answer in time" if self.child.poll() is None else f"it ended with exit code {self.child.returncode}"
        self.end()
        self.failed = f"{why}: {self.log.read_text(errors='replace')[-1500:]}"
        print(f"{self.side} is out: {self.failed}", flush=True)
        return None

    def end(self) -> None:
        """It and everything it started are gone: none that is out may disturb the others."""
        if self.child.stdin is not None and self.child.poll() is None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(3.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def work(self, workload: dict[str, int], limit: float) -> float | None:
        """Seconds that the workload took."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(workload), file=self.child.stdin, flush=True)
        found = self.answer(time.monotonic() + limit)
        return None if found is None else float(found)


@contextlib.contextmanager
def started(side: str, args: argparse.Namespace, folder: Path) -> Iterator[Engine]:
    """The engine of a side, starting; with everything it started it is gone at the end."""
    job = {"folder": str(folder / "model"), "options": (SMALL_OPTIONS if args.small else OPTIONS) | args.options}
    env = {**os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if side == "own":
        env["VLLM_PLUGINS"] = ""
    else:
        behind = [args.site26] if side == "fenno-0.26" else []
        path = [plugin.path(folder / "plugin")["PYTHONPATH"].partition(os.pathsep)[0], *behind, os.environ.get("PYTHONPATH", "")]
        env |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), grok_versions.FORCE: "1"}
    log = args.results / f"{side}.log"
    argv = [args.python, str(Path(__file__).with_name("passes.py").resolve()), json.dumps(job)]
    with log.open("w") as said:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "text": True}
        child = subprocess.Popen(argv, env=env, cwd=folder, start_new_session=True, **pipes)
    engine = Engine(side, child, log)
    try:
        yield engine
    finally:
        engine.end()


def rounds(engines: list[Engine], args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Rounds while there is time for another as long as the last; round 0 is not counted."""
    workloads = SMALL if args.small else WORKLOADS
    until, last = time.monotonic() + args.seconds, 0.0
    number = 0
    while time.monotonic() + last < until and any(not engine.failed for engine in engines):
        began = time.monotonic()
        for name, workload in workloads.items():
            for engine in engines if number % 2 else engines[::-1]:
                took = None if engine.failed else engine.work(workload, max(until - began, 30.0))
                if took is not None and number:
                    found["seconds"].setdefault(name, {}).setdefault(engine.side, []).append(round(took, 4))
        # The first has kernels to compile, and tells little of the next.
        last = time.monotonic() - began if number else 0.0
        number += 1
        tell(engines, found, workloads, args.results)


def tell(engines: list[Engine], found: dict[str, Any], workloads: dict[str, dict[str, int]], results: Path) -> None:
    """Write what there is, with rates and ratios; a line of each on stdout."""
    found["failed"] = {engine.side: engine.failed for engine in engines if engine.failed}
    found["tokens_per_second"] = {
        name: {side: round(tokens(workloads[name]) / statistics.median(took), 1) for side, took in sides.items()}
        for name, sides in found["seconds"].items()
    }
    found["ratio_to_own"] = {
        name: {side: ratio(sides["own"], took) for side, took in sides.items() if side != "own" and "own" in sides}
        for name, sides in found["seconds"].items()
    }
    (results / "throughput.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, sides in found["tokens_per_second"].items():
        print(name, sides, found["ratio_to_own"][name], flush=True)


def tokens(workload: dict[str, int]) -> int:
    """Of prompts and answers."""
    return workload["sequences"] * (workload["prompt"] + workload["answer"])


def ratio(own: list[float], other: list[float]) -> dict[str, float]:
    """How many times own's throughput the other has, round by round: the median, the least and the greatest; and by the quickest
    pass of each, since a kernel that is compiled on the way only ever makes a pass longer."""
    each = [one / two for one, two in zip(own, other, strict=False)]
    found = {"median": statistics.median(each), "least": min(each), "greatest": max(each), "quickest": min(own) / min(other)}
    return {name: round(value, 4) for name, value in found.items()}


def wanted() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--site26", default="")
    parser.add_argument("--quantization")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--start", type=float, default=200.0)
    parser.add_argument("--only", action="append", choices=SIDES)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.results = args.results.resolve()
    args.results.mkdir(parents=True, exist_ok=True)
    args.options = {"quantization": args.quantization} if args.quantization else {}
    newer = bool(args.site26) and Path(args.site26, "vllm").is_dir()
    args.sides = args.only or [side for side in SIDES if newer or side != "fenno-0.26"]
    return args


def document(args: argparse.Namespace) -> dict[str, Any]:
    host = machine.probe()
    cards = [f"{gpu.name}, driver {gpu.driver}" for gpu in host.gpus]
    return {
        "date": datetime.date.today().isoformat(),
        "host": f"{host.processor}, {len(os.sched_getaffinity(0))} cores",
        "gpus": cards,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "model": "grok2-tiny" if args.small else "grok2-12b",
        "options": (SMALL_OPTIONS if args.small else OPTIONS) | args.options,
        "workloads": SMALL if args.small else WORKLOADS,
        "bar": BAR,
        "engines": {},
        "seconds": {},
    }


def main() -> int:
    args = wanted()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = document(args)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        dummy.make(found["model"], Path(folder)).rename(Path(folder, "model"))
        plugin.install(Path(folder, "plugin"))
        began = time.monotonic()
        engines = [stack.enter_context(started(side, args, Path(folder))) for side in args.sides]
        for engine in engines:
            engine.about = engine.answer(began + args.start) or {}
            found["engines"][engine.side] = engine.about
            print(engine.side, engine.about, f"{time.monotonic() - began:.0f} s", flush=True)
        tell(engines, found, {}, args.results)
        rounds([engine for engine in engines if not engine.failed], args, found)
    kept = [each["median"] >= BAR for sides in found["ratio_to_own"].values() for side, each in sides.items() if side == "fenno"]
    return 0 if kept and all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
