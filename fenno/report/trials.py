"""The parts of a page that show trial after trial: the search over time, the tables, what failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fenno import units
from fenno.report import chart, words
from fenno.report.markup import Html, join, row, section, table, tag
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.judge import Figure, spell
from fenno.tune.space import Space
from fenno.tune.study import Trial

_SIGNS = {
    "met": "met",
    "missed": "missed",
    "unclear": "unclear: the interval holds the limit",
    "invalid": "no valid measurement",
    "failed": "failed",
}
_LEAD = (
    "The score is the worst ratio of a figure to its limit: 1 or less is met. Short lines are the single targets. "
    "A mark tells more when pointed at, and leads to its trial in the table."
)


def search(trials: Sequence[Trial]) -> str:
    """Every trial in its order: the worst ratio to a target, then each target by itself."""
    if not trials:
        return ""
    score = chart.over_time([_score(t) for t in trials], 1.0, lambda v: f"{v:.2g}", "Score of every trial", height=260, left=6)
    return section(
        "The search",
        tag("p", _LEAD, class_="quiet"),
        tag("p", *_keys(trials), class_="keys"),
        tag("figure", score),
        tag("div", *(_target_over_time(name, trials) for name in _targets(trials)), class_="cards"),
    )


def _keys(trials: Sequence[Trial]) -> list[Html]:
    states = {t.state for t in trials}
    keys = [chart.legend(state, meaning) for state, meaning in _SIGNS.items() if state in states]
    cold = next((t for t in trials if _cold(t)), None)
    return [*keys, chart.legend(cold.state, "in a square: after a cold start", cold=True)] if cold else keys


def _targets(trials: Sequence[Trial]) -> list[str]:
    """The targets there are, in their order."""
    return list(dict.fromkeys(finding.target for t in trials for finding in verdicts.findings(t)))


def _cold(trial: Trial) -> bool:
    return trial.origin == "confirmation"


def _score(trial: Trial) -> chart.Mark:
    ratios = tuple(f.ratio for f in verdicts.findings(trial) if f.figure)
    value = trial.score if ratios else None
    return chart.Mark(trial.number, value, trial.state, _cold(trial), words.told(trial), ticks=ratios)


def _target_over_time(target: str, trials: Sequence[Trial]) -> Html:
    found = [next((f for f in verdicts.findings(t) if f.target == target), None) for t in trials]
    limit = next(f.limit for f in found if f)
    marks = []
    for trial, finding in zip(trials, found, strict=True):
        figure = finding.figure if finding else None
        state = finding.state if finding and trial.measured else trial.state
        value, bounds = (figure.value, words.bounds(figure)) if figure else (None, None)
        marks.append(chart.Mark(trial.number, value, state, _cold(trial), words.told(trial), bounds))
    name = f"{words.label(target)}, target {words.limit(target, limit)}"
    picture = chart.over_time(marks, limit, lambda v: spell(target, v).removesuffix(" requests/s"), name, height=170, left=15)
    return tag("figure", tag("figcaption", name), picture)


def trade_off(trials: Sequence[Trial]) -> str:
    """What first tokens cost the tokens after them: P95 TTFT against P95 TPOT, of trials that were seen to their end, at the rate
    that most of them had."""
    seen = [t for t in trials if t.measured and not t.judgement.get("notes")]
    rate = max((t.rate for t in seen), key=[t.rate for t in seen].count, default=0.0)
    told = [(_p95(t, "tpot"), _p95(t, "ttft"), t) for t in seen if t.rate == rate]
    shown = [(x, chart.Mark(t.number, y, t.state, _cold(t), words.told(t)), t) for x, y, t in told if x > 0 and y > 0]
    if len({tuple(t.point.items()) for *_, t in shown}) < 2:
        return ""
    name = "TTFT p95 (upwards) against TPOT p95 (across)"
    picture = chart.against([(x, mark) for x, mark, _ in shown], words.milliseconds, name, height=260, left=9)
    out = "Trials at other rates, those that were stopped early, and those whose queue was not level, are left out."
    at = f"At {rate:g} requests/s; the" if rate else "The"  # a trial that was kept without its rate has 0
    lead = f"{at} nearer to the lower left the better. {out}"
    return section("Trade-off", tag("p", lead, class_="quiet"), tag("figure", tag("figcaption", name), picture))


def _p95(trial: Trial, latency: str) -> float:
    """A trial's P95 in ms; 0 where it has none."""
    return float(trial.summary.get(latency, {}).get("p95") or 0.0)


