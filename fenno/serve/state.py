"""The small files by which `fenno status`, `fenno stop` and `fenno rollback` find a server, one folder a name.

state.json      what is served, by which process, how it is; written by temp-and-rename
history.json    the recipes that were ready under this name, the newest last; their files lie in recipes/
lock            held while somebody serves under this name
engine.log      of the engine that runs; engine.log.1, … are the ones before
serve.log       what `fenno serve` itself said, where it was detached
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from fenno import process
from fenno.engine import catalogue
from fenno.errors import DiskError, UsageError
from fenno.recipe import Recipe

OVER = ("stopped", "failed")


@dataclass(frozen=True)
class State:
    """How a server is. `phase`: starting, ready, waiting (for the next start), draining, stopped or failed, `since` a time of
    the epoch; `stage` of a start, with the seconds `left`; `ready`: when this life became so; `pid` and `birth` are fenno's own,
    `engine` holds those of the engine's processes; `deaths` are of `policy.Death`, the last twenty; `said` and `hint`: why it
    failed; `role`: of one of several hosts, head or worker."""

    name: str
    recipe: str
    digest: str
    pid: int
    birth: str
    started: float
    log: str
    phase: str = "starting"
    since: float = 0.0
    stage: str = ""
    left: float | None = None
    ready: float | None = None
    url: str = ""
    model: str = ""
    port: int | None = None
    grace: float = 60.0
    on_gpu: bool = False
    detached: bool = False
    role: str = ""
    restarts: int = 0
    engine: list[list[Any]] = field(default_factory=list)
    deaths: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""
    hint: str = ""

    @property
    def alive(self) -> bool:
        """Whether the fenno that serves it runs; a process that got its pid later is another."""
        return self.phase not in OVER and process.birth(self.pid) == self.birth

    @property
    def service(self) -> str:
        """What it does when it is ready, in a few words."""
        return f"{self.url}/v1 serves {self.model}" if self.url else "it has joined the head"

    def leftovers(self) -> list[tuple[int, str]]:
        """The engine's processes that still run."""
        return [(pid, birth) for pid, birth in self.engine if process.birth(pid) == birth]


@dataclass(frozen=True)
class Served:
    """A recipe that was ready once: `path` of its copy, `cwd` where relative paths in it begin, `port` it was served on."""

    digest: str
    path: str
    cwd: str
    port: int | None
    at: float


def checked_name(name: str) -> str:
    """A server's name, which is a folder's. Raises `UsageError`."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise UsageError(f"{name!r} cannot be a server's name", "small letters, digits, dots and dashes")
    return name


def root() -> Path:
    """Where the servers' folders lie."""
    return catalogue.cache_folder() / "serve"


def read(folder: Path) -> State | None:
    """The state in a folder; None when there is none that this fenno can read."""
    try:
        data = json.loads((folder / "state.json").read_text())
        return State(**{f.name: data[f.name] for f in fields(State) if f.name in data})
    except (OSError, ValueError, TypeError):
        return None


def write(state: State) -> None:
    """Write a state to its folder. Raises `OSError`."""
    process.write(root() / state.name / "state.json", json.dumps(asdict(state), indent=1))


def states() -> list[State]:
    """All servers of this user on this host, by name."""
    return [found for folder in sorted(root().glob("*")) if (found := read(folder))]


def find(name: str | None) -> State:
    """The server of that name; without one the only one that runs. Raises `UsageError` with the names there are."""
    known = states()
    alive = [state for state in known if state.alive]
    fitting = [state for state in known if state.name == name] if name else (alive if alive else known)
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(state.name for state in (alive or known))
    if not known:
        raise UsageError("fenno serves nothing here", "start a server with `fenno serve RECIPE --detach`")
    if name:
        raise UsageError(f"no server is called {name}", f"there are: {names}")
    raise UsageError("which server is meant?" if alive else "no server runs", f"give the name of one: {names}")


class Place:
    """One server's folder, held by the process that serves."""

    def __init__(self, folder: Path, state: State, lock: IO[str]) -> None:
        self.folder, self.state, self._lock = folder, state, lock

    def update(self, **changes: Any) -> None:
        """Change the state, on disk too. A full disk does not end a server."""
        if changes.get("phase", self.state.phase) != self.state.phase:
            changes["since"] = time.time()
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            write(self.state)

    def remember(self, recipe: Recipe) -> None:
        """Note in the history that `recipe` is served now."""
        copy = self.folder / "recipes" / f"{recipe.digest()}.yaml"
        entry = Served(recipe.digest(), str(copy), str(Path.cwd()), self.state.port, time.time())
        others = [served for served in history(self.folder) if served.digest != entry.digest]
        with contextlib.suppress(OSError):
            process.write(copy, recipe.to_yaml())
            process.write(self.folder / "history.json", json.dumps([asdict(served) for served in [*others[-9:], entry]], indent=1))


def history(folder: Path) -> list[Served]:
    """The recipes that were served from this folder, each once, the last one served last."""
    try:
        return [Served(**entry) for entry in json.loads((folder / "history.json").read_text())]
    except (OSError, ValueError, TypeError):
        return []


def before(state: State) -> Served:
    """What was served under this name before the present recipe. Raises `UsageError` when nothing was."""
    others = [served for served in history(root() / state.name) if served.digest != state.digest]
    if not others:
        raise UsageError(f"nothing else was served as {state.name} before", "only a recipe that was ready once can be gone back to")
    return others[-1]


def hold(name: str, recipe: Recipe, source: str, *, detached: bool = False) -> Place:
    """Take a server's folder for this process. Raises `UsageError` when it is held, `DiskError` when it cannot be written."""
    folder = root() / name
    try:
        lock = process.locked(folder / "lock")
    except OSError as error:
        raise DiskError(f"cannot write {folder}: {error.strerror}", "free some space, or set XDG_CACHE_HOME") from error
    if lock is None:
        raise held(name)
    state = State(
        name,
        source,
        recipe.digest(),
        os.getpid(),
        process.birth(os.getpid()) or "",
        time.time(),
        str(folder / "engine.log"),
        since=time.time(),
        grace=recipe.serve.grace,
        detached=detached,
    )
    place = Place(folder, state, lock)
    place.update()
    return place


def held(name: str) -> UsageError:
    """The error for a name under which somebody serves already."""
    state = read(root() / name)
    who = f" by pid {state.pid}" + (f" at {state.url}" if state.url else "") if state else ""
    return UsageError(f"{name} is served already{who}", f"`fenno stop {name}` ends it; --name gives this one another name")
