"""`fenno soak`: killed with SIGKILL it goes on where it was, and a server that dies is a finding and not the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from stub.harness import Done, Place, side_by_side
from stub.waiting import until

from fenno.compare import block as making
from fenno.compare import run, soak, words
from fenno.compare.block import Arm, Making
from fenno.compare.run import Blocks
from fenno.errors import DiskError, EngineError, FennoError, LoadError, UsageError
from fenno.load import job, raw
from fenno.load.plan import Plan
from fenno.recipe import Recipe, load

WAYS = ("--rate", 30, "--each", "5s", "--blocks", 3, "--warmup", "300ms")


class Ran(NamedTuple):
    done: Done
    place: Place

    @property
    def folder(self) -> Path:
        return Path(self.place.folder, self.done.document["records"])


class Killed(NamedTuple):
    """A soak that was killed within a block, then given again: when the blocks that were over then were written, and the records
    of those that were not, each by its folder's name."""

    done: Done
    place: Place
    written: dict[str, int]
    lost: dict[str, int]


def interrupted(place: Place) -> Killed:
    """Killed within a block of the second round, or of the third where the kill came between two blocks."""
    arms = [place.recipe(name=name, env={"STUB_BASE_MS": ms}) for name, ms in (("original", 200), ("tuned", 40))]
    folder = place.folder / "fenno-soaks"

    def killed(number: str) -> tuple[dict[str, int], dict[str, int]]:
        soaking = place.start("soak", *arms, *WAYS)
        soaking.until(lambda _: any(path.stat().st_size for path in folder.glob(f"*/{number}-?/records-*")))
        soaking.signal(signal.SIGKILL)
        soaking.finish()
        until(lambda: place.empty(0.1))
        written = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/???-?/block.json")}
        return written, {path.name: len(list(raw.records(path))) for path in folder.glob("*/???-?") if path.name not in written}

    written, lost = killed("002")
    if not lost:
        written, lost = killed("003")
    return Killed(place.fenno("soak", *arms, *WAYS), place, written, lost)


def deadly(place: Place) -> Ran:
    """The second recipe's server dies after 20 requests, whenever it is started."""
    recipe = place.recipe(name="deadly", env={"STUB_DIE": 20})
    return Ran(place.fenno("soak", place.recipe(), recipe, *WAYS), place)


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    with side_by_side({"interrupted": interrupted, "deadly": deadly}, tmp_path_factory.mktemp) as tell:
        yield tell


@pytest.mark.scenario
def test_the_same_command_goes_on_after_a_kill_and_ends_with_the_table(came: Callable[[str], Any]) -> None:
    done, place, written, lost = came("interrupted")
    assert done.code in (0, 4), done.err  # 4: this host was too busy to measure
    assert f"going on after {len(written)} blocks" in done.err
    assert "P95 TTFT" in done.err
    folder = place.folder / done.document["records"]
    assert {"001-A", "001-B"} <= written.keys()
    kept = json.loads((folder / "soak.json").read_text())
    assert next(iter(kept)) == "schema" and kept["findings"] == done.document["findings"]
    assert {name: (folder / name / "block.json").stat().st_mtime_ns for name in written} == written, "measured once"
    aside = [(path.name.partition(making.ENDED)[0], len(list(raw.records(path)))) for path in folder.glob(f"*{making.ENDED}*")]
    assert lost.items() <= set(aside), "what was recorded before the kill is still there"
    assert not written.keys() & {name for name, _ in aside}


@pytest.mark.scenario
def test_its_table_is_of_all_blocks(came: Callable[[str], Any]) -> None:
    done = came("interrupted").done
    if not done.document["valid"]:
        pytest.skip("this host was too busy to measure")
    assert {name: arm["blocks"] for name, arm in done.document["arms"].items()} == {"A": 3, "B": 3}
    states = {each["metric"]: each["state"] for each in done.document["findings"]}
    assert states["p95_ttft"] == "better"
    assert done.document["arms"]["B"]["figures"]["p95_ttft"]["low"] is not None
    assert "p95_ttft" in [each["metric"] for each in done.document["creep"]["A"]]


@pytest.mark.scenario
def test_a_server_that_dies_is_started_again_for_its_next_block_and_told_of(came: Callable[[str], Any]) -> None:
    ran = came("deadly")
    assert ran.done.code == 5, ran.done.err
    deaths = ran.done.document["deaths"]
    assert list(deaths) == ["B"]
    assert 3 <= len(deaths["B"]) <= 6, "a round a death, and no hot loop"
    assert len(ran.place.starts()) == 2 * len(deaths["B"])
    assert ran.done.document["arms"]["B"]["figures"]["availability"]["value"] < 1
    assert f"the server of B died {len(deaths['B'])} time(s)" in ran.done.err


