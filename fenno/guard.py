"""Runs one command so that it never outlives whoever asked for it. Standard library only; started as a script by `process.py`.

usage: guard.py GRACE_SECONDS LOG COMMAND…

Standard input is a pipe whose other end the asker keeps open; a number on it changes the grace. LOG is "-" (the command writes to
the guard's own output) or BYTES,KEPT,PATH: the guard writes what the command prints to PATH, which begins anew at every start and
whenever it has grown to BYTES; PATH.1 to PATH.KEPT are the ones before.

The guard leads a session of its own and is a child subreaper, so that every descendant, also one that makes a session for
itself, either ends with the command or is handed to the guard. It stops them all when the pipe closes (the asker died, by
SIGKILL too), on SIGTERM, and when the command itself has ended: INT, then TERM, then KILL, each after the grace, or after
three seconds once the asker is gone: nobody waits for an orderly end then.
Exit code: the command's own, or 128 + signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ALONE = 3.0
ASKER = os.getppid()


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the process group alone has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Every live process below `root`, by /proc; zombies are not live."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def reap() -> dict[int, int]:
    """Collect every child that has ended: pid -> exit code (128 + signal when killed)."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            ended[pid] = code if code >= 0 else 128 - code
    return ended


def patience(grace: float) -> float:
    """The grace, or less when the asker has ended."""
    return grace if os.getppid() == ASKER else min(grace, ALONE)


def stop_all(leader: int, grace: float, code: int | None) -> int:
    """End what is left, gently first. Returns the leader's exit code."""
    for step in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        # The leader alone is asked first: an orderly program ends its own children, and a Ctrl-C to all of them at once
        # makes its workers die under its hands. Orphans of a leader that is gone are asked themselves.
        alone = code is None and step != signal.SIGKILL
        for pid in [leader] if alone else descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, step)
        asked = time.monotonic()
        while time.monotonic() - asked < (5.0 if step == signal.SIGKILL else patience(grace)):
            ended = reap()
            code = ended.get(leader, code)
            if not descendants(os.getpid()):
                return code if code is not None else 128 + step
            if alone and code is not None:
                break
            time.sleep(0.02)
    return code if code is not None else 128 + signal.SIGKILL


def put(file: int, data: bytes) -> int:
    """Write all of it. Returns how many bytes were lost: a full disk must not block the command."""
    while data:
        try:
            data = data[os.write(file, data) :]
        except OSError:
            return len(data)
    return 0


def fresh(path: str, kept: int) -> int:
    """Open PATH anew, with the one that lay there as PATH.1. Raises `OSError`."""
    if os.path.exists(path) and os.path.getsize(path):
        for number in range(kept, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}.{number - 1}" if number > 1 else path, f"{path}.{number}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def pump(source: int, file: int, path: str, most: int, kept: int) -> None:
    """Copy `source` to `file`, which is open at PATH, until nobody writes any more; a new file begins between two lines."""
    lost = 0
    while data := os.read(source, 65536):
        if lost and put(file, b"fenno: %d bytes of this log are missing here: the disk was full\n" % lost) == 0:
            lost = 0
        lines, newline, rest = data.rpartition(b"\n")
        lost += put(file, lines + newline)
        if newline and os.fstat(file).st_size >= most:
            # Without a new file the old one grows on.
            with contextlib.suppress(OSError):
                newer = fresh(path, kept)
                os.close(file)
                file = newer
                put(file, b"fenno: this log goes on from %s.1\n" % os.path.basename(path).encode())
        lost += put(file, rest)


def begin(argv: list[str], output: int | None) -> int:
    """Start the command, which ends with the guard and writes to `output`. Returns its pid."""
    parent, leader = os.getpid(), os.fork()
    if leader:
        return leader
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"guard: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def main(grace: float, log: str, argv: list[str]) -> int:
    if os.getsid(0) != os.getpid():
        os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    if log == "-":
        return watch(begin(argv, None), wake_read, grace)
    most, kept, path = log.split(",", 2)
    file, (source, output) = fresh(path, int(kept)), os.pipe()
    leader = begin(argv, output)
    os.close(output)
    copying = threading.Thread(target=pump, args=(source, file, path, int(most), int(kept)), daemon=True)
    copying.start()
    code = watch(leader, wake_read, grace)
    # Nobody is left to write, so this ends at once: the last lines are those that say why.
    copying.join(5.0)
    return code


def watch(leader: int, wake_read: int, grace: float) -> int:
    """Until the command has ended, or the asker has, or a signal came; then end all that is left. Returns the exit code."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            woken = {key.fd for key, _ in selector.select()}
            signals = os.read(wake_read, 64) if wake_read in woken else b""
            ended = reap()
            if leader in ended:
                return stop_all(leader, min(grace, 2.0), ended[leader])
            said = os.read(0, 64) if 0 in woken else None
            if said == b"" or set(signals) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
                return stop_all(leader, grace, None)
            if said:
                grace = float(said.split()[-1])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
