"""Every error fenno raises on purpose, its exit code, and what the reader can do next.

The exit codes are one table for all commands; `docs/exit-codes.md` shows the same numbers and a test compares the two.
"""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
INFEASIBLE = 3
INCONCLUSIVE = 4
ENGINE = 5
BUILD = 6
INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    OK: "targets met, or all well",
    FAILED: "a check failed, or something unexpected happened",
    USAGE: "usage or recipe",
    INFEASIBLE: "infeasible: the targets cannot be met here",
    INCONCLUSIVE: "inconclusive, or an INVALID measurement",
    ENGINE: "the engine",
    BUILD: "a build or a patch",
    INTERRUPTED: "interrupted",
}


class FennoError(Exception):
    """An error with a sentence for the reader (`str(error)`) and a next step (`hint`)."""

    exit_code = FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(FennoError):
    """An option or argument that cannot be understood."""

    exit_code = USAGE


class RecipeError(FennoError):
    """A recipe that is missing, malformed, or asks for what this engine does not have."""

    exit_code = USAGE


class ProcessError(FennoError):
    """A child process that could not be started, timed out, or ended with an error where none was expected."""


class DiskError(FennoError):
    """A result that could not be written: no space, no permission, a read-only folder."""


class EngineError(FennoError):
    """The engine did not start, died, hung, or answered what an engine should not.

    `stage` is where it happened (`start`, `load`, `control`, `stop`); `cause` is the failure's name from the engine's log,
    or "unknown"; `again`: whether the same start can succeed, "no", "perhaps" or "yes".
    """

    exit_code = ENGINE

    def __init__(
        self, message: str, hint: str = "", *, stage: str = "start", cause: str = "unknown", again: str = "perhaps"
    ) -> None:
        super().__init__(message, hint)
        self.stage = stage
        self.cause = cause
        self.again = again


class LoadError(FennoError):
    """Traffic that could not be made: unreadable prompts, a client that did not start, an endpoint that never answered."""

    exit_code = ENGINE


class BuildError(FennoError):
    """A build that failed."""

    exit_code = BUILD


class PatchError(FennoError):
    """A patch that could not be applied, reverted or trusted."""

    exit_code = BUILD


class CacheError(FennoError):
    """A KV cache that cannot hold what it is given: too many tokens, another shape, a model that keeps something else."""


class Interrupted(BaseException):
    """Ctrl-C, SIGTERM, or the terminal is gone. Not KeyboardInterrupt, of which typer makes what it likes."""
