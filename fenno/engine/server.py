"""The life of one engine: start, readiness by a real request, watching, end. As contexts, so that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import psutil

from fenno import process
from fenno.engine import catalogue, command, dummy, failures, http, plugin
from fenno.errors import EngineError, RecipeError, UsageError
from fenno.recipe import Engine, Recipe

Progress = Callable[[str], None]
GRACE = 3.0
MODEL = "`engine.model` is a folder with a config.json, a Hub id (owner/name), or dummy:NAME"

# What the log says while an engine starts, in the order of a start; the first column is shown to people.
_STAGES = (
    ("importing vLLM", re.compile(r"")),
    ("reading the model's config", re.compile(r"Resolved architecture|non-default args")),
    ("starting the engine core", re.compile(r"Initializing a V1 LLM engine")),
    ("loading the weights", re.compile(r"Starting to load model")),
    ("compiling", re.compile(r"torch\.compile takes|Start compiling|Dynamo bytecode")),
    ("allocating the KV cache", re.compile(r"KV cache size")),
    ("capturing CUDA graphs", re.compile(r"Capturing CUDA graph|Graph capturing")),
    ("starting the HTTP server", re.compile(r"Starting vLLM server|Started server process")),
)
# From the configuration that the engine core logs at its start, with what vLLM has made of every setting.
_GRAPHS = re.compile(r"'cudagraph_mode': <CUDAGraphMode\.(\w+):.*'max_cudagraph_capture_size': (\w+)")
_MIXED = ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


@dataclass
class Server:
    """A running engine. `url` has no trailing slash; `began` is when its start did, on the monotonic clock; `seconds` is how long
    that took; `control` is its live control file; `headers` go with every request to it; `graphs`: tokens of the largest step, with
    prompts in it, that it has as a CUDA graph, None where it has none or does not say."""

    recipe: Recipe
    url: str
    model: str
    folder: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    command: command.Command = field(default_factory=lambda: command.Command(()))
    child: process.Child | None = None
    catalogue: catalogue.Catalogue | None = None
    control: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    graphs: int | None = None

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def key(self) -> str | None:
        return command.api_key(self.recipe.engine)

    def pids(self) -> list[int]:
        """The engine's processes; none for an engine that fenno did not start."""
        return _family(self.child.pid) if self.child else []

    def check(self, stage: str = "load") -> None:
        """Raise `EngineError` with the cause from the log when the engine has died."""
        code = self.child.poll() if self.child else None
        if code is not None:
            raise death(self.log, code, stage)

    @property
    def on_gpu(self) -> bool:
        return self.catalogue is not None and self.catalogue.platform != "cpu"


@contextlib.contextmanager
def serving(
    recipe: Recipe,
    folder: Path,
    *,
    flags: command.Flags | None = None,
    env: Mapping[str, str | None] | None = None,
    port: int | None = None,
    control: Path | None = None,
    progress: Progress = lambda _: None,
    grace: float = GRACE,
    rotate: tuple[int, int] | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    wait: Callable[[Server], None] | None = None,
) -> Iterator[Server]:
    """Have an engine for `recipe` while the block lasts: started here, or the one at `engine.url`.

    `flags` and `env` are laid over the recipe's; `folder` gets `engine.log`. `grace`: seconds between INT, TERM and KILL at the
    end of a server that is ready; at the default even one that hangs is gone within ten. `rotate`: as for `process.running`.
    `headers`: what the server at `engine.url` wants with every request. `wait`: what readiness is for one that answers nobody.
    Raises `EngineError` (stage `start`) with the cause when it does not get ready, and `RecipeError` before any start for a flag
    that this engine does not have.
    """
    if recipe.engine.url is not None:
        with _attached(recipe, folder, progress, rotate, headers) as server:
            yield server
        return
    ready = prepare(recipe, flags=flags, env=env, port=port, folder=folder, say=progress)
    if ready.plugin:
        plugin.install(ready.plugin)
    server = Server(recipe, ready.url, "", folder, command=ready.command, catalogue=ready.catalogue)
    server.control = control
    with process.running(ready.command.argv, log=server.log, env=ready.command.env, grace=GRACE, rotate=rotate) as child:
        server.child = child
        wait(server) if wait else until_ready(server, progress)
        child.allow(grace)
        yield server


