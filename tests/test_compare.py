"""What a comparison says is right as often as it claims, on simulated blocks; and what people and pipelines get of it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fenno.compare import judge, run, words
from fenno.compare.block import Arm, Making
from fenno.errors import UsageError
from fenno.load import job
from fenno.recipe import Recipe

Blocks = dict[str, list[dict[str, Any]]]


def block(ttft: float | None, *, qps: float = 10.0, memory: float | None = 1e9, completed: int = 100) -> dict[str, Any]:
    """The document of one load test of 100 requests, all its latencies as long as the first token's."""
    latency = dict.fromkeys(("p50", "p95"), ttft)
    part = {**{name: latency for name, _ in judge.LATENCIES}, "requests": 100, "completed": completed}
    part |= {"qps": qps, "availability": completed / 100}
    server = {"memory": {"max": memory} if memory else None}
    return {**part, "classes": {"all": part}, "server": server, "client": {"lag_ms": {"p50": 0.1}}}


def simulated(rng: random.Random, rounds: int, change: float = 1.0, *, paired: bool = True, noise: float = 0.03) -> Blocks:
    """Blocks on a host that drifts by a tenth and is slower in some rounds for everybody; B's times are `change` times A's."""
    found: Blocks = {"A": [], "B": []}
    for number in range(rounds):
        weather = rng.gauss(0, 0.1 if paired else 0.0)
        for place, name in enumerate(run.order("AB", number)):
            drift = 0.1 * (2 * number + place) / (2 * rounds) if paired else 0.0
            slower = change if name == "B" else 1.0
            ttft = 300 * slower * math.exp(weather + drift + rng.gauss(0, noise))
            qps = 40 / slower * math.exp(rng.gauss(0, noise / 2) - weather)
            memory, failed = 4e10 * (1 + rng.gauss(0, 0.001)), sum(rng.random() < 0.01 for _ in range(100))
            found[name].append(block(ttft, qps=qps, memory=memory, completed=100 - failed))
    return found


def verdict(blocks: Blocks, *, paired: bool = True, margin: float = judge.MARGIN) -> str:
    return judge.verdict(judge.compare(blocks, paired=paired, margin=margin))


@pytest.mark.scenario  # hundreds of simulated comparisons
@pytest.mark.parametrize(("rounds", "paired"), [(4, True), (6, True), (10, False)])
def test_of_arms_that_are_the_same_one_comparison_in_twenty_at_most_says_they_differ(rounds: int, paired: bool) -> None:
    rng = random.Random(1)
    same = ("not distinguishable", "equivalent")
    wrong = sum(verdict(simulated(rng, rounds, paired=paired), paired=paired) not in same for _ in range(400))
    assert wrong <= 400 * 0.05 + 2 * math.sqrt(400 * 0.05 * 0.95)  # two standard errors


@pytest.mark.scenario
def test_a_difference_beyond_the_noise_is_found_nearly_always_and_named_by_its_side() -> None:
    rng = random.Random(2)
    slower = [verdict(simulated(rng, 6, 1.05, noise=0.01)) for _ in range(200)]
    faster = [verdict(simulated(rng, 6, 1 / 1.05, noise=0.01)) for _ in range(200)]
    assert slower.count("worse") >= 190
    assert faster.count("better") >= 190


@pytest.mark.scenario
def test_intervals_of_a_change_hold_the_true_one_as_often_as_they_say() -> None:
    rng, held = random.Random(3), 0
    for _ in range(400):
        (finding,) = (f for f in judge.compare(simulated(rng, 6, 1.1), paired=True) if f.metric.label == "p95_ttft")
        assert finding.change and finding.change.low and finding.change.high
        held += finding.change.low <= 1.1 <= finding.change.high
    assert 0.92 <= held / 400 <= 0.98


def states(blocks: Blocks, margin: float) -> dict[str, str]:
    return {f.metric.label: f.state for f in judge.compare(blocks, paired=True, margin=margin)}


@pytest.mark.scenario
def test_what_differs_by_the_whole_margin_is_called_equivalent_one_time_in_forty_at_most() -> None:
    rng = random.Random(5)
    found = [states(simulated(rng, 6, 1.02, noise=0.005), 0.02)["p95_ttft"] for _ in range(400)]
    assert found.count("equivalent") <= 400 * 0.025 + 2 * math.sqrt(400 * 0.025 * 0.975)


