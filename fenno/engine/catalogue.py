"""The knobs an installed vLLM has, asked from itself in a child process, so that a wrong flag is refused before a long start."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno import process
from fenno.engine.inside.introspect import MARK
from fenno.errors import EngineError, ProcessError, RecipeError
from fenno.vllm_plugin import versions

_SCRIPT = str(Path(__file__).parent / "inside" / "introspect.py")

# Flags people still write, and what became of them. A name that is not here gets the nearest one the engine has.
GONE = {
    "scheduler-policy": "it never existed; the order of waiting requests is `scheduling-policy`, or the recipe key `scheduler`",
    "swap-space": "V1 recomputes preempted requests instead of swapping them out; drop it",
    "num-scheduler-steps": "V1 schedules every step; drop it",
    "scheduler-delay-factor": "V1 has no delay factor; drop it",
    "use-v2-block-manager": "there is only one block manager now; drop it",
    "max-num-partial-prefills": "it was removed; `long-prefill-token-threshold` limits one prompt's part of a step",
    "max-long-partial-prefills": "it was removed; `long-prefill-token-threshold` limits one prompt's part of a step",
    "disable-log-requests": "requests are not logged unless `enable-log-requests` is given; drop it",
    "device": "the device follows from the installed build; drop it",
}


@dataclass(frozen=True)
class Flag:
    """One flag of `vllm serve`. `type` is the parser's own word for it; `switch` flags take no value and have a --no- form."""

    type: str | None
    choices: tuple[Any, ...] | None
    default: Any
    switch: bool


@dataclass(frozen=True)
class Identity:
    """Which vLLM is installed under `executable`."""

    executable: str
    distribution: str
    version: str
    python: str
    torch: str | None
    location: str


@dataclass(frozen=True)
class Catalogue:
    """The knobs of one engine. `defaults` are the batch limits it would choose on this machine; `variables` the VLLM_* it reads;
    `fields` what a request's body may have, on both endpoints."""

    engine: Identity
    platform: str
    flags: Mapping[str, Flag]
    defaults: Mapping[str, int | None]
    variables: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def check(self, flags: Mapping[str, Any], source: str = "recipe") -> None:
        """Raise `RecipeError` for the first flag or value that this engine would refuse."""
        for name, value in flags.items():
            flag = self.flags.get(name) or self.flags.get(name.partition(".")[0])
            if flag is None:
                raise RecipeError(f"{source}: vLLM {self.engine.version} has no flag `{name}`", self._instead(name))
            self._check_value(source, name, flag, value)

    def _check_value(self, source: str, name: str, flag: Flag, value: Any) -> None:
        if flag.choices and not isinstance(value, (bool, list)) and value not in flag.choices:
            raise RecipeError(f"{source}: `{name}` cannot be {value!r}", f"vLLM takes {', '.join(map(str, flag.choices))}")
        if flag.switch and not isinstance(value, bool):
            raise RecipeError(f"{source}: `{name}` is a switch, {value!r} is not true or false", f"write `{name}: true`")
        # Some flags take several, such as `cudagraph-capture-sizes`.
        if flag.type == "int" and not all(isinstance(one, int) for one in (value if isinstance(value, list) else [value])):
            raise RecipeError(f"{source}: `{name}` takes a whole number, not {value!r}", f"write it in digits: `{name}: 8`")

    def check_variable(self, name: str, source: str = "recipe") -> None:
        """Raise `RecipeError` for a VLLM_* variable that this engine never reads: it would warn and go on without."""
        if name.startswith("VLLM_") and name not in self.variables:
            near = difflib.get_close_matches(name, self.variables, n=1)
            hint = f"did you mean `{near[0]}`?" if near else "see vllm/envs.py of that version"
            raise RecipeError(f"{source}: vLLM {self.engine.version} does not read `{name}`", hint)

    def _instead(self, name: str) -> str:
        if name in GONE:
            return f"{GONE[name]}"
        near = difflib.get_close_matches(name, self.flags, n=1, cutoff=0.75)
        return f"did you mean `{near[0]}`?" if near else "see `vllm serve --help=all` of that version"


