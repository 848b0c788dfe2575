"""Long runs: three times as many requests take no more memory while they are recorded, and a little for each when they are told.

`benchmarks/longrun` does the same with 72 hours of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]  # a busy host may take minutes

BENCHMARK = Path(__file__).parents[1] / "benchmarks/longrun"
SIZES = (45_000, 120_000)  # a full file of lines and a fifth of one, and three and a fifth

# What `fenno loadtest` does while its client runs, up to the client's end; the most that each of the two held, in KiB.
RECORD = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import record
from fenno.load.run import LoadRun
LoadRun.result = lambda self: None
folder = Path(sys.argv[2])
folder.mkdir()
record.record(folder, int(sys.argv[3]), 1)
print(*(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


@dataclass(frozen=True)
class Held:
    """The most bytes that each process held."""

    fenno: int
    client: int
    report: int
    document: dict[str, Any]
    folder: Path


def recorded(folder: Path, count: int) -> Held:
    argv = [sys.executable, "-c", RECORD, str(BENCHMARK), str(folder), str(count)]
    fenno, client = map(int, subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    child = subprocess.Popen([sys.executable, "-m", "fenno", "report", folder, "--to", "json"], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    with child.stdout:
        said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return Held(fenno * 1024, client * 1024, used.ru_maxrss * 1024, json.loads(said), folder)


Runs = Callable[[int], Held]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("longrun")
    with ThreadPoolExecutor(len(SIZES)) as pool:
        found: dict[int, Future[Held]] = {size: pool.submit(recorded, folder / str(size), size) for size in SIZES}
        yield lambda size: found[size].result()


def test_recording_three_times_as_much_takes_no_more_memory(runs: Runs) -> None:
    few, many = (runs(size) for size in SIZES)
    assert len(list(many.folder.glob("records-*.parquet"))) > len(list(few.folder.glob("records-*.parquet"))) >= 1
    assert many.client / few.client < 1.05
    assert many.fenno / few.fenno < 1.2, "Arrow's allocator keeps more or less of what one file took"


def test_telling_it_takes_a_few_hundred_bytes_a_request(runs: Runs) -> None:
    few, many = (runs(size) for size in SIZES)
    assert (many.report - few.report) / (SIZES[1] - SIZES[0]) < 700


@pytest.mark.parametrize("size", SIZES)
def test_its_percentiles_are_exactly_those_that_were_put_in(runs: Runs, size: int) -> None:
    document = runs(size).document
    assert (document["requests"], document["completed"], document["ended"]["how"]) == (size, size, "done")
    # Request by request another microsecond from 50 ms on: each is there once.
    assert [document["ttft"][f"p{p}"] for p in (50, 95, 99)] == [(50_000 + size * p // 100 - 1) / 1e3 for p in (50, 95, 99)]
    assert document["ttft"]["max"] == (50_000 + size - 1) / 1e3