@pytest.mark.scenario
def test_arms_that_are_the_same_are_found_equivalent_where_the_noise_allows_it() -> None:
    rng = random.Random(6)
    found = [verdict(simulated(rng, 6, noise=0.003), margin=0.02) for _ in range(200)]
    assert found.count("equivalent") >= 180
    assert verdict(simulated(rng, 6, noise=0.2), margin=0.02) == "not distinguishable", "nobody can know here"


def test_a_difference_that_is_sure_and_tiny_is_equivalent_unless_the_margin_is_tinier() -> None:
    heavier = {"A": [block(100.0, memory=1e9 + i) for i in range(6)], "B": [block(100.0, memory=1.003e9 + 2 * i) for i in range(6)]}
    (memory,) = (f for f in judge.compare(heavier, paired=True) if f.metric.label == "memory")
    assert memory.adjusted < 1e-6 and memory.state == "equivalent"
    assert judge.verdict(judge.compare(heavier, paired=True)) == "equivalent"
    assert [states(heavier, margin)["memory"] for margin in (0.002, 0.0)] == ["worse", "worse"]


def test_equivalence_is_not_claimed_below_the_clients_own_delay_nor_of_availability() -> None:
    quick = {"A": [block(5.0)] * 6, "B": [block(5.0)] * 6}  # of 5 ms the client's delay is 2 %
    assert (states(quick, 0.01)["p95_ttft"], states(quick, 0.05)["p95_ttft"]) == ("not distinguishable", "equivalent")
    assert states(quick, 0.05)["availability"] == "not distinguishable"
    failing = {"A": [block(100.0)] * 6, "B": [block(100.0, completed=99)] * 6}
    assert states(failing, 0.05)["availability"] == "worse"


def test_a_host_that_drifts_favours_no_arm() -> None:
    assert run.order("AB", 0) + run.order("AB", 1) == list("ABBA")
    assert run.order("ABC", 0) + run.order("ABC", 1) == list("ABCCBA")


def test_pairs_see_through_what_both_arms_share() -> None:
    rng = random.Random(4)
    blocks = [simulated(rng, 6, 1.05, noise=0.01) for _ in range(50)]
    assert sum(verdict(b) == "worse" for b in blocks) > sum(verdict(b, paired=False) == "worse" for b in blocks) + 20


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (6, 2.4469), (30, 2.0423)])
def test_students_distribution_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert judge.quantile(0.975, freedom) == pytest.approx(t, abs=1e-4)


def test_a_difference_within_the_clients_own_delay_is_none_however_often_seen() -> None:
    findings = judge.compare({"A": [block(100.0)] * 6, "B": [block(100.05)] * 6}, paired=True, margin=0.0)
    assert judge.verdict(findings) == "not distinguishable"
    assert judge.verdict(judge.compare({"A": [block(100.0)] * 6, "B": [block(105.0)] * 6}, paired=True)) == "worse"


@pytest.mark.parametrize("paired", [True, False])
def test_answers_that_failed_are_infinitely_late_and_make_an_arm_worse(paired: bool) -> None:
    blocks = {"A": [block(100.0 + i) for i in range(10)], "B": [block(None, completed=50, memory=None)] * 10}
    findings = {f.metric.label: f for f in judge.compare(blocks, paired=paired)}
    assert findings["p95_ttft"].state == "worse"
    assert findings["availability"].state == "worse"
    assert findings["memory"].state == "not measured"


def test_the_number_of_metrics_does_not_make_a_difference() -> None:
    """Of forty metrics of the same arms one has p below 0.05 more often than not: Holm's decision says so of none."""
    metric = judge.TABLE[1]
    change = judge.Interval(1.1, 1.0, 1.2)
    findings = [judge.Finding("B", metric, change, p) for p in (0.004, 0.02, *([0.5] * 38))]
    assert {f.state for f in judge.holm(findings)} == {"not distinguishable"}
    assert [f.state for f in judge.holm([findings[0], judge.Finding("B", metric, None, 1.0)])] == ["worse", "not measured"]


def test_a_figure_has_the_unit_of_its_target_in_the_document_and_milliseconds_in_the_table() -> None:
    figure = judge.own(judge.TABLE[1], [block(100.0)] * 6)
    assert figure and figure.value == pytest.approx(0.1)
    assert words.show("p95_ttft", vars(figure)) == "100 ms (100 to 100)"


