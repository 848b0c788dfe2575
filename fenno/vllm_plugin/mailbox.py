"""The engine's end of the control file: at most one `stat` a step, and never an exception into the engine."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from fenno import control
from fenno.control import Acknowledgement, Wanted

log = logging.getLogger("vllm.fenno")

ANSWER_SECONDS = 1.0


class Mailbox:
    """What is wanted of this rank, and its answers. `problem` says why the last wish could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._seen: tuple[int, int, int] | None = None
        self._answered = self._looked = 0.0

    @staticmethod
    def of_environment() -> Mailbox | None:
        """The one at FENNO_CONTROL, or None: then the scheduler runs with what it was started with."""
        path = os.environ.get(control.VARIABLE)
        return Mailbox(Path(path)) if path else None

    def changed(self, at_once: bool = False) -> bool:
        """Whether there is a file that was not there before; False if the last look was just now, unless `at_once`. A rename gives
        a new inode, so that no clock is needed to tell."""
        now = time.monotonic()
        if now - self._looked < control.LOOK_SECONDS and not at_once:
            return False
        self._looked = now
        try:
            found = self.path.stat()
        except OSError:
            return False
        seen, self._seen = self._seen, (found.st_ino, found.st_mtime_ns, found.st_size)
        return seen != self._seen

    def read(self) -> Wanted | None:
        """The wish, or None with `problem` set: the engine goes on as it was."""
        try:
            wanted = control.read_wanted(self.path)
        except (OSError, ValueError) as error:
            self.problem = str(error)
            log.warning("fenno: the control file cannot be used: %s", error)
            return None
        self.problem = ""
        return wanted

    def due(self) -> bool:
        """Whether the last answer is old enough for its counters to be written again."""
        return time.monotonic() - self._answered >= ANSWER_SECONDS

    def answer(self, answer: Acknowledgement) -> None:
        self._answered = time.monotonic()
        try:
            control.write_acknowledgement(self.path, answer)
        except OSError as error:
            log.warning("fenno: the acknowledgement cannot be written: %s", error)
