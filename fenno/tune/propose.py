"""Which point to try next, by what held the last ones back. Pure: the article's rules, corrected to what today's engine does.

A rule moves one knob of the best point so far; where no rule speaks, the study's sampler proposes (see `study.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fenno.recipe import Scalar
from fenno.tune import memory
from fenno.tune import space as spaces
from fenno.tune.space import AGING, BUDGET, CAP, EDGES, GRAPHS, POLICY, STREAM, Space


@dataclass(frozen=True)
class Steps:
    """What the engine's steps were in the mean: how many seconds one took, and how many tokens, of prompts too; the sequences in
    it, and how many tokens each of these had in the cache."""

    seconds: float
    tokens: float
    sequences: float
    length: float


@dataclass(frozen=True)
class Roofline:
    """Seconds that such a step takes `device` at least, by its datasheet: until its bytes have come from memory, and until its
    products are made."""

    device: str
    memory: float
    compute: float


@dataclass(frozen=True)
class Load:
    """What the engine said of itself while the counted requests ran; means, None where this version does not say."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    step_tokens: float | None = None
    engine_ttft: float | None = None
    client_ttft: float | None = None
    in_flight: float | None = None
    server_cpu: float | None = None  # cores that the one HTTP process took
    steps: Steps | None = None
    graphs: int | None = None  # tokens of the largest step that is a CUDA graph


@dataclass(frozen=True)
class Limit:
    """What holds a point back, and the evidence in one sentence. `graphs`: where it is that steps take more tokens than CUDA graphs
    reach to, so many these are."""

    name: str
    evidence: str
    graphs: int | None = None

    @property
    def help(self) -> str:
        """What would help; empty where nothing is known to."""
        return HELP.get(self.name, "")


@dataclass(frozen=True)
class Tried:
    """A point that was measured: its score (see `judge.Judgement`) and its limit."""

    point: dict[str, Scalar]
    score: float
    limit: Limit


@dataclass(frozen=True)
class Proposal:
    """A point to try and why. `origin` is "defaults", "rule" or "sampler"; `patience`: to be measured so many times as long."""

    point: dict[str, Scalar]
    why: str
    origin: str = field(default="rule")
    patience: int = 1


# An event loop is one thread: from this share of a core on, what it has to do waits for it.
BUSY = 0.9


def diagnose(load: Load, point: spaces.Point, roofline: Roofline | None = None) -> Limit:
    """The binding limit of a point under its load. `roofline`: of `load.steps`, where the GPU is one whose figures are known."""
    waiting, running = load.waiting or 0.0, load.running or 0.0
    if (load.preemptions or 0) > 0 or (load.kv_usage or 0.0) > 0.95:
        return Limit("kv", f"the KV cache was {100 * (load.kv_usage or 0):.0f} % full, {load.preemptions or 0:.0f} preemptions")
    # What clients have sent and the engine does not know of yet lies in the HTTP front end: seen on a GPU, 3,000 requests in flight
    # of which the engine ran 750 and kept none waiting.
    if (load.in_flight or 0.0) > 1.5 * (running + waiting) + 16:
        evidence = f"clients had {load.in_flight:.0f} requests in flight, of which {running:.0f} ran and {waiting:.0f} waited"
        return Limit("front end", f"{evidence}: the rest was in the HTTP server")
    if load.client_ttft and load.engine_ttft and load.client_ttft > 1.5 * load.engine_ttft + 0.02:
        theirs, ours = 1e3 * load.engine_ttft, 1e3 * load.client_ttft
        return Limit("front end", f"clients waited {ours:.0f} ms for a first token that the engine had after {theirs:.0f} ms")
    # vLLM takes its own times and counts in that process, so where it is slow both sides agree.
    if (load.server_cpu or 0.0) > BUSY:
        return Limit("front end", f"the one HTTP process took {load.server_cpu:.2f} processor cores")
    cap, budget = point.get(CAP), point.get(BUDGET)
    name, took = bound(load.steps, roofline)
    beyond = beyond_graphs(load, budget)
    # Slow steps fill the seats and the queue: both are what comes of it.
    if beyond and name == "overhead":
        return Limit(name, beyond + took, load.graphs)
    if waiting >= 1 and isinstance(cap, int) and running >= 0.9 * cap:
        return Limit("sequences", f"{waiting:.0f} requests waited while {running:.0f} of at most {cap} ran")
    if waiting >= 1 and isinstance(budget, int) and (load.step_tokens or 0.0) >= 0.8 * budget:
        return Limit("budget", f"{waiting:.0f} requests waited; a step took {load.step_tokens:.0f} of at most {budget} tokens")
    if beyond and name == UNTOLD:
        return Limit("overhead", f"{beyond}{UNSURE}", load.graphs)
    waited = f"{waiting:.2g}" if waiting < 1 else f"{waiting:.0f}"
    return Limit("queue" if waiting else name, f"{running:.0f} requests ran and {waited} waited: steps take long{took}")


