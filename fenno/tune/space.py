"""What may be changed: live knobs and their values, the engine's own defaults, and the wide start that leaves room for all of them.

A point is a mapping from knob to value. Knob names are vLLM's configuration spelling, as in `control.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fenno import control
from fenno.engine.catalogue import Catalogue
from fenno.errors import RecipeError
from fenno.recipe import Latency, Recipe, Scalar
from fenno.tune import memory
from fenno.vllm_plugin import versions
from fenno.vllm_plugin.order import Order

Point = Mapping[str, Scalar]

BUDGET, CAP, THRESHOLD, POLICY = "max_num_scheduled_tokens", "max_num_active_seqs", "long_prefill_token_threshold", "policy"
INTERVAL = "prefill_schedule_interval"
AGING, EDGES = "aging_seconds", "class_edges"  # of the token-aware order alone
STREAM = "stream_interval"  # tokens that the server sends at a time

CARRIED = (STREAM,)  # the live knobs that no engine is set to: each request has them in its body

SERVERS, RUST, GRAPHS = "api-server-count", "VLLM_USE_RUST_FRONTEND", "max-cudagraph-capture-size"

POLICIES = ("fcfs", "token_aware")  # those that a recipe's `scheduler` can ask for

# The flag that says the same at a start, so that a winner needs no plugin. `policy` has none: token-aware is a scheduler class,
# and its parameters are variables.
PLAIN = {
    **{BUDGET: "max-num-batched-tokens", CAP: "max-num-seqs"},
    **{THRESHOLD: "long-prefill-token-threshold", INTERVAL: "prefill-schedule-interval", STREAM: "stream-interval"},
}


@dataclass(frozen=True)
class Space:
    """`values` by live knob, ascending where they are numbers; `restart`: the same for flags and environment variables that need a
    new start, in the order of trying; `defaults` of both is what the engine does when nobody sets anything; `unlisted`: those of
    `restart` that nobody asked for, tried only where what binds names them; `graphs`: tokens of the largest CUDA graph that vLLM
    is taken to capture at the wide start, None on a CPU and where the recipe says what is captured."""

    values: Mapping[str, tuple[Scalar, ...]]
    defaults: Point
    restart: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
    graphs: int | None = None

    @property
    def listed(self) -> dict[str, tuple[Scalar, ...]]:
        """Those of `every` that may be drawn, whatever binds."""
        return {knob: values for knob, values in self.every.items() if knob not in self.unlisted}

    @property
    def every(self) -> dict[str, tuple[Scalar, ...]]:
        """The values of all knobs, live ones first; of one of the start its default too."""
        return {**self.values, **{knob: (self.defaults[knob], *others) for knob, others in self.restart.items()}}

    def neighbours(self, knob: str, value: Scalar, up: bool) -> list[int | float]:
        """The values of `knob` beyond `value` in one direction, nearest first."""
        numbers = [v for v in self.values.get(knob, ()) if isinstance(v, int | float)]
        here = value if isinstance(value, int | float) else 0
        return [*sorted(v for v in numbers if v > here)] if up else [*sorted((v for v in numbers if v < here), reverse=True)]


def build(recipe: Recipe, catalogue: Catalogue, cores: int = 1) -> Space:
    """The space of a recipe on one engine: what the recipe lists, else powers of two around the engine's defaults, and as many
    HTTP processes as a host of so many `cores` has room for.

    Raises `RecipeError` for a live knob that fenno does not know, and a flag or variable that the engine does not.
    """
    flags = recipe.engine.flags
    budget = _number(flags.get(PLAIN[BUDGET]), catalogue.defaults.get(PLAIN[BUDGET]), 2048)
    cap = _number(flags.get(PLAIN[CAP]), catalogue.defaults.get(PLAIN[CAP]), 256)
    graphs = _graphs(recipe, catalogue, cap)
    defaults: dict[str, Scalar] = {
        BUDGET: budget,
        CAP: min(cap, budget),
        THRESHOLD: _number(flags.get(PLAIN[THRESHOLD]), None, 0),
        INTERVAL: _number(flags.get(PLAIN[INTERVAL]), None, 1),
        STREAM: _number(flags.get(PLAIN[STREAM]), None, 1),
        POLICY: recipe.engine.scheduler or "fcfs",
        **_order(recipe),
    }
    listed: dict[str, list[Scalar]] = dict(recipe.search.live) or {
        BUDGET: [*(max(1, budget * n // 4) for n in (1, 2, 4, 8)), *([min(graphs, budget)] if graphs else [])],
        CAP: [max(1, cap * n // 8) for n in (1, 2, 4, 8)],
        POLICY: ["fcfs", "token_aware"],
    }
    _check_listed(listed, defaults, recipe, catalogue)
    values = {knob: _ordered({_checked(knob, value) for value in (*given, defaults[knob])}) for knob, given in listed.items()}
    restart: dict[str, tuple[Scalar, ...]] = {}
    unlisted = {} if recipe.search.restart else {**_larger_graphs(graphs, budget), **memory.less(recipe, catalogue)}
    for name, given in (recipe.search.restart or {**_front_end(catalogue, cores), **unlisted}).items():
        taken = _restart(name, given, recipe, catalogue)
        defaults[name] = _at_start(name, recipe, catalogue)
        restart[name] = tuple(v for v in taken if v != defaults[name])
    if wants_smooth(recipe):
        values, restart = _smooth(values, defaults), _smooth(restart, defaults)
    return Space(values, {knob: defaults[knob] for knob in (*listed, *restart)}, restart, tuple(unlisted), graphs)


def _check_listed(listed: Mapping[str, Sequence[Scalar]], defaults: Point, recipe: Recipe, catalogue: Catalogue) -> None:
    """Raise `RecipeError` for a knob that fenno does not know, or that does nothing on this engine while it runs."""
    unknown = sorted(set(listed) - set(defaults))
    if unknown:
        raise RecipeError(f"`search.live` names `{unknown[0]}`, which is no live knob", f"live knobs are {', '.join(defaults)}")
    if INTERVAL in listed:
        _check_interval(recipe, catalogue)
    if STREAM in listed:
        _check_stream(recipe, catalogue)
    if {AGING, EDGES} & {*listed} and "token_aware" not in (*listed.get(POLICY, ()), defaults[POLICY]):
        said = f"{AGING} and {EDGES} belong to the token-aware order"
        raise RecipeError(f"{recipe.name}: search.live: {said}", "list it under `policy`, or set `engine.scheduler: token_aware`")


def _check_interval(recipe: Recipe, catalogue: Catalogue) -> None:
    """Raise `RecipeError` where the interval between prompts does not change while this engine runs, or there is none."""
    source, flag = f"{recipe.name}: search.live", PLAIN[INTERVAL]
    catalogue.check({flag: 1}, source)
    late = versions.interval_is_live(catalogue.engine.version)
    if not late or str(recipe.engine.flags.get("data-parallel-size") or 1) != "1":
        on = "under data parallelism" if late else f"on vLLM {catalogue.engine.version}"
        raise RecipeError(f"{source}: {on} {INTERVAL} is set at a start alone", f"list `{flag}` under `search.restart`")


def _check_stream(recipe: Recipe, catalogue: Catalogue) -> None:
    """Raise `RecipeError` where requests to this engine cannot have a stream interval of their own, or the start has it too."""
    source, flag = f"{recipe.name}: search.live", PLAIN[STREAM]
    catalogue.check({flag: 1}, source)
    if flag in recipe.search.restart:
        raise RecipeError(f"{source}: {STREAM} is `{flag}` of `search.restart`, searched while the engine runs", "list one of them")
    if STREAM not in catalogue.fields:
        said = f"to vLLM {catalogue.engine.version} {STREAM} is told at a start alone"
        raise RecipeError(f"{source}: {said}", f"list `{flag}` under `search.restart`")
    if RUST in recipe.search.restart or recipe.engine.variables.get(RUST) not in (None, "", "0"):
        raise RecipeError(f"{source}: vLLM's Rust front end has no {STREAM}", f"leave it out, or {RUST}")


def wants_smooth(recipe: Recipe) -> bool:
    """Whether a target names the longest gap of an answer, which only grows with the tokens that are sent at a time."""
    return any(Latency.of(name).metric == "gap" for name in recipe.targets.latencies())


def _smooth(listed: Mapping[str, tuple[Scalar, ...]], defaults: Point) -> dict[str, tuple[Scalar, ...]]:
    """`listed` without larger stream intervals than the default."""

    def larger(knob: str, value: Scalar) -> bool:
        return knob in (STREAM, PLAIN[STREAM]) and isinstance(value, int) and value > _number(defaults[knob], 1)

    return {knob: tuple(v for v in values if not larger(knob, v)) for knob, values in listed.items()}


def remark(recipe: Recipe) -> list[str]:
    """In a sentence, what a target keeps out of the search that the recipe has listed; nothing where it is nothing."""
    named = STREAM in recipe.search.live or PLAIN[STREAM] in recipe.search.restart
    if not named or not wants_smooth(recipe):
        return []
    return ["no larger stream interval is tried: a target names the longest gap, which grows with the tokens sent at a time"]


def _order(recipe: Recipe) -> dict[str, Scalar]:
    """The parameters of the token-aware order as the recipe's variables have them, else as it is by itself."""
    try:
        given = control.at_start(recipe.engine.variables)
    except ValueError as error:
        raise RecipeError(f"{recipe.name}: engine.env: {error}", "mend it, or leave it out") from error
    usual = Order()
    edges = control.edges(given[EDGES]) if EDGES in given else usual.edges
    return {AGING: usual.aging, **given, EDGES: _joined(edges)}


