"""From what an engine says of its KV cache to what of it is worth changing. Pure: facts and a recipe in, a document out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fenno.kv import layout
from fenno.recipe import Recipe

# A saving of memory below this share of a sequence is lost in what other requests do.
WORTH = 0.05
VARIABLE = "VLLM_KV_CACHE_LAYOUT"


def make(facts: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The plan: each usable backend's legal layouts and blocks with their figures, and the changes that are worth making."""
    backends = {name: _backend(found, facts) for name, found in facts["backends"].items()}
    tokens = mean_tokens(recipe)
    changes = [change for change in (_layout_change(facts, backends), _block_change(facts, backends, tokens)) if change]
    return {
        "engine": facts["version"],
        "platform": facts["platform"],
        "model": {"name": recipe.engine.model, **facts["model"]},
        "ranks": facts["ranks"],
        "usual": {"backend": facts["usual"], "layout": _current(facts), "block": facts["block"]},
        "tokens": tokens,
        "backends": backends,
        "refused": dict(facts["refused"]),
        "changes": changes,
        "why_not": [] if changes else _why_not(facts, backends, tokens),
    }


def _current(facts: Mapping[str, Any]) -> str | None:
    """The layout as the recipe is now: its own wish, else what the engine takes by itself."""
    alias = {"NHD": "LBNHC", "HND": "LBHNC"}
    wish = facts["wish"]
    cells = facts["backends"][facts["usual"]]["cells"]
    known = {cell["layout"] for cell in cells}
    usual: str | None = facts["backends"][facts["usual"]]["layout"]
    return usual if wish is None else wish if wish in known else alias.get(wish, wish)


