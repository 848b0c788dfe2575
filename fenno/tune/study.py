"""The study: an Optuna study in the study's own folder (SQLite) or in a database that several workers share, one finished trial a
row. Raw records lie in the folder of the worker that measured.

Whatever is killed, finished trials are kept: a trial is written when it ends, and `Study` finds it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fenno.recipe import Scalar
from fenno.tune import claims
from fenno.tune import storage as storages
from fenno.tune.claims import Claim, Claims
from fenno.tune.propose import Limit, Proposal, Tried
from fenno.tune.space import Point, Space, canonical, legal

State = Literal["met", "missed", "unclear", "invalid", "failed"]
FACTS, SETTLED = "facts", "verdict"


@dataclass(frozen=True)
class Trial:
    """One finished trial. `judgement` is `Judgement.as_dict()`, `summary` the load's figures; `reason` says why it failed;
    `rate` is what was offered, in requests a second; `cold` counts the study's cold starts from 1, and is 0 on a wide engine;
    `worker` says who made it, where several may."""

    number: int
    point: dict[str, Scalar]
    origin: str
    why: str
    state: State
    score: float
    seconds: float
    judgement: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    limit: Limit | None = None
    reason: str = ""
    rate: float = 0.0
    cold: int = 0
    worker: str = ""

    @property
    def measured(self) -> bool:
        return self.state in ("met", "missed", "unclear")

    @property
    def other_outputs(self) -> bool:
        """Whether it was seen to say other things than the defaults do, unasked: however fast, no winner."""
        return bool(self.summary.get("outputs", {}).get("state") == "moved")

    def tried(self) -> Tried:
        """What the rules need of it."""
        return Tried(self.point, self.score, self.limit or Limit("unknown", ""))


def from_dict(data: Mapping[str, Any]) -> Trial:
    """What `asdict` has made of a trial."""
    limit = data["limit"]
    return Trial(**{**data, "limit": Limit(**limit) if limit else None})


class Study:
    """The trials of one recipe, in `folder/study.db`, or in the database at `storage` under `name`, where other workers may have
    theirs too. `folder` is this worker's own in any case. Raises `DiskError`, `UsageError`."""

    def __init__(
        self, folder: Path, space: Space, seed: int, storage: Any = None, name: str | None = None, beat: float = claims.BEAT
    ) -> None:
        import optuna

        self.folder = folder
        self.space = space
        self.shared = isinstance(storage, str)
        self.worker = f"{platform.node()}-{os.getpid()}" if self.shared else ""
        self._where: object = storages.shown(storage) if self.shared else folder
        self._distributions = {knob: optuna.distributions.CategoricalDistribution(values) for knob, values in space.every.items()}
        with storages.kept(self._where):
            folder.mkdir(parents=True, exist_ok=True)
            # Anything but an address is a storage of Optuna's own.
            address = storages.own(folder) if storage is None else storage
            kept = storages.reach(address) if isinstance(address, str) else address
            self._study = optuna.create_study(
                study_name=name or folder.name, storage=kept, direction="minimize", load_if_exists=True
            )
            self._claims = Claims(self._study, kept, self._where if self.shared else None, beat)
            # Another worker, or a run that goes on with an earlier one, draws other points.
            drawn = len(self._study.get_trials(deepcopy=False))
            self._study.sampler = optuna.samplers.TPESampler(seed=seed + drawn, n_startup_trials=4)
            if not self.shared:
                self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        """A point that was asked for when fenno was killed counts for nothing."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def trials(self) -> list[Trial]:
        """All finished trials of all workers, in the order in which they ended; `number` is their place in it."""
        with storages.kept(self._where):
            return _finished(self._study)

    def add(self, trial: Trial) -> None:
        """Write a finished trial. Failed and invalid ones are kept too, as what they are."""
        from optuna.trial import TrialState, create_trial

        trial = replace(trial, worker=self.worker)
        # One call, one transaction: a kill leaves the whole trial or nothing of it.
        finished = create_trial(
            state=TrialState.COMPLETE if trial.measured else TrialState.FAIL,
            # The sampler compares trials at different rates: the same score where twice as much was asked for is better.
            value=trial.score / _asked(trial) if trial.measured else None,
            params={knob: trial.point[knob] for knob in self._distributions if knob in trial.point},
            distributions={knob: d for knob, d in self._distributions.items() if knob in trial.point},
            user_attrs={"trial": json.dumps(asdict(trial))},
        )
        with storages.kept(self._where):
            self._study.add_trial(finished)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Be one of the workers of this study while the block lasts."""
        with self._claims.present():
            yield

    def others(self) -> list[Claim]:
        """What other workers do now; nothing where there can be none."""
        return self._claims.others()

    def idle(self, idle: bool) -> None:
        """Say whether this worker waits for others."""
        self._claims.idle(idle)

    @contextlib.contextmanager
    def claimed(self, claim: Claim, seen: int) -> Iterator[bool]:
        """Whether this worker may do what `claim` says, and does while the block lasts; no other may then.

        `seen`: how many finished trials were known when it was decided on. What another has measured since is not measured again,
        and nothing is confirmed once there is a verdict.
        """

        def done() -> bool:
            if claim.kind == "confirmation":
                return self.settled() is not None
            made = [t for t in self.trials()[seen:] if t.point == claim.point]
            return (claim.kind == "start" and bool(made)) or any(t.rate == claim.rate for t in made)

        with self._claims.hold(claim, done) as mine:
            yield mine

    def begun(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The facts that the first worker's figures depend on: `facts` where this is the first."""
        with storages.kept(self._where):
            known = _first(self._study, FACTS) or self._say(FACTS, json.dumps(facts, default=str))
        return dict(json.loads(known))

    def settle(self, verdict: dict[str, Any]) -> None:
        """Tell all workers that the search is over. The first word holds."""
        if self.shared and self.settled() is None:
            with storages.kept(self._where):
                self._say(SETTLED, json.dumps(verdict))

    def settled(self) -> dict[str, Any] | None:
        """What `settle` was told, by whichever worker; None while the search goes on."""
        if not self.shared:
            return None
        with storages.kept(self._where):
            text = _first(self._study, SETTLED)
        return json.loads(text) if text else None

    def _say(self, kind: str, text: str) -> str:
        """Say a word to all workers. Returns the first one of its kind: another may have spoken at the same moment."""
        from optuna.trial import TrialState, create_trial

        # A trial, since an attribute of the study would be the last one's, and trials have numbers.
        self._study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={kind: text}))
        return _first(self._study, kind) or text

    def sample(self, restart: Point | None, attempts: int = 50) -> Proposal | None:
        """A legal point that was not tried yet under the flags of `restart`, from Optuna's sampler; None when it finds none.

        `restart`: None where these flags are to be drawn as well.
        """
        from optuna.trial import TrialState

        seen = [*(t.point for t in self.trials()), *(claim.point for claim in self.others())]
        among = self.space.listed if restart is None else self.space.values
        drawn = {knob: d for knob, d in self._distributions.items() if knob in among}
        for _ in range(attempts):
            asked = self._study.ask(drawn)
            self._study.tell(asked, state=TrialState.PRUNED)
            point = canonical({**self.space.defaults, **(restart or {}), **asked.params}, self.space)
            if legal(point) and point not in seen:
                return Proposal(point, "no rule speaks: the sampler's choice", "sampler")
        return None


