"""fenno as a real child process on the stub engine: recipes, runs that can be watched and signalled, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
ENGINE = Path(__file__).with_name("engine.py")
FENNO = Path(sys.executable).with_name("fenno")
# Compiled modules are kept whatever the shell says: these tests start hundreds of processes.
ENVIRONMENT = {**os.environ, "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": ""}


class Place:
    """A folder with an engine, a recipe and a home of its own. Every process that is started there carries its mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "stub-python"
        self.python.write_text(f'#!/bin/sh\necho "$*" >> {folder / "calls"}\nexec {sys.executable} {ENGINE} "$@"\n')
        self.python.chmod(0o755)
        self.mark = f"XDG_CACHE_HOME={folder / 'cache'}"

    def recipe(self, *, name: str = "stub", env: dict[str, Any] | None = None, **parts: Any) -> Path:
        """A recipe with quick trials: 2 tokens at 100 requests a second. `parts` are laid over its sections."""
        engine = {
            "model": "stub-model",
            "python": str(self.python),
            "ready_timeout": "120s",
            "flags": {"max-num-seqs": 64},
            "env": {key: str(value) for key, value in (env or {}).items()},
        }
        data: dict[str, Any] = {
            "name": name,
            "engine": engine,
            "workload": {
                "rate": 100,
                "timeout": "10s",
                "classes": [{"name": "one", "share": 1, "prompt_tokens": [8, 32], "output_tokens": 2}],
            },
            "targets": {"p95_ttft": "800ms"},
            "search": {"live": {"max_num_active_seqs": [64]}, "warmup": "300ms", "window": "1s"},
        }
        for section, value in parts.items():
            data[section] = {**data.get(section, {}), **value} if isinstance(value, dict) else value
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return path

    def start(self, *arguments: object, cwd: Path | None = None, before: Sequence[str] = (), **env: str) -> Run:
        """`fenno ARGUMENTS` in this place, going on by itself. `before`: a command that starts it, such as unshare."""
        number = len(list(self.folder.glob("*.err")))
        error = self.folder / f"{number}.err"
        name, _, value = self.mark.partition("=")
        with error.open("wb") as file:
            popen = subprocess.Popen(
                [*before, FENNO, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=cwd or self.folder,
                env={**ENVIRONMENT, name: value, **env},
                start_new_session=True,
            )
        return Run(popen, error)

    def fenno(self, *arguments: object, timeout: float = 300, **env: str) -> Done:
        """`fenno ARGUMENTS` to its end."""
        return self.start(*arguments, **env).finish(timeout)

    def left(self) -> list[int]:
        """Every live process that was started here, whatever session or parent it has now."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._mine(entry)]

    def _mine(self, entry: Path) -> bool:
        # A zombie has no environment any more, and nobody may read that of another user's process.
        with contextlib.suppress(OSError):
            return self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
        return False

    def kill(self, *words: str) -> None:
        """End each Python process started here whose command line has all these words, by SIGKILL; the guards above them stay."""
        for pid in self.left():
            with contextlib.suppress(OSError):
                said = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if set(words) <= set(said) and "python" in said[0] and not any(word.endswith("guard.py") for word in said):
                    os.kill(pid, signal.SIGKILL)

    def empty(self, within: float = 120) -> bool:
        """Whether nothing is left within so many seconds, the limit of a hang."""
        limit = time.monotonic() + within
        while self.left():
            if time.monotonic() > limit:
                return False
            time.sleep(0.2)
        return True

    def starts(self) -> list[str]:
        """The command line of every engine that was started here."""
        calls = self.folder / "calls"
        return [line for line in calls.read_text().splitlines() if " serve " in line] if calls.exists() else []

    def studies(self) -> list[Path]:
        return sorted((self.folder / "fenno-studies").glob("*"))


@dataclass(frozen=True)
class Done:
    """A run that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The last line of standard output."""
        document: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        assert next(iter(document)) == "schema", "a document says what kind it is"
        return document


class Run:
    """A run in progress."""

    def __init__(self, popen: subprocess.Popen[bytes], error: Path) -> None:
        self.popen, self.error = popen, error

    def until(self, there: Callable[[str], bool], timeout: float = 300) -> Run:
        """Wait until `there`, which is asked with what standard error said so far."""
        limit = time.monotonic() + timeout
        while not there(said := self.error.read_text()):
            assert self.popen.poll() is None and time.monotonic() < limit, f"it never came so far:\n{said}"
            time.sleep(0.05)
        return self

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def finish(self, timeout: float = 300) -> Done:
        try:
            out, _ = self.popen.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise AssertionError(f"it did not end within {timeout:g} s:\n{self.error.read_text()}") from None
        return Done(self.popen.returncode, out.decode(), self.error.read_text())


class Again:
    """At which further try of which test pytest is; "" at a first one. `conftest.py` keeps it."""

    now = ""


@contextlib.contextmanager
def side_by_side(
    scenarios: Mapping[str, Callable[[Any], T]],
    folder: Callable[[str], Path],
    workers: int = 6,
    place: Callable[[Path], Any] = Place,
) -> Iterator[Callable[[str], T]]:
    """Run scenarios at the same time, each in a place of its own: they mostly wait. Gives what came of one, by its name.

    A test that is tried again has its scenarios run again, one at a time: what failed once is not looked at twice.
    """
    with ThreadPoolExecutor(workers) as pool:
        results = {(name, ""): pool.submit(scenario, place(folder(name))) for name, scenario in scenarios.items()}

        def tell(name: str) -> T:
            if (name, Again.now) not in results:
                results[name, Again.now] = pool.submit(scenarios[name], place(folder(name)))
            return results[name, Again.now].result()

        try:
            yield tell
        finally:
            for result in results.values():
                result.cancel()
