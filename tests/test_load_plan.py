"""The same seed gives the same traffic; prompts have exact lengths and nothing in common; arrivals are what they are called."""

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno.errors import LoadError, UsageError
from fenno.load import job, prompts, stats
from fenno.load import plan as plans
from fenno.load.plan import Plan, Request
from fenno.recipe import LengthClass, Lengths, Workload

SEEDS = range(20)


def plan(**change: Any) -> Plan:
    workload = change.pop("workload", None) or Workload(**change.pop("traffic", {}))
    base: dict[str, Any] = {"url": "http://127.0.0.1:1", "model": "m", "workload": workload, "duration": 1.0}
    loop = {} if {"users", "ramp"} & set(change) else {"rate": 10.0}
    return Plan(**{**base, **loop, **change})


@pytest.mark.parametrize("name", ["timeout", "duration", "rate", "users", "requests", "processes"])
def test_nothing_of_what_must_be_more_than_nothing_is_taken_for_the_default(name: str) -> None:
    chosen = job.of_url("http://127.0.0.1:1", "m", "completions", None)
    with pytest.raises(UsageError, match=f"{name}(: Input should be greater| must be more) than 0"):
        job.plan(chosen, **{name: 0})  # type: ignore[arg-type]


def some(count: int, **change: Any) -> list[Request]:
    return list(itertools.islice(plans.requests(plan(**change)), count))


def kolmogorov_p(values: list[float], rate: float) -> float:
    """p of the KS test against the exponential (asymptotic series)."""
    n, ordered = len(values), sorted(values)
    d = max(max((i + 1) / n - c, c - i / n) for i, c in enumerate(1 - math.exp(-rate * v) for v in ordered))
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * d
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 100)))


def test_poisson_gaps_pass_a_kolmogorov_smirnov_test_for_all_but_one_of_20_seeds() -> None:
    low = 0
    for seed in SEEDS:
        times = list(itertools.islice(plans.arrivals(plan(seed=seed)), 1000))
        low += kolmogorov_p([b - a for a, b in itertools.pairwise([0.0, *times])], 10.0) < 0.01
    assert low <= 1


def test_that_kolmogorov_smirnov_test_notices_gaps_that_are_not_exponential() -> None:
    times = list(itertools.islice(plans.arrivals(plan(traffic={"arrival": "gamma", "burstiness": 0.5})), 1000))
    assert kolmogorov_p([b - a for a, b in itertools.pairwise([0.0, *times])], 10.0) < 0.001


def expected(time: float) -> float:
    """Arrivals up to a time on a ramp from 5 to 45 a second within 20 s, after 4 s of warm-up."""
    inside = min(max(time - 4, 0.0), 20.0)
    return 5 * min(time, 4.0) + 5 * inside + inside * inside + 45 * max(time - 24, 0.0)


def ramp(seed: int, traffic: dict[str, Any] | None = None) -> list[float]:
    asked = plan(ramp=(5.0, 45.0), warmup=4.0, duration=20.0, seed=seed, traffic=traffic or {})
    return list(itertools.islice(plans.arrivals(asked), 700))


def test_a_ramps_arrivals_are_poisson_of_just_that_rate_for_all_but_one_of_20_seeds() -> None:
    low = 0
    for seed in SEEDS:
        counts = [0.0, *map(expected, ramp(seed))]
        low += kolmogorov_p([b - a for a, b in itertools.pairwise(counts)], 1.0) < 0.01
    assert low <= 1


def test_a_ramp_rises_within_its_window_and_holds_its_last_rate_behind_it() -> None:
    times = ramp(1, {"arrival": "constant"})
    assert [expected(at) for at in times] == pytest.approx(range(1, 701))
    assert sum(at < 4 for at in times) == pytest.approx(20, abs=1)
    assert sum(23 <= at < 24 for at in times) == pytest.approx(44, abs=1)
    assert sum(25 <= at < 26 for at in times) == pytest.approx(45, abs=1)


@given(
    begin=st.floats(0.01, 1000),
    end=st.floats(0.01, 1000),
    before=st.floats(0, 100),
    length=st.floats(0.1, 1000),
    count=st.floats(0, 1e5),
)
def test_on_any_ramp_an_arrivals_time_is_when_so_many_are_expected(
    begin: float, end: float, before: float, length: float, count: float
) -> None:
    at = plans._on_ramp(count, begin, end, before, length)
    inside = min(max(at - before, 0.0), length)
    rate = begin + (end - begin) * inside / length
    found = begin * min(at, before) + (begin + rate) / 2 * inside + end * max(at - before - length, 0.0)
    assert found == pytest.approx(count, rel=1e-6, abs=1e-6)


def test_a_ramp_may_fall() -> None:
    times = itertools.takewhile(
        lambda at: at < 10, plans.arrivals(plan(ramp=(9.0, 1.0), duration=10.0, traffic={"arrival": "constant"}))
    )
    assert 48 <= sum(1 for _ in times) <= 50


