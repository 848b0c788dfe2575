"""What to send and when: a `Plan`, and the requests that follow from it. Pure; the same seed gives the same requests.

Arrival times, classes and lengths depend on `seed` alone; the content of prompts also on `arm`, so that two arms of a comparison
get the same traffic and neither finds the other's prompts in a prefix cache.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import random
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from fenno.errors import LoadError, UsageError
from fenno.load import prompts, trace
from fenno.recipe import LengthClass, Lengths, Workload, greatest

FORCED = ("ignore_eos", "min_tokens")
SIGNATURE = 12  # the first tokens of a prompt that no other prompt shares; well inside one cache block of any engine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of traffic. Times are in seconds. Raises `UsageError` when it says too much or too little.

    Of `rate`, `ramp`, `users` and the workload's trace exactly one says when requests are sent.
    """

    url: str
    model: str
    workload: Workload
    endpoint: Literal["completions", "chat"] = "completions"
    rate: float | None = None  # open loop: requests a second
    ramp: tuple[float, float] | None = None  # open loop: requests a second at the window's start and at its end
    users: int | None = None  # closed loop: each with one request in flight
    warmup: float = 0.0
    duration: float | None = None  # the counted window ...
    requests: int | None = None  # ... or the number of counted requests
    seed: int = 0
    timeout: float = 60.0
    arm: int | str = 0
    processes: int = 1
    bind: str | None = None  # where these processes, on hosts of their own, find this one: ADDRESS:PORT
    api_key_env: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ca_file: str | None = None
    forced: tuple[str, ...] = FORCED  # fields by which the server makes answers exactly as long as asked for
    joint: str = " "  # chat: what stands between two letters of a prompt, so that each letter is a token
    overhead: int = 0  # chat: tokens that the template adds to a prompt
    vocab: int = 256  # prompt token ids are drawn from the upper half below this: special tokens lie in the lower, or above

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.rate, self.ramp, self.users, self.workload.trace)) != 1:
            raise UsageError("give either a rate, a ramp or a trace (open loop), or a number of users (closed loop)")
        if (self.duration is None) == (self.requests is None):
            raise UsageError("give either a duration or a number of requests")
        if self.duration is None and self.rate is None and self.users is None:
            raise UsageError("a ramp or a trace lasts for a duration, not for a number of requests")
        if self.workload.turns != 1 and self.endpoint != "chat":
            raise UsageError("turns need the chat endpoint", "set `endpoint: chat`")
        for name in ("rate", "users", "duration", "requests", "timeout", "processes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} must be more than 0, not {value}")
        if not self.url.startswith(("http://", "https://")):
            raise UsageError(f"{self.url!r} is not an http:// or https:// address")

    @property
    def exact(self) -> bool:
        """Whether answers are as long as asked for."""
        return self.workload.ignore_eos and bool(self.forced)

    @property
    def path(self) -> str:
        return "/v1/completions" if self.endpoint == "completions" else "/v1/chat/completions"

    def api_key(self) -> str | None:
        """The key itself, from the environment. Raises `UsageError` when the variable is not set."""
        if self.api_key_env is None:
            return None
        if not os.environ.get(self.api_key_env):
            raise UsageError(f"the environment variable {self.api_key_env} is not set", "it should hold the API key")
        return os.environ[self.api_key_env]


@dataclass(frozen=True)
class Request:
    """One request. `at`: seconds from the start of traffic (open loop), None in a closed loop."""

    index: int
    at: float | None
    cls: str
    prompt_tokens: int | None  # None where the prompt is somebody's text, or holds answers
    output_tokens: int
    body: dict[str, Any]
    turn: int = 1
    later: tuple[tuple[str, int], ...] = ()  # the turns after this one: what is said, and how long the answer is to be


def dump(plan: Plan) -> str:
    """The plan as JSON, for the child process; header values, which may be secrets, are left out."""
    data = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    data["workload"] = plan.workload.model_dump(mode="json")
    data["headers"] = dict.fromkeys(plan.headers, "")
    return json.dumps(data)


def parse(text: str, headers: Mapping[str, str]) -> Plan:
    """The plan that `dump` wrote, with its headers put back."""
    data = json.loads(text)
    tuples = {"ramp": tuple(data["ramp"]) if data["ramp"] else None, "forced": tuple(data["forced"])}
    return Plan(**{**data, **tuples, "workload": Workload.model_validate(data["workload"]), "headers": dict(headers)})


def arrivals(plan: Plan) -> Iterator[float]:
    """Seconds from the start of traffic of every arrival of an open loop; without end, unless a trace has one."""
    if plan.workload.trace:
        return (entry.at / plan.workload.scale for entry in trace.load(Path(plan.workload.trace)))
    if plan.ramp is not None:
        begin, end = plan.ramp
        assert plan.duration is not None
        return (_on_ramp(count, begin, end, plan.warmup, plan.duration) for count in _counts(plan))
    rate = plan.rate or math.nan
    return (count / rate for count in _counts(plan))