def test_availability_without_a_failure_is_as_sure_as_its_requests_are_many() -> None:
    figure = judge.own(judge.TABLE[3], [block(100.0)] * 6)
    assert figure and figure.value == 1.0 and figure.high == 1.0
    assert figure.low == pytest.approx(600 / (600 + 1.96**2), abs=1e-4)
    assert judge.reaches(vars(figure), 0.99) == "met"
    assert judge.reaches(vars(figure), 0.995) == "unclear"


def document(b: list[dict[str, Any]], target: float | None = None, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    arms = [Arm("A", "http://a"), Arm("B", "http://b")]
    a = [block(100.0 + i % 3) for i in range(len(b))]
    return run.document(run.Blocks({"A": a, "B": b}, True, list(left_out)), arms, target, None)


def test_a_pipeline_gets_an_exit_code_and_a_failure_for_what_is_worse() -> None:
    worse = document([block(150.0 + i % 2, memory=None) for i in range(6)])
    assert words.exit_code(worse) == 1
    suite = ElementTree.fromstring(words.junit(worse).encode())
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    skipped = [case.get("name") for case in suite if case.find("skipped") is not None]
    assert (failed, skipped) == (["B: p95_ttft"], ["B: memory"])
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")
    assert "B is worse than A" in words.sentence(worse)
    assert words.exit_code(document([block(50.0 + i % 2) for i in range(6)])) == 0


def test_a_pipeline_does_not_fail_for_what_is_equivalent() -> None:
    found = document([block(100.2 + i % 3) for i in range(6)])
    assert (found["verdict"], found["margin"], words.exit_code(found)) == ({"B": "equivalent"}, 0.01, 0)
    assert words.sentence(found) == "B is equivalent to A: within 1 %"
    assert ElementTree.fromstring(words.junit(found).encode()).get("failures") == "0"
    assert words.rows(found)[1][-1].endswith(": equivalent")


def test_side_by_side_every_arm_has_every_place_in_turn() -> None:
    arms = [Arm(letter, letter) for letter in "ABC"]
    plan = job.plan(Recipe.model_validate({"name": "a", "engine": {"url": "http://a"}}), rate=1.0)
    its = [Making(plan, Path(), ("0,1", "2,3", "4,5"), measured=rounds) for rounds in range(4)]
    rounds = [[env["CUDA_VISIBLE_DEVICES"] for env in each.devices(arms)] for each in its]
    assert rounds == [["0,1", "2,3", "4,5"], ["2,3", "4,5", "0,1"], ["4,5", "0,1", "2,3"], ["0,1", "2,3", "4,5"]]
    assert Making(plan, Path(), measured=5).devices(arms[:1]) == [{}]


@pytest.mark.parametrize(
    ("gpus", "wanted"), [(("0", "1"), ["0A1B", "1A0B", "1A0B", "0A1B", "1A0B"]), ((), ["AB", "BA", "BA", "AB", "BA"])]
)
def test_a_round_that_is_made_up_for_has_the_places_and_the_order_of_the_one_that_was_left_out(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], wanted: list[str]
) -> None:
    plan = job.plan(Recipe.model_validate({"name": "a", "engine": {"url": "http://a"}}), rate=1.0)
    made = [""] * 5

    def make(arms: list[Arm], making: Making, number: int) -> Blocks:
        for arm, env in zip(arms, making.devices(arms), strict=True):
            made[number] += f"{env.get('CUDA_VISIBLE_DEVICES', '')}{arm.name}"
        told = {**block(100.0), "ended": {"how": "done"}, "reasons": ["the client was late"] if number == 1 else []}
        return {arm.name: told for arm in arms}  # type: ignore[misc]

    monkeypatch.setattr("fenno.compare.block.make", make)
    found = run.live([Arm(letter, letter) for letter in "AB"], Making(plan, Path(), gpus), 4, lambda _: None)
    assert (made, len(found.arms["A"])) == (wanted, 4)


def test_where_arms_ran_is_told_and_when_not_each_was_equally_often_on_each() -> None:
    told = document([block(100.0 + i % 3) for i in range(6)]) | {"gpus": ["0", "1"]}
    assert "side by side, in turn on the GPUs 0 and 1" in words.lines(told)
    told = document([block(100.0 + i % 3) for i in range(5)]) | {"gpus": ["0", "1"]}
    assert any("5 rounds are no multiple of 2" in line for line in words.lines(told))


