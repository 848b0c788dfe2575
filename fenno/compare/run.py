"""Has the blocks of a comparison made: rounds of one block an arm, forwards and backwards in turn; or cuts stored runs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fenno import process
from fenno.compare import judge
from fenno.engine import command, server
from fenno.engine.server import Server
from fenno.errors import DiskError, EngineError, Interrupted, LoadError, UsageError
from fenno.load import endpoint, figures, loadtest, stored
from fenno.load.plan import Plan
from fenno.load.stored import Stored
from fenno.recipe import Recipe

PIECES = 10  # blocks that a stored run is cut into
PAUSES = (5.0, 30.0)  # seconds after a first and a second try that failed
DYING = 5.0  # seconds within which the end of a server is seen that answers nothing any more
ENDED = "-ended-"  # in the name of what there is of a block that was ended within it
AGAIN = 2  # rounds without a measurement that are made up for, at most, and one more for every three rounds


@dataclass(frozen=True)
class Arm:
    """One side of a comparison, called "A", "B" or "C": a recipe (of a URL too), or the folder of a stored run."""

    name: str
    what: str
    recipe: Recipe | None = None
    folder: Path | None = None


@dataclass
class Blocks:
    """What was measured: the blocks' documents by arm, and why other blocks are left out. `died`: those in which a server did."""

    arms: dict[str, list[dict[str, Any]]]
    paired: bool
    left_out: list[str] = field(default_factory=list)
    died: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    interrupted: str = ""  # how far it had come

    @property
    def gone(self) -> str:
        """The arm whose server was gone, and why; of several the first."""
        return next((f"{name}: {blocks[0]['ended']['why']}" for name, blocks in self.died.items()), "")

    def add(self, number: int, documents: Mapping[str, dict[str, Any]]) -> list[str]:
        """Take a round, whole or not at all. Returns why it is left out."""
        wrong = [f"round {number + 1}, {name}: {why}" for name, document in documents.items() for why in _against(document)]
        for name, document in documents.items():
            if document["ended"]["how"] == "gone":
                self.died.setdefault(name, []).append(document)
            if not wrong and len(documents) == len(self.arms):
                self.arms[name].append(document)
        self.left_out += wrong
        return wrong


def _against(document: Mapping[str, Any]) -> list[str]:
    """Why a block is no measurement. One whose server died is none, however little else was wrong with it."""
    gone = document["ended"]["how"] == "gone"
    return list(document["reasons"]) or (["its server was gone"] if gone else [])


def order(names: Sequence[str], number: int) -> list[str]:
    """The arms of round `number`, from 0: forwards, then backwards, so that a steady drift favours none (ABBA)."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def live(
    arms: Sequence[Arm],
    plan: Plan,
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
    after: Callable[[Blocks], None] | None = None,
) -> Blocks:
    """Make so many rounds; within one the arms get the same traffic, each with prompts that nobody saw before.

    An engine that fenno starts is started for each block. A round in which some block is no measurement is left out as a whole and
    made up for, a few times at most; so is one in which somebody presses Ctrl-C, which is the last. With `after`, called after each
    round, it lasts: blocks that lie in `folder` are not made again, and a server that is gone is started again for its next block.
    Raises as `server.serving` and `loadtest.measure` do.
    """
    found = Blocks({arm.name: [] for arm in arms}, paired=True)
    fitted: dict[str, Plan] = {}
    by_name = {arm.name: arm for arm in arms}
    for number in range(rounds + AGAIN + rounds // 3):
        documents: dict[str, dict[str, Any]] = {}
        try:
            for name in order(list(by_name), number):
                say(f"round {number + 1}: {name} ({by_name[name].what})")
                making = (by_name[name], plan, number, folder, fitted)
                documents[name] = kept(*making, say) if after else block(*making)
                if documents[name]["ended"]["how"] == "gone" and not after:
                    break
        except Interrupted:
            found.interrupted = f"after {len(found.arms[arms[0].name])} of {rounds} rounds"
            break
        for reason in found.add(number, documents):
            say(f"left out: {reason}")
        if after:
            after(found)
        if (found.gone and not after) or len(found.arms[arms[0].name]) == rounds:
            break
    return found


def kept(
    arm: Arm, plan: Plan, number: int, folder: Path, fitted: dict[str, Plan], say: Callable[[str], None]
) -> dict[str, Any]:
    """A block's document from an earlier call that was ended, or else of the block made now. What there is of a block that was
    ended within it is moved aside. One that fails and may succeed later is tried three times. Raises `DiskError`."""
    place = folder / f"{number + 1:03d}-{arm.name}"
    document = place / "block.json"

    def make() -> dict[str, Any]:
        with writing(place):
            if place.exists():
                place.rename(place.with_name(f"{place.name}{ENDED}{time.time_ns():x}"))
        return block(arm, plan, number, folder, fitted)

    with writing(place):
        if document.exists():
            return dict(json.loads(document.read_text(encoding="utf-8")))
    found = _patiently(make, say)
    with writing(place):
        if found["requests"]:
            found["halves"] = pieces(stored.read(place), found["client"], 2)
        process.write(document, json.dumps(found))
    return found


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Around what reads and writes files and does nothing else. Raises `DiskError`."""
    try:
        yield
    except OSError as error:
        hint = "free some space, and give the same command again, or choose another --out folder"
        raise DiskError(f"cannot keep {place}: {error.strerror or error}", hint) from error