CLASS = {"name": "x", "share": 1, "prompt_tokens": [2, 5], "output_tokens": 9}
LOGNORMAL = Lengths(distribution="lognormal", mean=200, spread=150, least=1, most=10_000)


def drawn(lengths: Lengths) -> list[int]:
    mix = (LengthClass(name="x", share=1.0, prompt_tokens=20, output_tokens=lengths),)
    return [r.output_tokens for r in some(4000, workload=Workload(classes=mix))]


@pytest.mark.parametrize("lengths", [LOGNORMAL, Lengths(distribution="normal", mean=200, spread=50, least=1, most=1000)])
def test_lengths_have_the_mean_and_the_spread_asked_for(lengths: Lengths) -> None:
    found = drawn(lengths)
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((value - mean) ** 2 for value in found) / len(found))
    assert mean == pytest.approx(lengths.mean, rel=0.05)
    assert spread == pytest.approx(lengths.spread, rel=0.15)


def test_a_lognormal_has_its_median_below_its_mean() -> None:
    assert sorted(drawn(LOGNORMAL))[2000] == pytest.approx(200 / math.sqrt(1 + 0.75**2), rel=0.05)


@pytest.mark.parametrize("name", ["normal", "lognormal"])
def test_lengths_are_cut_off_without_a_heap_at_the_ends(name: Any) -> None:
    found = Counter(drawn(Lengths(distribution=name, mean=100, spread=80, least=61, most=160)))
    assert min(found) >= 61 and max(found) <= 160
    for end in (61, 160):
        assert found[end] < 120, "of 4000 among 100 lengths"


def test_a_chance_of_nought_or_nearly_one_gives_a_length_all_the_same() -> None:
    class Fixed(random.Random):
        def random(self) -> float:
            return self.value

        value = 0.0

    for name, value in itertools.product(("normal", "lognormal"), (0.0, 1 - 2**-53)):
        for limits in ({"least": 1, "most": 10_000}, {"least": 99, "most": 101}):
            rng = Fixed()
            rng.value = value
            found = plans.draw(Lengths(distribution=name, mean=100, spread=3, **limits), rng)
            assert limits["least"] <= found <= limits["most"]


def test_the_mix_passes_a_chi_square_test_for_all_but_one_of_20_seeds() -> None:
    low = 0
    for seed in SEEDS:
        seen = Counter(r.cls for r in some(1000, seed=seed))
        expected = {"short": 600, "medium": 300, "long": 100}
        low += (stats.mix_p(expected, seen) or 0.0) < 0.01
    assert low <= 1


def test_that_chi_square_test_notices_another_mix() -> None:
    seen = Counter(r.cls for r in some(1000))
    assert (stats.mix_p({"short": 500, "medium": 400, "long": 100}, seen) or 0.0) < 0.001