@dataclass(frozen=True)
class Ready:
    """Everything that is known before a start. `plugin` is the folder where the command expects fenno's plugin, if it does."""

    catalogue: catalogue.Catalogue
    command: command.Command
    url: str
    plugin: Path | None = None


def prepare(
    recipe: Recipe,
    *,
    flags: command.Flags | None = None,
    env: Mapping[str, str | None] | None = None,
    port: int | None = None,
    folder: Path | None = None,
    say: Progress = lambda _: None,
) -> Ready:
    """Check the flags against the installed engine, find a port, make a dummy model: all that can fail before a start.

    `folder` is where the plugin would be put: for a recipe that asks for fenno's scheduler, unless `flags` names one, and for a
    model that vLLM has only by the plugin.
    """
    command.check_inherited(recipe.engine)
    executable = catalogue.interpreter(recipe.engine.python)
    model, ours = model_path(recipe), None
    steering = {} if "scheduler-cls" in (flags or {}) else plugin.steering(recipe.engine)
    if folder and (steering or plugin.brings(model)):
        ours = folder / "plugin"
        flags = {**steering, **(flags or {})}
        env = {**plugin.path(ours), **(env or {})}
    known = catalogue.read(executable, say)
    known.check({**recipe.engine.flags, **(flags or {})}, recipe.name)
    host = command.address(recipe.engine.flags)
    chosen = claim_port(port or command.port(recipe.engine.flags), host)
    built = command.serve(
        recipe,
        executable=executable,
        distribution=known.engine.distribution,
        model=model,
        port=chosen,
        flags=flags,
        env={**_key_for_engine(recipe), **(env or {})},
    )
    return Ready(known, built, f"http://{host}:{chosen}", ours)


def command_line(recipe: Recipe, **start: Any) -> str:
    """What `serving` would run, for a shell; `start` as for `prepare`."""
    if recipe.engine.start:
        return shlex.join(recipe.engine.start)
    return prepare(recipe, **start).command.shell()


def model_path(recipe: Recipe) -> str:
    """What vLLM is told to load; a `dummy:` model is made first."""
    name = recipe.engine.model or ""
    if name.startswith(command.DUMMY):
        return str(dummy.make(name.removeprefix(command.DUMMY), catalogue.cache_folder() / "models"))
    return name


def model_fault(engine: Engine) -> str | None:
    """What is wrong with a model that is meant to be a folder or a dummy, in a sentence; None for all others."""
    if engine.model is None:
        return None
    name, path = engine.model, Path(engine.model)
    if name.startswith(command.DUMMY):
        return dummy.fault(name.removeprefix(command.DUMMY))
    if not (name.startswith((".", "/", "~")) or path.is_dir()):
        return None
    if name.startswith("~"):
        return f"vLLM takes ~ literally: write the whole path instead of {name}"
    if not path.is_dir():
        return f"there is no model folder {name}"
    if not (path / "config.json").is_file() and not list(path.glob("*.gguf")) and not (path / "params.json").is_file():
        return f"the folder {name} has no config.json: it holds no model"
    return None


def check_model(recipe: Recipe) -> None:
    """Raise `RecipeError` for a model that is meant to be a folder and is none that vLLM takes, or a dummy that there is not."""
    if (fault := model_fault(recipe.engine)) is not None:
        raise RecipeError(f"recipe {recipe.name}: {fault}", MODEL)


def claim_port(port: int | None, host: str = "127.0.0.1") -> int:
    """A free port at `host`, or `port` itself if it is free. Raises `EngineError` when it cannot be had, naming who holds it."""
    bare = host.strip("[]")
    if port is not None and not 0 < port < 65536:
        raise UsageError(f"{port} is no port", "it has to be a number from 1 to 65535")
    try:
        with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((bare, port or 0))
            # Bound but never listened on: free at once, and no other process has it now.
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            said = f"this user cannot listen on {host}{f':{port}' if port else ''}: {error.strerror}"
            raise EngineError(said, "is it an address of this host? ports below 1024 need root", cause="permission") from error
        raise EngineError(
            f"port {port} is held by {_holder(port)}; fenno does not touch it",
            "stop that program, give another `port`, or leave it out and fenno finds a free one",
            cause="port-in-use",
        ) from error


