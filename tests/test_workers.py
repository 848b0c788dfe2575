"""Several workers on one study: real processes on a replayed engine, one SQLite or a real PostgreSQL between them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from stub import worker
from stub.waiting import until

from fenno.errors import DiskError, UsageError
from fenno.tune import storage as storages
from fenno.tune import study as studies
from fenno.tune.capacity import Maximize
from fenno.tune.claims import MISSED, Claim, Pulse
from fenno.tune.space import CAP, Space
from fenno.tune.study import Study, Trial, shared_name

SPACE = Space({CAP: (16, 64, 128)}, {CAP: 128})
POINT = {CAP: 64}


def told(point: dict[str, Any], state: Any = "missed", rate: float = 8.0) -> Trial:
    return Trial(0, point, "rule", "", state, 1.5, 1.0, rate=rate)


def joined(folder: Path, url: str, beat: float = 10.0) -> Study:
    return Study(folder, SPACE, 1, url, "shared", beat)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}"


def test_what_one_worker_measures_no_other_does(tmp_path: Path, url: str) -> None:
    one, two = joined(tmp_path / "one", url), joined(tmp_path / "two", url)
    claim = Claim("trial", POINT, 8.0)
    with one.present(), two.present():
        with one.claimed(claim, 0) as first, two.claimed(claim, 0) as second:
            assert (first, second) == (True, False)
            assert two.others()[1:] == [claim] and one.others()[1:] == []
            with two.claimed(Claim("trial", POINT, 9.0), 0) as other_rate, two.claimed(Claim("start", POINT), 0) as start:
                assert other_rate and start
            one.add(told(POINT))
        with two.claimed(claim, 0) as late, two.claimed(claim, 1) as knowing:
            assert (late, knowing) == (False, True), "it was measured since, unless it was known when this was decided on"
    assert one.others() == two.others() == []


def test_trials_of_all_workers_are_numbered_in_the_order_in_which_they_end(tmp_path: Path, url: str) -> None:
    one, two = joined(tmp_path / "one", url), joined(tmp_path / "two", url)
    for study, cap in ((one, 16), (two, 64), (one, 128)):
        study.add(told({CAP: cap}))
    assert [(t.number, t.point[CAP]) for t in two.trials()] == [(0, 16), (1, 64), (2, 128)]
    assert one.trials() == two.trials() == studies.stored(tmp_path, {"url": url, "name": "shared"})


def test_a_worker_alone_writes_no_claims(tmp_path: Path) -> None:
    study = Study(tmp_path, SPACE, 1)
    with study.present(), study.claimed(Claim("trial", POINT, 8.0), 0) as mine:
        study.idle(True)
        assert mine and study.others() == [] and study.settled() is None
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
        assert database.execute("select count(*) from trials").fetchone() == (0,)


def test_a_worker_is_dead_when_it_shows_the_same_number_at_many_looks() -> None:
    pulse = Pulse(10.0)
    assert not any(pulse.dead(1, number, 10.0 * number) for number in range(50)), "it counts"
    looks = [pulse.dead(1, 49, 490.0 + 10.0 * more) for more in range(1, MISSED + 1)]
    assert looks == [False] * (MISSED - 1) + [True]
    assert not pulse.dead(1, 50, 9999.0), "it was not, after all"


def test_a_host_that_stood_still_takes_nobody_for_dead() -> None:
    pulse = Pulse(10.0)
    pulse.dead(1, 5, 0.0)
    assert not pulse.dead(1, 5, 3600.0) and not pulse.dead(1, 5, 3600.1)


def test_what_a_dead_worker_had_claimed_is_free(tmp_path: Path, url: str) -> None:
    claim = Claim("trial", POINT, 8.0)

    def claiming() -> None:
        gone = joined(tmp_path / "gone", url, beat=0.01)
        with gone.present(), gone.claimed(claim, 0):
            (tmp_path / "claimed").touch()
            time.sleep(300)

    study = joined(tmp_path / "mine", url, beat=0.01)
    with forked(claiming) as pid, study.present():
        until((tmp_path / "claimed").exists)
        assert claim in study.others()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not study.others())
        with study.claimed(claim, 0) as mine:
            assert mine


def test_a_worker_that_was_taken_for_dead_says_that_it_lives(tmp_path: Path, url: str) -> None:
    one, two = joined(tmp_path / "one", url, beat=0.01), joined(tmp_path / "two", url)
    with one.present(), two.present():
        (claim,) = two.others()
        running = two._claims._running()
        for number, other, _ in running:
            if other == claim and number != two._claims._worker:
                two._claims.end(number)
        until(lambda: [c.kind for c in two.others()] == ["worker"])


@pytest.mark.scenario
def test_the_first_verdict_is_that_of_all(tmp_path: Path, url: str) -> None:
    one, two = joined(tmp_path / "one", url), joined(tmp_path / "two", url)
    one.settle({"outcome": "met"})
    two.settle({"outcome": "infeasible"})
    assert one.settled() == two.settled() == {"outcome": "met"}


def test_of_two_workers_that_speak_at_the_same_moment_one_is_the_first_for_both(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = joined(tmp_path / "one", url), joined(tmp_path / "two", url)
    both, say = threading.Barrier(2), Study._say

    def together(study: Study, kind: str, text: str) -> str:
        both.wait(60)  # each has seen that nobody has spoken yet
        return say(study, kind, text)

    monkeypatch.setattr(Study, "_say", together)
    with ThreadPoolExecutor(2) as pool:
        facts = list(pool.map(lambda study, cores: study.begun({"cores": cores}), (one, two), (8, 64)))
        list(pool.map(lambda study, outcome: study.settle({"outcome": outcome}), (one, two), ("met", "infeasible")))
    assert facts[0] == facts[1]
    assert facts[0] in ({"cores": 8}, {"cores": 64})
    third = joined(tmp_path / "three", url)
    assert one.settled() == two.settled() == third.settled()
    assert one.settled() in ({"outcome": "met"}, {"outcome": "infeasible"})
    assert third.begun({}) == facts[0]
    assert third.trials() == []


def test_workers_come_to_the_study_that_is_not_over(tmp_path: Path, url: str) -> None:
    assert shared_name(url, "cpu-small-abc", fresh=False) == "cpu-small-abc-1"
    first = Study(tmp_path, SPACE, 1, url, "cpu-small-abc-1")
    Study(tmp_path, SPACE, 1, url, "cpu-small-abc-most-qps-7")
    assert shared_name(url, "cpu-small-abc", fresh=False) == "cpu-small-abc-1"
    assert shared_name(url, "cpu-small-abc", fresh=True) == "cpu-small-abc-2"
    first.settle({"outcome": "met"})
    assert shared_name(url, "cpu-small-abc", fresh=False) == "cpu-small-abc-2"


@pytest.mark.parametrize("text", ["shared.db", "sqlite://", "sqlite:///:memory:", "no-such-thing://host/name"])
def test_what_is_no_shared_database_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="database"):
        storages.reach(storages.address(text))


@pytest.mark.scenario
def test_a_database_that_is_not_there_is_a_sentence_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot keep a study in sqlite:///.*: .*unable to open"):
        joined(tmp_path, f"sqlite:///{tmp_path}/no/such/folder/shared.db")
    assert storages.shown("postgresql://me:secret@host/name") == "postgresql://me@host/name"


class Company:
    """Workers as processes, each in a folder of its own."""

    def __init__(self, folder: Path, storage: str) -> None:
        self.folder, self.storage = folder, storage
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, **options: Any) -> None:
        asked = json.dumps({"folder": str(self.folder / name), "storage": self.storage, **options})
        command = [sys.executable, worker.__file__, asked]
        with (self.folder / f"{name}.err").open("wb") as error:
            self.running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error)

    def told(self, name: str) -> dict[str, Any]:
        out, _ = self.running[name].communicate(timeout=200)
        assert self.running[name].returncode == 0, (self.folder / f"{name}.err").read_text()
        return dict(json.loads(out))

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()

    def trials(self) -> list[Trial]:
        return studies.stored(self.folder, {"url": self.storage, "name": "shared"})

    def lost(self, *names: str) -> list[list[Any]]:
        """What these workers had kept and what is not there."""
        kept = [[t.point, t.rate, t.score] for t in self.trials()]
        return [line for name in names for line in worker.noted(self.folder / name) if line not in kept]


PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path(shutil.which("postgres") or "/").parent)


@pytest.fixture
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL of one's own, on a socket in a folder of its own."""
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'fenno[postgres]'")
    if not (PROGRAMS / "initdb").exists():
        pytest.skip("PostgreSQL is not installed here")
    who: dict[str, Any] = {} if os.geteuid() else {"user": "nobody"}
    if who and "nobody" not in [each.pw_name for each in pwd.getpwall()]:
        pytest.skip("PostgreSQL refuses to run as root, and there is no user nobody")
    with tempfile.TemporaryDirectory() as folder:
        if who:
            shutil.chown(folder, "nobody")
            if subprocess.run(["test", "-w", folder], check=False, **who).returncode:
                pytest.skip(f"PostgreSQL refuses to run as root, and nobody may not enter {folder}: set TMPDIR")
        initdb = [PROGRAMS / "initdb", "-D", f"{folder}/data", "-U", "fenno", "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **who)
        serve = [PROGRAMS / "postgres", "-D", f"{folder}/data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(serve, stdout=log, stderr=log, cwd=folder, **who)

        def answers() -> bool:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(f"host={folder} user=fenno dbname=postgres").close()
                return True
            return False

        try:
            until(answers, 60, lambda: (Path(folder) / "log").read_text())
            yield f"postgresql://fenno:secret@/postgres?host={folder}"
        finally:
            # At once, whoever is still connected; and its children end with it.
            server.send_signal(signal.SIGINT)
            server.wait()


@pytest.fixture
def company(tmp_path: Path, url: str) -> Iterator[Company]:
    found = Company(tmp_path, url)
    yield found
    found.end()


# Surfaces with a search on them on which nothing is close to its limit: one can be met, the other not.
MET, INFEASIBLE = {"seed": 42, "ease": 2.0}, {"seed": 2}


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("surface", "options", "company_of", "outcome"),
    [
        (MET, {}, "trial", "met"),
        (MET, {"confirm": "full"}, "trial", "met"),
        (INFEASIBLE, {}, "trial", "infeasible"),
        # Between rates that are close to each other chance decides, and each has a budget of its own.
        (MET, {"maximize": "qps", "budget": 900.0}, "worker", ""),
        (MET, {"arm": "random"}, "start", "met"),
    ],
)
def test_two_workers_share_one_study_and_one_verdict(
    company: Company, surface: dict[str, Any], options: dict[str, Any], company_of: str, outcome: str
) -> None:
    for name in ("one", "two"):
        company.start(name, company=company_of, **surface, **options)
    one, two = company.told("one"), company.told("two")
    trials = company.trials()
    if outcome:
        assert (one["outcome"], one["sentence"]) == (two["outcome"], two["sentence"])
        assert one["outcome"] == outcome
        assert len({t.worker for t in trials if t.cold}) <= 1, "one of them confirms for both"
    live = [t for t in trials if t.origin != "confirmation"]
    twice = [(a, b) for a, b in combinations(live, 2) if (a.point, a.rate) == (b.point, b.rate)]
    assert [(a, b) for a, b in twice if a.state in ("missed", "failed")] == [], "what was plain is not measured again"
    if company_of == "trial":
        assert len({t.worker for t in live}) == 2
    assert company.lost("one", "two") == []


@pytest.mark.scenario
def test_sigkill_at_fifty_random_moments_costs_no_finished_trial(tmp_path: Path) -> None:
    draw, study, killed = random.Random(5), 0, 0
    for _ in range(50):
        folder = tmp_path / str(study)
        before = studies.stored(folder)
        enough = len(worker.noted(folder)) + draw.randrange(4)
        with forked(lambda folder=folder: worker.work(str(folder), maximize="qps", **MET)) as pid:  # type: ignore[misc]
            # From the opening of the database to the middle of a trial or of its commit: a search that is over begins anew.
            until(lambda: len(worker.noted(folder)) >= enough or ended(pid) is not None, 120)  # noqa: B023
            time.sleep(draw.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            code = ended(pid, wait=True)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        study += code == 0
        after = studies.stored(folder)
        assert after[: len(before)] == before
        kept = [[t.point, t.rate, t.score] for t in after]
        assert [line for line in worker.noted(folder) if line not in kept] == []
        if (folder / "study.db").exists():
            with contextlib.closing(sqlite3.connect(folder / "study.db")) as database:
                assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert killed
    verdict, whole = worker.work(str(folder), maximize="qps", **MET)
    assert verdict.over and whole.trials()[: len(after)] == after


@contextlib.contextmanager
def forked(work: Callable[[], object]) -> Iterator[int]:
    """The pid of a child that does `work`, for as long as the block lasts."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)  # nobody else has its number before it was waited for
        os.waitpid(pid, 0)


def ended(pid: int, wait: bool = False) -> int | None:
    """The exit code of a child of `forked`, negative for a signal's; None while it runs."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    return found and (found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


@pytest.mark.scenario
@pytest.mark.parametrize("maximize", [None, "qps"])
def test_a_worker_that_is_killed_costs_no_finished_trial_and_the_other_goes_on(company: Company, maximize: Maximize | None) -> None:
    kind = "worker" if maximize else "trial"
    for name in ("one", "two"):
        company.start(name, company=kind, maximize=maximize, beat=0.5, **MET)
    until(lambda: worker.noted(company.folder / "one") or worker.noted(company.folder / "two"), 120)
    company.running["one"].kill()
    company.running["one"].wait()
    assert company.told("two")["outcome"] == "met"
    assert company.lost("one", "two") == []


@pytest.mark.scenario
def test_two_workers_share_a_postgresql(tmp_path: Path, postgres: str) -> None:
    company = Company(tmp_path, postgres)
    try:
        for name in ("one", "two"):
            company.start(name, company="trial", **MET)
        one, two = company.told("one"), company.told("two")
        assert (one["outcome"], one["sentence"]) == (two["outcome"], two["sentence"]) and one["outcome"] == "met"
        assert len({t.worker for t in company.trials()}) == 2 and company.lost("one", "two") == []
        assert "secret" not in storages.shown(postgres)
    finally:
        company.end()


@pytest.mark.scenario
def test_a_worker_on_a_postgresql_that_is_killed_costs_no_finished_trial(tmp_path: Path, postgres: str) -> None:
    company = Company(tmp_path, postgres)
    try:
        for name in ("one", "two"):
            company.start(name, company="trial", beat=0.5, **MET)
        until(lambda: worker.noted(tmp_path / "one") or worker.noted(tmp_path / "two"), 120)
        company.running["one"].kill()
        assert company.told("two")["outcome"] == "met" and company.lost("one", "two") == []
    finally:
        company.end()
