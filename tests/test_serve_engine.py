"""A real vLLM on the CPU is kept up: its core is killed, and it is asked to end with requests in flight."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest
from stub.waiting import until

from fenno import recipe

pytestmark = pytest.mark.engine
FENNO = str(Path(sys.executable).with_name("fenno"))
IN_FLIGHT, TOKENS = 12, 900
# The limit of a hang, no measure: a host may stand still for a minute.
LONG = 300.0


class Serving:
    """`fenno serve` of cpu-small as a child process, and what it has said. At the end a slow host has the time to answer all."""

    def __init__(self, folder: Path) -> None:
        self.error, patient = folder / "said", folder / "patient.yaml"
        patient.write_text(f"{recipe.find('cpu-small').read_text()}\nserve: {{grace: {LONG:g}s, hang: {LONG:g}s}}\n")
        with self.error.open("wb") as output:
            self.popen = subprocess.Popen([FENNO, "serve", str(patient), "--name", folder.name.lower()], stderr=output)

    def said(self) -> str:
        return self.error.read_text()

    def until(self, there: Callable[[], object]) -> None:
        """Wait until `there`; it must not have ended before."""
        until(lambda: self.popen.poll() is not None or there(), LONG, told=self.said)
        assert self.popen.poll() is None, self.said()

    def ready(self, times: int) -> str:
        self.until(lambda: self.said().count("ready after") >= times)
        return self.said().rpartition("ready after")[2].split()[2]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    made.popen.kill()
    made.popen.wait()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def begun(url: str, model: str) -> HTTPResponse:
    """An answer of `TOKENS`, of which the first has come: so the server has the request. A gauge of the server's would tell of it
    late, perhaps when all is answered."""
    asked = {"model": model, "prompt": "a word", "max_tokens": TOKENS, "ignore_eos": True}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    answer: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"}), timeout=LONG
    )
    assert answer.readline().startswith(b"data: {")
    return answer


def tokens(answer: HTTPResponse) -> int:
    """How many there were in all; -1 when it was cut off."""
    said = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: {")]
    usage = said[-1]["usage"] if said else None
    return int(usage["completion_tokens"]) if usage else -1


def test_a_killed_core_is_replaced_and_no_request_in_flight_is_lost_at_the_end(serving: Serving) -> None:
    url = serving.ready(1)
    before = serving.family()
    (core,) = [each for each in before if "EngineCore" in " ".join(each.cmdline())]
    core.kill()
    serving.until(lambda: "starting it again" in serving.said())
    assert alive(before) == []
    assert serving.ready(2) == url
    before = serving.family()
    with urllib.request.urlopen(f"{url}/models", timeout=LONG) as answer:
        model = json.load(answer)["data"][0]["id"]
    answers = [begun(url, model) for _ in range(IN_FLIGHT)]
    serving.popen.send_signal(signal.SIGTERM)
    assert [tokens(answer) for answer in answers] == [TOKENS] * IN_FLIGHT
    assert serving.popen.wait(LONG) == 130, serving.said()
    assert alive(before) == []