def _holder(port: int | None) -> str:
    """Who listens on the port, as far as this user may know."""
    with contextlib.suppress(psutil.Error):
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port and link.pid:
                return f"another program ({psutil.Process(link.pid).name()}, pid {link.pid})"
    return "another program"


def death(log: Path, code: int | None, stage: str) -> EngineError:
    """The error for an engine that has ended, with the cause from its log."""
    # Of a long life the start is no longer in the log.
    before = "" if stage == "start" else f"{failures.ROTATED}\n"
    found = failures.explain(before + read_log(log), code)
    said = f"{'perhaps: ' if found.confidence == 'possible' else ''}{found.title}. {found.meaning}"
    if found.name in ("unknown", "none"):
        said = found.first_error or f"it ended with exit code {code}"
    hint = found.remedy or "see the log"
    again = failures.again(found.name, found.confidence)
    return EngineError(f"the engine ended: {said}", f"{hint} (log: {log})", stage=stage, cause=found.name, again=again)


def read_log(log: Path, last: int = 2_000_000, since: float = 0.0) -> str:
    """The last two megabytes of a log, or nothing when there is none, or none that was written to after `since`."""
    try:
        if log.stat().st_mtime < since:
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - last))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def stage_of(log: str) -> str:
    """How far a start has come, by its log."""
    return next(name for name, pattern in reversed(_STAGES) if pattern.search(log))


def graphs_of(log: str) -> int | None:
    """Tokens of the largest step, with prompts in it, that the engine of the last start in a log captures as a CUDA graph."""
    mode, size = next(iter(_GRAPHS.findall(log)[-1:]), ("NONE", "0"))
    return int(size) if mode in _MIXED and size.isdigit() else None


def until_ready(server: Server, progress: Progress = lambda _: None, starter: process.Child | None = None) -> None:
    """Wait until a real one-token request is answered. Raises `EngineError` when the engine dies, or takes too long from its start.

    `starter`: somebody's own command that starts it. It may be over long before; one that failed will start nothing.
    """
    limit = server.recipe.engine.ready_timeout
    began, deadline = time.time() - (time.monotonic() - server.began), server.began + limit
    shown = ""
    while time.monotonic() < deadline:
        server.check("start")
        if starter and (code := starter.poll()):
            raise death(server.log, code, "start")
        # Until the guard has begun a new log, the one of the start before lies there.
        stage = stage_of(read_log(server.log, since=began - 0.1))
        if stage != shown:
            progress(stage)
            shown = stage
        try:
            http.call(f"{server.url}/health", timeout=2.0, ca_file=server.recipe.engine.ca_file)
            _check_owner(server)
            server.model = served_model(server)
            one_token(server)
            server.seconds = time.monotonic() - server.began
            server.graphs = graphs_of(read_log(server.log))
            return
        except http.Refused as error:
            if error.status not in (None, 404, 503):
                raise EngineError(f"the engine refused a one-token request: {error}", f"see {server.log}") from error
        time.sleep(0.2)
    raise EngineError(
        f"the engine was not ready after {limit:g} s; it was {shown or 'starting'}",
        f"see {server.log}; for a slow start raise `engine.ready_timeout` in the recipe",
        cause="hang",
    )


# What vLLM calls each of several HTTP processes (`set_process_title`). One alone keeps the name of the command.
_HTTP = re.compile(r"::APIServer_\d+$")
TITLED = 60.0  # seconds until a process has its title at the latest


def http_processes(commands: Iterable[Sequence[str]]) -> int | None:
    """How many processes answer HTTP, by the command lines of an engine's processes; None while one of these has no title yet."""
    lines = [[*line] for line in commands]
    if any("spawn_main(" in word for line in lines for word in line):
        return None
    return max(1, sum(bool(line) and _HTTP.search(line[0]) is not None for line in lines))


