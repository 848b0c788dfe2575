"""What other programs get of a load test: vLLM's figures from vLLM's own raw data, Prometheus's text, a row for each request."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from stub import runs
from stub.harness import FENNO

from fenno.commands.report import report
from fenno.errors import DiskError, UsageError
from fenno.load import export, loadtest, stored
from fenno.load.record import Record
from fenno.load.stored import Asked
from fenno.recipe import Targets

# Written by `vllm bench serve --save-result --save-detailed` of vLLM 0.32.0 against the calibration server.
WRITTEN = json.loads(Path(__file__).with_name("metrics").joinpath("vllm_bench_serve_032.json").read_text())


def of_vllm() -> list[Record]:
    """The requests that vLLM sent, as our records."""
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    return [
        runs.answer(i, sent, ttft=ttft, gaps=[gap * 1e3 for gap in gaps], prompt_tokens=prompt, completion_tokens=tokens)
        for i, (sent, ttft, gaps, prompt, tokens) in enumerate(zip(*(WRITTEN[name] for name in columns), strict=True))
    ]


def exported(folder: Path) -> dict[str, Any]:
    kept = stored.read(folder)
    return export.vllm(kept, loadtest.document(kept))


def test_the_keys_of_vllm_mean_what_they_mean_there(tmp_path: Path) -> None:
    begin = WRITTEN["start_times"][0]
    run = runs.run(
        tmp_path / "run",
        of_vllm(),
        window=(begin, begin + WRITTEN["duration"]),
        rate=20.0,
        model="calibration",
        asked=Asked(at=1e9),
    )
    found = exported(run)
    figures = {name: value for name, value in WRITTEN.items() if not isinstance(value, list) and name not in ("date", "rtfx")}
    assert set(found) == {*figures, "date"}
    for name, value in figures.items():
        assert found[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ({"rate": 10.0}, {"request_rate": 10.0, "burstiness": 1.0, "max_concurrency": None}),
        ({"users": 8}, {"request_rate": "inf", "burstiness": 1.0, "max_concurrency": 8}),
        ({"ramp": (2.0, 40.0)}, {"ramp_up_strategy": "linear", "ramp_up_start_rps": 2.0, "ramp_up_end_rps": 40.0}),
        ({"rate": 10.0, "endpoint": "chat"}, {"backend": "openai-chat", "endpoint_type": "openai-chat"}),
    ],
)
def test_traffic_has_its_name_in_vllms_words(way: dict[str, Any], told: dict[str, Any], tmp_path: Path) -> None:
    found = exported(runs.run(tmp_path / "run", [runs.answer(0, 11.0)], **way))
    assert {name: found[name] for name in told} == told


def test_vllms_latencies_are_of_completed_requests_and_ours_of_all(tmp_path: Path) -> None:
    records = [runs.answer(i, 11 + i / 10) for i in range(9)] + [runs.failure(9, 12.0)]
    found = exported(runs.run(tmp_path / "run", records, asked=Asked(targets=Targets(p95_ttft=0.2))))
    assert (found["num_prompts"], found["completed"], found["failed"]) == (10, 9, 1)
    assert found["p99_ttft_ms"] == pytest.approx(100)
    assert found["request_goodput"] == pytest.approx(0.9)
    nothing = exported(runs.run(tmp_path / "none", [runs.failure(0, 12.0)]))
    assert (nothing["mean_ttft_ms"], nothing["max_concurrent_requests"], nothing["request_goodput"]) == (0.0, 0, None)


def samples(folder: Path) -> dict[tuple[str, ...], float]:
    """Every sample of the text that Prometheus would get, by its name and its labels' values."""
    kept = stored.read(folder)
    text = export.prometheus(loadtest.document(kept), kept.result.plan.model)
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name.removeprefix("fenno_loadtest_"), *s.labels.values()): s.value for s in found}


def test_prometheus_reads_every_figure_in_its_own_units(tmp_path: Path) -> None:
    records = [runs.answer(i, 10 + i / 10, cls="short" if i % 2 else "long") for i in range(100)]
    found = samples(runs.run(tmp_path / "run", records))
    assert found["ttft_seconds", "short", "0.95"] == pytest.approx(0.1)
    assert found["itl_seconds", "all", "0.5"] == pytest.approx(0.01)
    assert (found["requests", "long"], found["completed", "all"], found["availability", "all"]) == (50, 100, 1)
    assert (found["requests_per_second",], found["valid",], found["client_lag_seconds",]) == (10, 1, 0.0002)
    assert found["info", "some/model", str(tmp_path / "run")] == 1
    assert ("server_watts",) not in found, "nothing is known of it"


def test_a_latency_that_falls_on_a_failure_is_infinite_so_that_an_alert_fires(tmp_path: Path) -> None:
    records = [runs.failure(i, 10 + i / 10) if i % 10 == 0 else runs.answer(i, 10 + i / 10) for i in range(100)]
    found = samples(runs.run(tmp_path / "run", records))
    assert (found["ttft_seconds", "all", "0.95"], found["failures", "5xx"]) == (math.inf, 10)
    assert found["ttft_seconds", "all", "0.5"] == pytest.approx(0.1)


def test_a_csv_has_a_row_for_each_request_with_stamps_from_the_windows_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.run(tmp_path / "run", [runs.answer(1, 9.5, phase="warmup"), runs.answer(2, 11.0), runs.failure(3, 12.0)])
    with (folder / "records-0.jsonl").open("a") as file:
        file.write('{"id": "cut sh')
    report([folder], to="csv")
    early, good, bad = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert list(good) == list(export.COLUMNS)
    assert (early["phase"], early["sent"]) == ("warmup", "-0.5")
    assert (good["class"], good["sent"], good["first"], good["ttft_ms"], good["gap_ms"]) == ("short", "1.0", "1.1", "100.0", "30.0")
    assert (bad["outcome"], bad["status"], bad["error"], bad["first"], bad["ttft_ms"]) == (
        *("5xx", "503", 'HTTP 503: busy, "very"'),
        *("", ""),
    )


