"""A real vLLM on the CPU is kept up: its core is killed, and it is asked to end with requests in flight."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from stub.waiting import until

pytestmark = pytest.mark.engine
FENNO = str(Path(sys.executable).with_name("fenno"))
IN_FLIGHT, TOKENS = 40, 200
# The limit of a hang, no measure: a host may stand still for a minute.
LONG = 300.0


class Serving:
    """`fenno serve cpu-small` as a child process, and what it has said."""

    def __init__(self, folder: Path) -> None:
        self.error = folder / "said"
        with self.error.open("wb") as output:
            self.popen = subprocess.Popen([FENNO, "serve", "cpu-small", "--name", folder.name.lower()], stderr=output)

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
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def ask(url: str, model: str) -> int:
    """How many tokens were answered."""
    body = {"model": model, "prompt": "a word", "max_tokens": TOKENS, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONG) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def running(url: str) -> int:
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=LONG) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{"))


def all_are_known(url: str, answers: list[Future[int]]) -> bool:
    """Whether the engine has every request that is not answered yet, and there is one."""
    done = sum(answer.done() for answer in answers)
    return 0 < running(url) == len(answers) - done


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
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        answers = [pool.submit(ask, url, model) for _ in range(IN_FLIGHT)]
        serving.until(lambda: all_are_known(url, answers))
        serving.popen.send_signal(signal.SIGTERM)
        assert [answer.result() for answer in answers] == [TOKENS] * IN_FLIGHT
    assert serving.popen.wait(LONG) == 130, serving.said()
    assert alive(before) == []
