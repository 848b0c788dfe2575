"""Whether tuned settings give the outputs that the defaults give: log-probabilities of fixed texts, and of a greedy answer to each.

How far two runs of the same model may differ is not known beforehand: sums are rounded in another order as soon as a batch has
another size. So the defaults are asked twice, text after text and all at once, and what differs between the two is their noise.

Texts are short: for every token of a prompt vLLM (0.24 to 0.33) makes logits over the whole vocabulary, in memory that its start
has not set aside; with a vocabulary of 150,000 that is 1 MB a token.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fenno.engine import http
from fenno.engine.server import Server
from fenno.errors import LoadError
from fenno.tune import output

ANSWER = 8  # tokens of a greedy answer
TIMEOUT = 120.0  # seconds of one request, the first after a start among them

TEXTS = (
    "A river town keeps its bridges by a simple rule: each spring the piers are looked at from a boat, each autumn from the road, "
    "and whatever was seen is written into one book. Nobody remembers who began it. The oldest page is about a cart that",
    "def mean(values):\n    total, count = 0.0, 0\n    for value in values:\n        total += value\n        count += 1\n"
    "    return total / count if count else None\n\n\ndef variance(values):\n    middle = mean(values)\n",
    "Question: a train leaves at 8:15 and drives 126 kilometres in 1 hour and 45 minutes. How fast is it on average? Answer: "
    "126 divided by 1.75 is 72, so it drives 72 kilometres an hour. Question: when does it arrive? Answer:",
    "Zuerst kam der Regen, dann der Wind, und am Abend lag das Feld so still da, als wäre nichts gewesen. Der Bauer zählte die "
    "Zäune, schrieb drei Zahlen auf einen Zettel und ging ins Haus zurück, wo die Suppe schon kalt geworden",
    '{"order": 4711, "items": [{"name": "bolt", "size": "M8", "count": 200}, {"name": "nut", "size": "M8", "count": 200}, '
    '{"name": "washer", "size": "M8", "count": 400}], "deliver": "2031-05-06", "note": "leave at the gate", "total":',
    "Dear Ms Olin, thank you for the drawings of the second floor. Two doors open against each other near the stairs, and the "
    "window of the small office lies in front of a column. Could you move one of them? We would like to begin",
    "Water boils at 100 degrees at sea level and at about 93 degrees two kilometres higher, because less air presses on it. That "
    "is why beans take longer in the mountains, and why a lid with a weight makes them soft in half the time. The reason",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six twenty-seven twenty-eight",
)

# Settings of a start that may change what a model says. A search has them only where a recipe names them.
CHANGES_OUTPUTS = frozenset(
    ("calculate-kv-scales", "dtype", "hf-overrides", "kv-cache-dtype", "load-format", "quantization", "speculative-config")
)

# Outputs have moved when the mean difference is so many times the noise's and this many nats beyond it, or the largest is. In
# bfloat16 a logit of 16 is rounded by up to 0.03, in float32 by a millionth; a mean of 0.005 moves a perplexity by half a percent.
TIMES, MEAN, LARGEST = 3.0, 0.005, 0.05

# Random weights as vLLM's dummy loader makes them are so small that every token is as likely as any other, whatever is computed.
TELLING = 0.1

State = Literal["same", "moved", "asked", "unchanged", "blind"]


@dataclass(frozen=True)
class Answer:
    """One text: log-probabilities in nats of its tokens but the first, then a greedy answer's tokens and theirs."""

    prompt: tuple[float, ...]
    tokens: tuple[str, ...]
    chosen: tuple[float, ...]


# Every text once, in their order.
Pass = tuple[Answer, ...]


@dataclass(frozen=True)
class Spread:
    """Absolute differences of log-probabilities, in nats."""

    count: int
    mean: float
    median: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """The tuned settings against the defaults, and the defaults against themselves. `same_answers` of `answers` greedy answers were
    the same to the last token; what comes after the first other token is not compared."""

    state: State
    sentence: str
    found: Spread | None = None
    noise: Spread | None = None
    answers: int = 0
    same_answers: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def differences(one: Answer, other: Answer) -> list[float]:
    """How far apart the log-probabilities of two answers to one text are. Texts cut into other tokens are infinitely far apart."""
    if len(one.prompt) != len(other.prompt):
        return [math.inf]
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=False)))
    # Where two tokens were as good as equal, noise decides: their log-probabilities are near each other all the same.
    chosen = list(zip(one.chosen, other.chosen, strict=False))[: alike + 1]
    return [abs(a - b) for a, b in (*zip(one.prompt, other.prompt, strict=True), *chosen)]


