"""The page of a load test: whole, self-contained, both sides on one axis, failures by cause, whatever a server says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from stub import runs
from test_report import Reader

from fenno.engine import watch
from fenno.engine.metrics import Metrics
from fenno.load import figures, loadtest, stored
from fenno.load.record import Record
from fenno.load.requests import Requests
from fenno.report import chart
from fenno.report import loadtest as pages

EVIL = "</style><script>alert(1)</script> \" ' & \x00 \ud800"


def render(folder: Path, records: list[Record], **how: Any) -> str:
    runs.run(folder, records, **how)
    samples = [watch.Sample(10.5 + i, Metrics(running=3.0, waiting=1.0, kv_cache_usage=0.5), 2**30) for i in range(10)]
    (folder / "server.jsonl").write_text("".join(watch.dump(sample) + "\n" for sample in samples))
    kept = stored.read(folder)
    return pages.page(kept, loadtest.document(kept), "0.1.0")


def steady() -> list[Record]:
    return [runs.answer(i, 10 + i / 20, cls="short" if i % 2 else "long") for i in range(200)]


def test_a_page_shows_both_sides_over_time_distributions_and_each_class(tmp_path: Path) -> None:
    text = render(tmp_path / "run", steady())
    read = Reader(text)
    assert re.findall(r"<h2>([^<]*)</h2>", text) == ["Over time", "Distributions", "Latencies", "Conditions"]
    assert "verdict met" in read.values("class")
    for words in (
        "in flight, by the client",
        "running, by the server",
        "waiting, by the server",
        "KV cache, %",
        "long: 100 of 100",
    ):
        assert words in read.text, words
    assert "20.00 requests/s, 60.0 tokens/s over 10.0 s" in read.text
    paths = re.findall(r' d="(M[^"]*)"', text)
    assert len(paths) >= 8 and not [path for path in paths if "nan" in path or "inf" in path]


@pytest.mark.parametrize(
    ("records", "how", "said", "colour"),
    [
        ([], {}, "no request was counted", "missed"),
        (steady()[:90], {"ended": False}, "the load test was ended before its time", "failed"),
        ([runs.failure(i, 10 + i / 4) for i in range(40)], {}, "0 of 40 answers complete", "met"),
    ],
)
def test_what_is_no_whole_measurement_has_a_page_all_the_same(
    records: list[Record], how: dict[str, Any], said: str, colour: str, tmp_path: Path
) -> None:
    read = Reader(render(tmp_path / "run", records, **how))
    assert said in read.text
    assert f"verdict {colour}" in read.values("class")


def test_failures_are_told_by_cause_with_their_times_and_first_words(tmp_path: Path) -> None:
    wrong = [runs.failure(i, 14.0 + i / 10) for i in range(5)] + [runs.failure(9, 12.0, outcome="timeout", error="too late")]
    text = render(tmp_path / "run", [*steady(), *wrong])
    assert "Failures" in re.findall(r"<h2>([^<]*)</h2>", text)
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    assert ["5xx", "5", "4.0 s", "4.4 s", "HTTP 503: busy, &quot;very&quot;"] in cells
    assert ["timeout", "1", "2.0 s", "2.0 s", "too late"] in cells


def test_nothing_is_loaded_and_what_a_server_says_stays_text(tmp_path: Path) -> None:
    records = [*steady(), runs.failure(1, 12.0, error=EVIL, cls=EVIL)]
    text = render(tmp_path / "run", records, model=EVIL)
    read = Reader(text)
    tags = {element for element, _, _ in read.attributes} | set(re.findall(r"<([a-z]+)", text))
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert not read.values("src") and not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in read.text


def test_a_line_is_broken_where_a_value_is_infinite_or_missing() -> None:
    time = pages._Time(0.0, 4.0, 4)
    line = time.line("x", [1.0, float("inf"), None, 2.0])
    assert line.points == ((0.5, 1.0), (1.5, None), (3.5, 2.0))
    assert chart._path(line, (0.0, 4.0), 2.0) == "M125.0 500.0h2M875.0 0.0h2"


def test_requests_in_flight_are_averaged_over_each_part_of_the_window() -> None:
    requests = Requests.of([runs.answer(i, 9.5 + i / 3, ttft=0.2 + i / 50) for i in range(30)])
    time = pages._Time(10.0, 18.0, 16)
    assert time.in_flight(requests) == pytest.approx([figures.in_flight(requests, 10 + i / 2, 10.5 + i / 2) for i in range(16)])
