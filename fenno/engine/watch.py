"""The server's side while traffic runs: its metrics and its memory about once a second, on the clock of the client's records.

Never the load client's work: a thread of fenno's own process asks the server, and a child process asks NVML. What is seen lies
beside the records, one JSON line a sample: `server.jsonl` and, with GPUs, `gpus.jsonl`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fenno import machine, process
from fenno.engine import metrics
from fenno.engine.metrics import Histogram, Metrics
from fenno.engine.server import Server
from fenno.errors import EngineError
from fenno.machine import Gpu

LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of the monotonic clock. `metrics` is empty when the server said nothing, and `error` says why. `resident`: bytes
    of main memory that the engine's processes held; 0 on GPUs, and for a server that fenno did not start."""

    at: float
    metrics: Metrics
    resident: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The GPUs that the server may use, at one moment of the same clock."""

    at: float
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Seen:
    """Everything that was seen, in the order of time, and a sentence for each thing that could not be."""

    samples: tuple[Sample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
    notes: tuple[str, ...] = ()

    def between(self, start: float, end: float) -> Seen:
        """What was seen in [start, end]."""
        samples = tuple(s for s in self.samples if start <= s.at <= end)
        return Seen(samples, tuple(g for g in self.gpus if start <= g.at <= end), self.notes)

    def said(self) -> tuple[Sample, ...]:
        """The samples in which the server said something of itself."""
        return tuple(s for s in self.samples if s.metrics != Metrics())

    def busy(self) -> tuple[int, ...]:
        """The indices of the GPUs that did something; of those, all, where none says what it does."""
        indices = {g.index for s in self.gpus for g in s.gpus}
        worked = {g.index for s in self.gpus for g in s.gpus if g.utilization is None or g.utilization > 0}
        return tuple(sorted(worked or indices))

    def memory(self) -> list[int]:
        """Bytes held, sample by sample: of the GPUs that work, else of main memory. Empty for a server elsewhere."""
        busy = self.busy()
        if busy:
            return [sum(g.used for g in s.gpus if g.index in busy) for s in self.gpus]
        return [s.resident for s in self.samples if s.resident]

    def memory_total(self) -> int:
        """Bytes there are of that memory."""
        busy = self.busy()
        return sum(g.memory for g in self.gpus[-1].gpus if g.index in busy) if busy else machine.memory_limit()


class Watch:
    """Looks at a server until it is stopped, made by `watching`."""

    def __init__(self, server: Server, interval: float, path: Path, nvml: process.Child | None, keep: bool) -> None:
        self._server, self._interval, self._path, self._nvml, self._keep = server, interval, path, nvml, keep
        self._file = path.open("w", encoding="utf-8")
        self._samples: list[Sample] = []
        self._unwritten = ""
        self._code: int | None = None  # the exit code of the NVML process, had it ended before it was told to
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def last(self) -> Sample | None:
        """The latest sample; None before the first."""
        return self._samples[-1] if self._samples else None

    def seen(self) -> Seen:
        """Everything so far."""
        samples = tuple(self._samples) if self._keep else read_samples(self._path)
        notes = [note for note in (silence(samples), self._unwritten) if note]
        if self._nvml is None:
            return Seen(samples, (), tuple(notes))
        gpus, why = read_gpus(self._nvml.log, visible(self._server))
        code = self._code if self._over.is_set() else self._nvml.poll()
        if code:
            notes.append(f"reading NVML ended with exit code {code}; what it had said until then is kept")
        elif why and self._server.on_gpu:
            notes.append(f"the GPUs could not be read: {why}")
        return Seen(samples, gpus, tuple(notes))

    def stop(self) -> None:
        self._code = self._nvml.poll() if self._nvml else None
        self._over.set()
        self._thread.join()
        # On a full disk a close fails as well; what was said of the write is enough.
        with contextlib.suppress(OSError):
            self._file.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            sample = look(self._server)
            self._samples.append(sample)
            if not self._keep:
                del self._samples[:-1]
            try:
                self._file.write(dump(sample) + "\n")
                self._file.flush()
            except OSError as error:
                self._unwritten = f"the server's samples could not be written: {error.strerror}"
            due = max(due + self._interval, time.monotonic())
            self._over.wait(max(0.0, due - time.monotonic()))


@contextlib.contextmanager
def watching(server: Server, folder: Path, interval: float = 1.0, *, keep: bool = True) -> Iterator[Watch]:
    """Look at `server` every `interval` seconds while the block lasts. GPUs are asked where the server is on this host.

    `keep`: samples stay in memory, their histograms with all buckets. Else they are read from the file when they are asked for,
    without buckets: of a run of days nobody needs them, and they would be gigabytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = server.on_gpu or (server.child is None and urlsplit(server.url).hostname in LOCAL)
    with contextlib.ExitStack() as stack:
        nvml = None
        if here:
            log = folder / "gpus.jsonl"
            log.unlink(missing_ok=True)
            argv = [*process.module("fenno.nvml"), "--every", str(interval)]
            nvml = stack.enter_context(process.running(argv, log=log, grace=2.0))
        watch = Watch(server, interval, folder / "server.jsonl", nvml, keep)
        stack.callback(watch.stop)
        yield watch


