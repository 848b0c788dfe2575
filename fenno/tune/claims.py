"""What each of several workers on one study does now, so that no other does it as well; and which of them have died.

A claim is a running trial of the study's database. Every worker has one for itself, in which it counts as long as it lives. No two
clocks are compared: a worker is dead when another has looked often enough, a beat apart, and found the same number. Whatever else
it had claimed is free then.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fenno.errors import DiskError
from fenno.recipe import Scalar
from fenno.tune.storage import kept

BEAT = 10.0  # seconds
MISSED = 6  # looks that find the same number

Kind = Literal["worker", "start", "trial", "confirmation"]


@dataclass(frozen=True)
class Claim:
    """A worker itself; a start with the flags of `point`; a trial of `point` at `rate` requests a second; the cold starts at a
    search's end. `worker` is the number of its worker's own claim; `idle`: that worker has nothing to do but to wait for others."""

    kind: Kind
    point: Mapping[str, Scalar] = field(default_factory=dict)
    rate: float = 0.0
    worker: int = field(default=-1, compare=False)
    idle: bool = field(default=False, compare=False)


class Pulse:
    """Which of the others still beat, by one's own looks at them."""

    def __init__(self, beat: float) -> None:
        self.beat = beat
        self._seen: dict[int, tuple[int, float, int]] = {}

    def dead(self, worker: int, number: int, now: float) -> bool:
        """Whether a worker is gone that shows `number`; `now` on one's own clock, in seconds.

        However long ago the last look was, it counts as one: the looking host may have stood still itself.
        """
        last, at, missed = self._seen.get(worker, (-1, now, 0))
        if last != number:
            at, missed = now, 0
        elif now - at >= self.beat:
            at, missed = now, missed + 1
        self._seen[worker] = (number, at, missed)
        return missed >= MISSED


class Claims:
    """The claims on an Optuna study in `storage`, a database that is called `where`; None where nobody else can be: then nothing is
    written. Raises `DiskError` where that database cannot be reached."""

    def __init__(self, study: Any, storage: Any, where: object, beat: float = BEAT) -> None:
        self._study, self._storage, self._where = study, storage, where
        self._id = storage.get_study_id_from_name(study.study_name)
        self._pulse = Pulse(beat)
        self._worker = -1

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Be one of the workers while the block lasts."""
        if self._where is None:
            yield
            return
        self._worker = self._make(Claim("worker"))
        try:
            with _every(self._pulse.beat, self._beat):
                yield
        finally:
            self.end(self._worker)

    def idle(self, idle: bool) -> None:
        """Say whether this worker waits for others."""
        self._note("idle", idle)

    def others(self) -> list[Claim]:
        """What other workers do now. What one did that shows no life any more is free from now on."""
        running = self._running()
        alive = {self._worker}
        for number, claim, beat in running:
            if claim.kind == "worker" and not self._pulse.dead(number, beat, time.monotonic()):
                alive.add(number)
        found = []
        for number, claim, _ in running:
            worker = number if claim.kind == "worker" else claim.worker
            if worker not in alive:
                self.end(number)
            elif worker != self._worker:
                found.append(claim)
        return found

    @contextlib.contextmanager
    def hold(self, claim: Claim, done: Callable[[], bool]) -> Iterator[bool]:
        """Whether this worker may do what `claim` says, and does while the block lasts; no other may then. `done`: whether another
        has done it in the meantime."""
        if self._where is None:
            yield True
            return
        number = self._make(replace(claim, worker=self._worker))
        try:
            # Numbers are given one after the other, so of two workers that claim the same at once the second sees the first.
            first = all(number < other for other, theirs, _ in self._running() if other != number and theirs == claim)
            if not first or done():
                self.end(number)
                yield False
            else:
                yield True
        finally:
            self.end(number)

    def end(self, number: int) -> None:
        """Take a claim back, if nobody has yet."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with kept(self._where), contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(self._trial(number), TrialState.FAIL)

    def _running(self) -> list[tuple[int, Claim, int]]:
        """Every claim with its number, and the number that its worker shows in it."""
        from optuna.trial import TrialState

        if self._where is None:
            return []
        with kept(self._where):
            running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        attrs = ((t.number, t.user_attrs) for t in running if "claim" in t.user_attrs)
        return [(n, replace(_loads(a["claim"]), idle=a.get("idle", False)), a.get("beat", 0)) for n, a in attrs]

    def _make(self, claim: Claim) -> int:
        """The number of a new claim, whole in one transaction."""
        from optuna.trial import TrialState, create_trial

        template = create_trial(state=TrialState.RUNNING, user_attrs={"claim": json.dumps(asdict(claim))})
        with kept(self._where):
            number: int = self._storage.get_trial(self._storage.create_new_trial(self._id, template_trial=template)).number
        return number

    def _trial(self, number: int) -> Any:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _note(self, name: str, value: object) -> None:
        """Write something into this worker's own claim. Where another has taken this worker for dead, it shows that it is not."""
        from optuna.exceptions import UpdateFinishedTrialError

        if self._where is None:
            return
        try:
            with kept(self._where):
                self._storage.set_trial_user_attr(self._trial(self._worker), name, value)
        except UpdateFinishedTrialError:
            self._worker = self._make(Claim("worker"))

    def _beat(self, number: int) -> None:
        # The next beat will do; a database that is gone is told of where something has to be kept.
        with contextlib.suppress(DiskError):
            self._note("beat", number)


def _loads(text: str) -> Claim:
    return Claim(**json.loads(text))


@contextlib.contextmanager
def _every(seconds: float, beat: Callable[[int], None]) -> Iterator[None]:
    """`beat` with 1, 2 and so on, every so many seconds while the block lasts."""
    over = threading.Event()

    def work() -> None:
        number = 1
        while not over.wait(seconds):
            beat(number)
            number += 1

    thread = threading.Thread(target=work, name="fenno-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