def made(flags: dict[str, Any], **engine: Any) -> list[Arm]:
    """Two recipes, the second with these flags."""
    engines = [{"model": "m", **engine}, {"model": "m", "flags": flags, **engine}]
    recipes = [Recipe.model_validate({"name": name, "engine": its}) for name, its in zip(("one", "two"), engines, strict=True)]
    return [Arm(letter, "", recipe) for letter, recipe in zip("AB", recipes, strict=True)]


@pytest.mark.parametrize(
    ("gpus", "flags", "said"),
    [
        (["2"], {}, "given once for 2 recipes"),
        (["0", "1", "2"], {}, "given 3 times for 2 recipes"),
        (["0,1", "1"], {}, "share a GPU"),
        (["0", "00"], {}, "share a GPU"),
        (["0", ""], {}, "share a GPU, or name none"),
        (["0,1", "2"], {}, "0,1 and 2 are not equally many"),
        (["0", "1"], {"tensor-parallel-size": 2}, "two runs on 2 GPUs, and --devices names 1 for it"),
        (["0,1", "2,3"], {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}, "two runs on 4 GPUs"),
    ],
)
def test_gpus_on_which_arms_cannot_run_side_by_side_are_a_sentence(gpus: list[str], flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run.check_gpus(gpus, made(flags))


def test_gpus_are_for_several_engines_that_fenno_starts() -> None:
    with pytest.raises(UsageError, match="that fenno starts"):
        run.check_gpus(["0", "1"], made({}, model=None, url="http://a"))
    with pytest.raises(UsageError, match="--devices has recipes run side by side, and there is one"):
        run.check_gpus(["0"], made({})[:1])
    run.check_gpus([], made({}, model=None, url="http://a"))
    run.check_gpus(["0", "1"], made({}))
    run.check_gpus(["0,1", "2,3"], made({"tensor-parallel-size": 2}))


def test_too_few_blocks_are_no_comparison() -> None:
    found = document([block(200.0)] * 2, left_out=("round 3, B: the client was late",))
    assert (found["valid"], found["findings"], words.exit_code(found)) == (False, [], 4)
    assert "the client was late" in " ".join(words.lines(found))


def test_a_missed_availability_fails_and_one_that_cannot_be_told_is_inconclusive() -> None:
    assert words.exit_code(document([block(100.0 + i % 3) for i in range(6)], 0.9)) == 0
    assert words.exit_code(document([block(100.0 + i % 3) for i in range(6)], 0.999)) == 4
    assert words.exit_code(document([block(100.0 + i % 3, completed=97) for i in range(6)], 0.995)) == 1


@pytest.mark.parametrize(("paired", "more"), [(True, True), (False, False)])
def test_more_rounds_are_asked_for_where_there_are_rounds(paired: bool, more: bool) -> None:
    said = words.sentence({"arms": {"A": {}}, "valid": False, "paired": paired})
    assert said.startswith("INVALID: ") and "nothing is said of a difference" in said and ("--rounds" in said) is more


def test_of_load_tests_that_were_no_measurement_no_difference_is_told() -> None:
    blocks = {"A": [block(100.0 + i % 3) for i in range(6)], "B": [block(150.0 + i % 3) for i in range(6)]}
    arms = [Arm("A", "a", folder=Path("a")), Arm("B", "b", folder=Path("b"))]
    for reasons, code in (([], 1), (["B: the client was late"], 4)):
        found = run.document(run.Blocks(blocks, False, reasons), arms, None, None)
        said = " ".join([*words.lines(found), *(" ".join(row) for row in words.rows(found))])
        assert (words.exit_code(found), "INVALID" in said, "worse" in said) == (code, bool(reasons), not reasons)


def test_stored_runs_are_not_compared_with_what_has_yet_to_run(tmp_path: Any) -> None:
    def recipe_of(name: str) -> Recipe:
        return Recipe.model_validate({"name": "url", "engine": {"url": "http://127.0.0.1:1"}})

    with pytest.raises(UsageError, match="a stored run is compared with stored runs"):
        run.chosen([str(tmp_path), "http://a"], recipe_of)
    with pytest.raises(UsageError, match="1 to compare"):
        run.chosen(["http://a"], recipe_of)
    with pytest.raises(UsageError, match="holds no load test"):
        run.from_disk(run.chosen([str(tmp_path), str(tmp_path)], recipe_of))