def _patiently(make: Callable[[], dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    """A run of days does not end because a GPU's memory was not free again yet, or because a load client died."""
    for pause in PAUSES:
        try:
            return make()
        except (EngineError, LoadError) as error:
            if isinstance(error, EngineError) and error.again == "no":
                raise
            say(f"{error}; again in {pause:g} s")
            time.sleep(pause)
    return make()


def block(arm: Arm, plan: Plan, number: int, folder: Path, fitted: dict[str, Plan]) -> dict[str, Any]:
    """One load test of one arm. `fitted` keeps what an arm's endpoint takes, asked once. Raises `Interrupted` for one that was cut
    short, when its records and its ending are on disk, and `LoadError` where there was no traffic though the server lives."""
    assert arm.recipe is not None
    place = folder / f"{number + 1:03d}-{arm.name}"
    with server.serving(arm.recipe, place, headers=plan.headers) as running:
        try:
            if arm.name not in fitted:
                key, authority = command.key_variable(arm.recipe.engine), arm.recipe.engine.ca_file
                its = replace(plan, url=running.url, model=running.model, api_key_env=key, ca_file=authority)
                fitted[arm.name] = endpoint.fitted(its)
            before = len(list(folder.glob(f"{place.name}{ENDED}*")))  # such a block's prompts may be in a prefix cache
            prompts = f"{folder.name}-{place.name}" + (f"-{before}" if before else "")
            mine = replace(fitted[arm.name], url=running.url, seed=plan.seed + number, arm=prompts)
            found = loadtest.measure(mine, running, arm.recipe, place, probing=False)
        except LoadError:
            fitted.pop(arm.name, None)  # what a dying server takes says nothing
            if not (why := _death(running)):
                raise
            found = _unanswered(why)
    if found["ended"]["how"] == "interrupted":
        raise Interrupted
    return found


def _death(running: Server) -> str:
    """Why the server has ended, or is ending; nothing where it lives. Its port is closed before its end can be seen."""
    limit = time.monotonic() + DYING
    while running.child is not None and time.monotonic() < limit:
        try:
            running.check("load")
        except EngineError as error:
            return str(error)
        time.sleep(0.1)
    return ""


def _unanswered(why: str) -> dict[str, Any]:
    """The document of a block whose server died when it was ready, before it had answered anything."""
    nothing = {"requests": 0, "completed": 0, "availability": 0.0, "classes": {}}
    return {**nothing, "ended": {"how": "gone", "why": why}, "reasons": [f"its server ended before the first answer: {why}"]}


def from_disk(arms: Sequence[Arm]) -> Blocks:
    """Stored runs, each cut into pieces of equal time. Raises `UsageError` for a folder without a run."""
    found = Blocks({arm.name: [] for arm in arms}, paired=False)
    for arm in arms:
        assert arm.folder is not None
        whole = stored.read(arm.folder)
        told = loadtest.document(whole)
        found.left_out += [f"{arm.name}: {reason}" for reason in told["reasons"]]
        found.arms[arm.name] = pieces(whole, told["client"])
    return found


def pieces(whole: Stored, client: dict[str, Any], count: int = PIECES) -> list[dict[str, Any]]:
    """One stored run as so many blocks: the figures of each piece of its window, and the server's memory in it."""
    result, seen = whole.result, whole.seen
    start, end = result.state.start or 0.0, result.state.end or 0.0
    edges = [start + (end - start) * i / count for i in range(count + 1)]
    mine = figures.counted(result.requests)
    found = []
    for low, high in pairwise(edges):
        memory = seen.between(low, high).memory()
        part = figures.summarize(mine.where((low <= mine["scheduled"]) & (mine["scheduled"] < high)), (low, high))
        found.append({**part, "server": {"memory": {"max": max(memory)} if memory else None}, "client": client})
    return found


def chosen(names: Sequence[str], recipe_of: Callable[[str], Recipe], least: int = 2) -> list[Arm]:
    """What was named as arms A, B and C: folders with a stored run are that, all else is for `recipe_of`.

    Raises `UsageError` for fewer arms than `least` or more than three, and for stored runs beside what has yet to run.
    """
    if not least <= len(names) <= 3:
        raise UsageError(f"{len(names)} to compare", "give two or three: recipes, URLs, or folders of `fenno loadtest`")
    arms = []
    for letter, name in zip("ABC", names, strict=False):
        folder = Path(name) if Path(name).is_dir() else None
        arms.append(Arm(letter, name, None if folder else recipe_of(name), folder))
    if len({arm.folder is None for arm in arms}) > 1:
        raise UsageError("a stored run is compared with stored runs", "measure the others with `fenno loadtest` first")
    return arms


def document(
    found: Blocks, arms: Sequence[Arm], target: float | None, folder: Path | None, margin: float = judge.MARGIN
) -> dict[str, Any]:
    """The comparison as JSON: every arm's figures, every finding, and what it comes to. `target` (of availability) and `margin`
    (of equivalence) are shares."""
    first = arms[0].name
    enough = min(len(blocks) for blocks in found.arms.values()) >= judge.LEAST
    findings = judge.compare(found.arms, paired=found.paired, margin=margin) if enough else []
    own = {name: _own(blocks, found.died.get(name, ())) for name, blocks in found.arms.items()}
    return {
        "arms": {arm.name: {"what": arm.what, "blocks": len(found.arms[arm.name]), "figures": own[arm.name]} for arm in arms},
        "paired": found.paired,
        "margin": margin,
        "findings": [_finding(finding) for finding in findings],
        "verdict": {arm.name: judge.verdict([f for f in findings if f.arm == arm.name]) for arm in arms if arm.name != first},
        "availability_target": target,
        "availability": {name: judge.reaches(own[name].get("availability"), target) for name in own} if target else None,
        "valid": enough and (found.paired or not found.left_out),
        "left_out": found.left_out,
        "gone": found.gone,
        "creep": {name: [_finding(each) for each in creep(blocks)] for name, blocks in found.arms.items()},
        "deaths": {name: [block["ended"]["why"] for block in blocks] for name, blocks in found.died.items()},
        "interrupted": found.interrupted,
        "records": str(folder) if folder else None,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def creep(blocks: Sequence[dict[str, Any]]) -> list[judge.Finding]:
    """What grew or shrank within an arm's blocks: their second halves against the first ones, pair by pair; of long blocks only."""
    halves = [block["halves"] for block in blocks if "halves" in block]
    if len(halves) < judge.LEAST:
        return []
    first, second = ([each[i] for each in halves] for i in (0, 1))
    return [each for each in judge.compare({"first": first, "second": second}, paired=True) if each.metric.primary]


def _own(blocks: Sequence[dict[str, Any]], died: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """An arm's own figures by metric. Blocks in which its server died count for availability alone."""
    of = {m: judge.own(m, [*blocks, *died] if m.name == "availability" else blocks) for m in judge.metrics([*blocks, *died])}
    return {metric.label: vars(value) if value else None for metric, value in of.items()}


def _finding(finding: judge.Finding) -> dict[str, Any]:
    change = vars(finding.change) if finding.change else None
    how = {"by": "ratio" if finding.metric.by_ratio else "difference", "table": finding.metric.primary}
    facts = {"arm": finding.arm, "metric": finding.metric.label, **how, "change": change, "p": finding.p}
    return {**facts, "p_adjusted": finding.adjusted, "state": finding.state}
