"""Whether two engines say the same: pure."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fenno.tune import quality
from fenno.tune.quality import Answer, Pass

NOISE = 0.004


def passes(shift: float = 0.0, one: float = 0.0) -> list[Pass]:
    """Two passes of one engine whose numbers differ by `NOISE` between the passes, by `shift` from another engine's, and by `one`
    at a single token."""
    made = []
    for apart in (0.0, NOISE):
        prompt = tuple(-1.0 - 0.1 * i + apart + shift for i in range(40))
        first = Answer((prompt[0] + one, *prompt[1:]), ("a", "b", "c"), tuple(-0.5 + apart + shift for _ in "abc"))
        made.append((first, *(Answer(prompt, ("x",), (-2.0 + apart + shift,)) for _ in range(3))))
    return made


def test_an_engine_that_differs_no_more_than_the_defaults_from_themselves_says_the_same() -> None:
    found = quality.compare(passes(), passes(shift=NOISE))
    assert (found.state, found.answers, found.same_answers) == ("same", 8, 8)
    assert found.found and found.noise
    assert found.found.largest == pytest.approx(NOISE) == pytest.approx(found.noise.median)
    assert found.found.count == 2 * (4 * 40 + 3 + 3), "every token of every text, asked in two ways"
    assert found.sentence == (
        "the tuned settings give the same outputs: largest log-probability difference 0.004, median 0.004, "
        "noise of the defaults with themselves 0.004, median 0.004"
    )


def test_many_small_differences_and_a_single_large_one_are_a_change() -> None:
    assert quality.compare(passes(), passes(shift=quality.TIMES * NOISE + 2 * quality.MEAN)).state == "moved"
    assert quality.compare(passes(), passes(one=0.5)).state == "moved"
    assert quality.compare(passes(), passes(one=0.5), ["kv-cache-dtype"]).state == "asked"
    assert "asked for by kv-cache-dtype" in quality.compare(passes(), passes(one=0.5), ["kv-cache-dtype"]).sentence
    assert quality.compare(passes(), passes(), ["kv-cache-dtype"]).state == "same"


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    one = Answer((-1.0,), ("a", "b", "c", "d"), (-0.1, -0.2, -0.3, -0.4))
    other = Answer((-1.5,), ("a", "x", "c", "d"), (-0.1, -0.25, -9.0, -9.0))
    assert quality.differences(one, other) == pytest.approx([0.5, 0.0, 0.05])
    assert quality.differences(one, replace(one, tokens=(), chosen=())) == [0.0]


def test_a_text_cut_into_other_tokens_is_another_output() -> None:
    other = [tuple(replace(answer, prompt=answer.prompt[1:]) for answer in one) for one in passes()]
    found = quality.compare(passes(), other)
    assert found.state == "moved" and found.found and math.isinf(found.found.largest)


@given(some.lists(some.floats(-20, 0), min_size=1, max_size=30))
def test_an_engine_is_itself(numbers: list[float]) -> None:
    mine: Pass = (Answer((-21.0, *numbers), ("a",), (-1.0,)),)
    found = quality.compare([mine, mine], [mine, mine])
    assert found.state == "same" and found.found == quality.Spread(2 * len(numbers) + 4, 0.0, 0.0, 0.0)


def test_weights_to_which_all_tokens_are_alike_prove_nothing() -> None:
    mine: Pass = (Answer(tuple(-5.5 + 1e-6 * i for i in range(9)), ("a",), (-5.5,)),)
    found = quality.compare([mine, mine], [mine, mine])
    assert found.state == "blind" and found.found is None and "tell nothing" in found.sentence


def test_what_the_defaults_said_is_kept_and_a_cold_start_is_the_better_reference(tmp_path: Path) -> None:
    assert quality.kept(tmp_path) == []
    quality.keep(tmp_path, "wide", passes())
    assert quality.kept(tmp_path) == passes()
    quality.keep(tmp_path, "cold", passes(shift=0.1))
    assert quality.kept(tmp_path) == passes(shift=0.1)


def test_texts_are_short_for_any_tokenizer() -> None:
    assert all(180 < len(text) < 260 for text in quality.TEXTS) and len(set(quality.TEXTS)) == 8
