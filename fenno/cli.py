"""The command line: what commands there are, and the one place where every error becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from fenno import __version__, console, errors
from fenno.commands import compare, doctor, export, fa2, kv, load, models, patch, plan, recipes, report, serve, soak, study, tune
from fenno.errors import FennoError, Interrupted

app = typer.Typer(
    name="fenno",
    help="Make an LLM server meet its latency target without changing the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: rich's panels would take a fifth of the time that `--help` has.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor.doctor)
app.command()(load.loadtest)
app.command()(report.report)
app.command()(compare.compare)
app.command()(soak.soak)
app.command()(tune.tune)
app.command()(serve.serve)
app.command()(serve.status)
app.command()(serve.stop)
app.command()(serve.rollback)
app.command()(plan.plan)
app.command()(export.export)
app.command()(doctor.explain)
app.command("build-fa2")(fa2.build_fa2)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(recipes.init)
app.add_typer(study.group, name="study")
app.add_typer(recipes.group, name="recipe")
app.add_typer(kv.group, name="patch-kv")
app.add_typer(patch.group, name="patch")
app.add_typer(models.group, name="model")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fenno {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[int, typer.Option("-v", "--verbose", count=True, help="say more; before the command: fenno -v doctor")] = 0,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="only errors and the result; before the command, too")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    console.verbosity = -1 if quiet else verbose


def main() -> None:
    """The entry point: runs a command and turns whatever happens into an exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = _once_more
    sys.exit(_run())


def _run() -> int:
    try:
        # A command's return value is its exit code; typer's own usage errors print themselves and exit with 2.
        app(standalone_mode=True)
    except FennoError as error:
        console.fail(error)
        return error.exit_code
    except Interrupted:
        console.say("interrupted; nothing was left running, and what was finished is kept")
        return errors.INTERRUPTED
    except Exception as error:  # noqa: BLE001
        return _unexpected(error)
    return errors.OK


def _unexpected(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        where = f" {error.filename}" if error.filename else ""
        console.fail(errors.DiskError(f"cannot write{where}: {error.strerror}", "free some space, or choose another folder"))
        return errors.FAILED
    import tempfile
    import traceback

    hint = "run it again, and tell us what it printed"
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile("w", prefix="fenno-", suffix=".log", delete=False) as file:
        # Names of options, not their values: a header may be a secret.
        words = [word.partition("=")[0] for word in sys.argv[1:2] + [word for word in sys.argv[2:] if word.startswith("-")]]
        file.write(f"fenno {__version__}, Python {sys.version}, arguments {words}\n\n{traceback.format_exc()}")
        hint = f"a report for us is in {file.name}"
    console.fail(FennoError(f"unexpected: {type(error).__name__}: {error}", hint))
    return errors.FAILED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted


def _once_more(lost: sys.UnraisableHookArgs) -> None:
    """An exception that Python had to ignore, since it was raised while an object was cleared away. An interruption comes again."""
    if issubclass(lost.exc_type, Interrupted):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        sys.__unraisablehook__(lost)
