"""Has the blocks of a comparison made: rounds of one block an arm, in turn or side by side; or cuts stored runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fenno.compare import block, judge
from fenno.compare.block import Arm, Documents, Making
from fenno.errors import Interrupted, UsageError
from fenno.load import loadtest, stored
from fenno.recipe import Recipe

AGAIN = 2  # rounds without a measurement that are made up for, at most, and one more for every three rounds


@dataclass
class Blocks:
    """What was measured: the blocks' documents by arm, and why other blocks are left out. `died`: those in which a server did."""

    arms: dict[str, list[dict[str, Any]]]
    paired: bool
    left_out: list[str] = field(default_factory=list)
    died: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    interrupted: str = ""  # how far it had come
    gpus: Sequence[str] = ()  # where the arms ran side by side, one place an arm

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


def order(names: Sequence[str], measured: int) -> list[str]:
    """The arms of the round after `measured` others: forwards, then backwards, so that a steady drift favours none (ABBA). A round
    that is made up for has the order of the one that was left out."""
    return list(names) if measured % 2 == 0 else list(reversed(names))


def live(
    arms: Sequence[Arm], making: Making, rounds: int, say: Callable[[str], None], after: Callable[[Blocks], None] | None = None
) -> Blocks:
    """Make so many rounds; within one the arms get the same traffic, each with prompts that nobody saw before.

    An engine that fenno starts is started for each block. A round in which some block is no measurement is left out as a whole and
    made up for, a few times at most; so is one in which somebody presses Ctrl-C, which is the last. With `after`, called after each
    round, it lasts: blocks that lie there are not made again, and a server that is gone is started again for its next block.
    Raises as `server.serving` and `loadtest.measure` do.
    """
    found = Blocks({arm.name: [] for arm in arms}, paired=True, gpus=making.gpus)
    by_name = {arm.name: arm for arm in arms}
    for number in range(rounds + AGAIN + rounds // 3):
        documents: Documents = {}
        making.measured = len(found.arms[arms[0].name])
        turns = [list(arms)] if making.gpus else [[by_name[name]] for name in order(list(by_name), making.measured)]
        try:
            for turn in turns:
                say(f"round {number + 1}: {', '.join(f'{arm.name} ({arm.what})' for arm in turn)}")
                documents |= block.kept(turn, making, number, say) if after else block.make(turn, making, number)
                if not after and any(documents[arm.name]["ended"]["how"] == "gone" for arm in turn):
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


def from_disk(arms: Sequence[Arm]) -> Blocks:
    """Stored runs, each cut into pieces of equal time. Raises `UsageError` for a folder without a run."""
    found = Blocks({arm.name: [] for arm in arms}, paired=False)
    for arm in arms:
        assert arm.folder is not None
        whole = stored.read(arm.folder)
        told = loadtest.document(whole)
        found.left_out += [f"{arm.name}: {reason}" for reason in told["reasons"]]
        found.arms[arm.name] = block.pieces(whole, told["client"])
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
        live = " and ".join(arm.what for arm in arms if arm.folder is None)
        said = f"a stored run is compared with stored runs, a folder each, and {live} is none"
        raise UsageError(said, "measure the others with `fenno loadtest` first")
    return arms


def check_gpus(gpus: Sequence[str], arms: Sequence[Arm]) -> None:
    """Raise `UsageError` for GPUs on which the arms cannot run side by side, each in every place."""
    if not gpus:
        return
    if len(arms) < 2:
        raise UsageError("--devices has recipes run side by side, and there is one", "leave it out, and set CUDA_VISIBLE_DEVICES")
    if len(gpus) != len(arms):
        times = "once" if len(gpus) == 1 else f"{len(gpus)} times"
        said = f"--devices was given {times} for {len(arms)} recipes"
        raise UsageError(said, "give it once for each recipe: --devices 0 --devices 1")
    places = [[_gpu(name.strip()) for name in place.split(",")] for place in gpus]
    named = [name for place in places for name in place]
    if len(set(named)) != len(named) or not all(named):
        raise UsageError(f"--devices {' and '.join(gpus)} share a GPU, or name none", "give each recipe GPUs of its own")
    recipes = [arm.recipe for arm in arms if arm.recipe is not None and not arm.recipe.engine.url]
    if len(recipes) < len(arms):
        raise UsageError("--devices is for engines that fenno starts", "compare URLs and stored runs without it")
    if len({len(place) for place in places}) > 1:
        said = f"--devices {' and '.join(gpus)} are not equally many"
        raise UsageError(said, "recipes change places: name as many GPUs for each")
    if (most := max(recipes, key=lambda recipe: recipe.engine.ranks)).engine.ranks > len(places[0]):
        said = f"{most.name} runs on {most.engine.ranks} GPUs, and --devices names {len(places[0])} for it"
        raise UsageError(said, "name as many for each recipe: --devices 0,1 --devices 2,3")


def _gpu(name: str) -> str:
    """The one spelling of a GPU: 00 is 0."""
    return str(int(name)) if name.isdecimal() else name


def document(
    found: Blocks, arms: Sequence[Arm], target: float | None, folder: Path | None, margin: float = judge.MARGIN
) -> dict[str, Any]:
    """The comparison as JSON: every arm's figures, every finding, and what it comes to. `target` (of availability) and `margin`
    (of equivalence) are shares."""
    first = arms[0].name
    enough = min(len(blocks) for blocks in found.arms.values()) >= judge.LEAST
    valid = enough and (found.paired or not found.left_out)
    findings = judge.compare(found.arms, paired=found.paired, margin=margin) if valid else []
    own = {name: _own(blocks, found.died.get(name, ())) for name, blocks in found.arms.items()}
    return {
        "arms": {arm.name: {"what": arm.what, "blocks": len(found.arms[arm.name]), "figures": own[arm.name]} for arm in arms},
        "paired": found.paired,
        "gpus": list(found.gpus) or None,
        "margin": margin,
        "findings": [_finding(finding) for finding in findings],
        "verdict": {arm.name: judge.verdict([f for f in findings if f.arm == arm.name]) for arm in arms if arm.name != first},
        "availability_target": target,
        "availability": {name: judge.reaches(own[name].get("availability"), target) for name in own} if target else None,
        "valid": valid,
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
