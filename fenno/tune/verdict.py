"""The verdict of a study: met, infeasible or inconclusive, in one sentence, with the nearest point and the target that binds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fenno import errors
from fenno.tune.capacity import PRECISION, Bracket, Maximize, Most
from fenno.tune.judge import Figure, Finding, spell
from fenno.tune.space import AGING, EDGES, POLICY, Space, changed, in_bunches, show
from fenno.tune.study import Trial, from_dict

Outcome = Literal["met", "infeasible", "inconclusive"]
EXIT: dict[Outcome, int] = {"met": errors.OK, "infeasible": errors.INFEASIBLE, "inconclusive": errors.INCONCLUSIVE}


@dataclass(frozen=True)
class Verdict:
    """`trial` is the confirmed winner, or the nearest point there was. `over` is false where only the time was too short, and the
    study can be gone on with. `capacity`: in requests a second, and `most` of what, where that was looked for."""

    outcome: Outcome
    sentence: str
    trial: Trial | None
    over: bool = True
    capacity: Bracket | None = None
    most: Most | None = None

    @property
    def exit_code(self) -> int:
        return EXIT[self.outcome]


NEARNESS = ("met", "unclear", "missed", "failed")


def findings(trial: Trial) -> list[Finding]:
    """A stored trial's findings."""
    rows = trial.judgement.get("findings", [])
    return [Finding(**{**row, "figure": Figure(**row["figure"]) if row["figure"] else None}) for row in rows]


def figure(trial: Trial, target: str) -> Figure | None:
    """A stored trial's figure of one target; None where it was not judged, or not measured."""
    return next((f.figure for f in findings(trial) if f.target == target), None)


def latest(trials: Sequence[Trial]) -> list[Trial]:
    """The last word on every point: its latest measured trial, live or cold, or a cold start that failed; in the order of time."""
    measured = [t for t in trials if t.measured or (t.origin == "confirmation" and t.state == "failed")]
    return [t for i, t in enumerate(measured) if all(t.point != later.point for later in measured[i + 1 :])]


def nearest(trials: Sequence[Trial]) -> Trial | None:
    """The point that came closest, by the last word on it: a met one before an unclear one before a missed one, then by score."""
    return min(latest(trials), key=lambda t: (NEARNESS.index(t.state), t.score), default=None)


def met(trial: Trial, space: Space, confirmed: bool, apart: str = "") -> Verdict:
    """Every target is met by `trial`; the sentence is silent on the one that is told `apart`."""
    difference = changed(trial.point, space)
    by = f"with {show(difference)}" if difference else "with the engine's defaults"
    ordered = difference.get(POLICY) == "token_aware" or {AGING, EDGES} & {*difference}
    steered = " and fenno's scheduler: vLLM has no flag for that order" if ordered else ""
    after = f"; confirmed after a cold start with plain flags{steered}" if confirmed else ""
    bunches = in_bunches(difference)
    after += f"; clients get up to {bunches} tokens at a time" if bunches > 1 else ""
    return Verdict("met", f"met {by}: " + "; ".join(f.sentence() for f in findings(trial) if f.target != apart) + after, trial)


def held(trial: Trial, space: Space, capacity: Bracket, of: Maximize, confirmed: bool = False, note: str = "") -> Verdict:
    """`trial` is the rate at which every target was met and that was worth most; `capacity` is from there to one that was not."""
    # What goodput a trial had to show is the search's own affair.
    found, shown = met(trial, space, confirmed, apart="goodput" if of == "goodput" else ""), most(of, capacity, trial)
    at = {"qps": "", "tokens": f" ({capacity})", "goodput": f" of {trial.rate:.3g} that are sent"}[of]
    sentence = f"holds {shown}{at} {found.sentence.removeprefix('met ')}{note}"
    return replace(found, sentence=sentence, capacity=capacity, most=shown)


def most(of: Maximize, capacity: Bracket, trial: Trial | None) -> Most:
    """How much of what was maximised `trial` has shown; None: nothing was. The mix of requests stays the same, so tokens are as
    many as the rate gives."""
    if of == "goodput":
        shown = figure(trial, "goodput") if trial else None
        return Most(of, shown.value, shown.low or 0.0, shown.high or math.inf) if shown else Most(of, 0.0, 0.0, math.inf)
    tokens = trial.summary["output_tokens"] / trial.summary["requests"] if of == "tokens" and trial else 1.0
    return Most(of, capacity.held * tokens, capacity.held * tokens, capacity.lost * tokens)


def held_again(verdict: Verdict) -> dict[str, float]:
    """The targets of a winner's own recipe, in requests a second, where a rate was looked for: the one that was confirmed.

    The best goodput is at the edge of where latencies rise, so another cold start may show less of it. A step below, no smaller
    share of the requests is in time: that is what is held again.
    """
    if verdict.capacity is None or verdict.trial is None:
        return {}
    rate, shown = verdict.trial.rate, verdict.most
    if shown is None or shown.of != "goodput":
        return {"qps": rate}
    return {"qps": rate / (1 + PRECISION), "goodput": shown.low / (1 + PRECISION)}