@pytest.mark.scenario
def test_nothing_is_left_of_it(came: Callable[[str], Any]) -> None:
    assert came("interrupted").place.empty()
    assert came("deadly").place.empty()


def test_a_start_that_may_succeed_later_is_tried_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "PAUSES", (0.0, 0.0))
    said: list[str] = []

    def tried(failing: int, again: str, kind: type[FennoError] = EngineError) -> tuple[Any, int]:
        calls = []

        def make() -> dict[str, Any]:
            calls.append(1)
            if len(calls) <= failing:
                raise EngineError("no memory", again=again) if kind is EngineError else kind("it ended early")
            return {}

        try:
            return making.patiently(make, said.append), len(calls)
        except EngineError as error:
            return error, len(calls)

    assert tried(0, "perhaps") == ({}, 1)
    assert tried(2, "perhaps") == ({}, 3)
    assert tried(3, "yes")[1] == 3
    assert tried(1, "no")[1] == 1
    assert said[0] == "no memory; again in 0 s"
    assert tried(2, "perhaps", LoadError) == ({}, 3), "so is a load client that died"


@pytest.mark.scenario
def test_a_server_that_dies_before_its_first_answer_is_a_death_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    monkeypatch.setenv(*place.mark.split("=", 1))
    chosen = load(place.recipe(env={"STUB_DIE": 1}))  # of the request that makes it ready
    (arm,), its = arms_of(chosen), Making(job.plan(chosen, rate=30.0, duration=1.0), tmp_path / "soak")
    found = Blocks({"A": []}, paired=True)
    for number in (0, 0, 1):
        told = making.kept([arm], its, number, print)["A"]
        assert (told["ended"]["how"], told["requests"]) == ("gone", 0)
        assert "the engine ended: " in told["ended"]["why"]
    found.add(0, {"A": told})
    assert len(place.starts()) == 2, "the first block is known from its file the second time"
    assert its.fitted == {}, "what it takes is asked again"
    document = run.document(found, [arm], None, None)
    assert document["arms"]["A"]["figures"]["availability"]["value"] == 0
    assert document["deaths"] == {"A": [told["ended"]["why"]]}
    assert words.exit_code(document) == 5


def test_what_fails_within_a_soak_is_called_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = job.of_url("http://127.0.0.1:8000", "m", "completions", None)
    plan = job.plan(url, rate=2.0, duration=10.0)

    def failing(*_: object) -> NoReturn:
        raise BlockingIOError("a pipe is full")

    monkeypatch.setattr(making, "make", failing)
    with pytest.raises(BlockingIOError, match="a pipe is full"):
        soak.soak(arms_of(url), Making(plan, tmp_path / "soak"), 3, print, lambda _: {})
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="file/soak: Not a directory"):
        soak.soak(arms_of(url), Making(plan, tmp_path / "file" / "soak"), 3, print, lambda _: {})


def test_a_round_side_by_side_is_kept_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, rounds = job.of_url("http://127.0.0.1:8000", "m", "completions", None), list[int]()

    def made(arms: list[Arm], _: Making, number: int) -> dict[str, Any]:
        rounds.append(number)
        return {arm.name: {**block("done"), "requests": 0, "round": len(rounds)} for arm in arms}

    monkeypatch.setattr(making, "make", made)
    its = Making(job.plan(recipe, rate=2.0, duration=10.0), tmp_path, ("0", "1"))
    first = making.kept(arms_of(recipe, recipe), its, 0, print)
    assert making.kept(arms_of(recipe, recipe), its, 0, print) == first
    assert rounds == [0]
    (tmp_path / "001-B" / "block.json").unlink()  # killed between the two
    assert making.kept(arms_of(recipe, recipe), its, 0, print)["A"]["round"] == 2
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == ["001-A", "001-A-e", "001-B", "001-B-e"]


def arms_of(*recipes: Recipe) -> list[Arm]:
    return [Arm(letter, recipe.name, recipe) for letter, recipe in zip("ABC", recipes, strict=False)]


def test_the_same_command_finds_its_folder_and_any_other_has_another(tmp_path: Path) -> None:
    recipe = job.of_url("http://127.0.0.1:8000", "m", "completions", None)
    other = recipe.model_copy(update={"name": "other"})
    plan: Plan = job.plan(recipe, rate=2.0, duration=10.0)
    mine = soak.folder_of(arms_of(recipe, other), plan, 3, tmp_path)
    assert mine == soak.folder_of(arms_of(recipe, other), job.plan(recipe, rate=2.0, duration=10.0), 3, tmp_path)
    assert mine.name.startswith("url-other-")
    others = [
        soak.folder_of(arms_of(other, recipe), plan, 3, tmp_path),
        soak.folder_of(arms_of(recipe, other), plan, 4, tmp_path),
        soak.folder_of(arms_of(recipe, other), job.plan(recipe, rate=2.0, duration=10.0, seed=2), 3, tmp_path),
        soak.folder_of(arms_of(recipe, recipe), plan, 3, tmp_path),
        soak.folder_of(arms_of(recipe, other), plan, 3, tmp_path, ["0", "1"]),
    ]
    assert len({mine, *others}) == 6


