"""The one door to processes: `run` one to its end, have one `running` as a context, leave one `detached`, `tell` one to end.

Every child runs under `guard.py`, in a session of its own: a Ctrl-C in the terminal reaches fenno alone, and nothing is left
behind whichever way fenno ends. What a guard that was killed leaves comes to fenno, which ends it. Also here is what processes
share: a file that is `locked`, one that others see whole (`write`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from fenno.errors import DiskError, ProcessError

PR_SET_CHILD_SUBREAPER = 36
_GUARD = str(Path(__file__).with_name("guard.py"))
_started: set[int] = set()  # by this process: whatever else is its child is an orphan of a guard


@dataclass(frozen=True)
class Finished:
    """A child that has ended. `stdout` and `stderr` are text, decoded with replacement."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def check(self, what: str) -> Finished:
        """Itself, or a `ProcessError` saying that `what` failed, with the last line of stderr."""
        if self.returncode:
            said = last_line(self.stderr.strip() or self.stdout)
            raise ProcessError(f"{what} failed with exit code {self.returncode}: {said}", "run: " + " ".join(self.argv))
        return self


def last_line(text: str, nothing: str = "it printed nothing") -> str:
    """The last words of a process, for an error."""
    return (text.strip() or nothing).splitlines()[-1]


class Child:
    """A running child. `pid` is the guard's; the command and all its descendants end with it."""

    def __init__(self, popen: subprocess.Popen[bytes], argv: Sequence[str], log: Path, grace: float) -> None:
        self._popen = popen
        self.argv = tuple(argv)
        self.log = log
        self._grace = grace
        self._born = psutil.Process(popen.pid).create_time()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code (128 + signal when killed), or None while it runs."""
        code = self._popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises `ProcessError` after `timeout` seconds."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.argv[0]} did not end within {timeout:g} s", f"see {self.log}") from None
        return self.poll() or 0

    def allow(self, grace: float) -> None:
        """Change the seconds between INT, TERM and KILL: a server with requests in flight needs more than one that starts."""
        self._grace = grace
        if self._popen.stdin:
            # The guard may have ended with its command: then there is nothing to allow.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._popen.stdin.fileno(), f"{grace}\n".encode())

    def stop(self) -> int:
        """Ask it to end (INT, TERM, KILL, each after the grace) and wait until nothing of it is left."""
        if self._popen.stdin and not self._popen.stdin.closed:
            self._popen.stdin.close()
        code = self.wait(3 * self._grace + 15)
        if (self._popen.returncode or 0) < 0:
            _end_orphans(self._born)
        return code


def _end_orphans(since: float, within: float = 5.0) -> None:
    """End what a guard that was killed has left: it is this process's own now, since that adopts orphans."""
    limit = time.monotonic() + within
    while time.monotonic() < limit:
        strangers = [child for child in psutil.Process().children() if child.pid not in _started]
        orphans = [child for child in strangers if child.create_time() > since]
        if not orphans:
            return
        for member in [below for orphan in orphans for below in (orphan, *orphan.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for orphan in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)
        time.sleep(0.02)


def _adopt_orphans() -> None:
    """From now on the orphans among this process's descendants come to it and not to init. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def module(name: str) -> list[str]:
    """How a module of fenno's own environment is run. Never from the folder fenno is run in: somebody's `locust.py` or older
    `fenno/` lies there. (Python 3.10 cannot be told so.)"""
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", name]


def environment(extra: Mapping[str, str | None] | None) -> dict[str, str]:
    """fenno's own environment with `extra` laid over it; a value of None removes the variable."""
    merged: dict[str, str | None] = {**os.environ, **(extra or {})}
    return {key: value for key, value in merged.items() if value is not None}


@contextlib.contextmanager
def running(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    grace: float = 10.0,
    rotate: tuple[int, int] | None = None,
) -> Iterator[Child]:
    """Run `argv` while the block lasts; its output goes to the end of `log`.

    `grace`: seconds between INT, TERM and KILL when the block ends first. `rotate`: (bytes, files): `log` begins anew now and
    whenever it has grown so large, and so many older ones are kept as log.1, log.2, …; no line is lost or cut.
    Raises `DiskError` when the log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    except OSError as error:
        raise DiskError(f"cannot write {log}: {error.strerror}", "free some space, or choose another --out folder") from error
    _adopt_orphans()
    with output:
        # -I -S: the guard needs nothing but the standard library, and starts in 20 ms.
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(grace), f"{rotate[0]},{rotate[1]},{log.resolve()}" if rotate else "-", *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=environment(env),
            start_new_session=True,
        )
    _started.add(popen.pid)
    child = Child(popen, argv, log, grace)
    try:
        yield child
    finally:
        child.stop()


def run(
    argv: Sequence[str],
    *,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    text_input: str | None = None,
) -> Finished:
    """Run a short-lived command to its end and capture what it prints.

    Raises `ProcessError` when it cannot be started or takes longer than `timeout` seconds. A non-zero exit code is a value:
    call `.check(what)` where it is an error.
    """
    started = time.monotonic()
    try:
        with subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if text_input is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=environment(env),
            start_new_session=True,
        ) as popen:
            _started.add(popen.pid)
            try:
                out, err = popen.communicate(text_input.encode() if text_input is not None else None, timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, 9)
                raise
    except subprocess.TimeoutExpired:
        raise ProcessError(f"{argv[0]} took longer than {timeout:g} s", "run: " + " ".join(argv)) from None
    except OSError as error:
        raise ProcessError(f"cannot run {argv[0]}: {error.strerror}", "is it installed, and is the path right?") from error
    return Finished(
        tuple(argv),
        popen.returncode,
        out.decode(errors="replace"),
        err.decode(errors="replace"),
        time.monotonic() - started,
    )


def detached(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `argv` so that it goes on when fenno and the terminal end; `log` begins anew, the one before is log.1."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("wb") as output:
        return subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def birth(pid: int) -> str | None:
    """When the process was born, so that another one with the same pid is not taken for it; None when there is none (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return None if fields[0] == "Z" else f"{boot[:8]}-{fields[19]}"
    except FileNotFoundError:
        pass
    except ProcessLookupError:
        return None
    if Path("/proc/self").exists():
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).create_time())
    return None


def tell(pid: int, born: str, number: signal.Signals) -> bool:
    """Send a signal to the process `pid` that was born then. False when it has ended: nobody else is ever told."""
    try:
        with contextlib.ExitStack() as stack:
            handle = None
            if hasattr(os, "pidfd_open"):
                # Held before it is looked at: the pid cannot become another's in between.
                handle = os.pidfd_open(pid)
                stack.callback(os.close, handle)
            if birth(pid) != born:
                return False
            if handle is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
            return True
    except ProcessLookupError:
        return False


def locked(path: Path) -> TextIO | None:
    """The file, with a lock that is held until it is closed or this process ends; None while another holds it. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def write(path: Path, text: str) -> None:
    """Write a small file whole: to a temporary name, then renamed. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