def shared_name(storage: str, key: str, fresh: bool) -> str:
    """The name of the study of `key` in a shared database that all workers come to: the last one, or a new one where that is over.

    `fresh`: a new one in any case. Raises `DiskError`.
    """
    import optuna

    with storages.kept(storages.shown(storage)):
        reached = storages.reach(storage)
        names = optuna.get_all_study_names(storage=reached)
        last = max((int(n.removeprefix(f"{key}-")) for n in names if re.fullmatch(re.escape(key) + r"-\d+", n)), default=0)
        over = last == 0 or _first(optuna.load_study(study_name=f"{key}-{last}", storage=reached), SETTLED) is not None
    return f"{key}-{last + (fresh or over)}"


def stored(folder: Path, shared: Mapping[str, str] | None = None) -> list[Trial]:
    """The finished trials of the study in `folder`, oldest first, whoever runs it now; none where none was begun. Changes nothing.

    `shared`: the `url` and the `name` of a study in a database elsewhere. Raises `DiskError` for what is no study.
    """
    import optuna

    if shared is None and not (folder / "study.db").is_file():
        return []
    with storages.kept(shared["url"] if shared else folder):
        storage = storages.reach(shared["url"] if shared else storages.own(folder))
        # In a folder it is the only one there, if fenno came so far, and a folder that was moved or copied has another name.
        names = [shared["name"]] if shared else optuna.get_all_study_names(storage)
        return [trial for name in names for trial in _finished(optuna.load_study(study_name=name, storage=storage))]


def _asked(trial: Trial) -> float:
    """What was asked of a point, in requests a second: the goodput to show, else the rate."""
    goodput = (row["limit"] for row in trial.judgement.get("findings", ()) if row["target"] == "goodput")
    return float(next(goodput, trial.rate)) or 1.0


def _first(study: Any, kind: str) -> str | None:
    """The first word of its kind. Numbers are given one after the other: the lowest holds, whoever looks."""
    said = {t.number: str(t.user_attrs[kind]) for t in study.get_trials(deepcopy=False) if kind in t.user_attrs}
    return said[min(said)] if said else None


def _finished(study: Any) -> list[Trial]:
    """The trials of an Optuna study that have ended, oldest first."""
    ended = (from_dict(json.loads(t.user_attrs["trial"])) for t in study.get_trials(deepcopy=False) if "trial" in t.user_attrs)
    return [replace(trial, number=number) for number, trial in enumerate(ended)]