def test_a_soak_whose_token_is_another_one_is_the_same_soak(tmp_path: Path) -> None:
    def folder(**env: str) -> Path:
        mine = Recipe.model_validate({"name": "one", "engine": {"model": "m", "env": env}})
        return soak.folder_of(arms_of(mine, mine), job.plan(mine, rate=2.0, duration=10.0), 3, tmp_path)

    assert folder(HF_TOKEN="hf_old") == folder(HF_TOKEN="hf_new")
    assert folder(OMP_NUM_THREADS="1") != folder(OMP_NUM_THREADS="2")


def test_two_at_once_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    recipe = job.of_url("http://127.0.0.1:8000", "m", "completions", None)
    plan = job.plan(recipe, rate=2.0, duration=10.0)
    with soak._alone(tmp_path), pytest.raises(UsageError, match="another fenno measures into"):
        soak.soak(arms_of(recipe), Making(plan, tmp_path), 3, print, lambda _: {})


def block(how: str, completed: int = 100) -> dict[str, Any]:
    latency = {"p50": 100.0, "p95": 200.0}
    part = {**dict.fromkeys(("ttft", "tpot", "e2el", "gap"), latency), "requests": 100, "completed": completed, "qps": 10.0}
    part["availability"] = completed / 100
    reasons = [] if how == "done" else [f"the run did not end well: {how}"]
    ended = {"how": how, "why": "" if how == "done" else "CUDA error"}
    return {**part, "classes": {"all": part}, "server": {"memory": None}, "client": {}, "reasons": reasons, "ended": ended}


@pytest.mark.parametrize("reasons", [["the run did not end well"], []])
def test_blocks_in_which_a_server_died_count_for_availability_alone(reasons: list[str]) -> None:
    found = Blocks({"A": [], "B": []}, paired=True)
    for number in range(4):
        died = {**block("gone", 50), "reasons": reasons}
        wrong = found.add(number, {"A": block("done"), "B": died if number == 1 else block("done")})
        assert bool(wrong) == (number == 1)
    document = run.document(found, arms_of(*[job.of_url("http://127.0.0.1:8000", "m", "completions", None)] * 2), None, None)
    assert document["arms"]["B"]["blocks"] == document["arms"]["A"]["blocks"] == 3, "the round is left out for both"
    assert document["arms"]["B"]["figures"]["availability"]["value"] == pytest.approx((3 * 1.0 + 0.5) / 4)
    assert document["arms"]["A"]["figures"]["availability"]["value"] == 1.0
    assert document["deaths"] == {"B": ["CUDA error"]}
    assert "the server of B died 1 time(s): CUDA error" in words.lines(document)
    assert words.exit_code(document) == 5


def test_what_grows_within_blocks_is_told() -> None:
    found = Blocks({"A": [], "B": []}, paired=True)
    for number in range(6):
        grown = {**block("done"), "halves": [block("done"), {**block("done"), "ttft": {"p50": 100.0, "p95": 240.0 + number}}]}
        level = {**block("done"), "halves": [block("done"), {**block("done"), "ttft": {"p50": 100.0, "p95": 200.0 + number % 2}}]}
        found.add(number, {"A": level, "B": grown})
    document = run.document(found, arms_of(*[job.of_url("http://127.0.0.1:8000", "m", "completions", None)] * 2), None, None)
    states = {arm: {f["metric"]: f["state"] for f in findings} for arm, findings in document["creep"].items()}
    assert states["B"]["p95_ttft"] == "worse"
    assert states["A"]["p95_ttft"] != "worse"
    told = [line for line in words.lines(document) if "within its blocks" in line]
    assert len(told) == 1
    assert told[0].startswith("B, within its blocks: p95_ttft +21.")


def test_one_recipe_alone_has_a_table_of_its_own() -> None:
    found = Blocks({"A": []}, paired=True)
    for number in range(3):
        found.add(number, {"A": block("done")})
    document = run.document(found, arms_of(job.of_url("http://127.0.0.1:8000", "m", "completions", None)), 0.995, None)
    assert words.header(document) == ("95 % intervals", "A")
    assert [row[0] for row in words.rows(document)] == ["QPS", "P95 TTFT", "memory", "availability"]
    assert "A: " in words.sentence(document)
