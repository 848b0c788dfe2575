"""What is looked at of an engine that runs: whether it hangs, asked of real sockets that answer, refuse, or say nothing; how many
processes it really has, of real processes."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub.harness import Place
from stub.waiting import until

from fenno import process
from fenno import recipe as recipes
from fenno.engine import server
from fenno.engine.server import Server
from fenno.errors import EngineError
from fenno.load import probe
from fenno.recipe import Recipe
from fenno.tune import bench


@contextlib.contextmanager
def engine(folder: Path, statuses: list[int]) -> Iterator[Server]:
    """One that gives each request the next status, and to those after it no answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener, statuses), daemon=True).start()
        chosen = Recipe.model_validate({"name": "one", "engine": {"model": "m"}})
        yield Server(chosen, f"http://127.0.0.1:{listener.getsockname()[1]}", "m", folder)


def answer(listener: socket.socket, statuses: list[int]) -> None:
    while statuses:
        link, _ = listener.accept()
        with link:
            link.recv(1 << 16)
            link.sendall(f"HTTP/1.1 {statuses.pop(0)} .\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())


@pytest.mark.parametrize("statuses", [[200], [400], [429], [500, 200]])
def test_an_engine_that_answers_a_request_or_refuses_it_does_not_hang(tmp_path: Path, statuses: list[int]) -> None:
    with engine(tmp_path, statuses) as running:
        bench.until_answer(running, time.monotonic() + 60)
    assert statuses == [], "of one that answers with 500 it is asked again: its core may have died"


def test_an_engine_that_goes_on_with_500_has_answered(tmp_path: Path) -> None:
    with engine(tmp_path, [500]) as running:
        bench.until_answer(running, time.monotonic())


def test_an_engine_that_has_said_nothing_by_the_deadline_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LONGEST", 0.2)
    with engine(tmp_path, []) as running, pytest.raises(EngineError, match="the engine hangs: a request alone on it") as raised:
        bench.until_answer(running, time.monotonic())
    assert raised.value.stage == "load"


# Of vLLM 0.24.0's and 0.26.0's log on an H200, and 0.26.0's under `enforce-eager`, what is between left out.
LOGGED = """\
(APIServer pid=1) INFO 11-30 [utils.py:233] non-default args: {{'cudagraph_mode': None, 'max_cudagraph_capture_size': None}}
(EngineCore pid=2) INFO 11-30 [core.py:114] Initializing a V1 LLM engine (v0.24.0) with config: model='m', compilation_config={{\
'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.{}>, 'cudagraph_num_of_warmups': 1, \
'cudagraph_capture_sizes': [1, 2, 4], 'max_cudagraph_capture_size': {}, 'local_cache_dir': None}}, kernel_config=KernelConfig()
"""


@pytest.mark.parametrize(
    ("mode", "size", "found"),
    [
        ("FULL_AND_PIECEWISE: (2, 1)", 512, 512),
        ("PIECEWISE: 1", 256, 256),
        ("FULL_DECODE_ONLY: (2, 0)", 512, None),
        ("NONE: 0", 0, None),
        ("NONE: 0", None, None),
    ],
)
def test_the_largest_cuda_graph_of_a_step_with_prompts_is_read_from_the_engines_log(
    mode: str, size: int | None, found: int | None
) -> None:
    assert server.graphs_of(LOGGED.format(mode, size)) == found
    assert server.graphs_of(LOGGED.format("FULL_AND_PIECEWISE: (2, 1)", 128) + LOGGED.format(mode, size)) == found, "the last start"
    assert server.graphs_of("") is None


def test_an_engine_on_a_cpu_has_no_cuda_graphs() -> None:
    assert server.graphs_of((Path(__file__).parent / "engine_logs" / "healthy_vllm032_cpu.log").read_text()) is None


@pytest.mark.parametrize("reach", [512, None])
def test_what_a_started_engine_says_of_its_cuda_graphs_is_known_of_it(tmp_path: Path, reach: int | None) -> None:
    place = Place(tmp_path)
    chosen = recipes.load(place.recipe(env={"STUB_GRAPHS": reach} if reach else {}))
    with server.serving(chosen, tmp_path / "engine", grace=0.1) as running:
        assert running.graphs == reach


SPAWNED = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", "--multiprocessing-fork"]


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ([["vllm", "serve", "m"], ["VLLM::EngineCore", ""], []], 1),
        ([["vllm", "serve", "m"], ["VLLM::EngineCore"], ["VLLM::APIServer_0"], ["VLLM::APIServer_1"]], 2),
        ([["vllm", "serve", "m"], ["mine::APIServer_0"], ["mine::APIServer_10", ""]], 2),
        ([["vllm", "serve", "m"], ["VLLM::APIServer_0"], SPAWNED], None),
    ],
)
def test_http_processes_are_counted_by_their_titles_once_all_have_theirs(lines: list[list[str]], count: int | None) -> None:
    assert server.http_processes(lines) == count


# An engine whose second HTTP process is still coming up, until there is a file.
PROCESSES = """
import os, subprocess, sys, time
titled = lambda number: [f"VLLM::APIServer_{number}", "-c", "sleep 600; exit"]
if sys.argv[2:]:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    os.execv("/bin/sh", titled(1))
subprocess.Popen(titled(0), executable="/bin/sh")
subprocess.Popen([sys.executable, *sys.argv, "spawn_main()"])
time.sleep(600)
"""


def test_other_processes_than_were_asked_for_are_an_error_of_the_start_and_late_ones_are_waited_for(tmp_path: Path) -> None:
    (script := tmp_path / "engine.py").write_text(PROCESSES)
    chosen = Recipe.model_validate({"name": "one", "engine": {"model": "m"}})
    with process.running([sys.executable, str(script), str(tmp_path / "up")], log=tmp_path / "engine.log") as child:
        running = Server(chosen, "http://127.0.0.1:1", "m", tmp_path, child=child)
        until(lambda: "spawn_main(" in str(server._command_lines(running.pids())))
        threading.Timer(0.2, (tmp_path / "up").touch).start()
        server.check_http_processes(running, 2)
        said = "api-server-count is 4, and 2 processes answer HTTP"
        with pytest.raises(EngineError, match=said) as raised:
            server.check_http_processes(running, 4)
    assert raised.value.stage == "start" and "Rust front end" in raised.value.hint