def test_a_file_gets_the_same_as_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.run(tmp_path / "run", [runs.answer(i, 11.0 + i) for i in range(3)])
    for to in ("csv", "json", "vllm", "prometheus"):
        report([folder], to=to)
        report([folder], to=to, output=str(tmp_path / "deep" / to))
        assert (tmp_path / "deep" / to).read_text() == capsys.readouterr().out != ""


def test_several_are_told_one_after_the_other_or_written_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {n: [runs.answer(i, 10 + i / n) for i in range(10 * n)] for n in (1, 2, 3)}
    folders = [runs.run(tmp_path / f"00{n}-A", mine, ended=n != 2) for n, mine in answers.items()]
    with pytest.raises(typer.Exit) as ended:
        report(folders)
    assert ended.value.exit_code == 130, "that of the first that has one"
    out, err = capsys.readouterr()
    names = [str(folder) for folder in folders]
    assert [line[:-1] for line in err.splitlines() if line[:-1] in names] == names, "each under its name"
    assert f"1 of 3 have an exit code of their own: {folders[1]} (130)" in err
    told = [json.loads(line) for line in out.splitlines()]
    assert [(one["requests"], one["records"]) for one in told] == [(10 * n, str(tmp_path / f"00{n}-A")) for n in (1, 2, 3)]
    for to, name in (("html", "html"), ("vllm", "vllm.json"), ("prometheus", "prom"), ("parquet", "parquet")):
        report(folders, to=to, output=str(tmp_path / to))
        assert sorted(path.name for path in (tmp_path / to).iterdir()) == [f"00{n}-A.{name}" for n in (1, 2, 3)]
    assert json.loads((tmp_path / "vllm" / "003-A.vllm.json").read_text())["num_prompts"] == 30


def test_one_goes_into_a_folder_too_when_it_is_there_or_named_like_one(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "001-A", [runs.answer(i, 11.0 + i) for i in range(3)])
    (tmp_path / "there").mkdir()
    for output in ("there", "new/"):
        report([folder], to="json", output=f"{tmp_path}/{output}")
        assert [path.name for path in (tmp_path / output).iterdir()] == ["001-A.json"]
    report([folder], to="json", output=str(tmp_path / "file"))
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("to", ["csv", "html", "json", "parquet"])
def test_a_file_that_cannot_be_written_is_a_sentence(to: str, tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", [runs.answer(0, 11.0)])
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DiskError, match="cannot write .*file/out") as caught:
        report([folder], to=to, output=str(tmp_path / "file" / "out"))
    assert "-o" in caught.value.hint


@pytest.mark.parametrize("to", ["csv", "html"])
def test_a_file_stays_as_it_is_when_there_is_nothing_to_tell(to: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("of last week")
    with pytest.raises(UsageError, match="holds no load test"):
        report([Path("/nowhere")], to=to, output=str(tmp_path / "kept"))
    assert (tmp_path / "kept").read_text() == "of last week"


def test_a_reader_of_a_long_csv_may_leave_early(tmp_path: Path) -> None:
    folder = runs.run(tmp_path / "run", [runs.answer(i, 11.0) for i in range(3000)])
    with subprocess.Popen(
        [FENNO, "report", folder, "--to", "csv"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout and child.stderr
        assert child.stdout.readline().startswith("id,class,phase")
        child.stdout.close()  # far more than a pipe holds is still to come
        assert (child.stderr.read(), child.wait()) == ("", 0)


def test_parquet_has_the_columns_of_the_csv_and_every_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as parquet

    monkeypatch.setattr(export, "BATCH", 2)
    folder = runs.run(tmp_path / "run", [runs.answer(0, 11.0), runs.failure(1, 12.0), runs.answer(2, 13.0)])
    report([folder], to="parquet", output=str(tmp_path / "run.parquet"))
    table = parquet.read_table(tmp_path / "run.parquet").to_pydict()
    assert list(table) == [*export.COLUMNS, "itl_ms"]
    assert table["itl_ms"] == [[10.0, 30.0], [], [10.0, 30.0]]
    assert table["sent"] == [1.0, 2.0, 3.0] and table["ttft_ms"] == [100.0, None, 100.0]


def test_the_newest_load_test_is_told_when_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, at in (("b", 100), ("a", 200)):
        folder = runs.run(tmp_path / name, [runs.answer(i, 11.0) for i in range(ord(name))])
        os.utime(folder / "plan.json", (at, at))
    report(to="json", out=tmp_path)
    assert json.loads(capsys.readouterr().out)["requests"] == ord("a")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"to": "xml"}, "--to is 'xml'"),
        ({"output": "x"}, "-o needs a format"),
        ({"to": "parquet"}, "Parquet is no text"),
        ({"runs": [Path("/nowhere")], "to": "csv"}, "/nowhere holds no load test"),
        ({"runs": [Path("a"), Path("b")], "to": "csv"}, "2 load tests are as many files"),
        ({"runs": [Path("a/1"), Path("b/1")], "to": "csv", "output": "x"}, "the same name"),
        ({"out": Path("/nowhere")}, "there is no load test in /nowhere"),
    ],
)
def test_what_cannot_be_told_is_a_sentence(how: dict[str, Any], says: str, tmp_path: Path) -> None:
    place = {} if "out" in how else {"runs": [runs.run(tmp_path / "run", [runs.answer(0, 11.0)])]}
    with pytest.raises(UsageError, match=says):
        report(**{**place, **how})
