"""The server's side is seen while traffic runs: real servers, and NVML in a child process that may die."""

import contextlib
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stub.waiting import until

from fenno import machine
from fenno.engine import watch
from fenno.engine.metrics import Metrics
from fenno.engine.server import Server
from fenno.engine.watch import GpuSample, Sample, Seen
from fenno.load import calibration, job
from fenno.machine import Gpu

GIB = 2**30
BUSY = Gpu(0, "X", "GPU-a", 80 * GIB, 60 * GIB, (9, 0), "580", 90.0, 400.0, 1000.0)
IDLE = Gpu(1, "X", "GPU-b", 80 * GIB, 1 * GIB, (9, 0), "580", 0.0, 70.0, 500.0)

# What NVML says of two GPUs, until the third question, which ends the process that asks.
PYNVML = """
import os
class NVMLError(Exception): ...
class Memory: total, used = 80, 60
class Rates: gpu = 50
class State: asked = 0
def nvmlInit(): ...
def nvmlDeviceGetCount():
    State.asked += 1
    return 2 if State.asked < 3 else os.abort()
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetName(handle): return b"Card"
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetCudaComputeCapability(handle): return (9, 0)
def nvmlDeviceGetUtilizationRates(handle): return Rates
def nvmlDeviceGetPowerUsage(handle): raise NVMLError("not supported")
def nvmlDeviceGetTotalEnergyConsumption(handle): return 7000
def nvmlSystemGetDriverVersion(): return "580"
"""


def attached(url: str, folder: Path) -> Server:
    return Server(job.of_url(url, None, "completions", None), url, "m", folder)


@contextlib.contextmanager
def without_metrics() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign,assignment]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_samples_come_at_their_times_on_the_clients_clock_and_are_kept(tmp_path: Path) -> None:
    with calibration.serving(tmp_path) as server:
        began = time.monotonic()
        with watch.watching(attached(server.url, tmp_path), tmp_path / "run", 0.1) as looking:
            until(lambda: len(looking.seen().samples) >= 4)
        ended = time.monotonic()
    seen = looking.seen()
    stamps = [s.at for s in seen.samples]
    assert stamps == sorted(stamps)
    assert began <= stamps[0] < stamps[-1] <= ended
    assert len(stamps) <= (ended - began) / 0.1 + 1, "no more often than asked for"
    assert all(s.metrics.running == 0 for s in seen.samples)
    assert seen.notes == ()
    lines = [json.loads(line) for line in (tmp_path / "run/server.jsonl").read_text().splitlines()]
    assert [line["at"] for line in lines] == stamps
    assert lines[0] == {"at": stamps[0], "running": 0.0, "waiting": 0.0, "resident": 0, "error": ""}
    assert looking.seen() == seen, "nothing comes after the end"


def test_of_a_run_of_days_the_samples_are_in_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "run/server.jsonl"
    with (
        calibration.serving(tmp_path) as server,
        watch.watching(attached(server.url, tmp_path), tmp_path / "run", 0.05, keep=False) as looking,
    ):
        until(lambda: len(looking.seen().samples) >= 5)
        assert len(looking._samples) <= 2, "the last, and one that comes just now"
    samples = looking.seen().samples
    assert looking.last == samples[-1]
    with file.open("a") as lines:
        lines.write('{"at": 1')
    assert looking.seen().samples == watch.read_samples(file) == samples, "a line cut short is none"


@pytest.mark.scenario
def test_a_server_that_dies_or_has_no_metrics_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    with without_metrics() as url, watch.watching(attached(url, tmp_path), tmp_path / "none", 0.05) as looking:
        until(lambda: looking.last is not None)
        (note,) = looking.seen().notes
        assert note.startswith("the server says nothing of itself: ")
        assert "404" in note
    with calibration.serving(tmp_path) as server:
        with watch.watching(attached(server.url, tmp_path), tmp_path / "dies", 0.05) as looking:
            until(lambda: looking.last is not None)
            server.child.stop()
            until(lambda: looking.last is not None and looking.last.error)
        assert [note[:33] for note in looking.seen().notes] == ["the server did not say how it was"]


def test_gpus_are_read_by_one_child_process_and_its_crash_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with watch.watching(attached("http://127.0.0.1:9", tmp_path), tmp_path / "run", 0.1) as looking:
        until(lambda: any("NVML" in note for note in looking.seen().notes))
    seen = looking.seen()
    assert "reading NVML ended with exit code 134; what it had said until then is kept" in seen.notes
    assert len(seen.gpus) == 2
    assert seen.gpus[1].at > seen.gpus[0].at
    (gpu,) = seen.gpus[0].gpus
    assert (gpu.index, gpu.used, gpu.utilization, gpu.power, gpu.energy) == (1, 60, 50, None, 7)
    assert seen.memory() == [60, 60]


def test_an_orderly_end_of_the_child_process_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML.replace("State.asked < 3", "True"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with watch.watching(attached("http://127.0.0.1:9", tmp_path), tmp_path / "run", 0.05) as looking:
        until(lambda: len(looking.seen().gpus) > 3)
    assert [note for note in looking.seen().notes if "NVML" in note] == []
    assert [g.index for g in looking.seen().gpus[0].gpus] == [0, 1]


def test_the_memory_is_that_of_the_gpus_that_work_else_of_the_processes() -> None:
    gpus = (GpuSample(1.0, (BUSY, IDLE)), GpuSample(2.0, (replace(BUSY, used=70 * GIB, utilization=0.0), IDLE)))
    seen = Seen((Sample(1.0, Metrics(), 5),), gpus)
    assert seen.busy() == (0,)
    assert seen.memory() == [60 * GIB, 70 * GIB]
    assert seen.memory_total() == 80 * GIB
    nothing_said = Seen((), (GpuSample(1.0, (replace(BUSY, utilization=None), replace(IDLE, utilization=None))),))
    assert nothing_said.busy() == (0, 1)
    assert Seen((Sample(1.0, Metrics(), 5), Sample(2.0, Metrics()))).memory() == [5]
    assert Seen().memory() == []
    assert seen.between(1.5, 2.5).gpus == gpus[1:]


@pytest.mark.parametrize(
    ("setting", "indices"), [(None, [0, 1]), ("1", [1]), ("GPU-b,GPU-a", [0, 1]), ("GPU-b", [1]), ("", []), ("7", [])]
)
def test_visible_gpus_are_those_that_the_variable_names(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in machine.visible((BUSY, IDLE), setting)] == indices
