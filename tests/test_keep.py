"""Keeping a server up: what is done after a death, how long a start takes, who may be told to end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import doctor_facts
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenno import process, recipe
from fenno.doctor import modelfacts
from fenno.engine import command, dummy, server
from fenno.errors import RecipeError, UsageError
from fenno.machine import Gpu
from fenno.recipe import Recipe, Serve
from fenno.serve import policy, preflight, starts, state
from fenno.serve.policy import Death

LIMITS = Serve(deaths=3, stable=600.0)


def parsed(**engine: object) -> Recipe:
    return recipe.parse(json.dumps({"name": "one", "engine": {"model": "m", **engine}}), "test")


def died(cause: str = "unknown", again: str = "perhaps", lived: float = 5.0) -> Death:
    return Death(0.0, lived, cause, again)


def test_what_has_run_before_is_started_again_after_longer_and_longer_waits() -> None:
    waits = [policy.step([died()] * count, Serve(deaths=100)).wait for count in range(1, 10)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_cause_that_cannot_heal_is_not_tried_again_however_long_it_served() -> None:
    found = policy.step([died("weights-missing", "no", lived=10_000)], LIMITS)
    assert (found.wait, found.why) == (None, "starting it again cannot help")


def test_a_first_start_that_fails_is_tried_again_only_for_a_cause_that_passes() -> None:
    assert policy.step([died("unknown", lived=0)], LIMITS).wait is None
    assert policy.step([died("memory-taken", "yes", lived=0)], LIMITS).wait == 1
    assert policy.step([died(), died("unknown", lived=0)], LIMITS).wait == 2


def test_a_crash_loop_names_its_causes() -> None:
    found = policy.step([died("hang"), died("oom-serving"), died("hang", lived=0)], LIMITS)
    assert found.wait is None
    assert "3 deaths in a row, none after 10 min of service (hang ×2, oom-serving ×1)" in found.why


def test_a_worker_waits_for_the_next_head_however_often_heads_die() -> None:
    lost = [died(policy.HEAD_LOST, "yes")] * 9
    assert policy.step(lost, LIMITS).wait == 1
    assert policy.step([died(), *lost, died()], LIMITS).wait == 2, "its own deaths are two"
    assert policy.step([died(), *lost, died(), *lost, died()], LIMITS).wait is None


@given(st.lists(st.sampled_from([0.0, 5.0, 599.0, 600.0, 9_000.0])), st.integers(1, 6))
def test_only_deaths_in_a_row_make_a_loop(lives: list[float], limit: int) -> None:
    deaths = [died(lived=1.0), *(died(lived=lived) for lived in lives)]
    row = 0
    for death in deaths:
        row = 1 if death.lived >= 600 else row + 1
    assert (policy.step(deaths, Serve(deaths=limit)).wait is None) == (row >= limit)


def gpu(index: int, used: int) -> Gpu:
    return Gpu(index, "H", f"u{index}", 80 * 2**30, used * 2**30, (9, 0), "1")


def test_only_the_memory_of_the_gpus_it_used_is_waited_for() -> None:
    before, ready = (gpu(0, 1), gpu(1, 1)), (gpu(0, 70), gpu(1, 1))
    assert policy.held_back(before, ready, (gpu(0, 1), gpu(1, 40))) is None
    assert policy.held_back(before, ready, (gpu(0, 30), gpu(1, 1))) == "GPU 0 holds 30.0 GiB, before the start it was 1.0 GiB"
    assert policy.held_back(before, (), (gpu(0, 1), gpu(1, 40))) is not None
    assert policy.held_back((), (), ()) is None


def test_the_time_left_is_the_median_of_earlier_starts_from_the_same_stage(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "starts.json"
    assert starts.left(starts.read(path), "loading") is None
    for seconds in (20.0, 30.0, 100.0):
        starts.add(path, [("importing", 0.1), ("loading", 10.0), (starts.READY, seconds)])
    assert starts.left(starts.read(path), "loading") == 20.0
    assert starts.left(starts.read(path), "compiling") is None
    path.write_text("{not json")
    assert starts.read(path) == []


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield popen
    popen.kill()
    popen.wait()


def test_a_process_that_got_the_pid_of_another_is_never_told(sleeper: subprocess.Popen[bytes]) -> None:
    born = process.birth(sleeper.pid)
    assert born is not None
    assert not process.tell(sleeper.pid, f"{born}0", signal.SIGKILL)
    assert sleeper.poll() is None
    assert process.tell(sleeper.pid, born, signal.SIGKILL)
    assert sleeper.wait(50) == -signal.SIGKILL
    assert (process.birth(sleeper.pid), process.tell(sleeper.pid, born, signal.SIGKILL)) == (None, False)


def test_a_zombie_is_no_process(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process.birth(sleeper.pid) is None


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "fenno" / "serve"


def test_a_name_is_held_once_and_free_again(home: Path) -> None:
    place = state.hold("one", parsed(), "one.yaml")
    with pytest.raises(UsageError, match=f"one is served already by pid {os.getpid()}"):
        state.hold("one", parsed(), "one.yaml")
    assert state.find(None).alive
    place._lock.close()
    state.hold("one", parsed(), "one.yaml")._lock.close()


def test_a_server_whose_fenno_has_ended_is_not_alive(home: Path, sleeper: subprocess.Popen[bytes]) -> None:
    place = state.hold("one", parsed(), "one.yaml")
    place.update(phase="ready", pid=sleeper.pid, birth=process.birth(sleeper.pid))
    assert state.find("one").alive
    sleeper.kill()
    sleeper.wait()
    assert not state.find("one").alive


def test_which_server_is_meant_has_to_be_clear(home: Path) -> None:
    with pytest.raises(UsageError, match="serves nothing here"):
        state.find(None)
    for name in ("one", "two"):
        state.hold(name, parsed(), "x.yaml")
    with pytest.raises(UsageError, match="which server is meant") as both:
        state.find(None)
    assert "one, two" in both.value.hint
    with pytest.raises(UsageError, match="no server is called three"):
        state.find("three")
    with pytest.raises(UsageError, match="cannot be a server's name"):
        state.checked_name("../one")


def test_where_no_server_runs_none_is_asked_for_as_if_one_did(home: Path) -> None:
    for name in ("one", "two"):
        state.hold(name, parsed(), "x.yaml").update(phase="stopped")
    with pytest.raises(UsageError, match="no server runs") as found:
        state.find(None)
    assert "one, two" in found.value.hint


def test_a_state_that_cannot_be_read_is_none(home: Path) -> None:
    place = state.hold("one", parsed(), "one.yaml")
    (place.folder / "state.json").write_text("{")
    assert (state.read(place.folder), state.states(), state.history(place.folder)) == (None, [], [])


def test_the_recipe_before_is_the_last_other_one_that_was_ready(home: Path) -> None:
    first, second = parsed(), parsed(flags={"max-num-seqs": 8})
    place = state.hold("one", first, "one.yaml")
    place.remember(first)
    with pytest.raises(UsageError, match="nothing else was served as one before"):
        state.before(place.state)
    place.update(digest=second.digest())
    assert state.before(place.state).digest == first.digest(), "the second one never got ready"
    place.remember(second)
    assert recipe.load(Path(state.before(place.state).path)).digest() == first.digest()
    place.remember(first)
    place.update(digest=first.digest())
    assert state.before(place.state).digest == second.digest()


def test_a_model_folder_that_is_none_is_found_before_the_start(tmp_path: Path) -> None:
    for model in ("owner/name", "dummy:grok2-small"):
        assert server.model_fault(parsed(model=model).engine) is None
    assert "no dummy model grok; there are grok2-small" in (server.model_fault(parsed(model="dummy:grok").engine) or "")
    assert "no model folder" in (server.model_fault(parsed(model=str(tmp_path / "none")).engine) or "")
    assert "has no config.json" in (server.model_fault(parsed(model=str(tmp_path)).engine) or "")
    assert "literally" in (server.model_fault(parsed(model="~/model").engine) or "")
    (tmp_path / "config.json").write_text("{}")
    assert server.model_fault(parsed(model=str(tmp_path)).engine) is None


def test_what_has_no_room_whatever_is_left_out_is_refused_before_the_start(tmp_path: Path) -> None:
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps({**dummy.LLAMA3_8B, **wide}))
    facts = replace(doctor_facts.GOOD, model=modelfacts.read(str(tmp_path), tmp_path))

    def refusal(gpus: int, space: str = "", **flags: object) -> str | None:
        engine = {"model": str(tmp_path), "flags": flags, "env": {"VLLM_CPU_KVCACHE_SPACE": space}}
        chosen = recipe.parse(json.dumps({"name": "one", "engine": engine, "host": {"gpus": gpus}}), "test")
        try:
            preflight.fitting(chosen, facts)
        except RecipeError as error:
            return f"{error} ({error.hint})"
        return None

    said = refusal(1) or ""
    assert "131.4 GiB of weights and 2.5 GiB of KV cache" in said and "128.6 GiB" in said and "tensor-parallel-size 2" in said
    assert refusal(1, quantization="fp8") is None
    assert refusal(2, **{"tensor-parallel-size": 2}) is None
    assert refusal(1, **{"cpu-offload-gb": 60}) is None, "not all of it lies on the GPU"
    assert refusal(1, quantization="of-tomorrow") is None, "the engine has the last word"
    assert refusal(1, **{"max-model-len": -1}) is None, "the longest that fits"
    said = refusal(0, space="1000000") or ""
    assert "1000000.0 GiB of KV cache" in said and "that the engine has of main memory" in said


def test_listening_to_everybody_without_a_key_is_said(tmp_path: Path) -> None:
    assert preflight.exposed(parsed().engine) == []
    (said,) = preflight.exposed(parsed(flags={"host": "0.0.0.0"}).engine)
    assert "without an API key" in said
    key = tmp_path / "key"
    key.write_text("secret\n")
    key.chmod(0o600)
    assert preflight.exposed(parsed(flags={"host": "0.0.0.0"}, api_key_file=str(key)).engine) == []
    key.chmod(0o644)
    (said,) = preflight.exposed(parsed(api_key_file=str(key)).engine)
    assert "other users may read" in said


def test_a_key_that_was_promised_is_there_or_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    for text in ("", "two words", "two\nlines"):
        key.write_text(text)
        with pytest.raises(RecipeError, match="does not hold one API key"):
            command.api_key(parsed(api_key_file=str(key)).engine)
    key.write_text("secret\n")
    assert command.api_key(parsed(api_key_file=str(key)).engine) == "secret"
    with pytest.raises(RecipeError, match="cannot be read"):
        command.api_key(parsed(api_key_file=str(tmp_path / "none")).engine)
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(RecipeError, match="SOME_KEY is not set"):
        command.api_key(parsed(api_key_env="SOME_KEY").engine)
    monkeypatch.setenv("SOME_KEY", "other")
    assert command.api_key(parsed(api_key_env="SOME_KEY").engine) == "other"
    assert command.api_key(parsed().engine) is None


def test_a_variable_that_is_to_be_inherited_is_there_or_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = parsed(env={"SOME_TOKEN": None, "OTHER_TOKEN": "a"})
    monkeypatch.delenv("SOME_TOKEN", raising=False)
    with pytest.raises(RecipeError, match="SOME_TOKEN is not set"):
        command.check_inherited(chosen.engine)
    monkeypatch.setenv("SOME_TOKEN", "b")
    command.check_inherited(chosen.engine)
    start = command.serve(chosen, executable="python", distribution="vllm", model="m", port=1)
    assert "SOME_TOKEN" not in start.env and start.env["OTHER_TOKEN"] == "a", "fenno's own environment is the engine's too"


def test_a_key_on_the_command_line_is_refused() -> None:
    with pytest.raises(RecipeError, match="would be seen by everybody"):
        parsed(flags={"api-key": "secret"})
    with pytest.raises(RecipeError, match="`flags.hf-token` would be seen by everybody"):
        parsed(flags={"hf-token": "secret"})
    assert parsed(flags={"hf-token": True}).engine.flags == {"hf-token": True}, "the one that is stored"
    with pytest.raises(RecipeError, match="not both"):
        parsed(api_key_env="A", api_key_file="b")


@pytest.mark.parametrize(
    ("host", "reached"),
    [(None, "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("10.0.0.5", "10.0.0.5"), ("::1", "[::1]")],
)
def test_a_server_is_asked_where_it_listens(host: str | None, reached: str) -> None:
    assert command.address({"host": host}) == reached
