"""The study: an Optuna study in the study's own folder (SQLite), one finished trial a row, raw records beside it.

Whatever is killed, finished trials are kept: a trial is written when it ends, and `Study` finds it again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fenno.errors import DiskError
from fenno.recipe import Scalar
from fenno.tune.propose import Limit, Proposal, Tried
from fenno.tune.space import Point, Space, legal, live_part

State = Literal["met", "missed", "unclear", "invalid", "failed"]


@dataclass(frozen=True)
class Trial:
    """One finished trial. `judgement` is `Judgement.as_dict()`, `summary` the load's figures; `reason` says why it failed;
    `rate` is what was offered, in requests a second; `cold` counts the study's cold starts from 1, and is 0 on a wide engine."""

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


def from_json(text: str) -> Trial:
    data = json.loads(text)
    limit = data.pop("limit")
    return Trial(**data, limit=Limit(**limit) if limit else None)


class Study:
    """The trials of one recipe on one host, in `folder/study.db`."""

    def __init__(self, folder: Path, space: Space, seed: int, storage: str | None = None) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder = folder
        self.space = space
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
        self._distributions = {knob: optuna.distributions.CategoricalDistribution(values) for knob, values in space.values.items()}
        with _kept(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._study = optuna.create_study(
                study_name=folder.name,
                storage=storage or f"sqlite:///{folder / 'study.db'}",
                sampler=sampler,
                direction="minimize",
                load_if_exists=True,
            )
            self._forget_unfinished()

    def _forget_unfinished(self) -> None:
        """A trial that was running when fenno was killed counts for nothing."""
        from optuna.trial import TrialState

        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def trials(self) -> list[Trial]:
        """All finished trials, oldest first."""
        return _finished(self._study)

    def add(self, trial: Trial) -> None:
        """Write a finished trial. Failed and invalid ones are kept too, as what they are."""
        from optuna.trial import TrialState, create_trial

        # One call, one transaction: a kill leaves the whole trial or nothing of it.
        finished = create_trial(
            state=TrialState.COMPLETE if trial.measured else TrialState.FAIL,
            # The sampler compares trials at different rates: the same score at twice the rate is better.
            value=trial.score / (trial.rate or 1.0) if trial.measured else None,
            params=live_part(trial.point, self.space),
            distributions=self._distributions,
            user_attrs={"trial": json.dumps(asdict(trial))},
        )
        with _kept(self.folder):
            self._study.add_trial(finished)

    def sample(self, restart: Point, attempts: int = 50) -> Proposal | None:
        """A legal point that was not tried yet under the flags of `restart`, from Optuna's sampler; None when it finds none."""
        from optuna.trial import TrialState

        seen = [trial.point for trial in self.trials()]
        for _ in range(attempts):
            asked = self._study.ask(self._distributions)
            self._study.tell(asked, state=TrialState.PRUNED)
            point = {**self.space.defaults, **restart, **asked.params}
            if legal(point) and point not in seen:
                return Proposal(point, "no rule speaks: the sampler's choice", "sampler")
        return None


def stored(folder: Path) -> list[Trial]:
    """The finished trials of the study in `folder`, oldest first, whoever runs it now; none where none was begun. Changes nothing.

    Raises `DiskError` for what is no study.
    """
    import optuna

    if not (folder / "study.db").is_file():
        return []
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _kept(folder):
        # It is the only one there, and a folder that was moved or copied has another name.
        return _finished(optuna.load_study(study_name=None, storage=f"sqlite:///{folder / 'study.db'}"))


def _finished(study: Any) -> list[Trial]:
    """The trials of an Optuna study that have ended, oldest first."""
    return [from_json(t.user_attrs["trial"]) for t in study.get_trials(deepcopy=False) if "trial" in t.user_attrs]


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """A database that cannot be written is a `DiskError`, in one sentence."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        root: BaseException = error
        while root.__cause__:
            root = root.__cause__
        reason = root.strerror if isinstance(root, OSError) else root
        raise DiskError(f"cannot keep a study in {folder}: {reason}", "choose another --out folder, or free some space") from error
