"""Changing an engine, with the engine's own end of the control file behind a small real server, and the plugin's folder."""

import http.server
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import fenno
from fenno import control
from fenno.control import Acknowledgement, Wanted
from fenno.engine import live, plugin
from fenno.errors import EngineError, UsageError
from fenno.vllm_plugin import mailbox as mailboxes
from fenno.vllm_plugin.mailbox import Mailbox


class Ranks:
    """Schedulers as far as the control file sees them: they look when told to, and run what they run."""

    def __init__(self, path: Path, ranks: int, running: int) -> None:
        self.path, self.running, self.deaf = path, running, False
        self.mailboxes = [Mailbox(path) for _ in range(ranks)]
        self.wanted = Wanted(0)
        self.answer()

    def answer(self) -> None:
        for rank, mailbox in enumerate(self.mailboxes):
            if mailbox.changed(at_once=True):
                self.wanted = mailbox.read() or self.wanted
            cap = int(self.wanted.knobs.get("max_num_active_seqs") or 32)
            counters = {"steps": 2.0, "oldest_waiting_seconds": float(rank), "cap_max_num_active_seqs": float(cap)}
            mailbox.answer(
                Acknowledgement(
                    self.wanted.revision,
                    rank,
                    {"max_num_active_seqs": cap},
                    self.running <= cap,
                    running=self.running,
                    counters=counters,
                    problem=mailbox.problem,
                )
            )


