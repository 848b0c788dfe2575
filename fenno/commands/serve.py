"""`fenno serve`, `status`, `stop`, `rollback`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fenno import console, errors
from fenno.commands.given import RecipeArgument, choose
from fenno.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from fenno.engine.command import Flags
    from fenno.recipe import Recipe
    from fenno.serve.hosts import Hosts
    from fenno.serve.keep import Told

NameOption = Annotated[str | None, typer.Option(help="what the server is called; default: the recipe's name")]
NameArgument = Annotated[str | None, typer.Argument(metavar="NAME", help="the server's name; not needed when only one runs")]
DetachOption = Annotated[bool, typer.Option("--detach", help="serve in the background; returns when it is ready")]


def serve(
    recipe_name: RecipeArgument = None,
    name: NameOption = None,
    port: Annotated[int | None, typer.Option(help="the port to listen on; default: the recipe's, else a free one")] = None,
    host: Annotated[str | None, typer.Option(help="the address to listen on; default: the recipe's, else 127.0.0.1")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="a file with the API key that requests must carry")] = None,
    detach: DetachOption = False,
    role: Annotated[str | None, typer.Option(help="one model over several hosts: head, or worker")] = None,
    nnodes: Annotated[int | None, typer.Option(help="how many hosts; default with --role: 2")] = None,
    node_rank: Annotated[int | None, typer.Option(help="which of the workers this is, from 1; not needed with two hosts")] = None,
    master_addr: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="where the workers reach the head; the port is 29501 by default")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print command and environment, start nothing")] = False,
    detached: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a recipe and keep it up: restarts, health, drain; until Ctrl-C, or in the background."""
    from fenno import recipe
    from fenno.serve import hosts, keep, preflight, state

    path = choose(recipe_name)
    chosen = recipe.load(path).with_engine(host=host, api_key_file=str(api_key_file.resolve()) if api_key_file else None)
    name = state.checked_name(name or chosen.name)
    if chosen.engine.model is None and not chosen.engine.start:
        raise UsageError("this recipe's engine runs already: fenno does not serve it", f"it should answer at {chosen.engine.url}")
    several = hosts.given(chosen, role, nnodes, node_rank, master_addr)
    if dry_run:
        _commands(chosen, several, port, state.root() / name)
        return
    if several and hosts.by_ray(chosen):
        raise UsageError("fenno does not start Ray", "--dry-run prints what to run on each host")
    for warning in preflight.check(hosts.share(chosen, several)):
        console.say(warning, style="yellow")
    if detach:
        given = {"--port": port, "--host": host, "--api-key-file": api_key_file and api_key_file.resolve()}
        _detach(name, path, {**given, "--role": role, "--nnodes": nnodes, "--node-rank": node_rank, "--master-addr": master_addr})
        return
    place = state.hold(name, chosen, str(path.resolve()), detached=detached)
    place.update(role=role or "")
    console.say(f"log: {place.state.log}")
    with _starting() as told:
        keep.keep(chosen, place, port, told, several)


def _commands(chosen: Recipe, several: Hosts | None, port: int | None, folder: Path) -> None:
    """Print what would be run: here, or on each of several hosts."""
    import shlex

    from fenno.engine import server
    from fenno.serve import hosts, keep

    def serving(flags: Flags) -> str:
        return server.command_line(chosen, flags={**keep.flags(chosen), **flags}, port=port, folder=folder)

    if several is None:
        print(serving({}))
        return
    ray = hosts.by_ray(chosen)
    for each in map(several.at, range(several.count)):
        print(f"# {'worker' if each.rank else 'head'}, host {each.rank} of {several.count}")
        if ray:
            print(shlex.join(hosts.ray(each)))
        if not ray or each.rank == 0:
            print(f"RAY_ADDRESS={several.master} {serving({})}" if ray else serving(hosts.flags(each)))


def _detach(name: str, path: Path, options: dict[str, object]) -> None:
    """Serve in the background; the document says where."""
    from fenno.serve import detach, state

    known = state.read(state.root() / name)
    if known and known.alive:
        raise state.held(name)
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    with _starting() as told:
        now = detach.start(name, [str(path.resolve()), "--name", name, "--detached", *given], told)
    console.say(f"ready: {now.service}; `fenno status {name}` looks after it, `fenno stop {name}` ends it")
    console.result({"name": name, "url": now.url, "model": now.model, "pid": now.pid, "log": now.log, "digest": now.digest})


@contextlib.contextmanager
def _starting() -> Iterator[Told]:
    """What is shown of a start."""
    from fenno.screen import Starting
    from fenno.serve.keep import Told

    shown = Starting()
    try:
        yield Told(shown.say, shown.stage)
    finally:
        shown.rest()


def status(
    name: NameArgument = None,
    watch: Annotated[bool, typer.Option("--watch", help="again every two seconds, until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the JSON document alone, no table")] = False,
) -> None:
    """What the servers of fenno do: health, load, memory, restarts."""
    from fenno.serve import state
    from fenno.serve import status as statuses

    earlier: dict[str, tuple[float, float]] = {}
    while True:
        wanted = [state.find(name)] if name else state.states()
        seen = [statuses.look(server, earlier) for server in wanted]
        if not seen:
            console.say("fenno serves nothing here; start a server with `fenno serve RECIPE --detach`")
        elif not as_json:
            if watch and console.err.is_terminal:
                console.err.clear()
            console.table("", statuses.HEADER, [statuses.row(each) for each in seen])
            for note in [note for each in seen for note in statuses.notes(each)]:
                console.say(note)
        if as_json or not watch:
            console.document({"servers": seen}, asked=as_json)
        if not watch:
            break
        try:
            time.sleep(2.0)
        except Interrupted:
            break
    raise typer.Exit(errors.OK if all(map(statuses.well, seen)) else errors.FAILED)


def stop(
    name: NameArgument = None,
    now: Annotated[bool, typer.Option("--now", help="do not wait for requests in flight: they are lost")] = False,
) -> None:
    """End a server that fenno keeps up, its requests in flight first."""
    from fenno.serve import state
    from fenno.serve import status as statuses

    server = state.find(name)
    seconds = statuses.stop(server, console.say, now=now)
    console.say(f"{server.name} has ended")
    console.result({"name": server.name, "seconds": round(seconds, 1)})


def rollback(name: NameArgument = None, detach: DetachOption = False) -> None:
    """Serve the recipe that was served before under the same name, on the same port."""
    import os

    from fenno import recipe
    from fenno.engine import command
    from fenno.serve import state
    from fenno.serve import status as statuses

    server = state.find(name)
    if server.role:
        hint = f"`fenno stop {server.name}` on each host, then `fenno serve` the earlier recipe there with --role"
        raise UsageError(f"{server.name} is the {server.role} of several hosts, which have to serve the same recipe", hint)
    earlier = state.before(server)
    # What would end the start ends nothing that serves.
    command.check_inherited(recipe.load(Path(earlier.path)).engine)
    background = detach or (server.detached and server.alive)
    if server.alive:
        statuses.stop(server, console.say)
    console.say(f"{server.name}: back from recipe {server.digest} to {earlier.digest}")
    os.chdir(earlier.cwd)
    serve(earlier.path, name=server.name, port=server.port or earlier.port, detach=background)
