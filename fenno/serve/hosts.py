"""One model over several hosts: what each of them starts, through vLLM's own executors. Pure functions to flags and argument lists.

With multiprocessing every host runs `vllm serve`, all but the first without a server of their own; they meet at the head's store.
With Ray every host first joins a Ray cluster, and the head alone runs `vllm serve`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fenno.engine.command import Flags
from fenno.errors import RecipeError, UsageError
from fenno.recipe import Recipe
from fenno.units import Address, address

ROLES = ("head", "worker")
STORE, RAY = 29501, 6379  # the ports that vLLM and Ray take themselves
BACKEND = "distributed-executor-backend"


@dataclass(frozen=True)
class Hosts:
    """`count` hosts, of which this one is number `rank`, the head 0; `master`: where the others meet the head."""

    count: int
    rank: int
    master: Address

    def at(self, rank: int) -> Hosts:
        """The same as another host sees it."""
        return replace(self, rank=rank)


def given(recipe: Recipe, role: str | None, nnodes: int | None, node_rank: int | None, master: str | None) -> Hosts | None:
    """What was asked for on the command line; None for a single host.

    Raises `UsageError` for what does not go together, `RecipeError` for ranks that cannot be shared out evenly.
    """
    if role is None:
        if (nnodes, node_rank, master) != (None, None, None):
            raise UsageError("--nnodes, --node-rank and --master-addr go with --role", "--role head or --role worker")
        return None
    if role not in ROLES:
        raise UsageError(f"--role is {role!r}", "it has to be head or worker")
    count = nnodes or 2
    if master is None or count < 2:
        raise UsageError("one model over several hosts needs them", "--nnodes 2 or more, --master-addr HOST[:PORT] of the head")
    rank = node_rank if node_rank is not None else 0 if role == "head" else 1 if count == 2 else None
    if rank is None or not 0 <= rank < count or (rank == 0) != (role == "head"):
        raise UsageError(f"--node-rank is {rank} for a {role} of {count} hosts", f"0 is the head, 1 to {count - 1} are the workers")
    if str(recipe.engine.flags.get("data-parallel-size") or 1) != "1":
        # Its ranks meet elsewhere than at the store, and have an engine each.
        hint = "a server of its own on each host, and `fenno export --to nginx` before them"
        raise RecipeError(f"recipe {recipe.name}: data-parallel ranks are not shared out over hosts", hint)
    ranks = recipe.engine.ranks
    if ranks % count:
        said = f"{ranks} ranks cannot be shared out over {count} hosts"
        raise RecipeError(f"recipe {recipe.name}: {said}", "change its parallel flags, or --nnodes")
    return Hosts(count, rank, address(master, RAY if by_ray(recipe) else STORE))


def by_ray(recipe: Recipe) -> bool:
    """Whether the recipe asks for Ray's executor."""
    return recipe.engine.flags.get(BACKEND) == "ray"


def flags(hosts: Hosts | None) -> Flags:
    """What one host lays over the recipe's flags, with multiprocessing."""
    if hosts is None:
        return {}
    return {
        BACKEND: "mp",
        "nnodes": hosts.count,
        "node-rank": hosts.rank,
        "master-addr": hosts.master.bare,
        "master-port": hosts.master.port,
        **({"headless": True} if hosts.rank else {}),
    }


def share(recipe: Recipe, hosts: Hosts | None) -> Recipe:
    """The recipe with what it needs of this host alone: its part of the GPUs."""
    if hosts is None or not recipe.host.gpus:
        return recipe
    return recipe.model_copy(update={"host": recipe.host.model_copy(update={"gpus": math.ceil(recipe.host.gpus / hosts.count)})})


def ray(hosts: Hosts) -> list[str]:
    """How one host joins the Ray cluster, under the engine's interpreter's folder on the path."""
    if hosts.rank:
        return ["ray", "start", "--block", "--address", str(hosts.master)]
    where = ["--node-ip-address", hosts.master.bare, "--port", str(hosts.master.port)]
    return ["ray", "start", "--head", "--block", *where]