def _counts(plan: Plan) -> Iterator[float]:
    """Arrivals of an open loop of one request a second: any other rate is this one on another clock."""
    shape = plan.workload.burstiness if plan.workload.arrival == "gamma" else 1.0
    if plan.workload.arrival == "constant":
        return map(float, itertools.count(1))
    rng = random.Random(f"arrivals/{plan.seed}")
    return itertools.accumulate(rng.gammavariate(shape, 1 / shape) for _ in itertools.count())


def _on_ramp(count: float, begin: float, end: float, before: float, length: float) -> float:
    """When so many arrivals are expected: at the rate `begin` for `before` seconds, then rising to `end` within `length` seconds.

    The inverse of the cumulative rate, which turns a Poisson process of rate 1 into one of just this rate.
    """
    count -= begin * before
    if count <= 0:
        return before + count / begin
    whole = (begin + end) / 2 * length
    if count >= whole:
        return before + length + (count - whole) / end
    return before + 2 * count / (begin + math.sqrt(begin * begin + 2 * count * (end - begin) / length))


def requests(plan: Plan, first: int = 0, step: int = 1) -> Iterator[Request]:
    """Every request of the plan in order; of several processes, each takes every `step`th from `first` on.

    Without end, unless a trace has one. Raises `LoadError` when the workload's prompts cannot be read.
    """
    times: Iterator[float | None] = itertools.repeat(None) if plan.users is not None else arrivals(plan)
    make = _traced(plan) if plan.workload.trace else _real(plan) if plan.workload.prompts else _synthetic(plan)
    for index, at in itertools.islice(enumerate(times), first, None, step):
        yield make(index, at)


def _synthetic(plan: Plan) -> Any:
    """index, at -> Request, with random prompts of exact length."""
    classes, cumulative = plan.workload.classes, _cumulative(plan.workload.classes)
    alphabet = _alphabet(plan)
    prefix = _fill(random.Random(f"prefix/{plan.seed}/{plan.arm}"), max(greatest(cls.prompt_tokens) for cls in classes), alphabet)
    head = _signature(plan, alphabet)

    def make(index: int, at: float | None) -> Request:
        rng = random.Random(f"request/{plan.seed}/{index}")
        cls = classes[bisect.bisect(cumulative, rng.random() * cumulative[-1])]
        length = draw(cls.prompt_tokens, rng)
        shared = int(plan.workload.shared_prefix * length)
        ids = (prefix[:shared] + head(index) + _fill(rng, length, alphabet))[: _room(plan, length)]
        output = draw(cls.output_tokens, rng)
        turns = range(draw(plan.workload.turns, rng) - 1)
        said = [(_fill(rng, draw(cls.prompt_tokens, rng), alphabet), draw(cls.output_tokens, rng)) for _ in turns]
        later = tuple((_text(plan, words), tokens) for words, tokens in said)
        return Request(index, at, cls.name, length, output, body(plan, _asked(plan, ids), output), later=later)

    return make


def _traced(plan: Plan) -> Any:
    """index, at -> Request, with the trace's lengths; prompts that share leading blocks there share them here."""
    entries = trace.load(Path(plan.workload.trace or ""))
    alphabet = _alphabet(plan)
    head = _signature(plan, alphabet)

    def block(number: int) -> list[int]:
        return _fill(random.Random(f"block/{plan.seed}/{plan.arm}/{number}"), trace.BLOCK, alphabet)

    def make(index: int, at: float | None) -> Request:
        entry = entries[index]
        room = _room(plan, entry.prompt_tokens)
        ids = [token for number in entry.blocks for token in block(number)][:room]
        missing = room - len(ids)
        if missing:
            ids += (head(index) + _fill(random.Random(f"request/{plan.seed}/{index}"), missing, alphabet))[:missing]
        asked = _asked(plan, ids)
        return Request(index, at, "trace", entry.prompt_tokens, entry.output_tokens, body(plan, asked, entry.output_tokens))

    return make


def draw(tokens: int | tuple[int, int] | Lengths, rng: random.Random) -> int:
    """A length. One draw by inversion gives a distribution that is cut off, not one with heaps at its ends."""
    if isinstance(tokens, int):
        return tokens
    if isinstance(tokens, tuple):
        return rng.randint(*tokens)
    low, high = max(tokens.least - 0.5, 0.5), tokens.most + 0.5
    if tokens.distribution == "normal":
        normal = NormalDist(tokens.mean, tokens.spread)
        return _between(round(_cut(normal, low, high, rng.random())), tokens)
    variance = math.log1p((tokens.spread / tokens.mean) ** 2)
    normal = NormalDist(math.log(tokens.mean) - variance / 2, math.sqrt(variance))
    return _between(round(math.exp(_cut(normal, math.log(low), math.log(high), rng.random()))), tokens)