def beyond_graphs(load: Load, budget: Scalar) -> str:
    """That one step in ten, or the mean one, is too large for any CUDA graph; empty where it is not so, or not known.

    The engine counts a prompt that it has read in several steps whole in the last of them.
    """
    taken = max(load.step_tokens or 0.0, load.steps.tokens if load.steps else 0.0)
    if not load.graphs or not isinstance(budget, int) or min(taken, budget) <= load.graphs:
        return ""
    size = f"a step took {min(taken, budget):.0f} of at most {budget} tokens"
    return f"{size}, and beyond the {load.graphs} that CUDA graphs reach to the host launches its kernels one by one"


def bound(steps: Steps | None, roofline: Roofline | None) -> tuple[str, str]:
    """What makes steps take as long as they do, and the evidence. It is neither memory nor products where both together are less
    than half of a step; which of them it is cannot be told where nothing is known of the GPU, and on a CPU."""
    if steps is None or roofline is None or steps.seconds <= 0:
        return UNTOLD, ""
    names = {"memory bandwidth": roofline.memory, "compute": roofline.compute}
    neither = sum(names.values()) < steps.seconds / 2
    name = "overhead" if neither else max(names, key=lambda one: names[one])
    least = f"{1e3 * roofline.memory:.2g} ms for its bytes and {1e3 * roofline.compute:.2g} ms for its products"
    return name, f", {1e3 * steps.seconds:.3g} ms of {steps.tokens:.0f} tokens, for which {roofline.device} needs at least {least}"


UNTOLD = "compute or memory bandwidth"
UNSURE = "; whether that is what takes long cannot be told of this GPU"
_GPUS = "more GPUs (`tensor-parallel-size`), or fewer requests on each"
# By limit: what would help, also where fenno does not turn it by itself.
HELP = {
    "front end": "more HTTP processes (`api-server-count`), vLLM's Rust front end, a larger `stream-interval`",
    "sequences": "a higher `max-num-seqs`, as far as the KV cache goes",
    "budget": "a larger `max-num-batched-tokens`",
    "queue": "fewer sequences at a time, another order, another budget of tokens",
    "kv": "fewer sequences at a time, a larger `gpu-memory-utilization`; FP8 in the cache, which changes answers",
    "memory": "a smaller `gpu-memory-utilization` or `kv-cache-memory-bytes`",
    "memory bandwidth": f"more prompt tokens a step, which cost it little; {_GPUS}; fewer bits, which change answers",
    "compute": f"fewer prompt tokens a step, prefix caching where prompts begin alike; {_GPUS}; FP8, which changes answers",
    "overhead": "steps no larger than CUDA graphs reach (`max-num-batched-tokens`), or graphs as large as the steps"
    " (`max-cudagraph-capture-size`), `async-scheduling`, a faster processor",
    UNTOLD: f"fewer sequences or prompt tokens a step; {_GPUS}",
}


# By limit: which knob to move and where, in the order of trying. None as direction is any other value. An order and its parameters
# can help where requests wait.
_ORDER: tuple[tuple[str, bool | None], ...] = ((POLICY, None), (AGING, False), (AGING, True), (EDGES, None))
_MOVES: dict[str, tuple[tuple[str, bool | None], ...]] = {
    "sequences": ((CAP, True), *_ORDER, (BUDGET, False)),
    "budget": ((BUDGET, True), *_ORDER, (CAP, False)),
    "kv": ((CAP, False), (BUDGET, False), (POLICY, None)),
    # Nothing that the scheduler can do reaches the HTTP server, except to run less; but it writes less where tokens go in bunches.
    "front end": ((STREAM, True), (CAP, False)),
    # However few wait in the mean: at some requests a second that makes one of twenty late.
    "queue": ((CAP, False), *_ORDER, (BUDGET, False), (BUDGET, True)),
    # Where nothing ever waits, no order brings anything.
    **dict.fromkeys((UNTOLD, "compute", "overhead"), ((CAP, False), (BUDGET, False), (BUDGET, True))),
    # A step that waits for its bytes takes prompts along almost for nothing.
    "memory bandwidth": ((BUDGET, True), (CAP, False), (BUDGET, False)),
}
_REASONS = {
    (CAP, True): "let more requests run",
    (CAP, False): "run fewer requests at a time, so that steps are shorter",
    (BUDGET, True): "take more prompt tokens a step, so that the queue drains",
    (BUDGET, False): "take fewer prompt tokens a step, so that steps are shorter",
    (POLICY, None): "let short answers go first",
    (AGING, False): "let long answers wait less for short ones",
    (AGING, True): "let short answers go before long ones for longer",
    (STREAM, True): "send more tokens at a time, so that the HTTP server writes less often",
    (EDGES, None): "draw the line between short and long answers elsewhere",
}


