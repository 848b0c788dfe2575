"""Requests as columns say what their records say, one by one."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub import runs

from fenno.load import figures, raw, record, stats
from fenno.load.record import OUTCOMES, Record
from fenno.load.requests import Requests


def some(count: int = 300) -> list[Record]:
    """Requests of every outcome, class, phase and turn, with everything that may be missing."""
    rng, found = random.Random(7), []
    for i in range(count):
        gaps = tuple(round(rng.lognormvariate(3, 2), 2) for _ in range(rng.randrange(6)))
        change: dict[str, Any] = {
            **{"outcome": rng.choice((*OUTCOMES, *["ok"] * 20)), "cls": rng.choice("abc"), "turn": rng.choice((1, 1, 2))},
            **{"phase": rng.choice(("warmup", "counted", "counted", "drain")), "scheduled": 10 + i / 9 - rng.random()},
            **{"completion_tokens": rng.choice((None, len(gaps) + 1)), "prompt_tokens": rng.choice((None, 5, 6))},
            "asked_prompt": rng.choice((None, 5)),
        }
        if change["outcome"] != "ok":
            change |= {"error": f"failure {i}", **dict.fromkeys(("first", "last") if rng.random() < 0.5 else ())}
        found.append(runs.answer(i, 10 + i / 9, ttft=rng.lognormvariate(-2, 1), gaps=gaps, **change))
    rng.shuffle(found)
    return found


@pytest.fixture(params=["memory", "lines", "parquet", "both"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Requests, list[Record]]:
    """The same requests as columns, from wherever they may come, and as records."""
    mine = some()
    if request.param == "memory":
        return Requests.of(mine), mine
    for number, part in enumerate((mine[:100], mine[100:101], mine[101:]), 1):
        raw.file(tmp_path, 1, number).write_text("".join(record.dump(one) + "\n" for one in part))
    if request.param != "lines":
        raw.pack(tmp_path)
    if request.param == "parquet":
        raw.file(tmp_path, 1, 4).touch()
        raw.pack(tmp_path)
    return Requests.read(tmp_path), mine


def same(column: Any, values: list[float | None]) -> bool:
    return bool(np.array_equal(column, np.array([math.nan if v is None else v for v in values], np.float64), equal_nan=True))


def test_every_column_and_every_latency_is_the_records_own(both: tuple[Requests, list[Record]]) -> None:
    found, mine = both
    assert len(found) == len(mine)
    for name in ("scheduled", "sent", "first", "last", "end", *figures.LATENCIES, "lateness", "tokens", "ok", "counted"):
        column = found[name] if name in ("scheduled", "sent", "first", "last", "end") else getattr(found, name)
        assert same(column, [getattr(r, name) for r in mine]), name
    for name in ("asked_prompt", "prompt_tokens", "token_count", "turn"):
        assert same(found[name], [-1 if (v := getattr(r, name)) is None else v for r in mine]), name
    for name in ("cls", "phase", "outcome"):
        words = found.words(name)
        assert [words.names[code] for code in words.codes] == [getattr(r, name) for r in mine], name
    assert [found.error(i) for i in (0, 99, 100, 101, 299)] == [mine[i].error for i in (0, 99, 100, 101, 299)]


def test_gaps_belong_to_their_requests_however_these_are_chosen_and_ordered(both: tuple[Requests, list[Record]]) -> None:
    found, mine = both
    chosen = found.where(found.ok).by(found["sent"][found.ok])
    wanted = sorted((r for r in mine if r.ok), key=lambda r: r.sent)
    seen: dict[int, list[float]] = {}
    for who, counts, values in chosen.gaps():
        ends = np.cumsum(counts)
        seen |= {int(w): values[end - count : end].tolist() for w, count, end in zip(who, counts, ends, strict=True)}
    assert [seen[i] for i in range(len(wanted))] == [r.gaps.tolist() for r in wanted]
    assert list(chosen.where(chosen["sent"] < 0).gaps()) == []


def test_percentiles_of_columns_are_those_of_sorted_lists(both: tuple[Requests, list[Record]]) -> None:
    found, mine = both
    summary = figures.summarize(found, (10.0, 40.0))
    for name, part in [("", summary), *summary["classes"].items()]:
        counted = [r for r in mine if r.counted and name in ("", r.cls)]
        for latency in figures.LATENCIES:
            values = sorted(value for r in counted if (value := getattr(r, latency)) is not None)
            for p in (50, 95, 99):
                assert part[latency][f"p{p}"] == figures.milliseconds(stats.percentile(values, p)), (name, latency, p)
    for turn, part in summary["turns"].items():
        gaps = sorted(gap / 1e3 for r in mine if r.counted and r.ok and str(r.turn) == turn for gap in r.gaps)
        gaps += [math.inf] * sum(r.counted and not r.ok and str(r.turn) == turn for r in mine)
        assert part["itl"]["p50"] == pytest.approx((stats.percentile(gaps, 50)) * 1e3, abs=1e-3)


def test_few_and_many_gaps_are_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = figures.counted(Requests.of(some()))
    whole = [figures.itl(*figures.Gaps(mine).of(cls)) for cls in (None, "a", "b", "c")]
    monkeypatch.setattr(figures, "AT_ONCE", 10)
    monkeypatch.setattr(figures, "CELLS", 200)
    assert [figures.itl(*figures.Gaps(mine).of(cls)) for cls in (None, "a", "b", "c")] == whole


def test_nothing_at_all_has_figures_too(tmp_path: Path) -> None:
    for nothing in (Requests.of([]), Requests.read(tmp_path)):
        summary = figures.summarize(nothing, (10.0, 20.0))
        assert (summary["requests"], summary["ttft"]["p95"], summary["classes"], summary["turns"]) == (0, None, {}, {})
        assert not figures.steady(nothing, (10.0, 20.0)).steady


def test_halves_of_characters_in_what_a_server_said_do_not_make_a_run_unreadable(tmp_path: Path) -> None:
    said = r"half \ud83d, other \udc00, whole \ud83d\ude00, escaped \\ud83d"
    line = record.dump(runs.failure(1, 12.0, error="said: @")).replace("@", said)
    raw.file(tmp_path, 1, 1).write_text(line + "\n")
    assert Requests.read(tmp_path).error(0) == "said: half \ufffd, other \ufffd, whole \U0001f600, escaped \\ufffd"