def _cut(normal: NormalDist, low: float, high: float, spot: float) -> float:
    """The value at the share `spot` of what lies between two limits."""
    least, greatest = normal.cdf(low), normal.cdf(high)
    return normal.inv_cdf(min(max(least + spot * (greatest - least), 1e-300), 1 - 2**-53))


def _between(value: int, tokens: Lengths) -> int:
    return min(max(value, tokens.least), tokens.most)


def _alphabet(plan: Plan) -> range:
    """Token ids; on chat, which takes text, letters."""
    return range(plan.vocab // 2, plan.vocab) if plan.endpoint == "completions" else range(97, 123)


def _fill(rng: random.Random, count: int, alphabet: range) -> list[int]:
    """Random token ids. From raw bytes: a draw of each id by itself would hold up the loop for milliseconds at a long prompt."""
    low, size = alphabet.start, len(alphabet)
    if alphabet.stop <= 256:
        return list(rng.randbytes(count).translate(_table(low, size)))
    return [low + value % size for value in array("H", rng.randbytes(2 * count))]


@functools.lru_cache(maxsize=4)
def _table(low: int, size: int) -> bytes:
    """For each byte one of `size` ids from `low` on."""
    return bytes(low + value % size for value in range(256))


def _signature(plan: Plan, alphabet: range) -> Callable[[int], list[int]]:
    """index -> token ids that no other request of this plan starts with, and of another arm or seed only by a rare chance."""
    base = len(alphabet)
    size = base ** (SIGNATURE // 2)
    digest = int.from_bytes(hashlib.sha256(f"{plan.seed}/{plan.arm}".encode()).digest()[:16], "big")
    # A multiplier that shares no factor with the base permutes the numbers: neighbours differ in their first token.
    multiplier = next(m for m in itertools.count(0x9E3779B1 % size) if math.gcd(m, base) == 1)
    upper = size * (digest // size % size)

    def digits(index: int) -> list[int]:
        number, found = (index * multiplier + digest) % size + upper, []
        for _ in range(SIGNATURE):
            number, digit = divmod(number, base)
            found.append(alphabet[digit])
        return found

    return digits


def _real(plan: Plan) -> Any:
    """index, at -> Request, from a file of prompts, taken in an order that the seed shuffles, again and again."""
    assert plan.workload.prompts is not None
    entries = prompts.load(Path(plan.workload.prompts))
    order = list(range(len(entries)))
    random.Random(f"order/{plan.seed}/{plan.arm}").shuffle(order)
    classes, cumulative = plan.workload.classes, _cumulative(plan.workload.classes)

    def make(index: int, at: float | None) -> Request:
        entry = entries[order[index % len(order)]]
        name, output = "prompts", entry.output_tokens
        if output is None:
            if not classes:
                raise LoadError(f"{plan.workload.prompts}: a prompt has no max_tokens", "give the workload `classes` as well")
            rng = random.Random(f"request/{plan.seed}/{index}")
            cls = classes[bisect.bisect(cumulative, rng.random() * cumulative[-1])]
            name, output = cls.name, draw(cls.output_tokens, rng)
        asked = {"messages": entry.messages} if plan.endpoint == "chat" else {"prompt": entry.text()}
        return Request(index, at, name, None, output, body(plan, asked, output))

    return make


def follow(plan: Plan, request: Request, answer: str) -> Request:
    """The next turn of a conversation: all that was said before, the answer that came, and what is said now."""
    (text, output), *later = request.later
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    asked = body(plan, {"messages": [*request.body["messages"], *said]}, output)
    return Request(request.index, None, request.cls, None, output, asked, request.turn + 1, tuple(later))


def body(plan: Plan, asked: Mapping[str, Any], output_tokens: int) -> dict[str, Any]:
    """The JSON of one request: a stream that ends with the server's own token count."""
    exactly = {"ignore_eos": True, "min_tokens": output_tokens}
    forced = {name: exactly[name] for name in plan.forced} if plan.workload.ignore_eos else {}
    return {
        "model": plan.model,
        **asked,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **forced,
        **plan.extra_body,
    }


def _asked(plan: Plan, ids: list[int]) -> dict[str, Any]:
    """A prompt of token ids, or on chat of letters."""
    if plan.endpoint == "completions":
        return {"prompt": ids}
    return {"messages": [{"role": "user", "content": _text(plan, ids)}]}


def _text(plan: Plan, ids: list[int]) -> str:
    return plan.joint.join(bytes(ids).decode("ascii"))


def _room(plan: Plan, tokens: int) -> int:
    """How many tokens of a prompt are left for its content."""
    return max(1, tokens - plan.overhead)


def _cumulative(classes: tuple[LengthClass, ...]) -> list[float]:
    return list(itertools.accumulate(cls.share for cls in classes))