def check_http_processes(server: Server, asked: int) -> None:
    """Raise `EngineError` where another number of processes than `asked` answers HTTP: whatever is measured then is not what it is
    called. An engine that is ready may still spawn some of them; what cannot be told in a minute is no error."""
    deadline, before = time.monotonic() + TITLED, None
    while time.monotonic() < deadline:
        server.check("start")
        there = http_processes(_command_lines(server.pids()))
        if there == asked:
            return
        # Twice: while a process is given its title, it may have none at all.
        if there is not None and there == before:
            said = f"api-server-count is {asked}, and {there} {'process answers' if there == 1 else 'processes answer'} HTTP"
            hint = "vLLM ignores the flag with its Rust front end and under `enable-elastic-ep`: leave one of them out"
            raise EngineError(said, hint)
        before = there
        time.sleep(0.2)


def _command_lines(pids: Iterable[int]) -> list[list[str]]:
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid).cmdline())
    return found


def served_model(server: Server) -> str:
    """The name to use in requests: the recipe's, or the first that the server lists."""
    if server.recipe.engine.served_model:
        return server.recipe.engine.served_model
    ca_file = server.recipe.engine.ca_file
    listed = http.call_json(f"{server.url}/v1/models", key=server.key, headers=server.headers, ca_file=ca_file).get("data") or []
    if not listed:
        raise EngineError(f"{server.url}/v1/models lists no model", "set `engine.served_model` in the recipe", stage="load")
    return str(listed[0]["id"])


def one_token(server: Server, timeout: float = 60.0) -> None:
    """One real request: a server that is healthy and cannot answer is not ready. Raises `http.Refused`."""
    if server.recipe.workload.endpoint == "chat":
        body = {"messages": [{"role": "user", "content": "a"}]}
        path = "/v1/chat/completions"
    else:
        body, path = {"prompt": "a"}, "/v1/completions"  # type: ignore[dict-item]
    asked = {"model": server.model, "max_tokens": 1, **body}
    ca_file = server.recipe.engine.ca_file
    http.call(f"{server.url}{path}", asked, timeout=timeout, key=server.key, headers=server.headers, ca_file=ca_file)


@contextlib.contextmanager
def _attached(
    recipe: Recipe, folder: Path, progress: Progress, rotate: tuple[int, int] | None, headers: Mapping[str, str]
) -> Iterator[Server]:
    """The server at `engine.url`, started and stopped by the recipe's own commands where it has them."""
    server = Server(recipe, str(recipe.engine.url).rstrip("/"), "", folder, headers=headers)
    with contextlib.ExitStack() as stack:
        starter = None
        if recipe.engine.start:
            starter = stack.enter_context(process.running(recipe.engine.start, log=server.log, rotate=rotate))
        if recipe.engine.stop:
            stack.callback(lambda: process.run(recipe.engine.stop or [], timeout=120.0))
        if starter:
            until_ready(server, progress, starter)
        else:
            _reach(server)
        yield server


def _reach(server: Server) -> None:
    try:
        server.model = served_model(server)
    except http.Refused as error:
        raise EngineError(
            f"there is no usable server at {server.url}: {error}", "start it, or mend the URL", stage="load", cause="unreachable"
        ) from error


def _family(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _check_owner(server: Server) -> None:
    """Raise `EngineError` when somebody else's server answers where ours should: it is not to get a single request."""
    port = urlsplit(server.url).port
    if server.child and port and not _owns(server.child.pid, port):
        raise EngineError(
            f"port {port} is answered by a server that fenno did not start",
            "stop that server, or let fenno choose a port by leaving `port` out",
            cause="port-in-use",
        )


def _owns(pid: int, port: int) -> bool:
    """Whether one of our own processes listens on the port: a stranger's server also answers /health."""
    for member in _family(pid):
        with contextlib.suppress(psutil.Error):
            for link in psutil.Process(member).net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port:
                    return True
    return False


def _key_for_engine(recipe: Recipe) -> dict[str, str | None]:
    """The API key goes by the environment, never on a command line that `ps` shows."""
    key = command.api_key(recipe.engine)
    return {command.KEY_VARIABLE: key} if key else {}
