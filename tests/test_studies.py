"""Studies in their folders: found, listed, shown, exported, and what measuring one again says."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from fenno import documents
from fenno import recipe as recipes
from fenno.errors import DiskError, EngineError, UsageError
from fenno.recipe import Recipe, Scalar
from fenno.tune import again, output, studies
from fenno.tune.judge import Figure, judge
from fenno.tune.propose import Limit, Load
from fenno.tune.run import Run
from fenno.tune.space import BUDGET, CAP, POLICY, Point, Space
from fenno.tune.study import State, Study, Trial
from fenno.tune.trial import Measured
from fenno.tune.verdict import Verdict

DEFAULTS: dict[str, Scalar] = {CAP: 128, POLICY: "fcfs"}
SPACE = Space({CAP: (16, 64, 128), POLICY: ("fcfs", "token_aware")}, DEFAULTS)
RECIPE = recipes.load(recipes.embedded()["cpu-small"])


def measured(number: int, p95: float, *, origin: str = "rule", **point: Scalar) -> Trial:
    """A trial whose judgement follows from its P95 TTFT, in seconds."""
    figures = {"p95_ttft": Figure(p95, 0.9 * p95, 1.1 * p95), "qps": Figure(8.0, 7.9, 8.0), "memory_share": Figure(0.11)}
    found = judge(RECIPE.targets, figures, steady=True)
    return Trial(
        number,
        {**DEFAULTS, **point},
        origin,
        "because, so to say",
        found.state,
        found.score,
        12.5,
        judgement=found.as_dict(),
        summary={"requests": 120, "completed": 118, "goodput": 7.5, "ttft": {"p50": 99.0, "p95": 1e3 * p95, "p99": None}},
        limit=Limit("sequences", '5 requests waited, "as ever"'),
        rate=8.0,
    )


FAILED = replace(
    measured(1, 1.0, **{CAP: 16}), state="failed", score=math.inf, judgement={}, summary={}, limit=None, reason="load: it died"
)
TRIALS = [measured(0, 1.5, origin="defaults"), FAILED, measured(2, 0.4, **{CAP: 64}), measured(3, math.inf, origin="confirmation")]


def kept(out: Path, name: str, *, trials: list[Trial] | None = None, document: dict[str, Any] | None = None) -> Path:
    """A study's folder; `document`: what its end left, if it is over."""
    folder = out / name
    study = Study(folder, SPACE, 1)
    for trial in trials or []:
        study.add(trial)
    begun = {"recipe": "cpu-small", "recipe_digest": RECIPE.digest(), "date": "2026-01-02T03:04:05+0000", "fenno": "0.1.0"}
    files = {"recipe.yaml": output.recipe_yaml(RECIPE, "a recipe"), "study.json": documents.lines(begun)}
    if document:
        files["verdict.json"] = documents.lines({**begun, "trials": len(trials or []), **document})
    output.write(folder, files)
    return folder


