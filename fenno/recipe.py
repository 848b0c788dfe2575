"""The recipe: one YAML for an engine, its model, the traffic it serves, the targets it must meet, and what may be changed.

Models are frozen and refuse unknown keys. `load` reads a file and names the key and the line of a mistake; `find` resolves what a
person typed; `schema` is the JSON Schema that editors use.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from fenno import meant, units
from fenno.errors import RecipeError, UsageError
from fenno.quantities import FILE, Count, LatencyLimit, Limit, Memory, Rate, Seconds, Share, Size
from fenno.secret import in_flag, is_secret

Scalar = bool | int | float | str | None

PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
# The flags whose numbers vLLM reads in thousands too, such as 8k and 8K.
IN_THOUSANDS = {
    *("max-model-len", "max-num-batched-tokens", "max-num-scheduled-tokens", "max-num-queued-tokens"),
    "kv-cache-memory-bytes",
}


class Model(BaseModel):
    """Frozen, and a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _digits(flag: str, value: object) -> object:
    """A flag's number that is written in thousands, as vLLM reads it; another text, such as auto, as it is."""
    try:
        return units.tokens(value) if flag in IN_THOUSANDS and isinstance(value, str) else value
    except UsageError:
        return value


def _fault(flag: object, value: object) -> str | None:
    """What is wrong with a flag's value as such, whichever vLLM is here."""
    if isinstance(value, Mapping):
        return f"JSON is written as one text, {json.dumps(value, default=str)!r}"
    if not all(isinstance(each, Scalar) for each in (value if isinstance(value, list | tuple) else [value])):
        return "it takes text, a number, true or false, or a list of these"
    if flag in PARALLEL and value is not None and not re.fullmatch("[1-9][0-9]*", str(value)):
        return "it takes a whole number, such as 8"
    return None


class Engine(Model):
    """One vLLM: started by fenno (`model`), by commands of your own (`start`, `stop`), or running already (`url` alone)."""

    model: str | None = Field(None, description="a folder, a Hub id, or `dummy:NAME` for a small random model that fenno makes")
    python: str | None = Field(None, description="the interpreter vLLM is installed under; default: the one fenno runs under")
    flags: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict,
        description="`vllm serve` flags without the dashes; true for a switch, false for its --no- form",
    )
    env: dict[str, str | None] = Field(
        default_factory=dict, description="environment variables of the engine; null: as whoever runs fenno has it, such as a token"
    )
    scheduler: Literal["fcfs", "token_aware"] | None = Field(None, description="the order of waiting requests")
    trust_remote_code: bool = False
    url: str | None = Field(
        None, description="an OpenAI-compatible server that fenno does not start, such as http://127.0.0.1:8000"
    )
    start: list[str] | None = Field(None, description="a command that starts the server at `url`")
    stop: list[str] | None = Field(None, description="a command that stops it again")
    served_model: str | None = Field(None, description="the model's name in requests; default: the first of /v1/models")
    ready_timeout: Seconds = Field(600.0, description="how long a start may take")
    patches: str | None = Field(None, description="a folder of your own patches, see `fenno patch`")
    api_key_env: str | None = Field(None, description="the environment variable that holds the API key")
    api_key_file: str | None = Field(None, description="the file that holds the API key, alone")
    ca_file: str | None = Field(None, description="the certificate authority of an https `url`")

    @property
    def ranks(self) -> int:
        """How many GPUs its parallel flags ask for; 1 without any."""
        return math.prod(int(str(self.flags.get(name) or 1)) for name in PARALLEL)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that have their values here; the others are inherited."""
        return {name: value for name, value in self.env.items() if value is not None}

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The environment variables to which no file of fenno's gives a value: inherited ones, and secrets."""
        return tuple(name for name, value in self.env.items() if value is None or is_secret(name, value))

    @field_validator("flags", mode="before")
    @classmethod
    def _values(cls, flags: Any) -> Any:
        if not isinstance(flags, Mapping):
            return flags
        for name, value in flags.items():
            if fault := _fault(name, value):
                raise ValueError(f"`{name}` is {value!r}: {fault}")
        return {name: _digits(name, value) for name, value in flags.items()}

    @model_validator(mode="after")
    def _key_that_nobody_sees(self) -> Engine:
        if "api-key" in self.flags:
            raise ValueError("`flags.api-key` would be seen by everybody in `ps`: use `api_key_env` or `api_key_file`")
        if seen := next((name for name, value in self.flags.items() if in_flag(name, value)), None):
            raise ValueError(f"`flags.{seen}` would be seen by everybody in `ps`: give it as a variable in `env`")
        if self.api_key_env and self.api_key_file:
            raise ValueError("give `api_key_env` or `api_key_file`, not both")
        return self

    @model_validator(mode="after")
    def _one_way_to_start(self) -> Engine:
        if (self.model is None) == (self.url is None):
            raise ValueError("give either `model` (fenno starts vLLM) or `url` (a server that runs already)")
        if self.start and not self.url:
            raise ValueError("`start` needs `url`: where the server will answer")
        return self