def _joined(edges: Sequence[int]) -> str:
    """Edges of classes as `class_edges` has them: one spelling a value."""
    return ",".join(map(str, edges))


def is_variable(knob: str) -> bool:
    """Whether a knob of the start is an environment variable, such as `VLLM_USE_RUST_FRONTEND`; else it is a flag."""
    return knob.isupper()


def _front_end(catalogue: Catalogue, cores: int) -> dict[str, list[Scalar]]:
    """Where a recipe lists no flags of the start: processes for HTTP, which hold a fast GPU back first. On a CPU they would take
    the engine's own cores."""
    processes = min(4, cores // 4)
    return {SERVERS: [processes]} if processes > 1 and catalogue.platform != "cpu" and SERVERS in catalogue.flags else {}


# Tokens of the largest step that vLLM captures as a CUDA graph by itself (0.24 to 0.32; in 0.32 twice as many on Blackwell), and
# that a start of the search has captured: every 16 tokens more are one more graph, in seconds and in memory.
CAPTURED, LARGEST = 512, 2048


def _graphs(recipe: Recipe, catalogue: Catalogue, cap: int) -> int | None:
    """Tokens of the largest CUDA graph of a wide start, `cap` being the default of the sequences; None where there is none, or the
    recipe has settings of its own."""
    own = [name for name in recipe.engine.flags if "cudagraph" in name or name.startswith(("enforce-eager", "compilation-config"))]
    if own or catalogue.platform != "cuda" or GRAPHS not in catalogue.flags:
        return None
    return min(2 * max([cap, *(v for v in recipe.search.live.get(CAP, ()) if isinstance(v, int))]), CAPTURED)


def _larger_graphs(graphs: int | None, budget: int) -> dict[str, list[Scalar]]:
    """Larger ones, for where steps are beyond `graphs`."""
    return {GRAPHS: [min(budget, LARGEST)]} if graphs and graphs < budget else {}


def _restart(name: str, given: Sequence[Scalar], recipe: Recipe, catalogue: Catalogue) -> list[Scalar]:
    """The values of one knob of the start. Raises `RecipeError` for what this engine does not take."""
    if is_variable(name):
        catalogue.check_variable(name, f"{recipe.name}: search.restart")
        return [value if value is None else str(value) for value in given]
    named: list[Scalar] = [value for value in given if value is not None] or [None]
    for value in named:
        catalogue.check({name: value}, f"{recipe.name}: search.restart")
    return list(given)


def _at_start(name: str, recipe: Recipe, catalogue: Catalogue) -> Scalar:
    """The value of a knob of the start when the search changes nothing."""
    if is_variable(name):
        return recipe.engine.variables.get(name)
    # Of one key of a flag (`compilation-config.cudagraph_mode`) the catalogue has no default.
    flag = catalogue.flags.get(name)
    start = recipe.engine.flags.get(name, flag.default if flag else None)
    return start if not isinstance(start, list) else None


def _number(*candidates: object) -> int:
    return next(int(c) for c in candidates if isinstance(c, int) and not isinstance(c, bool))


def _checked(knob: str, value: Scalar) -> Scalar:
    """`value`, the edges of classes without spaces. Raises `RecipeError` for one that no engine takes."""
    if knob == POLICY:
        said = None if value in POLICIES else f"policy is {value!r}: it has to be one of {', '.join(POLICIES)}"
    elif knob in (AGING, EDGES):
        said = _impossible(knob, value)
    else:
        least = 0 if knob == THRESHOLD else 1
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        said = None if whole else f"{knob} is {value!r}: it has to be a whole number of at least {least}"
    if said:
        raise RecipeError(f"`search.live`: {said}", "mend the recipe's list, or the flag that gives the default")
    return _joined(control.edges(value)) if knob == EDGES else value


def _impossible(knob: str, value: Scalar) -> str | None:
    """Why no scheduler takes a value of a parameter; None where one does."""
    try:
        control.check({knob: value})
    except ValueError as error:
        return str(error)
    return None if value is not None else f"{knob} has no value"


def _ordered(values: set[Scalar]) -> tuple[Scalar, ...]:
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v)))


