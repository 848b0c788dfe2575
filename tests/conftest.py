"""What holds for every test: fast tests start no engine, compiler or installer, and no two runs have engines at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import pytest
from stub.harness import Again

# Seconds by marker, where a minute is too short on a slow host.
TIMEOUTS = {"engine": 600, "scenario": 480}
# The same examples in every run, and no verdict by the clock of a shared host. `HYPOTHESIS_PROFILE=search` looks for new ones, ten
# times as many.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

HEAVY_PROGRAMS = {"vllm", "nvcc", "ninja", "pip", "pip3"}
HEAVY_MODULES = {"vllm", "pip"}


def pytest_configure(config: pytest.Config) -> None:
    """A shell's FENNO_ variables are not the tests', nor its caches, nor the signals that it has its background ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith("FENNO_")]:
        del os.environ[name]
    caches = tempfile.TemporaryDirectory(prefix="fenno-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(caches.cleanup)
    os.environ["XDG_CACHE_HOME"] = caches.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on an engine come last and may take longer."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
    for item in items:
        longer = max((seconds for name, seconds in TIMEOUTS.items() if item.get_closest_marker(name)), default=0)
        if longer and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(longer))


def pytest_collection_finish(session: pytest.Session) -> None:
    """One run with engines at a time on this machine. It waits here, where no test's clock runs yet; the lock ends with pytest."""
    if session.config.option.collectonly or not any(item.get_closest_marker("engine") for item in session.items):
        return
    turn = Path(tempfile.gettempdir(), "fenno-engine-tests.lock").open("w")  # noqa: SIM115
    session.config.add_cleanup(turn.close)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("\nwaiting for another run of the engine tests to end ...", file=sys.stderr, flush=True)
        fcntl.flock(turn, fcntl.LOCK_EX)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make` tries a test that fails once more."""
    tries = getattr(item, "execution_count", 1)
    Again.now = f"{item.nodeid}, {tries}" if tries > 1 else ""


def heavy(argv: Sequence[str | os.PathLike[str]], playground: Path) -> str | None:
    """What `argv` would start that a fast test must not, or None. A stand-in that lies under `playground` may be started."""
    words = [os.fspath(word) for word in argv]
    if any(word.endswith("guard.py") for word in words[:4]):
        words = words[6:]
    program = Path(shutil.which(words[0]) or words[0]) if words else Path()
    if program.is_relative_to(playground):
        return None
    if program.name in HEAVY_PROGRAMS:
        return program.name
    if program.name.startswith("python"):
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if module.partition(".")[0] in HEAVY_MODULES:
            return module
        if any(word.endswith("engine/inside/launch.py") for word in words[1:3]):
            return "an engine"
    return None


@pytest.fixture(autouse=True)
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A `subprocess.Popen` that refuses what only tests marked `engine`, `gpu` or `installs` may start."""
    if any(request.node.get_closest_marker(name) for name in ("engine", "gpu", "installs")):
        return
    playground = tmp_path_factory.getbasetemp()

    class Guarded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, args, *rest, **options) -> None:  # type: ignore[no-untyped-def]
            found = heavy(args if isinstance(args, list | tuple) else os.fspath(args).split(), playground)
            if found:
                pytest.fail(f"this test starts {found}, and is not marked for it: {args}")
            super().__init__(args, *rest, **options)

    monkeypatch.setattr(subprocess, "Popen", Guarded)