def test_gamma_arrivals_keep_the_rate_and_have_the_burstiness_asked_for() -> None:
    times = list(itertools.islice(plans.arrivals(plan(traffic={"arrival": "gamma", "burstiness": 0.25})), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variation = sum((g - mean) ** 2 for g in gaps) / len(gaps) / mean**2
    assert mean == pytest.approx(0.1, rel=0.05)
    assert variation == pytest.approx(4.0, rel=0.15)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert list(itertools.islice(plans.arrivals(plan(traffic={"arrival": "constant"})), 3)) == pytest.approx([0.1, 0.2, 0.3])


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    assert some(30, seed=4) == some(30, seed=4)
    assert some(30, seed=4) != some(30, seed=5)


def test_processes_share_the_requests_without_gap_or_overlap() -> None:
    whole = some(30)
    parts = [list(itertools.islice(plans.requests(plan(), first, 3), 10)) for first in range(3)]
    assert [parts[i % 3][i // 3] for i in range(30)] == whole


def test_arms_have_the_same_times_and_lengths_but_no_first_token_block_in_common() -> None:
    one, two = some(300, arm="a"), some(300, arm="b")
    assert [(r.at, r.cls, r.prompt_tokens) for r in one] == [(r.at, r.cls, r.prompt_tokens) for r in two]
    heads = [tuple(r.body["prompt"][: plans.SIGNATURE]) for r in one + two]
    assert len(set(heads)) == 600


def test_prompts_have_their_exact_length_and_no_special_token() -> None:
    for request in some(200, vocab=1000):
        ids = request.body["prompt"]
        assert len(ids) == request.prompt_tokens
        assert 64 <= len(ids) <= 448
        assert all(500 <= token < 1000 for token in ids)


def test_no_two_of_many_short_prompts_are_alike() -> None:
    tiny = Workload(classes=(LengthClass(name="x", share=1.0, prompt_tokens=8, output_tokens=1),))
    assert len({tuple(r.body["prompt"]) for r in some(5000, workload=tiny)}) == 5000


def test_a_shared_prefix_has_the_share_asked_for() -> None:
    half = Workload(classes=(LengthClass(name="x", share=1.0, prompt_tokens=100, output_tokens=1),), shared_prefix=0.5)
    first, second = (r.body["prompt"] for r in some(2, workload=half))
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert common == 50


def test_a_body_asks_for_an_exact_answer_with_usage() -> None:
    body = some(1)[0].body
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == body["min_tokens"]
    assert body["ignore_eos"] is True
    assert "ignore_eos" not in some(1, traffic={"ignore_eos": False})[0].body
    assert some(1, extra_body={"temperature": 1, "priority": 3})[0].body["priority"] == 3


def test_chat_sends_messages() -> None:
    request = some(1, endpoint="chat")[0]
    assert len(request.body["messages"][0]["content"].split()) == request.prompt_tokens
    assert plan(endpoint="chat").path == "/v1/chat/completions"


def test_a_conversation_carries_every_turn_and_answer() -> None:
    asked = plan(endpoint="chat", traffic={"turns": [2, 4]})
    request = next(r for r in plans.requests(asked) if len(r.later) == 3)
    assert request == next(r for r in plans.requests(asked) if r.index == request.index), "the same seed, the same words"
    said = [request.body["messages"][0]["content"]]
    for turn in (2, 3, 4):
        following = request.later[0]
        request = plans.follow(asked, request, f"answer {turn - 1}")
        said += [f"answer {turn - 1}", following[0]]
        assert (request.turn, request.output_tokens, request.body["max_tokens"]) == (turn, following[1], following[1])
        assert request.prompt_tokens is None
    assert [m["content"] for m in request.body["messages"]] == said
    assert [m["role"] for m in request.body["messages"]] == ["user", "assistant"] * 3 + ["user"]
    assert request.later == ()
    assert {len(r.later) + 1 for r in itertools.islice(plans.requests(asked), 100)} == {2, 3, 4}


def test_what_the_template_adds_is_taken_off_a_chat_prompt() -> None:
    asked = plan(endpoint="chat", overhead=9, joint="")
    for request in itertools.islice(plans.requests(asked), 20):
        assert len(request.body["messages"][0]["content"]) == (request.prompt_tokens or 0) - 9


def test_fields_that_a_server_refuses_are_left_out() -> None:
    body = next(plans.requests(plan(forced=("min_tokens",)))).body
    assert "ignore_eos" not in body
    assert body["min_tokens"] == body["max_tokens"]
    assert plan(forced=("min_tokens",)).exact
    assert not plan(forced=()).exact


def test_a_plan_survives_its_json_without_its_headers_values() -> None:
    one = plan(headers={"X-Secret": "hush"}, ramp=(1.0, 2.0), traffic={"classes": [{**CLASS, "prompt_tokens": LOGNORMAL}]})
    text = plans.dump(one)
    assert "hush" not in text
    assert plans.parse(text, one.headers) == one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"users": 2, "rate": 1.0}, "either a rate"),
        ({"ramp": (1.0, 2.0), "users": 2}, "either a rate"),
        ({"ramp": (1.0, 2.0), "duration": None, "requests": 5}, "a ramp or a trace lasts for a duration"),
        ({"traffic": {"turns": 3}}, "turns need the chat endpoint"),
        ({"requests": 5}, "either a duration"),
        ({"rate": -1.0}, "rate must be more than 0"),
        ({"url": "127.0.0.1:8000"}, "is not an http"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan(**change)


def test_share_gpt_prompts_take_their_lengths_from_the_mix(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hi."}]
    path.write_text(json.dumps([{"id": "1", "conversations": talk}, {"id": "2", "conversations": [{"from": "gpt", "value": "x"}]}]))
    found = some(20, traffic={"prompts": str(path)})
    assert {r.body["prompt"] for r in found} == {"Hello?"}
    assert {r.output_tokens for r in found} <= {64, 128, 512}


def test_batch_prompts_keep_their_own_max_tokens(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    asked = [[{"role": "user", "content": f"q{i}"}] for i in range(4)]
    lines = [{"custom_id": str(i), "body": {"messages": asked[i], "max_tokens": 10 + i}} for i in range(4)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = some(8, traffic={"prompts": str(path)}, endpoint="chat")
    assert {(r.body["messages"][0]["content"], r.output_tokens) for r in found} == {(f"q{i}", 10 + i) for i in range(4)}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"body": {"prompt": "ok"}}\n{oops\n', ":2: not JSON"),
        (b'{"body": {"prompt": "ok"}}\n\n{"body": {}}\n', ":3: no `body` with"),
        (b'[\n{"a": 1},\n oops]', ":3: not JSON"),
        (b'[{"a": 1}]', "conversation 1 has no list"),
        (b"[]", "no prompt in it"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_unreadable_prompts_name_the_file_and_the_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=words) as caught:
        prompts.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_missing_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot read"):
        prompts.load(tmp_path / "nothing.json")
