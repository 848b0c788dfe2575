"""Lines for a file, written beside the event loop."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gevent


class Spool:
    """Lines for a file, written by a thread: a disk that is busy would stop the loop for tens of milliseconds.

    The thread does nothing but write bytes, which needs no interpreter lock; with it, it could stop the loop for 5 ms itself.
    `name`: of the first file, the second, ...; one of `full` bytes or more is followed by the next.
    """

    def __init__(self, name: Callable[[int], Path], full: float = math.inf) -> None:
        self._name, self._full, self._number = name, full, 1
        self._file = name(1).open("ab")
        self._lines: list[str] = []
        self._job: Any = None

    def add(self, line: str) -> None:
        self._lines.append(line + "\n")

    def flush(self, wait: bool = False) -> None:
        """Hand over what there is, unless the thread is still busy with the last lot; `wait` until all is written."""
        if wait and self._job is not None:
            self._job.get()
        if self._lines and (self._job is None or self._job.ready()):
            lines, self._lines = self._lines, []
            self._job = gevent.get_hub().threadpool.spawn(self._write, "".join(lines).encode())
        if wait and self._job is not None:
            self._job.get()

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
            if self._file.tell() >= self._full:
                self._file.close()
                self._number += 1
                self._file = self._name(self._number).open("ab")
        except OSError as error:
            give_up(error)


def give_up(error: OSError) -> NoReturn:
    """End at once: locust would go on without traffic or without records, for ever."""
    with contextlib.suppress(OSError):
        print(f"cannot write: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(70)
