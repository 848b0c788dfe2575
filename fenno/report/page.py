"""One self-contained HTML page: what an engineer shows to a colleague. Nothing is loaded from anywhere, and no script runs.

Every part is a function of the study alone, so the same study gives the same page; a part that has nothing to say is left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fenno import units
from fenno.engine.command import without_secrets
from fenno.load import figures
from fenno.recipe import Recipe, Scalar
from fenno.report import chart, frame, words
from fenno.report.markup import Html, facts, row, section, table, tag
from fenno.report.trials import badge, distribution, every_trial, of_targets, refused, search, trade_off, with_interval
from fenno.tune import space as spaces
from fenno.tune import verdict as verdicts
from fenno.tune.judge import Figure, Finding, judge, spell
from fenno.tune.space import Space
from fenno.tune.study import Trial

Document = Mapping[str, Any]

_COLOURS = {"met": "met", "infeasible": "missed", "inconclusive": "unclear"}
_WORDS = (
    ("Met, missed, unclear", "The whole interval is on the good side of the limit, on the bad side, or holds the limit."),
    ("Availability", "Met by the share itself, since no trial is long enough for its interval; missed by its whole interval."),
    ("95 % interval", "It misses the true value in at most 5 of 100 trials, also when a trial is looked at up to three times."),
    ("QPS", "Met when answers keep up with requests sent at that rate: the queue is level, and the interval reaches the target."),
    ("Goodput", "Requests a second that each kept every latency limit; in a search for the most the target is the best so far."),
    ("Invalid", "The client was too slow for its own figures: that is no measurement, and nothing is concluded from it."),
    ("Defaults", "The limits that vLLM chooses by itself, set on the same running server as those of every other live trial."),
    ("Cold confirmation", "A fresh start with plain flags and fresh prompts. The verdict rests on it, not on the live trial."),
    ("TTFT, TPOT", "Time to first token; time per output token after the first."),
    ("ITL, longest gap, E2EL", "Time between two tokens; the longest such time of an answer; time to the last token."),
)


def tune(document: Document, trials: Sequence[Trial], recipe: Recipe, space: Space) -> str:
    """The page of a study. `document` is what standard output gets (see `verdict.document` and `output.facts`)."""
    best, before = spoken_of(document, trials), defaults(trials)
    parts = [
        headline(document, trials, recipe),
        targets(document, recipe, best, before),
        binding(best),
        comparison(document, best, before),
        outputs(document),
        settings(document, best, trials, space),
        worth(document, best, trials, space),
        search(trials),
        trade_off(trials),
        distribution(best),
        refused(trials, space),
        every_trial(trials, space),
        conditions(document, recipe, best),
        section("How to read this", facts(_WORDS)),
    ]
    return frame.whole(f"{recipe.name}: {document['verdict']} (fenno tune)", document["fenno"], *parts)


def spoken_of(document: Document, trials: Sequence[Trial]) -> Trial | None:
    """The trial whose point and figures the document gives: the confirmed winner, or the nearest point."""
    wanted = {name: figure["value"] for name, figure in document["figures"].items()}
    for trial in reversed(trials):
        values = {f.target: f.figure.value for f in verdicts.findings(trial) if f.figure}
        if trial.point == document["point"] and values == wanted:
            return trial
    return None


def defaults(trials: Sequence[Trial]) -> Trial | None:
    """The trial of the engine's imitated defaults: the last one that was measured, where one was."""
    mine = [t for t in trials if t.origin == "defaults"]
    return next((t for t in reversed(mine) if t.measured), mine[-1] if mine else None)


def headline(document: Document, trials: Sequence[Trial], recipe: Recipe) -> Html:
    """The verdict in one sentence, and what it rests on in one line."""
    engine, verdict = document["engine"], document["verdict"]
    count = f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}"
    rests = f"{count} in {units.show_duration(sum(t.seconds for t in trials))}" if trials else "no trial"
    where = f"{engine['distribution']} {engine['version']} on {words.machine(document['host'])}"
    colour = f"verdict {_COLOURS[verdict]}"
    return tag(
        "header",
        tag("h1", tag("span", "fenno tune", class_="brand"), " ", recipe.name),
        tag("div", tag("strong", verdict, class_="badge"), tag("p", document["sentence"]), class_=colour),
        tag("p", f"{rests} · {where} · ", tag("time", document["date"], datetime=document["date"]), class_="quiet"),
    )


def role_of(document: Document) -> str:
    """What the trial that the document speaks of is called beside the defaults."""
    return "tuned" if document["verdict"] == "met" else "nearest"


def targets(document: Document, recipe: Recipe, best: Trial | None, before: Trial | None) -> Html:
    """Each target: figure, interval, limit, state, drawn as an interval against the limit."""
    found = verdicts.findings(best) if best else judge(recipe.targets, {}, steady=True).findings
    cards = [target_card(finding, role_of(document), before if before is not best else None) for finding in found]
    note = "No trial was measured, so none has a figure."
    if best:
        note = "; ".join([f"Figures of trial {best.number} ({best.state}), {words.origin(best)}", *words.remarks(best)])
    return section("Targets", tag("p", note, class_="quiet"), tag("div", *cards, class_="cards"))


