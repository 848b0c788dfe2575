"""`fenno export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fenno import console
from fenno.commands.given import RecipeArgument, choose

TO = "systemd, compose, k8s, vllm-config, prometheus (alert rules), grafana (a dashboard), nginx or vllm-router (before replicas)"


def export(
    to: Annotated[str, typer.Option(help=TO)],
    recipe_name: RecipeArgument = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="DIR|FILE", help="where to; default: standard output")
    ] = None,
    image: Annotated[str | None, typer.Option(help="compose, k8s: the image; default: vLLM's own of the version here")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="compose, k8s: how many; default: what recipe and flags say")] = None,
    claim: Annotated[str | None, typer.Option(help="k8s: PersistentVolumeClaim with the model, or for downloads")] = None,
    monitor: Annotated[bool, typer.Option("--monitor", help="k8s: a PodMonitor and the alert rules too")] = False,
    user: Annotated[str | None, typer.Option(help="systemd: who the engine runs as; default: you")] = None,
    replica: Annotated[
        list[str] | None, typer.Option(metavar="HOST[:PORT]", help="nginx, vllm-router: a server behind it; once for each")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="nginx, vllm-router: where it listens; default: 127.0.0.1:8080")
    ] = None,
) -> None:
    """Write production files from a recipe: a unit, a compose file, Kubernetes objects, alert rules, a dashboard, a proxy's."""
    import getpass

    from fenno import recipe
    from fenno.export import make
    from fenno.tune.output import write

    behind = tuple(replica or ())
    asked = make.Asked(to, user=user, image=image, gpus=gpus, claim=claim, monitor=monitor, replica=behind, listen=listen)
    asked.check()
    chosen = recipe.load(choose(recipe_name))
    file = target(output, f"{chosen.name}{make.FORMATS[to]}")
    text = make.make(chosen, asked, file, getpass.getuser(), console.say)
    if file is None:
        print(text, end="")
        return
    write(file.parent, {file.name: text})
    console.say(f"written: {file}")


def target(output: str | None, name: str) -> Path | None:
    """The file that is meant: `name` in a folder that is there, or that is written like one; None for standard output."""
    if output is None:
        return None
    path = Path(output)
    # What follows the point in qwen2.5-7b is no file's ending.
    file = path.suffix[1:].isalpha() and not output.endswith("/") and not path.is_dir()
    return path if file else path / name
