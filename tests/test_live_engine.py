"""A really served vLLM with fenno's scheduler, changed while it runs. One start for the whole file."""

import importlib.util
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
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

    def until(self, there: Callable[[], object]) -> None:
        until(there, LONG, told=lambda: (metrics.scrape(self.url, timeout=LONG), self.failures, self.log.read_text()[-2000:]))

    @contextmanager
    def busy(self, streams: int, tokens: int = 900) -> Iterator[None]:
        """So many long answers at once, each asked for again when it ends, until the block does; then all are cancelled."""
        over = threading.Event()

        def one(number: int) -> None:
            while not over.is_set():
                try:
                    self.stream(f"request {number}", tokens, over)
                except (OSError, ValueError) as error:
                    self.failures.append(str(error))
                    return

        threads = [threading.Thread(target=one, args=(number,)) for number in range(streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(LONG)

    def stream(self, prompt: str, max_tokens: int, over: threading.Event) -> None:
        """Read one answer as it comes; hanging up before its end cancels it."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LONG) as answer:
            for line in answer:
                if over.is_set():
                    return
                if b"error" in line:
                    raise ValueError(line.decode())


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


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


def running(engine: Engine) -> float:
    return metrics.scrape(engine.url, timeout=LONG).running or 0


def test_the_plugin_was_really_loaded_from_its_folder(engine: Engine) -> None:
    marks = plugin.loaded(engine.control)
    answer = live.merge(control.read_acknowledgements(engine.control))
    assert answer.pid in marks
    assert len(marks) >= 2  # the API server and the engine core
    assert answer.engine.startswith("0.")


def test_an_idle_engine_applies_a_change_and_has_reached_it(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    answer = live.change(engine.url, engine.control, {"max_num_active_seqs": 7, "max_num_scheduled_tokens": 512}, timeout=LONG)
    assert answer.reached
    assert (answer.applied["max_num_active_seqs"], answer.applied["max_num_scheduled_tokens"]) == (7, 512)
    back = live.change(engine.url, engine.control, {"max_num_active_seqs": None}, timeout=LONG)
    assert (back.applied["max_num_active_seqs"], back.applied["max_num_scheduled_tokens"]) == (32, 512)
    assert back.revision == answer.revision + 1
    live.change(engine.url, engine.control, {"max_num_scheduled_tokens": None}, timeout=LONG)


def test_what_this_version_cannot_change_live_is_named(engine: Engine) -> None:
    answer = live.change(engine.url, engine.control, {"prefill_schedule_interval": 4, "a_knob_of_tomorrow": 1}, timeout=LONG)
    assert "a_knob_of_tomorrow" in answer.unsupported
    known_from = tuple(int(part) for part in answer.engine.split(".")[:2]) >= (0, 33)
    assert ("prefill_schedule_interval" in answer.unsupported) is not known_from
    live.change(engine.url, engine.control, {"prefill_schedule_interval": None, "a_knob_of_tomorrow": None}, timeout=LONG)


def test_a_lower_cap_lowers_what_runs_and_never_ends_the_engine(engine: Engine) -> None:
    # Answers far longer than it takes to send the requests: on the slowest host as many run as may.
    with engine.busy(40):
        engine.until(lambda: running(engine) == 32)
        answer = live.change(engine.url, engine.control, {"max_num_active_seqs": 2, "max_num_scheduled_tokens": 2}, timeout=LONG)
        assert not answer.reached
        assert answer.running > 2
        assert live.wait_reached(engine.control, LONG).running <= 2
        engine.until(lambda: running(engine) <= 2)
        assert waiting(engine) > 0
        live.change(engine.url, engine.control, {"max_num_active_seqs": None, "max_num_scheduled_tokens": None}, timeout=LONG)
        engine.until(lambda: running(engine) > 2)
    live.settle(engine.url, LONG)
    assert engine.failures == []
    assert engine.child.poll() is None


def waiting(engine: Engine) -> float:
    return metrics.scrape(engine.url, timeout=LONG).waiting or 0


def test_the_policy_changes_under_load_and_short_answers_go_first(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    live.change(engine.url, engine.control, {"policy": "fcfs"}, timeout=LONG)
    done: list[str] = []

    def one(name: str, max_tokens: int) -> None:
        engine.post(name, max_tokens)
        done.append(name)

    threads = []
    # One seat for those who wait, and nobody gets it as long as 32 others run. Their answers take minutes: a single one would be
    # over in seconds, sooner than a host that is busy otherwise has taken in three requests.
    with engine.busy(32, tokens=4000):
        engine.until(lambda: running(engine) == 32)
        live.change(engine.url, engine.control, {"max_num_active_seqs": 1}, timeout=LONG)
        for name, max_tokens in (("long", 140), ("middle", 60), ("short", 5)):
            threads.append(threading.Thread(target=one, args=(name, max_tokens)))
            threads[-1].start()
            engine.until(lambda: waiting(engine) >= len(threads))
        live.change(engine.url, engine.control, {"policy": "token_aware", "aging_seconds": 600}, timeout=LONG)
        assert done == []
    for thread in threads:
        thread.join(LONG)
    assert done == ["short", "middle", "long"]
    live.change(engine.url, engine.control, {"max_num_active_seqs": None, "policy": None, "aging_seconds": None}, timeout=LONG)


def test_the_counters_are_in_the_metrics_and_in_the_answer(engine: Engine) -> None:
    live.settle(engine.url, LONG)
    before = live.change(engine.url, engine.control, {"policy": None}, timeout=LONG).counters
    engine.post("one more", 3)
    after = live.change(engine.url, engine.control, {"max_num_active_seqs": 5}, timeout=LONG).counters
    assert after["admissions"] == before["admissions"] + 1
    assert after["cap_max_num_active_seqs"] == 5
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'fenno:cap_max_num_active_seqs{rank="0"} 5.0' in text
    assert f'fenno:admissions{{rank="0"}} {after["admissions"]:.1f}' in text
    assert 'fenno:waiting_class_2{rank="0"} 0.0' in text


def test_an_impossible_wish_written_by_someone_else_changes_nothing(engine: Engine) -> None:
    before = live.merge(control.read_acknowledgements(engine.control))
    engine.control.write_text('{"schema": 1, "revision": 999, "knobs": {"max_num_active_seqs": -3}}')
    live.nudge(engine.url)
    after = live.merge(control.read_acknowledgements(engine.control))
    assert "max_num_active_seqs" in after.problem
    assert (after.revision, after.applied) == (before.revision, before.applied)
    assert live.change(engine.url, engine.control, {"max_num_active_seqs": None}, timeout=LONG).problem == ""
