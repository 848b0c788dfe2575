"""Children end with fenno, whichever way it ends."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from stub.waiting import until

from fenno import process
from fenno.errors import ProcessError

pytestmark = pytest.mark.scenario

LONG = 120.0  # seconds, the limit of a hang and no measure
# A program that refuses INT and TERM and has a grandchild in a session of its own: the worst behaved thing we start.
STUBBORN = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
    """
)


def pids_in(log: Path) -> list[int]:
    def words() -> list[str]:
        return log.read_text().split() if log.exists() and log.read_text().endswith("\n") else []

    until(lambda: len(words()) == 2)
    return [int(word) for word in words()]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def test_run_gives_output_and_exit_code() -> None:
    done = process.run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
    with pytest.raises(ProcessError, match="the probe failed with exit code 3: err"):
        done.check("the probe")


def test_run_times_out_and_kills_what_it_started() -> None:
    with pytest.raises(ProcessError, match="longer than 0.3 s"):
        process.run(["sh", "-c", "sleep 98.7 & sleep 98.7"], timeout=0.3)
    until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98.7"]])


def test_run_names_a_missing_program() -> None:
    with pytest.raises(ProcessError, match="cannot run /no/such/program"):
        process.run(["/no/such/program"])


@pytest.mark.parametrize("code", [0, 7])
def test_a_child_keeps_its_own_exit_code(tmp_path: Path, code: int) -> None:
    with process.running([sys.executable, "-c", f"raise SystemExit({code})"], log=tmp_path / "log") as child:
        assert child.wait(LONG) == code


def test_a_killed_child_says_which_signal(tmp_path: Path) -> None:
    with process.running(["sh", "-c", "kill -9 $$"], log=tmp_path / "log") as child:
        assert child.wait(LONG) == 128 + 9


def test_leaving_the_block_ends_stubborn_descendants(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process.running([sys.executable, "-c", STUBBORN], log=log, grace=0.3):
        pids = pids_in(log)
    until(lambda: not any(alive(pid) for pid in pids))


def test_an_orderly_child_is_interrupted_not_killed(tmp_path: Path) -> None:
    script = "import time\ntry:\n    print('up', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n    print('bye')"
    log = tmp_path / "log"
    with process.running([sys.executable, "-c", script], log=log):
        until(lambda: log.exists() and "up" in log.read_text())
    assert log.read_text().split() == ["up", "bye"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_fenno(tmp_path: Path, how: signal.Signals) -> None:
    log = tmp_path / "log"
    parent_script = textwrap.dedent(
        f"""
        import sys, time, pathlib
        from fenno import process
        with process.running([sys.executable, "-c", {STUBBORN!r}], log=pathlib.Path({str(log)!r}), grace=0.3):
            time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_script], stderr=subprocess.DEVNULL)
    pids = pids_in(log)
    parent.send_signal(how)
    parent.wait(LONG)
    until(lambda: not any(alive(pid) for pid in pids))


def test_orphans_of_a_command_that_ended_are_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process.running(["sh", "-c", "sleep 97.3 & echo $$ $!"], log=log) as child:
        pids = pids_in(log)
        assert child.wait(LONG) == 0
    until(lambda: not any(alive(pid) for pid in pids))


CHATTY = "for number in range(20_000): print(f'line {number}', flush=number % 100 == 0)"


def test_a_log_that_is_rotated_loses_no_line_and_cuts_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process.running([sys.executable, "-c", CHATTY], log=log, rotate=(30_000, 9)) as child:
        assert child.wait(LONG) == 0
    files = [log.with_name(f"log.{number}") for number in range(9, 0, -1)] + [log]
    texts = [file.read_text() for file in files if file.exists()]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("fenno: this log goes on from log.1")]
    assert lines == [f"line {number}" for number in range(20_000)]
    assert 3 <= len(texts) <= 9
    assert max(len(text) for text in texts) < 30_000 + 2 * 65_536
    assert texts[1].startswith("fenno: this log goes on from log.1\n")


def test_only_so_many_logs_are_kept_and_each_start_begins_a_new_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number in range(4):
        with process.running(["echo", f"start {number}"], log=log, rotate=(1000, 2)) as child:
            assert child.wait(LONG) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "log": "start 3\n",
        "log.1": "start 2\n",
        "log.2": "start 1\n",
    }


def test_the_last_words_of_a_killed_command_are_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = "import os, signal, sys; sys.stdout.write('no newline'); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    with process.running([sys.executable, "-c", words], log=log, rotate=(1000, 2)) as child:
        assert child.wait(LONG) == 137
    assert log.read_text() == "no newline"


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
def test_what_a_killed_guard_leaves_is_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bystander = subprocess.Popen(["sleep", "600"])
    with process.running([sys.executable, "-c", STUBBORN], log=log, rotate=(1000, 2)) as child:
        pids = pids_in(log)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(LONG) == 137
    until(lambda: not any(alive(pid) for pid in pids))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_the_environment_is_laid_over_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENNO_A", "1")
    env = process.environment({"FENNO_A": None, "FENNO_B": "2"})
    assert "FENNO_A" not in env
    assert env["FENNO_B"] == "2"
    assert os.environ["PATH"] == env["PATH"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks where it is started first")
@pytest.mark.parametrize("module", [("fenno.nvml",), ("locust", "--version"), ("fenno", "--help")])
def test_what_lies_where_fenno_is_run_is_no_part_of_it(
    module: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fenno", "locust"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('somebody else')\n")
    monkeypatch.chdir(tmp_path)
    assert process.run([*process.module(module[0]), *module[1:]], timeout=60).returncode == 0


def test_no_child_of_fenno_is_started_from_the_folder_it_is_run_in() -> None:
    package = Path(process.__file__).parent
    direct = {path.name for path in package.rglob("*.py") if re.search(r'sys\.executable, "-m"', path.read_text())}
    assert direct == set(), "process.module() is how a module of our own is run"