def infeasible(trials: Sequence[Trial], reason: str) -> Verdict:
    """No point met the targets, and `reason` says why none will."""
    best = nearest(trials)
    return Verdict("infeasible", f"infeasible here: {reason}{_near(best)}", best)


def inconclusive(trials: Sequence[Trial], reason: str) -> Verdict:
    """Nothing can be said, and `reason` says what was missing."""
    best = nearest(trials)
    return Verdict("inconclusive", f"inconclusive: {reason}{_near(best)}", best)


def cut_short(trials: Sequence[Trial], reason: str) -> Verdict:
    """Nothing can be said yet: the time ended first."""
    return replace(inconclusive(trials, reason), over=False)


def dumps(verdict: Verdict) -> dict[str, Any]:
    """A verdict for other workers: `loads` reads it."""
    return asdict(verdict)


def loads(told: dict[str, Any]) -> Verdict:
    """What `dumps` has written."""
    trial, held, shown = told["trial"], told["capacity"], told.get("most")
    read = {"capacity": Bracket(**held) if held else None, "most": Most(**shown) if shown else None}
    return Verdict(**{**told, **read, "trial": from_dict(trial) if trial else None})


def _near(best: Trial | None) -> str:
    if best is None:
        return ""
    binding = max(findings(best), key=lambda f: f.ratio, default=None)
    held = f"; the binding target is {binding.sentence()}" if binding else ""
    return f"; the nearest point was {show(best.point)}{held}"


def document(verdict: Verdict, space: Space, trials: Sequence[Trial]) -> dict[str, Any]:
    """What standard output gets, without the paths."""
    best = verdict.trial
    return {
        "verdict": verdict.outcome,
        "sentence": verdict.sentence,
        "exit_code": verdict.exit_code,
        "changed": changed(best.point, space) if best else None,
        "point": best.point if best else None,
        "figures": {
            f.target: {"value": f.figure.value, "low": f.figure.low, "high": f.figure.high, "target": f.limit, "state": f.state}
            for f in (findings(best) if best else [])
            if f.figure
        },
        "trials": len(trials),
        **_limit(best),
        **_helped(verdict, space, trials),
        **_outputs(best, trials),
        **({"capacity": verdict.capacity.as_dict()} if verdict.capacity else {}),
        **({"most": verdict.most.as_dict()} if verdict.most else {}),
    }


def _limit(best: Trial | None) -> dict[str, Any]:
    """What holds the point that is spoken of back, and what would help."""
    limit = best.limit if best else None
    return {"limit": {"name": limit.name, "evidence": limit.evidence, "help": limit.help}} if limit else {}


def _helped(verdict: Verdict, space: Space, trials: Sequence[Trial]) -> dict[str, Any]:
    """Why a winner's changes helped, where that is known."""
    best = verdict.trial
    said = helped(best, space, trials) if best and verdict.outcome == "met" else ""
    return {"helped": said} if said else {}


def helped(best: Trial, space: Space, trials: Sequence[Trial]) -> str:
    """Why the changes of `best` helped, in a sentence: what held the defaults back at its rate or a lower one, what came of their
    worst target, and what binds now. Empty where the last word on the defaults at no such rate is that they missed."""
    last = {t.rate: t for t in trials if t.point == space.defaults and t.measured and t.rate <= best.rate}
    before = max((t for t in last.values() if t.state == "missed" and t.limit), key=lambda t: t.rate, default=None)
    if before is None or before.limit is None or best.limit is None or best.point == before.point:
        return ""
    was, now = before.limit, best.limit
    moved = next((said for f in sorted(findings(before), key=lambda f: -f.ratio) if (said := _moved(f, before, best))), "")
    binds = f"{now.name} binds now" if now.name != was.name else "it still binds"
    by = show(changed(best.point, space))
    return f"why {by} helped: the defaults were held back by {was.name} ({was.evidence}); {moved}{binds} ({now.evidence})"


def _moved(lost: Finding, before: Trial, best: Trial) -> str:
    """What a target's figure was and has become, with the rates where they differ; empty where it is not known of both."""
    target, after = lost.target, figure(best, lost.target)
    if lost.figure is None or after is None:
        return ""
    was, now = (f" at {t.rate:.3g} requests/s" if t.rate and before.rate != best.rate else "" for t in (before, best))
    return f"{target} went from {spell(target, lost.figure.value)}{was} to {spell(target, after.value)}{now}, and "


def _outputs(best: Trial | None, trials: Sequence[Trial]) -> dict[str, Any]:
    """The comparison of outputs with the defaults': of the trial that is spoken of, else the last there was."""
    compared = [t.summary["outputs"] for t in (*trials, *([best] if best else [])) if "outputs" in t.summary]
    return {"outputs": compared[-1]} if compared else {}