def binding(best: Trial | None) -> str:
    """What holds the point that is spoken of back, and what would help."""
    if best is None or best.limit is None:
        return ""
    parts = [tag("p", tag("b", best.limit.name), f": {best.limit.evidence}")]
    parts += [tag("p", f"What would help: {best.limit.help}")] if best.limit.help else []
    return section("What holds it back", *parts)


def target_card(finding: Finding, name: str, before: Trial | None) -> Html:
    """One target; what the defaults gave is drawn below."""
    target, limit = finding.target, words.limit(finding.target, finding.limit)
    top = tag("h3", words.label(target), " ", badge(finding.state))
    if finding.figure is None:
        return tag("article", top, tag("p", f"Target: {limit}. It was not measured."))
    rows = [(name, str(finding.state), finding.figure), *(drawn("defaults", before, target) if before else [])]
    good = target in words.MORE_IS_BETTER
    return tag(
        "article",
        top,
        tag("p", spell(target, finding.figure.value), class_="figure"),
        facts([("95 % interval", words.interval(target, finding.figure)), ("Target", limit)]),
        chart.intervals(rows, finding.limit, good, lambda v: spell(target, v), finding.sentence()),
    )


def drawn(name: str, trial: Trial, target: str) -> list[tuple[str, str, Figure]]:
    """A row of a picture: what was no valid measurement has met nothing."""
    found = [f for f in verdicts.findings(trial) if f.target == target]
    return [(name, f.state if trial.measured else trial.state, f.figure) for f in found if f.figure]


def comparison(document: Document, best: Trial | None, before: Trial | None) -> str:
    """The engine's imitated defaults against the winner, with intervals where there are some."""
    title = "Before and after"
    if best is None or before is None:
        return ""
    if before is best:
        return section(title, tag("p", f"The {role_of(document)} point is the engine's defaults."))
    heads = ["", f"Defaults (trial {before.number})", f"{role_of(document).capitalize()} (trial {best.number})", "Change"]
    old = {f.target: f.figure for f in verdicts.findings(before)}
    cells = [compared(f.target, old.get(f.target), f.figure) for f in verdicts.findings(best) if f.figure]
    told = {"TTFT p95": "p95_ttft", "Goodput, requests/s": "goodput"}
    cells += [c for c in further(before.summary, best.summary) if told.get(c[0]) not in old]
    # What was no valid measurement is shown, and nothing is concluded from it.
    rows = [row(heads, c if before.measured else [*c[:-1], ""]) for c in cells]
    notes = [] if before.measured else [tag("p", f"The defaults gave no valid measurement: {before.reason}")]
    if helped := document.get("helped"):
        notes.append(tag("p", helped[0].upper() + helped[1:]))
    if best.point == before.point:
        notes.append(tag("p", "Both are the engine's defaults: what differs is the start, and chance."))
    caption = "The targets with their 95 % intervals, and further figures"
    return section(title, *notes, table(caption, heads, rows, class_="narrow"))


def compared(target: str, old: Figure | None, new: Figure) -> list[str]:
    """One target: name, before, after, change."""
    was, change = (with_interval(target, old), words.change(old, new)) if old else ("not measured", "")
    return [words.label(target), was, with_interval(target, new), change]


def further(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[str]]:
    """Figures that were no targets: name, before, after, change."""
    found = []
    for key, name in words.LATENCIES.items():
        a, b = old.get(key, {}).get("p95"), new.get(key, {}).get("p95")
        if a is not None or b is not None:
            found.append([f"{name} p95", words.milliseconds(a), words.milliseconds(b), words.signed(b / a - 1) if a and b else ""])
    for key, name in (("token_throughput", "Output tokens/s"), ("goodput", "Goodput, requests/s")):
        a, b = old.get(key), new.get(key)
        if a and b:
            found.append([name, f"{a:.4g}", f"{b:.4g}", words.signed(b / a - 1)])
    return found


def outputs(document: Document) -> str:
    """Whether the winner says what the defaults say."""
    found = document.get("outputs")
    if not found:
        return ""
    parts = [tag("p", found["sentence"])]
    if found["found"]:
        heads = ["Log-probabilities, in nats", "Tuned against defaults", "Defaults against themselves"]
        names = {"largest": "Largest difference", "mean": "Mean", "median": "Median"}
        rows = [row(heads, [name, *(f"{found[of][key]:.2g}" for of in ("found", "noise"))]) for key, name in names.items()]
        note = f"{found['found']['count']} tokens; {found['same_answers']} of {found['answers']} greedy answers are the same"
        parts.append(table(note, heads, rows, class_="narrow"))
    return section("Outputs", *parts)


