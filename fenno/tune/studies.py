"""Studies as they lie in their folders: which there are, what each of them found, and its trials as a table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenno import recipe as recipes
from fenno.errors import DiskError, FennoError, UsageError
from fenno.load import figures
from fenno.recipe import Scalar
from fenno.tune import output, study
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.judge import Finding, judge, spell
from fenno.tune.space import Space
from fenno.tune.study import Trial

HEADER = ("study", "verdict", "recipe", "date", "trials")
TRIALS_HEADER = ("trial", "state", "changed", "found", "held back by", "s")
# Columns that every export has, in this order; those of the load, of knobs and of targets follow.
COLUMNS = ("trial", "origin", "state", "why", "rate_per_s", "seconds", "score", "limit", "limit_evidence", "reason", "worker")
COUNTS = ("requests", "completed", "output_tokens", "token_throughput", "goodput")


@dataclass(frozen=True)
class Kept:
    """A study in its folder. `document` is what its end left (see `session.finish`), or what was known at its beginning."""

    folder: Path
    document: dict[str, Any]

    @property
    def verdict(self) -> str:
        return str(self.document.get("verdict", "not over"))

    @property
    def sentence(self) -> str:
        return str(self.document.get("sentence", "not over: the same `fenno tune` goes on with it"))

    def trials(self) -> list[Trial]:
        """Its finished trials, oldest first. Raises `DiskError`."""
        return study.stored(self.folder, self.document.get("storage"))


def load(folder: Path) -> Kept:
    """The study in `folder`. Raises `DiskError` when its files cannot be read."""
    facts = folder / output.DONE if (folder / output.DONE).is_file() else folder / output.BEGUN
    try:
        document = json.loads(facts.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DiskError(f"cannot read {facts}: {error}", "a study's folder holds what `fenno tune` left in it") from error
    return Kept(folder, document)


def folders(out: Path) -> list[Path]:
    """The folders of studies under `out`, the newest first."""
    begun = sorted(out.glob(f"*/{output.BEGUN}"), key=lambda facts: facts.stat().st_mtime_ns, reverse=True)
    return [facts.parent for facts in begun]


def find(out: Path, name: str | None) -> Kept:
    """A study by its folder, or by its name under `out` or the beginning of it; None: the newest. Raises `UsageError`."""
    if name is not None and (Path(name) / output.BEGUN).is_file():
        return load(Path(name))
    there = folders(out)
    meant = [folder for folder in there if folder.name.startswith(name or "")]
    exact = [folder for folder in meant if folder.name == name]
    if not there:
        raise UsageError(f"there is no study in {out}", "`fenno tune` makes one; `--out` names the folder they are kept in")
    if not meant:
        raise UsageError(f"there is no study {name!r} in {out}", "see `fenno study list`")
    if name is not None and len(meant) > 1 and not exact:
        names = ", ".join(folder.name for folder in meant[:3])
        raise UsageError(f"{name!r} begins the names of {len(meant)} studies: {names}", "give more of the name")
    return load((exact or meant)[0])


def tuned(kept: Kept) -> Path:
    """The file of the recipe whose targets the study found to be met. Raises `UsageError` when it found none."""
    path = kept.folder / output.TUNED
    if not path.is_file():
        said = f"this study has no settings to measure again: {kept.sentence}"
        raise UsageError(said, "`fenno study list` shows the studies whose verdict is met")
    return path


def best_point(kept: Kept, space: Space) -> dict[str, Scalar]:
    """The point of a study that came nearest to its targets, at the largest rate that it was tried at, as `space` has it: what that
    lacks is at its default. Raises `UsageError` where nothing was measured, only the defaults are left of it, or no legal point."""
    ranked = sorted(verdicts.latest(kept.trials()), key=lambda t: (verdicts.NEARNESS.index(t.state), -t.rate, t.score))
    best = ranked[0].point if ranked else {}
    known = {knob: value for knob, value in best.items() if value in space.every.get(knob, ())}
    point = spaces.canonical({**space.defaults, **known}, space)
    if not ranked:
        said = "has no measured trial"
    elif point == space.defaults:
        said = "has no other settings than the defaults for this search"
    elif not spaces.legal(point):
        said = f"has a best point that would be {spaces.show(point)} here: a token budget below the cap of sequences"
    else:
        return point
    raise UsageError(f"{kept.folder.name} {said}", "leave out --trials-from, or name another study")


def beside(path: Path) -> Kept | None:
    """The study that made the recipe at `path`, where it lies in its folder still."""
    return load(path.parent) if path.name == output.TUNED and (path.parent / output.DONE).is_file() else None


def listed(out: Path) -> list[dict[str, Any]]:
    """A line of `fenno study list` for each study under `out`, the newest first; one whose files are broken says so."""
    return [_line(folder) for folder in folders(out)]


def _line(folder: Path) -> dict[str, Any]:
    try:
        kept = load(folder)
        count = kept.document["trials"] if "trials" in kept.document else len(kept.trials())
    except FennoError as error:
        return {**dict.fromkeys(("study", *HEADER)), "study": folder.name, "verdict": "unreadable", "sentence": str(error)}
    known = {name: kept.document.get(name) for name in ("recipe", "recipe_digest", "date", "capacity")}
    return {"study": folder.name, "verdict": kept.verdict, **known, "trials": count, "sentence": kept.sentence}


def row(line: dict[str, Any]) -> list[str]:
    """One of `listed` for people."""
    return ["" if line[name] is None else str(line[name]) for name in HEADER]


def lines(shown: Mapping[str, Any]) -> list[str]:
    """What `document` says of a study beside its verdict and its trials, in lines."""
    engine = shown.get("engine", {})
    said = [f"recipe {shown.get('recipe')} ({shown.get('recipe_digest')}), begun {shown.get('date')}, seed {shown.get('seed')}"]
    said += [f"engine {engine.get('distribution')} {engine.get('version')}, fenno {shown.get('fenno')}"]
    if shown.get("changed") is not None:
        kind = "settings" if shown["verdict"] == "met" else "nearest"
        said.append(f"{kind}: {spaces.show(shown['changed'])}")
    return said + [f"{name}: {shown[name]}" for name in ("tuned", "serve", "config", "report") if shown.get(name)]


def defaults(kept: Kept, trials: Sequence[Trial]) -> dict[str, Scalar]:
    """What the engine does by itself: the point of the trial that imitated it, which comes first; where there is none, as in a
    study without a search, what the study knew at its beginning."""
    known: dict[str, Scalar] = kept.document.get("space", {}).get("defaults", {})
    return next((t.point for t in trials if t.origin == "defaults"), known)


def changed(trial: Trial, base: Mapping[str, Scalar]) -> str:
    """A trial's settings as far as they differ from the defaults, for people."""
    return spaces.show({knob: value for knob, value in trial.point.items() if knob not in base or base[knob] != value})