def spread(pairs: Iterable[tuple[Pass, Pass]]) -> Spread:
    """All differences of pairs of passes."""
    found = [d for one, other in pairs for a, b in zip(one, other, strict=True) for d in differences(a, b)]
    return Spread(len(found), statistics.fmean(found), statistics.median(found), max(found)) if found else Spread(0, 0, 0, 0)


def compare(defaults: Sequence[Pass], tuned: Sequence[Pass], named: Sequence[str] = ()) -> Comparison:
    """Passes of the tuned engine against those of the defaults, each with the one that was asked in the same way.

    `named`: changed settings that may move outputs, and that the recipe named.
    """
    known = [value for one in defaults for answer in one for value in answer.prompt]
    if not known or max(known) - min(known) < TELLING:
        return BLIND
    pairs = list(zip(defaults, tuned, strict=False))
    found, noise = spread(pairs), spread(itertools.combinations(defaults, 2))
    texts = [(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)]
    moved = found.mean > TIMES * noise.mean + MEAN or found.largest > TIMES * noise.largest + LARGEST
    state: State = ("asked" if named else "moved") if moved else "same"
    said = {
        "same": "the tuned settings give the same outputs",
        "moved": "the tuned settings do not give the outputs of the defaults",
        "asked": f"the outputs are others than the defaults', as asked for by {', '.join(named)}",
    }[state]
    figures = f"largest log-probability difference {found.largest:.2g}, median {found.median:.2g}"
    own = f"noise of the defaults with themselves {noise.largest:.2g}, median {noise.median:.2g}"
    return Comparison(state, f"{said}: {figures}, {own}", found, noise, len(texts), sum(a.tokens == b.tokens for a, b in texts))


BLIND = Comparison("blind", "outputs tell nothing here: to these weights every token is as likely as any other")
UNCHANGED = Comparison("unchanged", "nothing was changed, so the outputs are those of the defaults")


def ask(server: Server) -> tuple[Pass, Pass]:
    """Every text twice: one after the other, then all at once. Raises `EngineError` when the engine has died, `LoadError` when it
    gives no log-probabilities."""
    try:
        alone = tuple(_answer(server, text) for text in TEXTS)
        with ThreadPoolExecutor(len(TEXTS)) as pool:
            return alone, tuple(pool.map(lambda text: _answer(server, text), TEXTS))
    except (http.Refused, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        server.check("load")
        raise LoadError(f"the engine gave no log-probabilities: {error}", f"see {server.log}") from error


def _answer(server: Server, text: str) -> Answer:
    """One request: vLLM reads no cached prefix for it, so that every token is computed."""
    wanted = {"prompt_logprobs": 0, "logprobs": 0, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    body = {"model": server.model, "prompt": text, **wanted}
    choice = http.call_json(f"{server.url}/v1/completions", body, timeout=TIMEOUT, key=server.key)["choices"][0]
    # Of each position the one entry that was asked for: the text's own token.
    prompt = tuple(float(next(iter(entry.values()))["logprob"]) for entry in choice["prompt_logprobs"] if entry)
    found = choice["logprobs"]
    return Answer(prompt, tuple(found["tokens"]), tuple(map(float, found["token_logprobs"])))


KEPT = "outputs.json"


def keep(folder: Path, start: Literal["wide", "cold"], passes: Sequence[Pass]) -> None:
    """Keep what the defaults gave, for the comparison and for a study that is taken up again. Raises `DiskError`."""
    output.write(folder, {KEPT: json.dumps({**_read(folder), start: [[asdict(answer) for answer in one] for one in passes]})})


def kept(folder: Path) -> list[Pass]:
    """What the defaults gave: after a cold start where there was one, else imitated on the wide engine; nothing if never asked."""
    found = _read(folder)
    passes = found.get("cold") or found.get("wide") or []
    return [tuple(Answer(*(tuple(a[part]) for part in ("prompt", "tokens", "chosen"))) for a in one) for one in passes]


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
