"""One self-contained HTML page of a load test: what it came to, both sides over time, distributions, failures by cause. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fenno import units
from fenno.load import figures, stats
from fenno.load import words as told
from fenno.load.requests import Floats, Requests
from fenno.load.stored import Stored
from fenno.report import chart, frame
from fenno.report.chart import Line
from fenno.report.markup import Html, facts, row, section, table, tag
from fenno.report.trials import latencies

Document = Mapping[str, Any]
MOST = 120  # points of a line: more would not be seen
CURVES = (
    ("ttft", "Time to first token"),
    ("tpot", "Time per token after the first"),
    ("gap", "Longest gap"),
    ("e2el", "To the end"),
)


def page(run: Stored, document: Document, fenno: str) -> str:
    """The page of a load test. `document` is what standard output gets; `fenno`: the version that makes it."""
    mine = figures.counted(run.result.requests)
    parts = [
        headline(document, run.result.plan.model),
        over_time(run, mine) if len(mine) else "",
        distributions(mine),
        by_class(document),
        failures(mine, run.result.state.start or 0.0),
        conditions(run, document),
    ]
    return frame.whole(f"{run.result.plan.model}: {state(document)[0]} (fenno loadtest)", fenno, *parts)


def state(document: Document) -> tuple[str, str]:
    """What kind of measurement it is, and the colour of that."""
    if document["ended"]["how"] in ("gone", "interrupted"):
        return document["ended"]["how"], "failed"
    return ("valid", "met") if document["valid"] else ("invalid", "missed")


def headline(document: Document, model: str) -> Html:
    """Whether it is a measurement, why not, and each figure in a sentence."""
    name, colour = state(document)
    invalid = [f"{reason}; next: {step}" for reason, step in zip(document["reasons"], document["next_steps"], strict=True)]
    why = [document["ended"]["why"], *invalid, *(f"mind: {flag}" for flag in document["flags"])]
    return tag(
        "header",
        tag("h1", tag("span", "fenno loadtest", class_="brand"), " ", model),
        tag(
            "div", tag("strong", name, class_="badge"), *_paragraphs([told.throughput(dict(document))]), class_=f"verdict {colour}"
        ),
        *_paragraphs([*why, *told.lines(dict(document))[1:]]),
    )


def _paragraphs(sentences: Iterable[str]) -> list[Html]:
    return [tag("p", sentence) for sentence in sentences if sentence]


def over_time(run: Stored, mine: Requests) -> Html:
    """Client and server from the window's start to its end, all pictures on the same axis. `mine`: what is counted."""
    start, end = run.result.state.start or 0.0, run.result.state.end or 0.0
    requests = run.result.requests
    number = max(1, min(MOST, len(mine) // 20))
    time = _Time(start, end, number)
    ttft = time.parts(mine["sent"], mine.ttft * 1e3)
    said = [(s.at, s.metrics) for s in run.seen.between(start, end).said()]
    memory = [(s.at, float(s.resident)) for s in run.seen.between(start, end).samples if s.resident]
    pictures = [
        (
            "First token, ms",
            [
                time.line("P95", [_percentile(part, 95) for part in ttft]),
                time.line("P50", [_percentile(part, 50) for part in ttft]),
            ],
        ),
        (
            "Requests",
            [
                time.line("in flight, by the client", time.in_flight(requests)),
                time.line("running, by the server", time.means((at, m.running) for at, m in said)),
                time.line("waiting, by the server", time.means((at, m.waiting) for at, m in said)),
            ],
        ),
        (
            "Answers a second",
            [
                time.line("complete", time.rates(requests["end"][requests.ok])),
                time.line("failed", time.rates(mine["end"][~mine.ok])),
            ],
        ),
        (
            "KV cache, %",
            [time.line("used", time.means((at, None if m.kv_cache_usage is None else 100 * m.kv_cache_usage) for at, m in said))],
        ),
        ("Memory of the engine, GiB", [time.line("held", time.means((at, held / 2**30) for at, held in memory))]),
    ]
    figures = [_figure(name, lines, (0.0, end - start), "s") for name, lines in pictures if any(line.points for line in lines)]
    return section("Over time", tag("p", "Seconds from the start of the counted window.", class_="quiet"), *figures)


def _figure(name: str, lines: Sequence[Line], extent: tuple[float, float], unit: str) -> Html:
    shown = [line for line in lines if line.points]
    keys = [chart.line_legend(place, line.name) for place, line in enumerate(shown)]
    picture = chart.lines(shown, extent, name, unit)
    return tag("figure", tag("figcaption", name, " ", *keys, class_="keys"), picture)


class _Time:
    """The window in parts of equal length, by which everything is drawn."""

    def __init__(self, start: float, end: float, number: int) -> None:
        self.start, self.number = start, number
        self.width = (end - start) / number or 1.0

    def parts(self, stamps: Floats, values: Floats) -> list[Floats]:
        """Stamped values by part; what lies outside of the window is left out."""
        places = np.floor((stamps - self.start) / self.width)
        order = np.argsort(places, kind="stable")
        edges = np.searchsorted(places[order], np.arange(self.number + 1))
        return [values[order[low:high]] for low, high in pairwise(edges)]

    def means(self, values: Iterable[tuple[float, float | None]]) -> list[float | None]:
        known = np.array([(at, value) for at, value in values if value is not None]).reshape(-1, 2)
        return [float(part.mean()) if len(part) else None for part in self.parts(known[:, 0], known[:, 1])]

    def rates(self, stamps: Floats) -> list[float | None]:
        """How many a second."""
        return [len(part) / self.width for part in self.parts(stamps, stamps)]

    def in_flight(self, requests: Requests) -> list[float | None]:
        """Requests in flight, averaged over each part."""
        edges = [self.start + self.width * place for place in range(self.number + 1)]
        return [figures.in_flight(requests, low, high) for low, high in pairwise(edges)]

    def line(self, name: str, values: Sequence[float | None]) -> Line:
        """A value for each part, drawn at its middle; a gap where there is none."""
        known = [(self.width * (place + 0.5), value) for place, value in enumerate(values) if value is not None]
        return Line(name, tuple(((x, y) if math.isfinite(y) else (x, None)) for x, y in known))


def _percentile(part: Floats, p: float) -> float | None:
    return stats.percentile(np.sort(part), p) if len(part) else None


def distributions(mine: Requests) -> str:
    """Each latency by percentile: how late the latest are, and how many of them there are."""
    cards = []
    for name, words in CURVES:
        seconds = getattr(mine, name)
        values = np.sort(seconds[~np.isnan(seconds)]) * 1e3
        points = [(p, stats.percentile(values, p)) for p in range(1, 101)] if len(values) else []
        line = Line(words, tuple((float(p), value if math.isfinite(value) else None) for p, value in points))
        if any(value is not None for _, value in line.points):
            cards.append(tag("figure", tag("figcaption", f"{words}, ms"), chart.lines([line], (0.0, 100.0), words, "%")))
    note = "The share of requests that had it no later. A failed request is infinitely late: there the line ends."
    return section("Distributions", tag("p", note, class_="quiet"), tag("div", *cards, class_="cards")) if cards else ""


def by_class(document: Document) -> Html:
    """Percentiles of all requests, and by class where there are several."""
    classes = document["classes"] if len(document["classes"]) > 1 else {}
    tables = [latencies(name, figures) for name, figures in [("All requests", document), *classes.items()]]
    return section("Latencies", tag("div", *tables, class_="cards"))


def failures(mine: Requests, start: float) -> str:
    """Each kind of failure: how many, when, and what the first one said."""
    wrong = mine.where(~mine.ok)
    heads = ["Failure", "Requests", "From", "To", "The first one"]
    rows = []
    for kind, count in sorted(wrong.words("outcome").counts().items(), key=lambda item: -item[1]):
        those = wrong.where(wrong.words("outcome").are(kind))
        times = [f"{at - start:.1f} s" for at in those["sent"][[0, -1]]]
        rows.append(row(heads, [kind, str(count), *times, those.error(0)]))
    return (
        section("Failures", table("By cause; sent so long after the window's start", heads, rows, class_="stack")) if rows else ""
    )


def conditions(run: Stored, document: Document) -> Html:
    """What every figure depends on."""
    plan, client = run.result.plan, document["client"]
    pairs = [
        ("Begun", document["at"] or ""),
        ("Server", f"{plan.url}, {plan.endpoint}"),
        ("Traffic", told.traffic(plan)),
        ("Window", f"{units.show_duration(document['seconds'])} after {units.show_duration(plan.warmup)} of warm-up"),
        ("Timeout", units.show_duration(plan.timeout)),
        ("Seed", str(plan.seed)),
        ("Client", ", ".join(f"{name} {version}" for name, version in client["versions"].items())),
        ("Its lag", f"P95 {client['lag_ms']['p95']:g} ms; requests sent P95 {client['lateness_ms']['p95']:g} ms late"),
        *([("Hosts", told.hosts(client["workers"]))] if client["workers"] else []),
        ("Records", document["records"]),
    ]
    return section("Conditions", facts(pairs))