def by_rule(tried: Sequence[Tried], space: Space, seen: Sequence[spaces.Point] = ()) -> Proposal | None:
    """The next point that the rules name: a move away from the limit of the best point, else of the next best one.

    `seen`: points that are not to be proposed again, besides the tried ones.
    """
    seen = [*seen, *(t.point for t in tried)]
    for best in sorted(tried, key=lambda t: t.score)[:2]:
        inside = inside_graphs(best, space)
        if inside and inside not in seen:
            return Proposal(inside, f"{best.limit.name}: {best.limit.evidence}; take no more tokens a step than they reach to")
        for knob, up in _MOVES.get(best.limit.name, ()):
            for value in _moves(space, best.point, knob, up):
                point = spaces.canonical({**best.point, knob: value}, space)
                if point not in seen and spaces.legal(point):
                    return Proposal(point, f"{best.limit.name}: {best.limit.evidence}; {_REASONS[knob, up]}")
    return None


def inside_graphs(best: Tried, space: Space) -> dict[str, Scalar] | None:
    """`best` with the largest budget whose every step is a CUDA graph, and no more sequences than it has tokens for: without any
    prompt a step has one of each. None where that is not what holds it back, or no such budget is in the space."""
    reach = best.limit.graphs or 0
    budgets = [v for v in space.neighbours(BUDGET, best.point.get(BUDGET), up=False) if v <= reach]
    if not budgets:
        return None
    point = {**best.point, BUDGET: budgets[0]}
    caps = [v for v in space.neighbours(CAP, best.point.get(CAP), up=False) if v <= budgets[0]]
    if caps and not spaces.legal(point):
        point[CAP] = caps[0]
    return spaces.canonical(point, space) if spaces.legal(point) else None


def _moves(space: Space, point: spaces.Point, knob: str, up: bool | None) -> Sequence[Scalar]:
    if knob not in space.values:
        return []
    if up is None:
        return [value for value in space.values[knob] if value != point.get(knob)]
    # One knob is moved at most two steps at a time: half way first, then on.
    return space.neighbours(knob, point.get(knob), up)[:2]


# Outside the key of vLLM's compile cache, as its config classes have it: a start with another value of these compiles nothing anew.
_QUICK = {
    *("api-server-count", "stream-interval", memory.FLAG, memory.OTHER, "enable-prefix-caching"),
    *("max-num-queued-reqs", "max-num-queued-tokens", "scheduling-policy", "async-scheduling", "prefill-schedule-interval"),
}
# By limit: which flags that need a start can help; every other flag of the recipe comes after these, quick ones first.
_MEMORY = (memory.FLAG, memory.OTHER)
_RESTARTS = {
    "front end": ("api-server-count", "VLLM_USE_RUST_FRONTEND", "stream-interval"),
    "kv": _MEMORY,
    "overhead": ("async-scheduling", "performance-mode"),
}


def next_restart(
    tried: Sequence[Tried], space: Space, seen: Sequence[spaces.Point], refused: Sequence[spaces.Point] = ()
) -> Proposal | None:
    """The best point so far under one more restart flag moved: those that its limit names first, as larger CUDA graphs where its
    steps are beyond them and less memory where that is over its target, then those whose starts take less. None when all are tried.

    `seen`: points, failed ones too; a setting of restart flags that one of them had is not proposed again. `refused`: points with
    which no engine started; none with the same flags among others is proposed either.
    """
    if not tried:
        return None
    best = min(tried, key=lambda t: t.score)
    before = [spaces.restart_part(point, space) for point in seen]
    never = [part for point in refused if (part := spaces.restart_part(point, space))]
    # These answer to one limit alone, unless the recipe lists them.
    answers = (GRAPHS,) if best.limit.graphs else _MEMORY if best.limit.name == "memory" else ()
    listed = [knob for knob in space.restart if knob not in space.unlisted]
    named = [knob for knob in answers if knob in space.restart]
    named += [knob for knob in _RESTARTS.get(best.limit.name, ()) if knob in listed and knob not in named]
    others = sorted((knob for knob in listed if knob not in named), key=lambda knob: knob not in _QUICK)
    for knob in (*named, *others):
        for value in space.restart[knob]:
            point = {**best.point, knob: value}
            start = spaces.restart_part(point, space)
            if start not in before and not any(part.items() <= start.items() for part in never):
                return Proposal(point, f"{best.limit.name}: {best.limit.evidence}; start again with {knob} {value}", "restart")
    return None


def improving(scores: Sequence[float], patience: int, margin: float = 0.05) -> bool:
    """Whether one of the last `patience` scores beat all before them by `margin`: else the search has run dry."""
    if len(scores) <= patience:
        return True
    return min(scores[-patience:]) < min(scores[:-patience]) * (1 - margin)