def identify(executable: str) -> Identity:
    """Which vLLM `executable` has, from its metadata alone. Raises `EngineError` for none, or an unsupported one."""
    facts = _ask(executable, ["--identify"], timeout=300.0)
    if facts["distribution"] is None:
        raise EngineError(
            f"vLLM is not installed under {executable}",
            "install it there (`fenno doctor` says how), or set `engine.python` in the recipe to the interpreter that has it",
            cause="not-installed",
        )
    found = Identity(executable, facts["distribution"], facts["version"], facts["python"], facts["torch"], facts["location"])
    if not versions.supported(found.version):
        low, high = (".".join(map(str, end)) for end in (versions.OLDEST, versions.TOO_NEW))
        raise EngineError(
            f"vLLM {found.version} under {executable} is outside what fenno supports",
            f"install a vLLM from {low} up to, not including, {high}",
            cause="version",
        )
    return found


def read(executable: str, say: Callable[[str], None] = lambda text: None) -> Catalogue:
    """The catalogue of the vLLM under `executable`: a child imports it once, which `say` is told, later calls read a cache file."""
    if cached(executable) is None:
        identify(executable)  # where there is none, nothing is asked
        say("asking this vLLM for its flags (once; it takes ten seconds or more)")
    return _read(executable)


@functools.lru_cache(maxsize=8)
def _read(executable: str) -> Catalogue:
    engine = identify(executable)
    path = _cache_file(engine)
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        facts = _ask(executable, [], timeout=300.0)
        _store(path, facts)
    return _made(engine, facts)


def cached(executable: str) -> Catalogue | None:
    """What `read` would give, where an earlier call has stored it; None where vLLM would have to be imported."""
    try:
        engine = identify(executable)
        return _made(engine, json.loads(_cache_file(engine).read_text()))
    except (EngineError, OSError, ValueError):
        return None


def _made(engine: Identity, facts: Mapping[str, Any]) -> Catalogue:
    flags = {
        name: Flag(f["type"], tuple(f["choices"]) if f["choices"] else None, f["default"], f["switch"])
        for name, f in facts["flags"].items()
    }
    return Catalogue(engine, facts["platform"], flags, facts["defaults"], tuple(facts["variables"]), tuple(facts["fields"]))


def cache_folder() -> Path:
    """Where fenno keeps what it can make again: $XDG_CACHE_HOME/fenno or ~/.cache/fenno."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fenno"


def _cache_file(engine: Identity) -> Path:
    # The folder's change time tells an upgrade, and an edit in place, from what was read before.
    stamp = Path(engine.location).stat().st_mtime_ns if Path(engine.location).exists() else 0
    script = hashlib.sha256(Path(_SCRIPT).read_bytes()).hexdigest()
    key = hashlib.sha256(f"{engine}{stamp}{script}".encode()).hexdigest()[:16]
    return cache_folder() / "catalogue" / f"{engine.version}-{key}.json"


def _store(path: Path, facts: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a read-only home costs ten seconds next time, nothing else
        process.write(path, json.dumps(facts))


def _ask(executable: str, arguments: list[str], timeout: float) -> dict[str, Any]:
    try:
        done = process.run([executable, _SCRIPT, *arguments], timeout=timeout, env={"VLLM_LOGGING_LEVEL": "ERROR"})
    except ProcessError as error:
        hint = "`engine.python` in the recipe is the interpreter that has vLLM; without it, it is fenno's own"
        raise EngineError(f"the engine's Python cannot be asked: {error}", hint, cause="interpreter") from error
    line = next((text for text in done.stdout.splitlines() if text.startswith(MARK)), None)
    if line is None:
        last = process.last_line(done.stderr)
        raise EngineError(
            f"vLLM under {executable} cannot be imported: {last}",
            f"run: {executable} -c 'import vllm.entrypoints.cli.serve'",
            cause="import",
        )
    facts: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return facts


def interpreter(python: str | None) -> str:
    """The engine's interpreter, by its whole path: the recipe's, or the one fenno runs under. A name alone is looked for on PATH.

    Links stay, since a virtual environment's interpreter is one.
    """
    if not python:
        return sys.executable
    return str(Path(python).expanduser().absolute()) if "/" in python else shutil.which(python) or python
