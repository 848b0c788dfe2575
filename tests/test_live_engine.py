"""A really served vLLM with fenno's scheduler, changed while it runs. One start for the whole file."""

import importlib.util
import json
import select
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from stub.waiting import until

import fenno.engine
from fenno import control, process
from fenno.engine import dummy, live, metrics, plugin

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this Python"),
]

# Limits of hangs, no measure: a host may stand still for a minute.
LONG = 300.0
START = {"max-num-seqs": "32", "max-num-batched-tokens": "1024", "max-model-len": "4096", "load-format": "dummy"}


@dataclass
class Engine:
    url: str
    control: Path
    log: Path
    child: process.Child
    failures: list[str] = field(default_factory=list)

    def post(self, prompt: str, max_tokens: int, **more: object) -> dict:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            return json.load(answer)

    def change(self, **knobs: control.Value) -> control.Acknowledgement:
        """The scheduler's own answer, so of now: what `/metrics` says is old where the API server lags behind."""
        return live.change(self.url, self.control, knobs, timeout=LONG)

    def until(self, there: Callable[[], object]) -> None:
        until(there, LONG, told=lambda: (metrics.scrape(self.url, timeout=LONG), self.failures, self.log.read_text()[-2000:]))

    @contextmanager
    def busy(self, requests: int, tokens: int, priority: int = 0) -> Iterator[None]:
        """So many answers of `tokens` to twice as many at once, each asked for again when it ends, until the block does; then they
        are cancelled.

        One thread waits for all of them and each comes in one piece: threads that read token by token leave a fast engine's own
        test no processor, and what it waits for is long over when it looks.
        """
        over = threading.Event()
        bodies = [
            {"prompt": "a long answer", "max_tokens": tokens * (requests + number) // requests, "priority": priority}
            for number in range(requests)
        ]
        thread = threading.Thread(target=self._keep_asking, args=(bodies, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(LONG)

    def _keep_asking(self, bodies: list[dict], over: threading.Event) -> None:
        held = {self._ask(body): body for body in bodies}
        while not over.is_set():
            for connection in select.select(held, [], [], 0.05)[0]:
                answer = connection.recv(1 << 20)
                if answer.startswith(b"HTTP/") and b" 200 " not in answer[:20]:
                    self.failures.append(answer.decode())
                if not answer:
                    connection.close()
                    body = held.pop(connection)
                    held[self._ask(body)] = body
        for connection in held:
            connection.close()

    def _ask(self, asked: dict) -> socket.socket:
        """A request for one answer, which ends with the connection; closing it before cancels the request."""
        body = json.dumps({"model": "tiny", "ignore_eos": True, **asked})
        port = int(self.url.rpartition(":")[2])
        connection = socket.create_connection(("127.0.0.1", port), timeout=LONG)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = dummy.make("grok2-small", folder)
    flags = [word for name, value in START.items() for word in (f"--{name}", value)]
    launch = next(Path(fenno.engine.__file__).parent.rglob("launch.py"))
    argv = [sys.executable, str(launch), "serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    argv += [*flags, "--served-model-name", "tiny", "--scheduler-cls", plugin.SCHEDULER]
    env = plugin.environment(plugin.install(folder / "plugin"), folder / "control.json")
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with process.running(argv, log=folder / "engine.log", env=env, grace=5) as child:
        found = Engine(f"http://127.0.0.1:{port}", folder / "control.json", folder / "engine.log", child)
        until(lambda: child.poll() is not None or answers(found.url), LONG)
        assert child.poll() is None, found.log.read_text()[-3000:]
        # On a processor with AMX, vllm-cpu 0.32 dies of SIGILL when its first prompt has a few tokens; after a longer one, not.
        found.post("a first prompt of more than a few tokens", 4)
        yield found


@pytest.fixture(autouse=True)
def as_started(engine: Engine) -> None:
    """Every test begins with the values of the start, whatever one that failed has left."""
    engine.change(**dict.fromkeys(control.KNOBS))
    engine.failures.clear()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def test_the_plugin_was_really_loaded_from_its_folder(engine: Engine) -> None:
    marks = plugin.loaded(engine.control)
    answer = live.merge(control.read_acknowledgements(engine.control))
    assert answer.pid in marks
    assert len(marks) >= 2  # the API server and the engine core
    assert answer.engine.startswith("0.")


def test_an_idle_engine_applies_a_change_and_has_reached_it(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    answer = engine.change(max_num_active_seqs=7, max_num_scheduled_tokens=512)
    assert answer.reached
    assert (answer.applied["max_num_active_seqs"], answer.applied["max_num_scheduled_tokens"]) == (7, 512)
    back = engine.change(max_num_active_seqs=None)
    assert (back.applied["max_num_active_seqs"], back.applied["max_num_scheduled_tokens"]) == (32, 512)
    assert back.revision == answer.revision + 1
    engine.change(max_num_scheduled_tokens=None)


def test_what_this_version_cannot_change_live_is_named(engine: Engine) -> None:
    answer = engine.change(prefill_schedule_interval=4, a_knob_of_tomorrow=1)
    assert "a_knob_of_tomorrow" in answer.unsupported
    known_from = tuple(int(part) for part in answer.engine.split(".")[:2]) >= (0, 33)
    assert ("prefill_schedule_interval" in answer.unsupported) is not known_from
    engine.change(prefill_schedule_interval=None, a_knob_of_tomorrow=None)


def test_a_lower_cap_lowers_what_runs_and_never_ends_the_engine(engine: Engine) -> None:
    with engine.busy(40, tokens=1000):
        engine.until(lambda: engine.change().running == 32)
        answer = engine.change(max_num_active_seqs=2, max_num_scheduled_tokens=256)
        assert not answer.reached
        assert answer.running > 2
        assert live.wait_reached(engine.control, LONG).running <= 2
        engine.until(lambda: engine.change().waiting > 2)
        engine.change(max_num_active_seqs=None, max_num_scheduled_tokens=None)
        engine.until(lambda: engine.change().running > 2)
    live.settle(engine.url, LONG)
    assert engine.failures == []
    assert engine.child.poll() is None


def test_the_policy_changes_under_load_and_short_answers_go_first(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    engine.change(policy="priority", max_num_active_seqs=1)
    # The only seat is held by requests that come first under either policy, for as long as the test wants.
    with ThreadPoolExecutor() as clients:
        with engine.busy(4, tokens=2000, priority=-1):
            engine.until(lambda: engine.change().waiting == 3)
            posted = []
            for max_tokens in (1600, 800, 5):
                posted.append(clients.submit(engine.post, "one of three", max_tokens))
                engine.until(lambda: engine.change().waiting == 3 + len(posted))
            answer = engine.change(policy="token_aware", class_edges="8,800,1600", aging_seconds=6000)
            assert waiting_of_three(answer) == (1, 1, 1)
        # Who still waits tells in which order they were let in: when their answers arrive, an API server that lags behind does not.
        states = {(1, 1, 1)}
        while not all(post.done() for post in posted):
            states.add(waiting_of_three(engine.change()))
    assert states <= {(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0)}
    assert [post.result()["usage"]["completion_tokens"] for post in posted] == [1600, 800, 5]
    assert engine.failures == []


def waiting_of_three(answer: control.Acknowledgement) -> tuple[float, ...]:
    return tuple(answer.counters[f"waiting_class_{number}"] for number in range(3))


def test_the_counters_are_in_the_metrics_and_in_the_answer(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    before = engine.change(policy=None).counters
    engine.post("one more", 3)
    after = engine.change(max_num_active_seqs=5).counters
    assert after["admissions"] == before["admissions"] + 1
    assert after["cap_max_num_active_seqs"] == 5
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=LONG) as answer:
        text = answer.read().decode()
    assert 'fenno:cap_max_num_active_seqs{rank="0"} 5.0' in text
    assert f'fenno:admissions{{rank="0"}} {after["admissions"]:.1f}' in text
    assert 'fenno:waiting_class_2{rank="0"} 0.0' in text


def test_an_impossible_wish_written_by_someone_else_changes_nothing(engine: Engine) -> None:
    before = live.merge(control.read_acknowledgements(engine.control))
    engine.control.write_text('{"schema": 1, "revision": 999, "knobs": {"max_num_active_seqs": -3}}')
    live.nudge(engine.url, LONG)
    after = live.merge(control.read_acknowledgements(engine.control))
    assert "max_num_active_seqs" in after.problem
    assert (after.revision, after.applied) == (before.revision, before.applied)
    assert engine.change(max_num_active_seqs=None).problem == ""
