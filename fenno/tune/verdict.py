"""The verdict of a study: met, infeasible or inconclusive, in one sentence, with the nearest point and the target that binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fenno import errors
from fenno.tune.capacity import Bracket
from fenno.tune.judge import Figure, Finding
from fenno.tune.space import POLICY, Space, changed, show
from fenno.tune.study import Trial, from_dict

Outcome = Literal["met", "infeasible", "inconclusive"]
EXIT: dict[Outcome, int] = {"met": errors.OK, "infeasible": errors.INFEASIBLE, "inconclusive": errors.INCONCLUSIVE}


@dataclass(frozen=True)
class Verdict:
    """`trial` is the confirmed winner, or the nearest point there was. `over` is false where only the time was too short, and the
    study can be gone on with. `capacity`: in requests a second, where the largest rate was looked for."""

    outcome: Outcome
    sentence: str
    trial: Trial | None
    over: bool = True
    capacity: Bracket | None = None

    @property
    def exit_code(self) -> int:
        return EXIT[self.outcome]


NEARNESS = ("met", "unclear", "missed", "failed")


def findings(trial: Trial) -> list[Finding]:
    """A stored trial's findings."""
    rows = trial.judgement.get("findings", [])
    return [Finding(**{**row, "figure": Figure(**row["figure"]) if row["figure"] else None}) for row in rows]


def latest(trials: Sequence[Trial]) -> list[Trial]:
    """The last word on every point: its latest measured trial, live or cold, or a cold start that failed; in the order of time."""
    measured = [t for t in trials if t.measured or (t.origin == "confirmation" and t.state == "failed")]
    return [t for i, t in enumerate(measured) if all(t.point != later.point for later in measured[i + 1 :])]


def nearest(trials: Sequence[Trial]) -> Trial | None:
    """The point that came closest, by the last word on it: a met one before an unclear one before a missed one, then by score."""
    return min(latest(trials), key=lambda t: (NEARNESS.index(t.state), t.score), default=None)


def met(trial: Trial, space: Space, confirmed: bool) -> Verdict:
    """Every target is met by `trial`."""
    difference = changed(trial.point, space)
    by = f"with {show(difference)}" if difference else "with the engine's defaults"
    steered = " and fenno's scheduler: vLLM has no flag for that order" if difference.get(POLICY) == "token_aware" else ""
    after = f"; confirmed after a cold start with plain flags{steered}" if confirmed else ""
    return Verdict("met", f"met {by}: " + "; ".join(f.sentence() for f in findings(trial)) + after, trial)


def held(trial: Trial, space: Space, capacity: Bracket, confirmed: bool = False, note: str = "") -> Verdict:
    """`trial` is the largest rate at which every target was met; `capacity` lies between that rate and one that was not held."""
    found = met(trial, space, confirmed)
    sentence = f"holds {capacity} {found.sentence.removeprefix('met ')}{note}"
    return replace(found, sentence=sentence, capacity=capacity)


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
    trial, held = told["trial"], told["capacity"]
    return Verdict(**{**told, "trial": from_dict(trial) if trial else None, "capacity": Bracket(**held) if held else None})


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
        **_outputs(best, trials),
        **({"capacity": verdict.capacity.as_dict()} if verdict.capacity else {}),
    }


def _limit(best: Trial | None) -> dict[str, Any]:
    """What holds the point that is spoken of back, and what would help."""
    return {"limit": {**asdict(best.limit), "help": best.limit.help}} if best and best.limit else {}


def _outputs(best: Trial | None, trials: Sequence[Trial]) -> dict[str, Any]:
    """The comparison of outputs with the defaults': of the trial that is spoken of, else the last there was."""
    compared = [t.summary["outputs"] for t in (*trials, *([best] if best else [])) if "outputs" in t.summary]
    return {"outputs": compared[-1]} if compared else {}