def _backend(found: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """One backend: each legal pair of layout and block with its figures, and the reasons against the others."""
    legal = [cell for cell in found["cells"] if not cell["why"]]
    return {
        "layout": found["layout"],
        "layouts": sorted({cell["layout"] for cell in legal}),
        "blocks": sorted({cell["block"] for cell in legal}),
        "legal": [_figures(cell, facts) for cell in legal],
        "illegal": [{key: cell[key] for key in ("layout", "block", "why")} for cell in found["cells"] if cell["why"]],
    }


def _figures(cell: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes on one rank: of a token, of the longest sequence, of the empty tail; and what lies together for each reader."""
    axes, block = cell["axes"], cell["block"]
    said: dict[str, Any] = {"layout": cell["layout"], "block": block, "kernel": cell["kernel"]}
    if not axes:
        return said
    one, longest = layout.token(axes), -(-facts["model"]["max_len"] // block) * block
    reads = {
        name: {"run": layout.run(axes, taken), "pieces": layout.volume(axes, taken) // layout.run(axes, taken)}
        for name, taken in layout.READS.items()
    }
    return {**said, "token": one, "sequence": one * longest, "tail": round(one * layout.tail(block)), "reads": reads}


def _layout_change(facts: Mapping[str, Any], backends: Mapping[str, Any]) -> dict[str, Any] | None:
    """The legal layout that moves a block in the fewest pieces, where the cache is moved at all."""
    chosen = backends[facts["usual"]]
    if _current(facts) not in chosen["layouts"] and chosen["layouts"]:
        why = f"the engine refuses {_current(facts)}: {_reason(chosen, 'layout', _current(facts))}"
        return {"means": "variable", "name": VARIABLE, "value": chosen["layout"], "now": _current(facts), "why": why}
    pairs = [pair for pair in chosen["legal"] if pair["block"] == facts["block"] and "reads" in pair]
    now = next((pair for pair in pairs if pair["layout"] == _current(facts)), None)
    best = min(pairs, key=lambda pair: (pair["reads"]["transfer"]["pieces"], pair is not now), default=None)
    if not (facts["leaves"] and now and best) or best["reads"]["transfer"]["pieces"] == now["reads"]["transfer"]["pieces"]:
        return None
    pieces = [pair["reads"]["transfer"]["pieces"] for pair in (now, best)]
    why = f"a block leaves the engine in {pieces[1]} piece(s) instead of {pieces[0]}"
    return {"means": "variable", "name": VARIABLE, "value": best["layout"], "now": now["layout"], "why": why}


def _block_change(facts: Mapping[str, Any], backends: Mapping[str, Any], tokens: float | None) -> dict[str, Any] | None:
    """The smallest legal block, where the empty tails of the present one cost memory that requests could use."""
    chosen = backends[facts["usual"]]
    if facts["block"] not in chosen["blocks"] and chosen["blocks"]:
        why = f"the engine refuses blocks of {facts['block']}: {_reason(chosen, 'block', facts['block'])}"
        return {"means": "flag", "name": "block-size", "value": chosen["blocks"][0], "now": facts["block"], "why": why}
    legal = [block for block in chosen["blocks"] if block < facts["block"]]
    if not legal or tokens is None or _holds_all(facts, backends):
        return None
    shares = [layout.tail(block) / (tokens + layout.tail(block)) for block in (facts["block"], legal[0])]
    if shares[0] - shares[1] < WORTH:
        return None
    why = f"{shares[1]:.0%} of a sequence's cache stays empty instead of {shares[0]:.0%}: where it is full, more requests fit"
    why += "; what that costs in time is for `fenno tune` to say (`search.restart`)"
    return {"means": "flag", "name": "block-size", "value": legal[0], "now": facts["block"], "why": why}


def _reason(chosen: Mapping[str, Any], key: str, value: Any) -> str:
    """The engine's reason against a layout, or a block: from a pair whose other half is legal, where there is one."""
    against = [each for each in chosen["illegal"] if each[key] == value]
    other, legal = ("block", chosen["blocks"]) if key == "layout" else ("layout", chosen["layouts"])
    return next((each["why"] for each in sorted(against, key=lambda each: each[other] not in legal)), "it has no such one")


def _holds_all(facts: Mapping[str, Any], backends: Mapping[str, Any]) -> bool:
    """Whether as many of the longest sequences as may run at once fit, as far as the cache's size is known now."""
    pairs = [pair for pair in backends[facts["usual"]]["legal"] if pair["block"] == facts["block"] and "sequence" in pair]
    return bool(facts["cache_bytes"] and pairs) and facts["sequences"] * pairs[0]["sequence"] <= facts["cache_bytes"]


def _why_not(facts: Mapping[str, Any], backends: Mapping[str, Any], tokens: float | None) -> list[str]:
    """Why nothing is worth changing, in sentences."""
    chosen = backends[facts["usual"]]
    reasons = []
    if len(chosen["layouts"]) < 2:
        reasons.append(f"{facts['usual']} takes one layout, {chosen['layout']}")
    elif not facts["leaves"]:
        reasons.append("the cache never leaves the engine in this recipe, and no rank ever reads another's: no layout saves a copy")
    else:
        reasons.append(f"{_current(facts)} moves a block in as few pieces as any layout that is legal here")
    if _holds_all(facts, backends):
        reasons.append(
            f"the {facts['sequences']} sequences that may run fit into the cache at once, each as long as can be: no empty tail "
            "costs a request its place"
        )
    elif tokens is None:
        reasons.append("how long this recipe's requests are is not known before they are sent, so nor is what their tails cost")
    else:
        reasons.append(f"no smaller legal block saves {WORTH:.0%} of a sequence's memory")
    return reasons


def mean_tokens(recipe: Recipe) -> float | None:
    """Tokens of a request at its end, on average over the classes; None for a trace, prompts of a file, conversations."""
    workload = recipe.workload
    if workload.trace or workload.prompts or workload.turns != 1 or not workload.classes:
        return None
    return round(sum(workload.mean_lengths()), 1)


def asked(plan: Mapping[str, Any], wanted_layout: str | None, wanted_block: int | None) -> list[dict[str, Any]]:
    """The changes for a layout and a block that somebody wants; what is not wanted stays. Empty where all is so already.

    `refusal` says first whether the engine takes them.
    """
    usual = plan["usual"]
    wanted = ("variable", VARIABLE, wanted_layout, usual["layout"]), ("flag", "block-size", wanted_block, usual["block"])
    return [
        {"means": means, "name": name, "value": value, "now": now, "why": "asked for"}
        for means, name, value, now in wanted
        if value is not None and value != now
    ]


def refusal(plan: Mapping[str, Any], wanted_layout: str | None, wanted_block: int | None) -> str | None:
    """Why the engine would refuse this layout with this block, or None where it takes them."""
    usual = plan["usual"]
    name, block = wanted_layout or usual["layout"], wanted_block or usual["block"]
    backend = plan["backends"][usual["backend"]]
    if any((each["layout"], each["block"]) == (name, block) for each in backend["legal"]):
        return None
    known = (each["why"] for each in backend["illegal"] if (each["layout"], each["block"]) == (name, block))
    return next(
        known, f"legal are the layouts {', '.join(backend['layouts'])} and the blocks {', '.join(map(str, backend['blocks']))}"
    )