def visible(server: Server) -> str | None:
    """The GPUs that a server may use, as its environment says."""
    return {**os.environ, **server.command.env}.get("CUDA_VISIBLE_DEVICES")


def look(server: Server, timeout: float = 5.0) -> Sample:
    """One sample. A server that does not answer, or has no /metrics, is a finding and no error; so is one that has died."""
    began = time.monotonic()
    try:
        found, error = metrics.scrape(server.url, timeout, server.recipe.engine.ca_file, server.headers), ""
    except EngineError as failure:
        found, error = Metrics(), str(failure)
    # The figures are of a moment between the question and the answer.
    at = (began + time.monotonic()) / 2
    return Sample(at, found, 0 if server.on_gpu else machine.resident(server.pids()), error)


def silence(samples: Sequence[Sample]) -> str:
    """A sentence when the server did not say how it was, or not always; else ""."""
    mute = [s for s in samples if s.error]
    if not mute:
        return ""
    if len(mute) == len(samples):
        return f"the server says nothing of itself: {mute[-1].error}"
    return f"the server did not say how it was {len(mute)} of {len(samples)} times: {mute[-1].error}"


def read_gpus(file: Path, visible: str | None) -> tuple[tuple[GpuSample, ...], str | None]:
    """What `fenno.nvml --every` wrote of the GPUs that `visible` names, and why there are none. A line cut short is left out."""
    found, why = [], None
    with file.open(encoding="utf-8", errors="replace") if file.exists() else io.StringIO() as lines:
        for line in lines:
            try:
                facts = json.loads(line)
            except ValueError:
                continue
            if facts["gpus"]:
                found.append(GpuSample(facts["at"], machine.visible(machine.gpus_of(facts), visible)))
            why = facts["error"] or why
    return tuple(found), why


def read_samples(file: Path) -> tuple[Sample, ...]:
    """The samples that lie in `file`, without their histograms' buckets. A line cut short is left out."""
    with file.open(encoding="utf-8") if file.exists() else io.StringIO() as lines:
        return tuple(parse(line) for line in lines if line.endswith("\n"))


def dump(sample: Sample) -> str:
    """One line of JSON: the stamp, every family that was there (of a histogram its sum and count), the resident set."""
    values = {f.name: value for f in fields(Metrics) if (value := getattr(sample.metrics, f.name)) is not None}
    plain = {name: {"sum": v.sum, "count": v.count} if isinstance(v, Histogram) else v for name, v in values.items()}
    return json.dumps({"at": sample.at, **plain, "resident": sample.resident, "error": sample.error})


def parse(line: str) -> Sample:
    """The sample of one line; histograms have no buckets. Raises `ValueError` for anything else."""
    data: dict[str, Any] = json.loads(line)
    at, resident, error = data.pop("at"), data.pop("resident"), data.pop("error")
    values: dict[str, Any] = {name: Histogram(v["sum"], v["count"], ()) if isinstance(v, dict) else v for name, v in data.items()}
    return Sample(at, Metrics(**values), resident, error)