class Host(Model):
    """What the recipe needs of a machine."""

    gpus: int | None = Field(None, ge=0, description="how many; 0: it runs on a CPU; unsaid: those that its parallel flags take")
    gpu_memory: Size | None = Field(None, description="at least this much on each GPU")
    memory: Size | None = Field(None, description="at least this much main memory")


class Lengths(Model):
    """Token counts of a distribution, cut off at `least` and `most`; `mean` and `spread` are its own, before the cut."""

    distribution: Literal["normal", "lognormal"]
    mean: float = Field(gt=0)
    spread: float = Field(gt=0, description="the standard deviation")
    least: Count = Field(1, ge=1)
    most: Count

    @model_validator(mode="after")
    def _mean_inside(self) -> Lengths:
        if not self.least <= self.mean <= self.most:
            raise ValueError(f"the mean {self.mean:g} is not between {self.least} and {self.most}")
        return self


def _kind(value: object) -> str:
    # In brackets, as `_explain` leaves such parts of a place out.
    return "[lengths]" if isinstance(value, Mapping | Lengths) else "[range]" if isinstance(value, list | tuple) else "[count]"


Tokens = Annotated[
    Annotated[Count, Tag("[count]")] | Annotated[tuple[Count, Count], Tag("[range]")] | Annotated[Lengths, Tag("[lengths]")],
    Discriminator(_kind),
]


def _mean(tokens: int | tuple[int, int] | Lengths) -> float:
    if isinstance(tokens, Lengths):
        return tokens.mean
    return sum(tokens) / 2 if isinstance(tokens, tuple) else float(tokens)


def greatest(tokens: int | tuple[int, int] | Lengths) -> int:
    """The most there may be."""
    if isinstance(tokens, Lengths):
        return tokens.most
    return max(tokens) if isinstance(tokens, tuple) else tokens


class LengthClass(Model):
    """One kind of request in the mix. Lengths are one number, a [least, most] range drawn uniformly, or a distribution."""

    name: str
    share: Share = Field(description="its part of the mix; shares are normalised")
    prompt_tokens: Tokens
    output_tokens: Tokens

    @model_validator(mode="after")
    def _ranges(self) -> LengthClass:
        for tokens in (self.prompt_tokens, self.output_tokens):
            if isinstance(tokens, tuple) and not 1 <= tokens[0] <= tokens[1]:
                raise ValueError(f"[{tokens[0]}, {tokens[1]}] is no range of lengths: the lesser one comes first")
        return self

    @property
    def longest(self) -> int:
        """Tokens of its longest request when that ends."""
        return greatest(self.prompt_tokens) + greatest(self.output_tokens)


ARTICLE_MIX = (
    LengthClass(name="short", share=0.6, prompt_tokens=(64, 448), output_tokens=64),
    LengthClass(name="medium", share=0.3, prompt_tokens=(64, 448), output_tokens=128),
    LengthClass(name="long", share=0.1, prompt_tokens=(64, 448), output_tokens=512),
)


