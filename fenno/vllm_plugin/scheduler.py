"""`vllm serve --scheduler-cls fenno.vllm_plugin.scheduler.TokenAware`: vLLM's own scheduler with another order and live limits.

`TokenAware` is a function: vLLM calls it like a class, and only then is it known whether this engine schedules
asynchronously. `schedule()` itself stays vLLM's. The order reaches it through `request.priority`, which vLLM compares both in
its priority queue and when it chooses whom to preempt: a `Place` there instead of a number gives both the same order in every
version. The queues are vLLM's own classes too, exchanged for the other kind when the policy changes between two steps; so
`--scheduling-policy` does not matter.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fenno import control
from fenno.control import Acknowledgement, Value, Wanted
from fenno.vllm_plugin import limits, versions
from fenno.vllm_plugin.limits import Settings
from fenno.vllm_plugin.mailbox import Mailbox
from fenno.vllm_plugin.order import Order, Place, Work

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object


class Steered(Scheduler):  # type: ignore[misc]
    """Goes in front of vLLM's Scheduler or AsyncScheduler."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._start = versions.start(self, limits.changed(Order(), control.at_start(os.environ)))
        self._settings = Settings(self._start.limits, "", None)
        self._mailbox = Mailbox.of_environment()
        self._revision = 0
        self._counts = Counter(admissions=0, promotions=0, preemptions=0, steps=0)
        self._answered_reached = self._answered_busy = False
        self._obey(Wanted(0))
        self._look(answer=True)

    # What vLLM calls.

    def schedule(self, *args: Any, **keywords: Any) -> Any:
        self._look()
        self._hold()
        output = super().schedule(*args, **keywords)
        self._count(output)
        if self._mailbox and self._answer_is_old():
            self._answer()
        return output

    def add_request(self, request: Any) -> None:
        if self._settings.order and request.request_id not in self.requests:
            request.priority = self._place(request)
        super().add_request(request)

    def _preempt_request(self, request: Any, *args: Any, **keywords: Any) -> None:
        self._counts["preemptions"] += 1
        request.priority = self._place(request)
        super()._preempt_request(request, *args, **keywords)

    def reset_prefix_cache(self, *args: Any, **keywords: Any) -> Any:
        # An idle engine makes no steps: this call is how it is made to look.
        self._look(answer=True)
        return super().reset_prefix_cache(*args, **keywords)

    # The order.

    def _place(self, request: Any) -> Place | int:
        """Its place under the token-aware order, its client's own priority under vLLM's."""
        client: int = request.priority.client if isinstance(request.priority, Place) else request.priority
        if not self._settings.order:
            return client
        prompt = request.num_prompt_tokens
        work = Work(prompt, request.num_output_tokens, request.max_tokens, self.max_model_len - prompt)
        return self._settings.order.place(client, request.arrival_time, work, self.max_num_scheduled_tokens)

    def _reorder(self) -> None:
        """Give every request its place anew and build every queue anew: a heap whose keys have changed is none."""
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
        from vllm.v1.request import RequestStatus

        queued = {name: list(getattr(self, name)) for name in versions.queues(self)}
        self.policy = SchedulingPolicy.FCFS if self._settings.policy == "fcfs" else SchedulingPolicy.PRIORITY
        for requests in (self.running, *queued.values()):
            for request in requests:
                request.priority = self._place(request)
        for name, requests in queued.items():
            queue = create_request_queue(self.policy)
            # First come, first served has the preempted in front, as vLLM puts them.
            for request in sorted(requests, key=lambda r: (r.status != RequestStatus.PREEMPTED, r.arrival_time)):
                queue.add_request(request)
            setattr(self, name, queue)

    # The limits.

    def _hold(self) -> None:
        wanted = self._settings
        compete = wanted.order is not None and not wanted.limits.long_prefill and self._prompts_compete()
        versions.hold(self, limits.in_force(self._start, wanted, len(self.running), compete), self._start.fixed)

    def _prompts_compete(self) -> bool:
        """Whether more than one prompt can use tokens of the next step: those that wait and have a seat, and those half read."""
        running, waiting = self.get_request_counts()
        wanting: int = min(waiting, max(0, self._settings.limits.seqs - running))
        if wanting < 2:
            wanting += sum(1 for request in self.running if request.is_prefill_chunk)
        return wanting > 1

    # The control file.

    def _look(self, answer: bool = False) -> None:
        """Obey the control file if it has changed, and answer then or when asked to."""
        if not self._mailbox:
            return
        changed = self._mailbox.changed(at_once=answer)
        wanted = self._mailbox.read() if changed else None
        if wanted:
            self._obey(wanted)
        if changed or answer:
            self._answer()

    def _obey(self, wanted: Wanted) -> None:
        before, self._settings = self._settings, limits.settings(self._start, wanted.knobs)
        self._revision = wanted.revision
        if (self._settings.policy, self._settings.order) != (before.policy, before.order):
            self._reorder()
        self._hold()

    def _count(self, output: Any) -> None:
        """Promotions: admissions of a longer class that had waited out its handicap, so that no newcomer could overtake it."""
        self._counts["steps"] += 1
        self._counts["admissions"] += len(output.scheduled_new_reqs)
        for new in output.scheduled_new_reqs:
            place = self.requests[new.req_id].priority
            if isinstance(place, Place) and place.group and place.due <= time.time():
                self._counts["promotions"] += 1

    def _reached(self) -> bool:
        return len(self.running) <= self._settings.limits.seqs

    def _answer_is_old(self) -> bool:
        busy = bool(self.running or self.get_request_counts()[1])
        news = (self._reached(), busy) != (self._answered_reached, self._answered_busy)
        return news or (self._mailbox is not None and self._mailbox.due())

    def _answer(self) -> None:
        if not self._mailbox:
            return
        running, waiting = self.get_request_counts()
        self._answered_reached, self._answered_busy = self._reached(), bool(running or waiting)
        answer = Acknowledgement(
            revision=self._revision,
            rank=versions.rank(self),
            applied=self._applied(),
            reached=self._answered_reached,
            unsupported=self._settings.unsupported,
            running=running,
            waiting=waiting,
            counters=self._counters(),
            problem=self._mailbox.problem,
            pid=os.getpid(),
            engine=_vllm_version(),
        )
        self._mailbox.answer(answer)

    def _applied(self) -> dict[str, Value]:
        now, order = self._settings, self._settings.order or self._start.order
        return {
            "max_num_scheduled_tokens": self.max_num_scheduled_tokens,
            "max_num_active_seqs": now.limits.seqs,
            "long_prefill_token_threshold": now.limits.long_prefill,
            "prefill_schedule_interval": now.limits.interval,
            "policy": now.policy,
            "class_edges": ",".join(map(str, order.edges)),
            "aging_seconds": order.aging,
        }

    def _counters(self) -> dict[str, float]:
        """What `/metrics` shows of this rank (see `fenno.vllm_plugin`): the caps in force, and who waits."""
        waiting, order = versions.waiting(self), self._settings.order
        groups = Counter(request.priority.group for request in waiting if isinstance(request.priority, Place))
        return {
            **self._counts,
            **{f"waiting_class_{group}": groups[group] for group in range(len(order.edges) + 1 if order else 0)},
            "oldest_waiting_seconds": max((time.time() - request.arrival_time for request in waiting), default=0.0),
            "cap_max_num_scheduled_tokens": self.max_num_scheduled_tokens,
            "cap_max_num_active_seqs": self._settings.limits.seqs,
            "cap_long_prefill_token_threshold": self.scheduler_config.long_prefill_token_threshold,
        }


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def steered(base: type[Any]) -> type[Any]:
    """`base`, one of vLLM's schedulers, with fenno in front of it."""
    return type(f"TokenAware{base.__name__}", (Steered, base), {"__doc__": Steered.__doc__})


def TokenAware(**keywords: Any) -> Any:
    """Make the scheduler of one engine; `keywords` are whatever this vLLM gives its own. Raises `RuntimeError` for a vLLM that
    fenno does not know."""
    versions.check(_vllm_version())
    return steered(versions.base_class(keywords["vllm_config"]))(**keywords)
