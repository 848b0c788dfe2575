"""The plan of a KV cache as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADER = ("backend", "layout", "block", "token", "longest sequence", "empty tail", "attention run", "shard run", "block moved in")


def title(plan: Mapping[str, Any]) -> str:
    """What the table is of."""
    ranks = f"one of {plan['ranks']} ranks" if plan["ranks"] > 1 else "one rank"
    return f"KV cache of {plan['model']['name']} on vLLM {plan['engine']} ({plan['platform']}), bytes on {ranks}"


def rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a legal pair; `*` is how the recipe is now."""
    return [_row(plan, name, pair) for name, backend in plan["backends"].items() for pair in backend["legal"]]


def _row(plan: Mapping[str, Any], name: str, pair: Mapping[str, Any]) -> tuple[str, ...]:
    usual = plan["usual"]
    now = (name, pair["layout"], pair["block"]) == (usual["backend"], usual["layout"], usual["block"])
    first = (f"{name}{' *' if now else ''}", pair["layout"], str(pair["block"]))
    if "reads" not in pair:
        return (*first, *["not told"] * 6)
    reads = pair["reads"]
    figures = (pair["token"], pair["sequence"], pair["tail"], reads["attention"]["run"], reads["shard"]["run"])
    pieces = reads["transfer"]["pieces"]
    return (*first, *map(size, figures), f"{pieces} piece{'s' if pieces > 1 else ''} of {size(reads['transfer']['run'])}")


def size(count: float) -> str:
    """Bytes in a unit that keeps the figure short: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


def lines(plan: Mapping[str, Any]) -> list[str]:
    """What is not in the table: the other pairs, what would change and by which means, or why nothing."""
    said = [line for name, backend in plan["backends"].items() for line in _illegal(name, backend)]
    if plan["model"]["windowed"]:
        said.append(f"{plan['model']['windowed']} layers keep a window of tokens: a sequence takes less than the table says")
    if plan["ranks"] > plan["model"]["kv_heads"]:
        said.append(f"{plan['model']['kv_heads']} KV head(s) on {plan['ranks']} ranks: each is kept more than once")
    for change in plan["changes"]:
        means = f"--{change['name']} {change['value']}" if change["means"] == "flag" else f"{change['name']}={change['value']}"
        said.append(f"worth changing: {means} (now {change['now']}), by a {change['means']}: {change['why']}")
    if not plan["changes"]:
        said += ["nothing is worth changing:", *(f"  {reason}" for reason in plan["why_not"])]
    return said


def _illegal(name: str, backend: Mapping[str, Any]) -> list[str]:
    """One line a reason, with the layouts and blocks that it speaks against."""
    reasons: dict[str, list[str]] = {}
    for each in backend["illegal"]:
        no_layout, no_block = each["layout"] not in backend["layouts"], each["block"] not in backend["blocks"]
        what = (
            f"blocks of {each['block']}" if no_block else each["layout"] if no_layout else f"{each['layout']} with {each['block']}"
        )
        # The engine's sentence names the one it was asked for; ours names all of them.
        why = each["why"].replace(f"={each['layout']}", "").replace(f" for {each['block']} ", " ")
        names = reasons.setdefault(why, [])
        names += [what] if what not in names else []
    return [f"{name} refuses {', '.join(what)}: {why}" for why, what in reasons.items()]


def canary(found: Mapping[str, Any]) -> list[str]:
    """What of a cache and of logits is no number, or that all of it is."""
    layers = found["kv"].get("layers", [])
    said = []
    if layers:
        token = found["kv"]["token"]
        first = "first seen in the answer" if token is None else f"from token {token} on (the first is 0)"
        more = f" and {len(layers) - 1} more layer(s)" if len(layers) > 1 else ""
        said.append(f"NaN or Inf in the KV cache of {layers[0]}{more}, {first}")
    if found["logits"]:
        tokens = found["logits"]["tokens"]
        more = f", and after {len(tokens) - 1} more" if len(tokens) > 1 else ""
        where = f"after token {tokens[0]} (the first is 0){more}" if tokens else "of the answer"
        said.append(f"NaN or Inf in the logits {where}")
    whole = f"every number in the KV cache and the logits of {found['layers']} layers and {found['tokens']} tokens is finite"
    return said or [whole]


TRANSFER_HEADER = ("moved", "layout", "how", "messages", "bytes", "time", "share of the link")


def transfers(found: Mapping[str, Any]) -> tuple[str, list[tuple[str, ...]]]:
    """The title and the rows of a benchmark of transfers."""
    where = f"two GPUs ({found['device']})" if found["backend"] == "nccl" else "two processes on this host's CPU, no GPUs"
    link = f"{size(found['link']['bytes_per_second'])}/s for a plain message of {size(found['link']['bytes'])}"
    return f"between {where}, {found['backend']}, torch {found['torch']}: {link}", [_transfer(row) for row in found["rows"]]


def wrong(found: Mapping[str, Any]) -> str:
    """The ways of a benchmark of transfers that brought other bytes than were sent, in a sentence; nothing where all were right."""
    ways = [f"the {row['what']} as {row['layout']} by {row['how']}" for row in found["rows"] if not row["right"]]
    return f"what came is not what was sent: {'; '.join(ways)}" if ways else ""


def _transfer(row: Mapping[str, Any]) -> tuple[str, ...]:
    how = (row["what"], row["layout"], row["how"], str(row["messages"]), size(row["bytes"]))
    return (*how, f"{row['seconds'] * 1e3:.3g} ms", f"{row['share']:.1%}" if row["right"] else "WRONG BYTES")