def settings(document: Document, best: Trial | None, trials: Sequence[Trial], space: Space) -> Html:
    """What may be changed and what was, and the command that serves it."""
    heads = ["Knob", "Defaults", role_of(document).capitalize(), "Tried", "May be"]
    rows = []
    for knob, values in space.every.items():
        chosen, default = best.point.get(knob) if best else None, space.defaults.get(knob)
        tried = [v for v in values if any(t.point.get(knob) == v for t in trials)]
        said = "" if best is None else tag("b", str(chosen)) if chosen != default else str(chosen)
        rows.append(row(heads, [tag("code", knob), str(default), said, listed(tried), listed(values)]))
    parts = [table("Knobs; what differs from the defaults is in bold", heads, rows, class_="stack")]
    if document.get("serve"):
        parts += [tag("h3", "Serve it"), tag("pre", tag("code", without_secrets(document["serve"])), tabindex=0)]
    if document.get("tuned"):
        parts.append(tag("p", "With fenno: ", tag("code", f"fenno serve {shlex.quote(document['tuned'])}")))
    if document.get("config"):
        parts.append(tag("p", "For ", tag("code", "vllm serve --config"), ": ", tag("code", document["config"])))
    return section("Settings", *parts)


def worth(document: Document, best: Trial | None, trials: Sequence[Trial], space: Space) -> str:
    """What each change of a winner is worth: the last trial of the same point, at the same rate, with that change put back."""
    if best is None or document["verdict"] != "met":
        return ""
    changed = spaces.changed(best.point, space)
    without = {knob: (spaces.without(best.point, knob, space), best.rate) for knob in changed}
    measured = [t for t in reversed(trials) if t.measured]
    back = {knob: next((t for t in measured if (t.point, t.rate) == at), None) for knob, at in without.items()}
    if not any(back.values()):
        return ""
    names = [f.target for f in verdicts.findings(best)]
    heads = ["Without", "State", *map(words.label, names), "Held back by"]
    rows = [row(heads, ["the winner itself", badge(best.state), *of_targets(best, names), held_back(best)])]
    for knob, found in back.items():
        nothing = ["not measured", *("" for _ in heads[2:])]
        cells = [badge(found.state), *of_targets(found, names), held_back(found)] if found else nothing
        rows.append(row(heads, [tag("code", f"{knob}={changed[knob]}"), *cells]))
    return section("What each change brings", table("The winner with one change put back at a time", heads, rows, class_="stack"))


def held_back(trial: Trial) -> str:
    """The name of what held a trial back."""
    return trial.limit.name if trial.limit else ""


def listed(values: Sequence[Scalar]) -> str:
    """Values one after the other."""
    return ", ".join(map(str, values))


def roofline(document: Document, best: Trial | None) -> list[tuple[str, str]]:
    """What share of the most that the GPUs allow a trial has made, as a row; nothing where either is not known."""
    bound, made = document.get("roofline"), best.summary.get("token_throughput") if best else None
    if not bound or not made:
        return []
    share = f"{made:,.0f} output tokens/s are {100 * made / bound['rate']:.2g} % of the {bound['rate']:,.0f}"
    return [("Roofline", f"{share} that {bound['by']} allows at most, decoding {bound['batch']} sequences at once (fenno plan)")]


def goodput(recipe: Recipe) -> list[tuple[str, str]]:
    """What each request of a goodput kept, as a row; nothing where that is no target."""
    if recipe.targets.goodput is None:
        return []
    limits = figures.goodput_limits(recipe.targets.latencies())
    return [("Goodput of", ", ".join(f"{latency} at most {units.show_duration(limit)}" for latency, limit in limits.items()))]


def conditions(document: Document, recipe: Recipe, best: Trial | None) -> Html:
    """What every figure depends on."""
    host, engine = document["host"], document["engine"]
    drivers = ", ".join(dict.fromkeys(gpu["driver"] for gpu in host["gpus"]))
    pairs = [
        ("Host", f"{host['system']}, kernel {host['kernel']}"),
        ("Processor", f"{host['processor']}, {host['cores']} cores"),
        ("Memory", units.show_memory(host["memory"])),
        ("GPUs", f"{words.machine(host)}, driver {drivers}" if host["gpus"] else "none"),
        ("Engine", f"{engine['distribution']} {engine['version']} for {engine['platform']}"),
        ("Its Python", f"{engine['python']}, torch {engine['torch']}"),
        ("Model", recipe.engine.model or recipe.engine.url or ""),
        ("Traffic", words.traffic(recipe)),
        *goodput(recipe),
        *roofline(document, best),
        ("fenno", document["fenno"]),
        ("Recipe", f"{recipe.name}, hash {document['recipe_digest']}"),
        ("About it", recipe.summary),
        ("Seed", str(document["seed"])),
        ("Begun", document["date"]),
        ("Study", document.get("study", "")),
    ]
    return section("Conditions", facts(pairs))
