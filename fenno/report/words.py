"""How a study's figures and trials are called: text, no markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fenno import units
from fenno.recipe import Latency, Lengths, Recipe
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.judge import Figure, spell
from fenno.tune.study import Trial
from fenno.tune.trial import target_rate

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "gap": "longest gap", "e2el": "E2EL"}
MORE_IS_BETTER = {"qps", "goodput", "availability"}

_NAMES = {"qps": "QPS", "goodput": "Goodput", "memory": "Memory", "memory_share": "Memory", "availability": "Availability"}
_ORIGINS = {
    "defaults": "the engine's defaults, imitated on the running server",
    "rule": "proposed by a rule, set on the running server",
    "sampler": "proposed by the sampler, set on the running server",
    "another study": "the best point of another study, set on the running server",
    "ablation": "the winner with one change put back, set on the running server",
    "closer look": "measured again for longer, on the running server",
    "restart": "a start with other flags",
    "control": "after a start of its own with plain flags, not proposed by the search",
    "confirmation": "after a cold start with plain flags",
}


def label(target: str) -> str:
    """ "p95_ttft" as "P95 TTFT", "short:p95_ttft" as "P95 TTFT (short)"."""
    if target in _NAMES:
        return _NAMES[target]
    wanted = Latency.of(target)
    return f"P{wanted.percentile:g} {LATENCIES.get(wanted.metric, wanted.metric)}" + (f" ({wanted.cls})" if wanted.cls else "")


def origin(trial: Trial) -> str:
    """Where a trial's figures come from."""
    return _ORIGINS.get(trial.origin, trial.origin)


def limit(target: str, value: float) -> str:
    """A target's limit with its direction."""
    return f"{'at least' if target in MORE_IS_BETTER else 'at most'} {spell(target, value)}"


def bounds(figure: Figure) -> tuple[float, float] | None:
    """Both ends of the interval, or None where there is none."""
    return None if figure.low is None or figure.high is None else (figure.low, figure.high)


def interval(target: str, figure: Figure) -> str:
    """The interval in words."""
    ends = bounds(figure)
    if ends is None:
        return "no interval"
    if ends[0] <= 0 and math.isinf(ends[1]):
        return "no interval: too few independent requests"
    low, high = (spell(target, end) for end in ends)
    unit = high[high.rfind(" ") :] if low.count(" ") == high.count(" ") == 1 else ""
    return f"{low.removesuffix(unit)} to {high}"


def change(old: Figure, new: Figure) -> str:
    """By how much, and whether that may be chance: intervals that overlap tell nothing."""
    if not math.isfinite(old.value) or not math.isfinite(new.value) or old.value == 0:
        return ""
    by, was, now = signed(new.value / old.value - 1), bounds(old), bounds(new)
    apart = was is None or now is None or now[0] > was[1] or now[1] < was[0]
    return by if apart or by == "0 %" else f"{by}, but the intervals overlap"


def signed(share: float) -> str:
    """A relative change in percent."""
    whole = round(share * 100)
    return f"{'+' if whole > 0 else '−' if whole < 0 else ''}{abs(whole)} %"


def milliseconds(value: float | None) -> str:
    """A latency of a load's summary."""
    return "none" if value is None else units.show_duration(value / 1e3)


def told(trial: Trial) -> str:
    """A trial in a few lines: what was set, why, what came of it."""
    found = [finding.sentence() for finding in verdicts.findings(trial)]
    score = f", score {trial.score:.2f}" if math.isfinite(trial.score) else ""
    lines = [f"trial {trial.number}, {origin(trial)}: {trial.state}{score}", spaces.show(trial.point), f"why: {trial.why}"]
    return "\n".join([*lines, *found, *remarks(trial)])


def remarks(trial: Trial) -> list[str]:
    """Notes and reason, each said once."""
    notes = [str(note) for note in trial.judgement.get("notes", [])]
    return [*notes, *([trial.reason] if trial.reason and trial.reason != "; ".join(notes) else [])]


def machine(host: Mapping[str, Any]) -> str:
    """The hardware in a few words."""
    names = [gpu["name"] for gpu in host["gpus"]]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{host['processor']}, {host['cores']} cores"


def traffic(recipe: Recipe) -> str:
    """The workload in one line."""
    load = recipe.workload
    mix = [
        f"{c.name} {c.share * 100:g} % ({_lengths(c.prompt_tokens)} tokens in, {_lengths(c.output_tokens)} out)"
        for c in load.classes
    ]
    what = f"prompts of {load.prompts}" if load.prompts else ", ".join(mix)
    return f"open loop, {target_rate(recipe):g} requests/s, {load.arrival} arrivals; {what}"


def _lengths(tokens: int | Sequence[int] | Lengths) -> str:
    if isinstance(tokens, Lengths):
        return f"{tokens.distribution} around {tokens.mean:g}, {tokens.least} to {tokens.most}"
    return str(tokens) if isinstance(tokens, int) else " to ".join(map(str, tokens))