def distribution(best: Trial | None) -> str:
    """Latencies of the trial that counts: of all requests, then by class."""
    if best is None or not best.summary:
        return ""
    groups = [("All requests", best.summary), *best.summary.get("classes", {}).items()]
    note = f"Of trial {best.number}. A failed request is infinitely late; a percentile that falls on one is none."
    tables = [latencies(name, figures) for name, figures in groups]
    return section("Latencies", tag("p", note, class_="quiet"), tag("div", *tables, class_="cards"))


def latencies(name: str, figures: Mapping[str, Any]) -> Html:
    """A table of percentiles, of a trial's or a load test's figures."""
    heads = ["", "p50", "p95", "p99"]
    known = {latency: figures[latency] for latency in words.LATENCIES if latency in figures}
    rows = [row(heads, [words.LATENCIES[k], *(words.milliseconds(v.get(p)) for p in heads[1:])]) for k, v in known.items()]
    failures = "".join(f", {count} {outcome}" for outcome, count in figures.get("failures", {}).items())
    caption = f"{name}: {figures.get('completed', 0)} of {figures.get('requests', 0)} answers complete{failures}"
    return table(caption, heads, rows, class_="narrow")


def refused(trials: Sequence[Trial], space: Space) -> str:
    """What gave no measurement, and why."""
    if not trials:
        return ""
    lost = [_loss(t, space) for t in trials if not t.measured]
    return section("Refused or failed", tag("ul", *lost) if lost else tag("p", "Nothing: every trial was measured."))


def _loss(trial: Trial, space: Space) -> Html:
    where = tag("a", f"trial {trial.number}", href=f"#trial-{trial.number}")
    what = spaces.show(spaces.changed(trial.point, space))
    return tag("li", badge(trial.state), " ", where, f", {what}: ", trial.reason or "no reason was given")


def badge(state: str) -> Html:
    """A state as a coloured word."""
    return tag("span", state, class_=f"badge {state}")


def with_interval(target: str, figure: Figure) -> Html:
    """A figure, and its interval below it."""
    return join([tag("b", spell(target, figure.value)), " ", tag("small", words.interval(target, figure))])


def of_targets(trial: Trial, names: Sequence[str]) -> list[str]:
    """The figures of some targets with their intervals; of one that was not measured nothing."""
    found = {f.target: f.figure for f in verdicts.findings(trial) if f.figure}
    return [with_interval(name, found[name]) if name in found else "" for name in names]


def every_trial(trials: Sequence[Trial], space: Space) -> str:
    """The table of all trials."""
    if not trials:
        return ""
    names = _targets(trials)
    heads = ["Trial", "State", "Changed", "Why", *map(words.label, names), "What held it back", "Notes", "Took"]
    rows = [row(heads, _cells(t, names, space), id=f"trial-{t.number}") for t in trials]
    wide = table("In their order; what was changed is against the engine's defaults", heads, rows, class_="stack")
    return section("All trials", tag("div", wide, class_="wide", tabindex=0, role="region", aria_label="All trials"))


def _cells(trial: Trial, names: Sequence[str], space: Space) -> list[str]:
    changed = spaces.changed(trial.point, space)
    known = any(f.figure for f in verdicts.findings(trial))
    score = tag("small", f"score {trial.score:.2f}") if known and math.isfinite(trial.score) else ""
    return [
        join([str(trial.number), " ", tag("small", "cold confirmation" if _cold(trial) else trial.origin)]),
        join([badge(trial.state), " ", score]),
        join([tag("code", f"{knob}={value}") for knob, value in changed.items()], " ") if changed else "nothing",
        trial.why,
        *of_targets(trial, names),
        join([tag("b", trial.limit.name), " ", tag("span", trial.limit.evidence)]) if trial.limit else "",
        "; ".join(words.remarks(trial)),
        units.show_duration(trial.seconds),
    ]