def legal(point: Point) -> bool:
    """A budget below the sequence cap would starve running requests."""
    budget, cap = point.get(BUDGET), point.get(CAP)
    return not (isinstance(budget, int) and isinstance(cap, int)) or budget >= cap


def canonical(point: Point, space: Space) -> dict[str, Scalar]:
    """`point` with the parameters of an order that is off at their defaults, where they change nothing."""
    off = point.get(POLICY, "token_aware") != "token_aware"
    return {knob: space.defaults[knob] if off and knob in (AGING, EDGES) else value for knob, value in point.items()}


def without(point: Point, knob: str, space: Space) -> dict[str, Scalar]:
    """`point` with its change of one knob put back."""
    return canonical({**point, knob: space.defaults[knob]}, space)


def wide(space: Space) -> dict[str, Scalar | list[Scalar]]:
    """Flags of the one start under which every point can be reached: limits that are narrowed, and the least stream interval,
    since a request can only ask for a larger one."""
    flags: dict[str, Scalar | list[Scalar]] = {}
    for knob, end in ((BUDGET, max), (CAP, max), (STREAM, min)):
        numbers = [v for v in space.values.get(knob, ()) if isinstance(v, int)]
        if numbers:
            flags[PLAIN[knob]] = end(numbers)
    return flags


