"""Recorded traffic: both formats, their mistakes, and the requests and windows that follow from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from fenno import recipe
from fenno.errors import UsageError
from fenno.load import job, trace
from fenno.load import plan as plans
from fenno.load.plan import Plan
from fenno.load.trace import Entry
from fenno.recipe import Workload

ROOT = Path(__file__).resolve().parents[1]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 23:59:59.7500000,30,4
2024-05-11 00:00:00.2500000,1,0
2024-05-11 00:00:00.0000000,700,9
"""
BLOCKS = ((1100, [7, 8, 9]), (1000, [7, 8]), (520, [7, 5]), (40, []))
MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 + 250 * i, "input_length": tokens, "output_length": 3, "hash_ids": ids}) + "\n"
    for i, (tokens, ids) in enumerate(BLOCKS)
)


def kept(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def plan(path: Path, **change: Any) -> Plan:
    workload = Workload(trace=str(path), **change.pop("traffic", {}))
    return Plan(**{"url": "http://127.0.0.1:1", "model": "m", "workload": workload, "duration": 1.0, **change})


def test_azures_times_of_day_become_seconds_in_order(tmp_path: Path) -> None:
    path = kept(tmp_path, AZURE)
    found = trace.load(path)
    assert [(e.prompt_tokens, e.output_tokens) for e in found] == [(30, 4), (700, 9), (1, 1)]
    assert [e.at for e in found] == pytest.approx([0.0, 0.25, 0.5], abs=1e-6)


@pytest.mark.parametrize(
    "stamp", ["2024-05-10 00:00:00.009930+00:00", "2024-05-10T00:00:00.00993Z", "2024-05-10 02:00:00.0099300+02:00"]
)
def test_times_may_name_their_zone(tmp_path: Path, stamp: str) -> None:
    rows = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,1\n{stamp},2,2\n"
    assert trace.load(kept(tmp_path, rows))[1].at == pytest.approx(0.00993, abs=1e-6)


def test_mooncakes_milliseconds_and_blocks_are_read(tmp_path: Path) -> None:
    found = trace.load(kept(tmp_path, MOONCAKE))
    assert found[1] == Entry(0.25, 1000, 3, (7, 8))
    assert [e.at for e in found] == [0.0, 0.25, 0.5, 0.75]


def test_prompts_share_what_their_blocks_share_and_nothing_else(tmp_path: Path) -> None:
    path = kept(tmp_path, MOONCAKE)
    ids = [request.body["prompt"] for request in plans.requests(plan(path))]
    assert [len(i) for i in ids] == [1100, 1000, 520, 40]
    assert ids[0][:1000] == ids[1], "two blocks in common, the second one in part"
    assert ids[0][:512] == ids[2][:512]
    assert ids[0][512:520] != ids[2][512:]
    assert ids[3][:12] != ids[0][:12]
    other = [request.body["prompt"] for request in plans.requests(plan(path, arm="other"))]
    assert not {tuple(i[:12]) for i in ids} & {tuple(i[:12]) for i in other}, "another arm finds nothing of this one in a cache"


def test_a_trace_is_replayed_so_many_times_faster_and_ends(tmp_path: Path) -> None:
    asked = plan(kept(tmp_path, MOONCAKE), traffic={"scale": 5})
    assert [r.at for r in plans.requests(asked)] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert {(r.cls, r.output_tokens, r.body["max_tokens"]) for r in plans.requests(asked)} == {("trace", 3, 3)}
    parts = [r.index for first in range(3) for r in plans.requests(asked, first, 3)]
    assert sorted(parts) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens\n2024-05-10 00:00:00,1\n", ":2: 'GeneratedTokens' is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,1\nnoon,1,1\n", ":3: 'noon' is no time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,-1,1\n", ":2: -1 tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1\n", ":2: int"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n', ":2: 'input_length' is missing"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n\n{oops}\n', ":3: Expecting"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it"),
        ("", "no request in it"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = kept(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        trace.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "ContextTokens" in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read .*nothing.csv: No such file"):
        trace.load(tmp_path / "nothing.csv")


def asked(path: Path, **options: Any) -> Plan:
    chosen = job.of_url("http://127.0.0.1:9", "m", "completions", None)
    return job.plan(chosen, trace=str(path), **options)


def test_the_window_ends_with_the_trace_or_before_it(tmp_path: Path) -> None:
    path = kept(tmp_path, MOONCAKE)
    whole = asked(path, warmup=0.0)
    assert whole.duration == pytest.approx(1.0), "four requests in four gaps of 250 ms"
    assert (whole.rate, whole.users) == (None, None)
    assert asked(path, warmup=0.5, scale=0.5).duration == pytest.approx(1.5)
    assert asked(path, warmup=0.2, duration=0.3).duration == pytest.approx(0.3)
    assert asked(path, warmup=0.2, duration=30.0).duration == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 5.0}, "lasts 1 s at this speed, and the warm-up is 5 s"),
        ({"rate": 3.0}, "--rate and --trace exclude each other"),
        ({"scale": -1.0, "warmup": 0.0}, "greater than 0"),
    ],
)
def test_a_trace_and_what_contradicts_it_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(kept(tmp_path, MOONCAKE), **options)


@pytest.mark.parametrize("name", ["code", "conv"])
def test_published_traces_are_read_whole(name: str) -> None:
    path = ROOT.parent / "shared" / "data" / "azure_llm_2023" / f"{name}.csv"
    if not path.exists():
        pytest.skip("the published traces are not here")
    found = trace.load(path)
    assert len(found) == len(path.read_text().splitlines()) - 1
    assert 3300 < found[-1].at < 3600, "an hour"
    assert sum(e.prompt_tokens for e in found) / len(found) > 1000


def test_recipes_have_a_trace_a_ramp_and_lengths() -> None:
    text = """
name: a
engine: {model: m}
workload:
  ramp: [2, 40]
  classes:
    - {name: x, share: 1, prompt_tokens: {distribution: lognormal, mean: 300, spread: 200, most: 2k}, output_tokens: [8, 16]}
"""
    found = recipe.parse(text, "here").workload
    assert found.ramp == (2.0, 40.0)
    lengths = found.classes[0].prompt_tokens
    assert isinstance(lengths, recipe.Lengths)
    assert (lengths.least, lengths.most) == (1, 2000)