MET = {"verdict": "met", "sentence": "met with max_num_active_seqs=64", "exit_code": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three studies: one over, one not, one broken; the last the newest."""
    out = tmp_path_factory.mktemp("made")
    first = kept(out, "cpu-small-aaa-20260101-000000", trials=TRIALS, document=MET)
    output.write(first, {"tuned.yaml": output.recipe_yaml(RECIPE.with_targets(qps=7), "tuned")})
    kept(out, "cpu-small-bbb-20260101-000000", trials=TRIALS[:2])
    (kept(out, "other-20260101-000000") / "study.json").write_text("{")
    for age, name in enumerate(("other", "cpu-small-bbb", "cpu-small-aaa")):
        os.utime(out / f"{name}-20260101-000000" / "study.json", (1e9 - age, 1e9 - age))
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return shutil.copytree(made, tmp_path / "out")


def test_studies_are_listed_newest_first_and_a_broken_one_says_so(out: Path) -> None:
    found = studies.listed(out)
    assert [line["study"].split("-2026")[0] for line in found] == ["other", "cpu-small-bbb", "cpu-small-aaa"]
    assert [line["verdict"] for line in found] == ["unreadable", "not over", "met"]
    assert "study.json" in found[0]["sentence"]
    assert [line["trials"] for line in found] == [None, 2, 4]
    assert studies.row(found[2]) == [found[2]["study"], "met", "cpu-small", "2026-01-02T03:04:05+0000", "4"]
    assert studies.row(found[0])[2:] == ["", "", ""]
    assert studies.listed(out / "nowhere") == []


def test_a_study_that_was_kept_without_a_schema_is_read_and_told_with_one(out: Path) -> None:
    folder = out / "cpu-small-aaa-20260101-000000"
    verdict = json.loads((folder / "verdict.json").read_text())
    assert next(iter(verdict)) == "schema"
    (folder / "verdict.json").write_text(json.dumps({name: value for name, value in verdict.items() if name != "schema"}))
    shown = json.loads(documents.line(studies.document(studies.load(folder), [])))
    assert next(iter(shown)) == "schema" and shown["sentence"] == MET["sentence"]


def test_looking_at_a_study_changes_nothing_even_while_it_runs(tmp_path: Path) -> None:
    import optuna

    folder = kept(tmp_path, "cpu-small-20260101-000000", trials=TRIALS[:1])
    running = optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}")
    running.ask()
    assert len(studies.load(folder).trials()) == 1
    assert [trial.state.name for trial in running.get_trials()] == ["COMPLETE", "RUNNING"]
    assert not (kept(tmp_path, "x") / "nothing").exists() and studies.load(tmp_path / "x").trials() == []


def test_a_study_is_found_by_its_folder_its_name_its_beginning_or_as_the_newest(out: Path) -> None:
    name = "cpu-small-aaa-20260101-000000"
    for given in (str(out / name), name, "cpu-small-a"):
        assert studies.find(out, given).folder.name == name
    with pytest.raises(DiskError, match=r"cannot read .*study\.json"):
        studies.find(out, None)
    (out / "other-20260101-000000" / "study.json").unlink()
    assert studies.find(out, None).folder.name == "cpu-small-bbb-20260101-000000"


@pytest.mark.parametrize(
    ("name", "said"),
    [("cpu", "begins the names of 2 studies"), ("gpu", "there is no study 'gpu'"), ("cpu-small-aaa-2027", "no study")],
)
def test_a_name_that_means_no_one_study_is_told(out: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        studies.find(out, name)
    with pytest.raises(UsageError, match="there is no study in"):
        studies.find(out / "nowhere", None)


def test_a_study_is_shown_with_every_trial_and_what_was_refused(out: Path) -> None:
    study = studies.find(out, "cpu-small-a")
    trials = study.trials()
    assert trials == TRIALS
    rows = [studies.told(trial, studies.defaults(study, trials)) for trial in trials]
    assert rows[0] == [
        *("0", "missed", "the engine's defaults"),
        "p95_ttft 1.5 s (missed); qps 8.00 requests/s; memory_share 11.0 %",
        *("sequences", "12"),
    ]
    assert rows[1][1:5] == ["failed", "max_num_active_seqs=16", "load: it died", ""]
    assert rows[3][2] == "cold: the engine's defaults" and "p95_ttft never (missed)" in rows[3][3]
    shown = studies.document(study, trials)
    assert (shown["verdict"], shown["exit_code"], len(shown["trials"])) == ("met", 0, 4)
    refused = {"trial": 1, "state": "failed", "changed": "max_num_active_seqs=16", "reason": "load: it died"}
    assert shown["refused"] == [refused]
    assert "not over" in studies.document(studies.find(out, "cpu-small-b"), [])["sentence"]


def test_a_study_without_a_search_is_shown_against_the_defaults_it_knew(tmp_path: Path) -> None:
    cold = TRIALS[3]
    knew = {**MET, "space": {"defaults": dict(cold.point)}}
    study = studies.load(kept(tmp_path, "again-20260101-000000", trials=[cold], document=knew))
    assert cold.origin == "confirmation" and studies.told(cold, studies.defaults(study, [cold]))[2] == "cold: the engine's defaults"


def test_an_export_has_the_same_columns_for_every_trial_and_survives_csv(out: Path) -> None:
    study = studies.find(out, "cpu-small-a")
    rows = studies.rows(study, study.trials())
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert list(rows[0])[: len(studies.COLUMNS)] == list(studies.COLUMNS)
    best = rows[2]
    assert (best["state"], best["rate_per_s"], best["knob.max_num_active_seqs"], best["ttft_p95_ms"]) == ("met", 8.0, 64, 400.0)
    assert (best["target.p95_ttft.limit"], best["target.p95_ttft.value"], best["target.p95_ttft.state"]) == (0.8, 0.4, "met")
    assert (rows[1]["score"], rows[1]["target.p95_ttft.value"], rows[1]["reason"]) == (None, None, "load: it died")
    back = list(csv.DictReader(io.StringIO(studies.csv_text(rows))))
    assert list(back[0]) == list(rows[0]) and len(back) == 4
    assert back[2]["limit_evidence"] == '5 requests waited, "as ever"'
    assert (back[1]["score"], back[3]["target.p95_ttft.value"]) == ("", "inf")
    empty = studies.csv_text(studies.rows(study, []))
    assert empty.split(",")[:2] == ["trial", "origin"] and empty.count("\n") == 1


def test_only_a_study_that_found_settings_can_be_measured_again(out: Path) -> None:
    study = studies.find(out, "cpu-small-a")
    assert recipes.load(studies.tuned(study)).targets.qps == 7
    with pytest.raises(UsageError, match="no settings to measure again: not over"):
        studies.tuned(studies.find(out, "cpu-small-b"))
    beside = studies.beside(study.folder / "tuned.yaml")
    assert beside and beside.document["verdict"] == "met"
    assert studies.beside(study.folder / "recipe.yaml") is None
    assert studies.beside(out / "tuned.yaml") is None


@pytest.mark.scenario
def test_an_unfinished_study_is_gone_on_with_on_the_same_engine_host_and_values_alone(tmp_path: Path) -> None:
    host = {"system": "Linux", "processor": "p", "cores": 2, "memory": 4, "gpus": [{"name": "H200", "used": 1}]}
    facts = {"engine": {"version": "0.32.0", "torch": "2"}, "host": host, "space": asdict(SPACE), "date": "a"}
    key = f"cpu-small-{RECIPE.digest()}-vllm0.32.0"
    for name in (f"{key}-20260101-000000", f"{key}-20260102-000000", f"{key}-most-qps-20260103-000000"):
        kept(tmp_path, name)
        output.write(tmp_path / name, {"study.json": documents.lines(facts)})
    later = {**facts, "date": "b", "host": {**host, "gpus": [{"name": "H200", "used": 2}]}}
    assert output.place(tmp_path, RECIPE, later, fresh=False) == output.Place(tmp_path / f"{key}-20260102-000000", resumed=True)
    most = output.place(tmp_path, RECIPE, facts, fresh=False, goal="most-qps")
    assert most == output.Place(tmp_path / f"{key}-most-qps-20260103-000000", resumed=True)
    assert not output.place(tmp_path, RECIPE, facts, fresh=True).resumed
    others: list[dict[str, Any]] = [
        {"host": {**host, "cores": 4}},
        {"host": {**host, "gpus": []}},
        {"engine": {"version": "0.32.0", "torch": "3"}},
        {"space": asdict(replace(SPACE, defaults={**DEFAULTS, CAP: 64}))},
    ]
    assert [output.place(tmp_path, RECIPE, {**facts, **other}, fresh=False).resumed for other in others] == [False] * 4
    (tmp_path / f"{key}-20260102-000000" / "verdict.json").write_text("{}")
    assert output.place(tmp_path, RECIPE, facts, fresh=False).folder.name == f"{key}-20260101-000000"


def test_what_differs_from_the_time_of_the_study_is_named() -> None:
    gpu = {"name": "H200", "driver": "1", "used": 5}
    then = {"fenno": "0.1", "date": "a", "engine": {"version": "0.24.0", "torch": None}, "host": {"gpus": [gpu], "cores": 2}}
    now = {
        "fenno": "0.1",
        "date": "b",
        "engine": {"version": "0.32.0", "torch": None},
        "host": {"gpus": [{**gpu, "used": 9}], "cores": 4},
    }
    assert again.differences(then, now) == ["engine.version was 0.24.0 and is 0.32.0", "host.cores was 2 and is 4"]
    assert again.differences(now, now) == []
    other = {"host": {"gpus": [{**gpu, "driver": "2"}]}}
    assert again.differences(then, other) == ["host.gpus was H200 (driver 1) and is H200 (driver 2)"]


@pytest.mark.parametrize(
    ("state", "held", "outcome", "code", "said"),
    [
        ("met", True, "met", 0, "it still holds: p95_ttft 400 ms"),
        ("met", False, "met", 0, "it holds: p95_ttft 400 ms"),
        ("missed", True, "infeasible", 3, "it no longer holds: p95_ttft 1.5 s"),
        ("missed", False, "infeasible", 3, "it does not hold: p95_ttft 1.5 s"),
        ("unclear", True, "inconclusive", 4, "inconclusive: p95_ttft 800 ms"),
        ("invalid", True, "inconclusive", 4, "inconclusive: load: it died"),
        ("failed", False, "inconclusive", 4, "inconclusive: load: it died"),
    ],
)
def test_a_look_says_whether_it_holds(state: State, held: bool, outcome: str, code: int, said: str) -> None:
    seen = {"met": measured(0, 0.4), "missed": measured(0, 1.5), "unclear": measured(0, 0.8)}.get(
        state, replace(FAILED, state=state)
    )
    assert seen.state == state
    found = again.judged(seen, held)
    assert (found.outcome, found.exit_code) == (outcome, code)
    assert found.sentence.startswith(said)


@dataclass
class Bench:
    """A bench with a clock of its own, where each cold start takes a second and gives the next P95 TTFT, or raises. A trial takes
    ten seconds. Without a next one somebody presses Ctrl-C."""

    given: list[float | EngineError]
    clock: float = 1000.0
    start_seconds: float = 1.0
    begun: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        if not self.given:
            raise KeyboardInterrupt

    def wide(self, restart: Point) -> Any:
        raise AssertionError("nothing is searched")

    @contextlib.contextmanager
    def plain(self, point: Point) -> Iterator[Bench]:
        assert point == DEFAULTS
        self.begun.append(self.clock)
        self.clock += 1.0
        if isinstance(self.given[0], EngineError):
            raise cast(EngineError, self.given.pop(0))
        yield self

    def move(self, point: Point) -> None:
        assert point == {}

    def alone(self) -> list[float]:
        return []

    def measure(self, recipe: Recipe, *, arm: str, seed: int, patience: int = 1) -> Measured:
        self.clock += 10.0
        p95 = cast(float, self.given.pop(0))
        figures = {"p95_ttft": Figure(p95), "qps": Figure(8.0), "memory_share": Figure(0.1)}
        return Measured(judge(recipe.targets, figures, steady=True), {}, Load(), True, 10.0)


class Silent:
    """Events that nobody watches."""

    def say(self, text: str) -> None: ...
    def stage(self, text: str) -> None: ...
    def watch(self, share: float, text: str) -> None: ...
    def done(self, trial: Trial) -> None: ...


def watched(folder: Path, given: list[float | EngineError], held: bool = False) -> tuple[list[Verdict], Run, Bench]:
    """What a watch every hour sees until Ctrl-C."""
    bench = Bench(given)
    run = Run(RECIPE, SPACE, Study(folder, SPACE, 1), 1, bench.clock + 100.0, Silent(), bench)
    seen: list[Verdict] = []
    with pytest.raises(KeyboardInterrupt):
        for look in again.looks(run, held=held, every=3600.0, budget=100.0, sleep=bench.sleep):
            seen.append(look)
    return seen, run, bench


DEAD = EngineError("it did not start", "see the log", stage="start")


def test_a_watch_looks_once_an_hour_and_tells_when_it_no_longer_holds(tmp_path: Path) -> None:
    seen, run, bench = watched(tmp_path, [0.4, 1.5, DEAD, 0.3])
    assert [look.outcome for look in seen] == ["met", "infeasible", "inconclusive", "met"]
    assert [look.sentence.partition(":")[0] for look in seen] == [
        "it holds",
        "it no longer holds",
        "inconclusive",
        "it still holds",
    ]
    assert bench.begun == [1000.0, 4600.0, 8200.0, 11800.0]
    assert [t.state for t in run.study.trials()] == ["met", "missed", "failed", "met"], "each is kept as it ends"
    assert run.deadline == 11900.0
    end = again.summed(seen)
    assert (end.outcome, end.exit_code, end.trial) == ("infeasible", 3, seen[1].trial)
    assert end.sentence.startswith("of 4 looks 2 held, 1 did not, 1 said nothing; it no longer holds: p95_ttft 1.5 s")


def test_a_look_that_takes_longer_than_an_hour_is_followed_by_the_next_at_once(tmp_path: Path) -> None:
    bench = Bench([0.4, 0.4])
    run = Run(RECIPE, SPACE, Study(tmp_path, SPACE, 1), 1, bench.clock + 100.0, Silent(), bench)
    looks = again.looks(run, held=False, every=5.0, budget=100.0, sleep=bench.sleep)
    assert [next(looks).outcome, next(looks).outcome] == ["met", "met"]
    assert bench.begun == [1000.0, 1011.0]


def test_a_watch_of_what_cannot_be_started_ends_at_once(tmp_path: Path) -> None:
    bench = Bench([DEAD])
    run = Run(RECIPE, SPACE, Study(tmp_path, SPACE, 1), 1, bench.clock + 100.0, Silent(), bench)
    with pytest.raises(EngineError, match="it did not start"):
        next(again.looks(run, held=True, every=5.0, budget=100.0, sleep=bench.sleep))


def test_a_watch_that_saw_it_hold_says_so_and_one_that_saw_nothing_is_inconclusive() -> None:
    held, blind = again.judged(measured(0, 0.4), True), again.judged(FAILED, True)
    assert again.summed([held, blind]).exit_code == 0
    assert again.summed([held]).sentence.startswith("of 1 look 1 held; it still holds: ")
    assert (again.summed([blind, blind]).exit_code, again.summed([blind]).trial) == (4, FAILED)


def test_the_best_point_of_a_study_is_where_another_one_begins_with_what_its_space_has(tmp_path: Path) -> None:
    best = measured(1, 0.4, **{CAP: 64, POLICY: "token_aware"})
    found = studies.load(kept(tmp_path, "one", trials=[TRIALS[0], best, measured(2, 1.2, **{CAP: 16}), FAILED]))
    assert studies.best_point(found, SPACE) == {CAP: 64, POLICY: "token_aware"}
    narrow = Space({CAP: (16, 128)}, {CAP: 128, "api-server-count": None}, {"api-server-count": (4,)})
    with pytest.raises(UsageError, match="one has no other settings than the defaults"):
        studies.best_point(found, narrow)
    wide = Space({CAP: (64, 128)}, narrow.defaults, narrow.restart)
    assert studies.best_point(found, wide) == {CAP: 64, "api-server-count": None}
    starving = Space({CAP: (64, 128)}, {CAP: 128, BUDGET: 32})
    with pytest.raises(UsageError, match=rf"one has a best point that would be {CAP}=64 {BUDGET}=32 here: a token budget below"):
        studies.best_point(found, starving)
    with pytest.raises(UsageError, match="two has no measured trial"):
        studies.best_point(studies.load(kept(tmp_path, "two", trials=[FAILED])), SPACE)
