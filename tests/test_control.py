"""The control file: what is written is what is read, whole, private, and by nothing but the standard library."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenno import control
from fenno.control import Acknowledgement, Wanted

KNOBS = st.fixed_dictionaries(
    {},
    optional={
        "max_num_scheduled_tokens": st.none() | st.integers(1, 10**6),
        "long_prefill_token_threshold": st.none() | st.integers(0, 10**6),
        "policy": st.none() | st.sampled_from(control.POLICIES),
        "class_edges": st.none() | st.sampled_from(["32,128", "1", "8,16,24"]),
        "aging_seconds": st.none() | st.floats(0.001, 1000),
        "a_knob_of_tomorrow": st.integers() | st.text('ab é"', max_size=5),
    },
)


@settings(max_examples=50)
@given(revision=st.integers(0, 10**9), knobs=KNOBS)
def test_a_wish_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, revision: int, knobs: dict) -> None:
    path = tmp_path_factory.mktemp("control") / "control.json"
    control.write_wanted(path, Wanted(revision, knobs))
    assert control.read_wanted(path) == Wanted(revision, knobs)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_answers_come_back_by_rank_and_leave_the_wish_alone(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    control.write_wanted(path, Wanted(3))
    answers = [Acknowledgement(3, rank, {"policy": "fcfs"}, rank == 0, ("a",), 7, 9, {"x": 1.5}) for rank in (0, 1, 10)]
    for answer in answers:
        control.write_acknowledgement(path, answer)
    assert control.read_acknowledgements(path) == {answer.rank: answer for answer in answers}
    assert control.read_wanted(path) == Wanted(3)
    control.write_mark(path, "1.2.3")
    assert control.read_marks(path) == {os.getpid(): "1.2.3"}
    control.clear(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_active_seqs": 0},
        {"max_num_active_seqs": 2.5},
        {"max_num_active_seqs": True},
        {"long_prefill_token_threshold": -1},
        {"policy": "sjf"},
        {"class_edges": "128,32"},
        {"class_edges": "0,32"},
        {"class_edges": "few"},
        {"aging_seconds": 0},
        {"aging_seconds": "long"},
        {"aging_seconds": float("nan")},
    ],
)
def test_an_impossible_value_is_refused_before_it_is_written_and_after(tmp_path: Path, knobs: dict) -> None:
    path = tmp_path / "control.json"
    with pytest.raises(ValueError, match=next(iter(knobs))):
        control.write_wanted(path, Wanted(1, knobs))
    path.write_text(json.dumps({"schema": control.SCHEMA, "revision": 1, "knobs": knobs}))
    with pytest.raises(ValueError, match=next(iter(knobs))):
        control.read_wanted(path)


def test_an_environment_gives_the_order_its_parameters_and_an_impossible_one_is_refused() -> None:
    assert control.at_start({"FENNO_AGING_SECONDS": "", "OTHER": "1"}) == {}
    given = {"FENNO_AGING_SECONDS": "2.5", "FENNO_CLASS_EDGES": "8,16"}
    assert control.at_start(given) == {"aging_seconds": 2.5, "class_edges": "8,16"}
    for name, value in (("FENNO_AGING_SECONDS", "long"), ("FENNO_AGING_SECONDS", "-1"), ("FENNO_CLASS_EDGES", "16,8")):
        with pytest.raises(ValueError, match="(?i)" + name.removeprefix("FENNO_")):
            control.at_start({name: value})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "revision": 1}', '{"schema": 1, "revision": "x", "knobs": {}}'],
)
def test_a_file_that_makes_no_sense_is_a_value_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "control.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        control.read_wanted(path)


def test_an_answer_of_a_later_fenno_is_read_without_its_news(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    answer = {"schema": 1, "revision": 2, "rank": 0, "applied": {}, "reached": True, "a_field_of_tomorrow": 1}
    control.acknowledgement_path(path, 0).write_text(json.dumps(answer))
    assert control.read_acknowledgements(path) == {0: Acknowledgement(2, 0, {}, True)}


def test_a_reader_never_sees_half_a_wish(tmp_path: Path) -> None:
    path = tmp_path / "control.json"
    knobs = {f"knob_{i}": "x" * 200 for i in range(200)}
    control.write_wanted(path, Wanted(0, knobs))
    done = threading.Event()

    def write() -> None:
        for revision in range(1, 150):
            control.write_wanted(path, Wanted(revision, knobs))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        wanted = control.read_wanted(path)
        assert wanted.knobs == knobs
        seen.append(wanted.revision)
    writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_it_needs_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import fenno.control; new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(m for m in new if m not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['fenno']"