def told(trial: Trial, base: Mapping[str, Scalar]) -> list[str]:
    """A row of the table of trials for people; `base`: the defaults."""
    found = "; ".join(_short(finding) for finding in verdicts.findings(trial)) if trial.measured else trial.reason
    cold = "cold: " if trial.origin == "confirmation" else ""
    limit = trial.limit.name if trial.limit else ""
    return [str(trial.number), trial.state, cold + changed(trial, base), found, limit, f"{trial.seconds:.0f}"]


def _short(finding: Finding) -> str:
    """ "p95_ttft 412 ms", with its state where that is not met."""
    value = spell(finding.target, finding.figure.value) if finding.figure else "not measured"
    return f"{finding.target} {value}" + ("" if finding.state == "met" else f" ({finding.state})")


def refused(trials: Sequence[Trial], base: Mapping[str, Scalar]) -> list[dict[str, Any]]:
    """The trials that gave no measurement, and why; `base`: the defaults."""
    return [
        {"trial": t.number, "state": t.state, "changed": changed(t, base), "reason": t.reason or "no reason was given"}
        for t in trials
        if not t.measured
    ]


def document(kept: Kept, trials: Sequence[Trial]) -> dict[str, Any]:
    """What `fenno study show` gives to programs: the study's own document, every trial, and what was refused."""
    own = {"study": str(kept.folder), "verdict": kept.verdict, "sentence": kept.sentence}
    return {**kept.document, **own, "trials": rows(kept, trials), "refused": refused(trials, defaults(kept, trials))}


def rows(kept: Kept, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The trials with one set of columns for all of them: `COLUMNS`, `COUNTS`, `LATENCY_p50_ms` and so on for each latency, a
    `knob.NAME` for each knob, and five for each target, whose latencies are in seconds, rates in requests a second, memory in
    bytes (`memory`) or a share (`memory_share`).

    What was not measured is None; an infinite latency is one that failed requests fall on.
    """
    knobs = list(dict.fromkeys(knob for trial in trials for knob in trial.point))
    chosen = recipes.load(kept.folder / "recipe.yaml")
    targets = [finding.target for finding in judge(chosen.targets, {}, steady=True).findings]
    return [
        {**_fixed(t), **_load(t.summary), **{f"knob.{k}": t.point.get(k) for k in knobs}, **dict(_of_targets(t, targets))}
        for t in trials
    ]


def _fixed(trial: Trial) -> dict[str, Any]:
    limit = (trial.limit.name, trial.limit.evidence) if trial.limit else (None, None)
    score = trial.score if trial.measured else None
    told = (
        trial.number,
        trial.origin,
        trial.state,
        trial.why,
        trial.rate or None,
        trial.seconds,
        score,
        *limit,
        trial.reason,
        trial.worker,
    )
    return dict(zip(COLUMNS, told, strict=True))


def _load(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the traffic came to (docs/metrics.md); latencies in milliseconds."""
    latencies = {f"{name}_{p}_ms": summary.get(name, {}).get(p) for name in figures.LATENCIES for p in ("p50", "p95", "p99")}
    return {**{name: summary.get(name) for name in COUNTS}, **latencies}


def _of_targets(trial: Trial, targets: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Limit, value, both ends of the 95 % interval, and state of each target."""
    found = {finding.target: finding for finding in verdicts.findings(trial)}
    for name in targets:
        finding = found.get(name)
        figure = finding.figure if finding else None
        parts = (figure.value, figure.low, figure.high) if figure else (None, None, None)
        state, limit = (finding.state, finding.limit) if finding else (None, None)
        values = {"limit": limit, "value": parts[0], "low": parts[1], "high": parts[2], "state": state}
        yield from ((f"target.{name}.{part}", value) for part, value in values.items())


def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    """The same as CSV, a header first; None is an empty field, an infinite latency `inf`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