def plain_flags(point: Point, space: Space) -> dict[str, Scalar | list[Scalar]]:
    """The flags that give `point` at a start: only what differs from the defaults."""
    flags: dict[str, Scalar | list[Scalar]] = {PLAIN[knob]: point[knob] for knob in changed(point, space) if knob in PLAIN}
    return {**flags, **(_kept_graphs(point, space) if flags else {}), **flags_of(restart_part(point, space))}


def _kept_graphs(point: Point, space: Space) -> dict[str, Scalar | list[Scalar]]:
    """The CUDA graphs of the wide start, where one with fewer sequences would capture only smaller ones by itself, and the host
    would launch steps kernel by kernel that were captured when they were measured."""
    cap, budget = point.get(CAP), point.get(BUDGET)
    kept = min([space.graphs or 0, *([budget] if isinstance(budget, int) else [])])
    return {GRAPHS: kept} if isinstance(cap, int) and 2 * cap < kept else {}


def plain_variables(point: Point, space: Space) -> dict[str, str | None]:
    """The environment variables that give `point` at a start: only what differs from the defaults, but every searched
    parameter of the token-aware order where it is on: whoever starts it may have other values in a shell."""
    on = point.get(POLICY, "token_aware") == "token_aware"
    order = {control.VARIABLES[knob]: str(value) for knob, value in point.items() if on and knob in control.VARIABLES}
    return {**variables_of(restart_part(point, space)), **order}


def restart_part(point: Point, space: Space) -> dict[str, Scalar]:
    """The flags and variables of `point` that need a start of their own, as far as they differ from the defaults."""
    return {knob: value for knob, value in changed(point, space).items() if knob in space.restart}


def flags_of(restart: Point) -> dict[str, Scalar | list[Scalar]]:
    """The flags among the knobs of a start."""
    return {knob: value for knob, value in restart.items() if not is_variable(knob)}


def variables_of(restart: Point) -> dict[str, str | None]:
    """The environment variables among the knobs of a start; None: not set."""
    return {knob: None if value is None else str(value) for knob, value in restart.items() if is_variable(knob)}


def live_part(point: Point, space: Space) -> dict[str, Scalar]:
    """The knobs of `point` that need no start of their own."""
    return {knob: value for knob, value in point.items() if knob in space.values}


def in_bunches(point: Point) -> int:
    """How many tokens `point` has the server send at a time, where it says so; else 1."""
    return _number(point.get(STREAM), point.get(PLAIN[STREAM]), 1)


def changed(point: Point, space: Space) -> dict[str, Scalar]:
    """The knobs of `point` that differ from the engine's defaults: the smallest change."""
    return {knob: value for knob, value in point.items() if value != space.defaults.get(knob)}


def show(point: Point) -> str:
    """A point for people."""
    return " ".join(f"{knob}={value}" for knob, value in point.items()) or "the engine's defaults"