class Workload(Model):
    """The traffic. Open loop: `rate` requests a second, a `ramp` or a `trace`; closed loop: `users`, each with one in flight."""

    classes: tuple[LengthClass, ...] = ARTICLE_MIX
    endpoint: Literal["completions", "chat"] = "completions"
    arrival: Literal["poisson", "constant", "gamma"] = "poisson"
    burstiness: float = Field(1.0, gt=0, description="shape of gamma arrivals: 1 is Poisson, less is burstier")
    rate: float | None = Field(None, gt=0, allow_inf_nan=False, description="requests a second")
    ramp: tuple[Rate, Rate] | None = Field(None, description="requests a second at the window's start and at its end")
    trace: str | None = Field(None, description="recorded arrivals and lengths: Azure's CSV, or Mooncake's JSONL")
    scale: float = Field(1.0, gt=0, description="how many times faster than recorded a trace is replayed")
    users: int | None = Field(None, gt=0)
    turns: Tokens = Field(1, description="chat: requests of a conversation, each with all that was said before")
    think_time: Seconds = Field(0.0, description="between a user's requests, and between the turns of a conversation")
    prompts: str | None = Field(None, description="real prompts: ShareGPT JSON, or OpenAI batch JSONL")
    shared_prefix: float = Field(0.0, ge=0, lt=1, description="share of every prompt that all prompts of a run have in common")
    ignore_eos: bool = Field(True, description="make answers exactly as long as asked for")
    timeout: Seconds = Field(60.0, description="an answer that takes longer is a failure")

    @model_validator(mode="after")
    def _one_loop(self) -> Workload:
        if sum(way is not None for way in (self.rate, self.ramp, self.trace, self.users)) > 1:
            raise ValueError("give one of `rate`, `ramp`, `trace` (open loop) and `users` (closed loop)")
        if self.prompts and (self.trace or self.turns != 1):
            raise ValueError("`prompts` go with neither `trace` nor `turns`, which make up their own")
        if self.trace and self.turns != 1:
            raise ValueError("a `trace` has no `turns`: every request is in it")
        if not self.classes and not self.prompts:
            raise ValueError("give `classes` or `prompts`")
        return self

    def mean_lengths(self) -> tuple[float, float]:
        """Tokens of prompt and answer, on average over the classes."""
        whole = sum(each.share for each in self.classes) or 1.0
        prompt = sum(each.share * _mean(each.prompt_tokens) for each in self.classes) / whole
        return prompt, sum(each.share * _mean(each.output_tokens) for each in self.classes) / whole


TARGETS = "they are percentiles of ttft, tpot, e2el or gap (p95_ttft, p99.9_gap), and qps, goodput, memory, availability"
METRICS = ("ttft", "tpot", "e2el", "gap")
# Any percentile from 1 to below 100, to a hundredth, in one spelling.
LATENCY = rf"^p[1-9]\d?(\.\d?[1-9])?_({'|'.join(METRICS)})$"
# What most people ask for, for who has misspelt one.
USUAL = tuple(f"p{percentile}_{metric}" for metric in METRICS for percentile in (50, 90, 95, 99))


def _only_latencies(schema: dict[str, Any]) -> None:
    schema["patternProperties"], schema["additionalProperties"] = {LATENCY: schema["additionalProperties"]}, False


class Latencies(Model):
    """Limits of percentiles in seconds: to the first token (`p95_ttft`), a token after it (`p50_tpot`), to the last token
    (`p99_e2el`), the longest gap (`p99.9_gap`)."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_only_latencies)
    __pydantic_extra__: dict[Annotated[str, Field(pattern=LATENCY)], LatencyLimit]

    @model_validator(mode="before")
    @classmethod
    def _without_none(cls, given: Any) -> Any:
        """A limit may be written as none, as in a file whose value was taken out and in the records of runs."""
        if not isinstance(given, Mapping):
            return given
        return {name: limit for name, limit in given.items() if limit is not None or not re.fullmatch(LATENCY, str(name))}

    def limits(self) -> dict[str, float]:
        """Those that are set, by name ("p95_ttft"), in seconds: metric by metric, the lowest percentile first."""
        names = {Latency.of(name): name for name in self.__pydantic_extra__}
        ordered = sorted(names, key=lambda one: (METRICS.index(one.metric), one.percentile))
        return {names[one]: self.__pydantic_extra__[names[one]] for one in ordered}


class Targets(Latencies):
    """What must hold at the same time; a class of the workload may have limits of its own."""

    qps: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="requests a second, completed, under open-loop arrivals at this rate"
    )
    goodput: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="at least so many requests a second that each keep every latency limit; no percentile is judged then",
    )
    memory: Memory | None = Field(None, description="at most this share, or this much, of GPU memory (on a CPU: of the machine's)")
    availability: Share | None = Field(None, description="complete and correct answers / attempts")
    classes: dict[str, Latencies] = Field(default_factory=dict, description="limits for one class of the workload, by its name")

    def latencies(self) -> dict[str, float]:
        """The latency targets that are set, in seconds, by name: "p95_ttft", or "short:p95_ttft" for a class."""
        mine = {f"{cls}:{name}": limit for cls, limits in self.classes.items() for name, limit in limits.limits().items()}
        return {**self.limits(), **mine}

    def percentiles(self) -> dict[str, float]:
        """The latency targets whose percentile is judged: none under a goodput target, which is of single requests."""
        return self.latencies() if self.goodput is None else {}


class Latency(NamedTuple):
    """A latency target's name taken apart: "short:p95_ttft" is class "short", percentile 95, metric "ttft"."""

    cls: str | None
    percentile: float
    metric: str

    @classmethod
    def of(cls, name: str) -> Latency:
        owner, _, rest = name.rpartition(":")
        percentile, _, metric = rest.partition("_")
        return cls(owner or None, float(percentile[1:]), metric)