@contextmanager
def engine(ranks: Ranks, *, development: bool = True) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            known = development and self.path == "/reset_prefix_cache"
            if known and not ranks.deaf:
                ranks.answer()
            self.reply(200 if known else 404, json.dumps({"success": ranks.running == 0}))

        def do_GET(self) -> None:
            self.reply(200, f"vllm:num_requests_running {ranks.running}.0\nvllm:num_requests_waiting 0.0\n")

        def reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_an_idle_engine_is_made_to_look_and_all_ranks_answer(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    ranks = Ranks(path, 3, running=0)
    with engine(ranks) as url:
        first = live.change(url, path, {"max_num_active_seqs": 4, "policy": "fcfs"}, timeout=60)
        assert (first.revision, first.applied, first.reached) == (1, {"max_num_active_seqs": 4}, True)
        second = live.change(url, path, {"policy": None}, timeout=60)
    assert second.revision == 2
    # The file is the whole wish: what was set before stays, what was taken back is gone.
    assert control.read_wanted(path) == Wanted(2, {"max_num_active_seqs": 4})
    assert second.counters == {"steps": 6.0, "oldest_waiting_seconds": 2.0, "cap_max_num_active_seqs": 4.0}


def test_a_lowered_cap_is_applied_at_once_and_reached_when_requests_have_finished(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    ranks = Ranks(path, 1, running=9)
    with engine(ranks) as url:
        assert not live.change(url, path, {"max_num_active_seqs": 4}, timeout=60).reached
        with pytest.raises(EngineError, match="9 requests still run 0.1 s after the cap was set to 4"):
            live.wait_reached(path, 0.1)
        ranks.running = 3
        threading.Timer(0.1, ranks.answer).start()
        assert live.wait_reached(path, 60).running == 3


def test_settling_waits_until_nothing_runs(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "control.json", 1, running=1)
    with engine(ranks) as url:
        with pytest.raises(EngineError, match="1 requests still run and 0 wait"):
            live.settle(url, 0.1)
        threading.Timer(0.2, lambda: setattr(ranks, "running", 0)).start()
        live.settle(url, 60)
        assert ranks.running == 0


def test_every_way_in_which_an_engine_does_not_answer_is_said(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    with pytest.raises(EngineError, match="no scheduler has ever answered") as error:
        live.change("http://127.0.0.1:9", path, {}, timeout=1)
    assert error.value.stage == "control"
    ranks = Ranks(path, 2, running=0)
    with engine(ranks, development=False) as url, pytest.raises(EngineError) as error:
        live.change(url, path, {"max_num_active_seqs": 4}, timeout=1)
    assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint
    ranks.deaf = True
    with engine(ranks) as url, pytest.raises(EngineError, match="did not apply .* within 0.3 s"):
        live.change(url, path, {"max_num_active_seqs": 5}, timeout=0.3)
    with pytest.raises(EngineError, match="did not answer"):
        live.change("http://127.0.0.1:9", path, {"max_num_active_seqs": 6}, timeout=1)
    with pytest.raises(UsageError, match="policy is 'sjf'"):
        live.change("http://127.0.0.1:9", path, {"policy": "sjf"}, timeout=1)


def under(folder: Path, path: Path, code: str) -> str:
    env = {**os.environ, **plugin.environment(folder, path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd="/").stdout.strip()


def test_the_folder_alone_brings_the_plugin_and_its_entry_point(tmp_path: Path) -> None:
    folder, path = plugin.install(tmp_path / "plugin"), tmp_path / "control.json"
    code = (
        "from importlib.metadata import entry_points, version\n"
        "found = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'fenno']\n"
        "found[0].load()(); found[0].load()()\n"
        "import fenno.vllm_plugin as it; print(len(found), version('fenno'), it.__file__)"
    )
    assert under(folder, path, code) == f"1 {fenno.__version__} {folder}/fenno/vllm_plugin/__init__.py"
    assert set(control.read_marks(path).values()) == {fenno.__version__}
    # Made again it is made anew, and nothing but what runs in the engine is in it.
    (folder / "fenno" / "old.py").touch()
    plugin.install(folder)
    assert {entry.name for entry in (folder / "fenno").iterdir()} == {"__init__.py", "control.py", "vllm_plugin"}
    assert [d.name for d in importlib.metadata.distributions(path=[str(folder)])] == ["fenno"]


def test_the_counters_of_every_rank_are_shown_at_each_scrape(tmp_path: Path) -> None:
    folder, path = plugin.install(tmp_path / "plugin"), tmp_path / "control.json"
    Ranks(path, 2, running=0)
    code = (
        "import prometheus_client as p, fenno.vllm_plugin as it; it.register(); it.register()\n"
        "print([l for l in p.generate_latest().decode().splitlines() if l.startswith('fenno:')])"
    )
    shown = under(folder, path, code)
    assert "'fenno:steps{rank=\"0\"} 2.0', 'fenno:steps{rank=\"1\"} 2.0'" in shown
    assert shown.count("fenno:cap_max_num_active_seqs") == 2


def test_a_plugin_that_was_not_loaded_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    with pytest.raises(EngineError, match="did not load"):
        plugin.loaded(path)
    control.write_mark(path, fenno.__version__)
    with pytest.raises(EngineError, match="without fenno's scheduler") as error:
        plugin.loaded(path)
    assert plugin.SCHEDULER in error.value.hint
    Ranks(path, 1, running=0)
    assert plugin.loaded(path) == {os.getpid(): fenno.__version__}
    control.write_mark(path, "0.0.0")
    with pytest.raises(EngineError, match=r"fenno 0\.0\.0"):
        plugin.loaded(path)


def test_an_allow_list_of_plugins_gets_fennos_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = plugin.environment(tmp_path, tmp_path / "c.json")
    assert found["VLLM_PLUGINS"] == "mine,fenno"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "/somewhere"]
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "VLLM_PLUGINS" not in plugin.environment(tmp_path, tmp_path / "c.json")


def test_a_busy_engine_looks_at_its_control_file_now_and_then_and_one_that_is_told_to_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(mailboxes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    path = tmp_path / "control.json"
    busy, told = Mailbox(path), Mailbox(path)
    assert not busy.changed()
    control.write_wanted(path, Wanted(1, {"max_num_active_seqs": 4}))
    assert not busy.changed(), "a look a moment ago is enough"
    assert told.changed()
    control.write_wanted(path, Wanted(2, {"max_num_active_seqs": 5}))
    assert told.changed(at_once=True)
    clock[0] += 2 * control.LOOK_SECONDS
    assert busy.changed()
    assert not busy.changed(at_once=True), "the same wish is none"