class Stack(Model):
    """What a recipe was written for, as its source names it. `fenno doctor` compares it with what is here; nothing of it is run."""

    python: str | None = Field(None, description="such as 3.10")
    cuda: str | None = Field(None, description="the CUDA release, such as 12.1")
    system: str | None = Field(None, description="such as Ubuntu 22.04")
    packages: dict[str, str] = Field(default_factory=dict, description="package -> version (2.3.0) or range (>=2.6,<3)")
    steps: list[str] = Field(default_factory=list, description="commands or code besides the server's own, as the source has them")


class Search(Model):
    """What `fenno tune` may change: values to try by knob. Live knobs change on the running server, restart knobs need a start:
    flags, and environment variables by their names in capitals."""

    live: dict[str, list[Scalar]] = Field(default_factory=dict)
    restart: dict[str, list[Scalar]] = Field(default_factory=dict)
    warmup: Seconds = Field(3.0, gt=0, description="at least so much traffic before requests count; long answers need more")
    window: Seconds = Field(8.0, gt=0, description="at least so much traffic before a trial is judged")

    @field_validator("restart")
    @classmethod
    def _in_digits(cls, restart: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [_digits(name, value) for value in values] for name, values in restart.items()}


class Serve(Model):
    """How `fenno serve` keeps the engine up."""

    grace: Seconds = Field(60.0, ge=0, description="for requests in flight when the server is asked to end")
    hang: Limit = Field(120.0, description="so long without a single token, on request, is a death")
    deaths: int = Field(5, gt=0, description="so many deaths in a row are a crash loop")
    stable: Seconds = Field(600.0, description="who has served so long starts a new row")


class Recipe(Model):
    """One YAML. `name` is how it is called in studies and reports."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    summary: str = ""
    tested: str = Field("", description="what of this recipe was run, on which hardware, and what was not")
    engine: Engine
    host: Host = Host()
    stack: Stack = Stack()
    workload: Workload = Workload()
    targets: Targets = Targets()
    search: Search = Search()
    serve: Serve = Serve()

    @property
    def gpus(self) -> int:
        """How many GPUs it runs on: what it says of its host, and at least what its parallel flags take; 0 for a CPU."""
        return 0 if self.host.gpus == 0 else max(self.host.gpus or 1, self.engine.ranks)

    def digest(self) -> str:
        """Twelve hex digits that change whenever anything in the recipe does but a secret."""
        told = self.without_secrets().model_dump(mode="json")
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    def without_secrets(self) -> Recipe:
        """The same recipe as it may be written down: variables that hold secrets are inherited from whoever reads it again."""
        env = {**self.engine.env, **dict.fromkeys(self.engine.unwritten)}
        return self.model_copy(update={"engine": self.engine.model_copy(update={"env": env})})

    def to_yaml(self) -> str:
        """The recipe as a file's text, without what is at its default, and without its secrets."""
        data = self.without_secrets().model_dump(mode="json", exclude_defaults=True, context=FILE)
        return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)

    @model_validator(mode="after")
    def _classes_there(self) -> Recipe:
        names = [cls.name for cls in self.workload.classes]
        missing = next((name for name in self.targets.classes if name not in names), None)
        if missing is not None:
            raise ValueError(f"`targets.classes` names {missing!r}; the workload's classes are {', '.join(names)}")
        return self

    def with_engine(self, *, host: str | None = None, api_key_file: str | None = None, ca_file: str | None = None) -> Recipe:
        """The same recipe with what is given (not None) in place of its own address to listen on, API key, and authority."""
        flags = {**self.engine.flags, **({"host": host} if host is not None else {})}
        key = {"api_key_file": api_key_file, "api_key_env": None} if api_key_file is not None else {}
        trust = {"ca_file": ca_file} if ca_file is not None else {}
        return self.model_copy(update={"engine": self.engine.model_copy(update={"flags": flags, **key, **trust})})

    def with_flags(self, **flags: object) -> Recipe:
        """The same recipe with these flags of `vllm serve` over its own, by their names without the dashes in front.

        Values as a recipe file has them. Raises `UsageError` for one that no engine takes.
        """
        try:
            engine = Engine.model_validate({**self.engine.model_dump(), "flags": {**self.engine.flags, **flags}})
        except ValidationError as error:
            said = _explain(error.errors()[0]).removeprefix("`flags`: ").replace("`flags.", "`")
            raise UsageError(f"the flag {said}", "write it as a recipe has it under `engine.flags`") from error
        return self.model_copy(update={"engine": engine})

    def with_targets(self, **targets: object) -> Recipe:
        """The same recipe with the targets that are given (not None) replaced: by name, a class's as "short:p95_ttft".

        Values as a recipe file has them. Raises `UsageError` for an impossible one.
        """
        merged: dict[str, Any] = self.targets.model_dump()
        for name, value in targets.items():
            cls, colon, rest = name.rpartition(":")
            if value is not None:
                (merged["classes"].setdefault(cls, {}) if colon else merged)[rest] = value
        try:
            return Recipe.model_validate({**self.model_dump(), "targets": merged})
        except ValidationError as error:
            first = error.errors()[0]
            if _unknown(first):
                name = str(first["loc"][-1])
                raise UsageError(f"there is no target `{name}`{meant.key(name, _keys_at(['targets']))}", TARGETS) from error
            raise UsageError("the target " + _explain(first).replace("`targets.", "`")) from error


def schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def folder() -> Path:
    """Where the embedded recipes lie: inside the wheel, or at the top of a source checkout."""
    packaged = Path(str(resources.files("fenno"))) / "data" / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "recipes"


def embedded() -> dict[str, Path]:
    """The recipes that ship with fenno, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.yaml"))}


def find(what: str) -> Path:
    """The file behind a path or an embedded recipe's name. Raises `RecipeError` with the names there are."""
    if what in embedded():
        return embedded()[what]
    path = Path(what)
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError(f"{what} is a folder, not a recipe", meant.by_folder(path))
    near = difflib.get_close_matches(what, embedded(), n=1)
    raise RecipeError(
        f"there is no recipe {what!r}, neither a file nor a name" + (f"; did you mean {near[0]}?" if near else ""),
        meant.by_words(what),
    )


def load(path: Path) -> Recipe:
    """Read and check one recipe file. Raises `RecipeError` naming the file, the line and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read {path}: {error}", "give a recipe file, or a name from `fenno recipe list`") from error
    return parse(text, str(path))


def parse(text: str, source: str) -> Recipe:
    """A recipe from YAML text; `source` is what messages call it."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        raise RecipeError(
            f"{where}: not YAML: {getattr(error, 'problem', error)}", "mind the indentation and the colons"
        ) from error
    if not isinstance(data, Mapping):
        raise RecipeError(f"{source}: a recipe is a mapping of keys, this is not", "see `fenno recipe show cpu-small`")
    try:
        return Recipe.model_validate(data, context=FILE)
    except ValidationError as error:
        # A misspelt key also makes the right one missing: name the misspelling.
        first = min(error.errors(), key=lambda e: not _unknown(e))
        line = _line(node, first["loc"])
        raise RecipeError(f"{source}:{line}: {_explain(first)}", "`fenno recipe schema` lists every key") from error


def _unknown(error: Any) -> bool:
    """Whether one of pydantic's errors says that a key is none."""
    return bool(error["type"] == "extra_forbidden" or error.get("ctx", {}).get("pattern") == LATENCY)


def _explain(error: Any) -> str:
    """One of pydantic's errors in a sentence."""
    names = [str(part) for part in error["loc"] if isinstance(part, int) or "[" not in part]
    key = ".".join(names)
    if _unknown(error):
        return f"unknown key `{key}`" + meant.key(names[-1], _keys_at(names[:-1]))
    if error["type"] == "missing":
        return f"`{key}` is missing"
    if error["type"] == "string_pattern_mismatch":
        return f"`{key}`: {error['input']!r} is no name: small letters and digits, behind the first also . _ and -"
    message = error["msg"].removeprefix("Value error, ")
    return f"`{key}`: {message}" if key else message


def _keys_at(names: list[str]) -> list[str]:
    """The keys that are allowed below `names`."""
    if names[:2] == ["targets", "classes"]:
        return [*USUAL]
    model: Any = Recipe
    for name in names:
        field = getattr(model, "model_fields", {}).get(name)
        if field is not None:
            model = {"classes": LengthClass, "prompt_tokens": Lengths, "output_tokens": Lengths}.get(name, field.annotation)
    usual = USUAL if model is Targets else ()
    return [*usual, *getattr(model, "model_fields", {})]


def _line(node: Any, loc: tuple[int | str, ...]) -> int:
    """The line (from 1) of the deepest key of `loc` that the file has."""
    line = node.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return int(line)
