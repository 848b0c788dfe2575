"""Recipes: what they accept, how a mistake is told, and that the ones that ship with fenno hold together."""

import json
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from stub.harness import ENGINE

from fenno import recipe
from fenno.engine import catalogue
from fenno.errors import EngineError, RecipeError, UsageError
from fenno.recipe import Recipe
from fenno.secret import is_secret

SMALLEST = "name: a\nengine: {model: m}\n"


@pytest.fixture(scope="module")
def known() -> catalogue.Catalogue:
    """The catalogue of the stub engine."""
    done = subprocess.run([sys.executable, ENGINE, "introspect.py"], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.removeprefix(catalogue.MARK))
    flags = {
        name: catalogue.Flag(f["type"], f["choices"] and tuple(f["choices"]), f["default"], f["switch"])
        for name, f in facts["flags"].items()
    }
    identity = catalogue.Identity("stub", facts["distribution"], facts["version"], facts["python"], None, facts["location"])
    return catalogue.Catalogue(identity, facts["platform"], flags, facts["defaults"])


@pytest.mark.parametrize("name", recipe.embedded())
def test_every_embedded_recipe_loads_and_is_called_like_its_file(name: str) -> None:
    found = recipe.load(recipe.find(name))
    assert found.name == name
    assert found.summary and found.tested, "people choose by these"


def test_the_embedded_recipe_for_this_host_has_flags_that_the_engine_has(known: catalogue.Catalogue) -> None:
    known.check(recipe.load(recipe.find("cpu-small")).engine.flags)


@pytest.mark.parametrize("version", ["0.23.4", "0.34.0", "0.1.dev1+g12ab", "dev"])
def test_a_vllm_that_fenno_does_not_know_is_refused_whatever_its_version_looks_like(version: str, tmp_path: Path) -> None:
    facts = dict.fromkeys(("executable", "python", "torch", "location"), "x") | {"distribution": "vllm", "version": version}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{catalogue.MARK}{json.dumps(facts)}'\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=f"vLLM {re.escape(version)} under .* is outside what fenno supports") as raised:
        catalogue.identify(str(python))
    assert raised.value.hint == "install a vLLM from 0.24 up to, not including, 0.34"


CLASS = f"{SMALLEST}workload:\n  classes:\n    - name: x\n      share: 1\n      output_tokens: 1\n      prompt_tokens: %s\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "name: a\nengine: {model: m}\ntargets:\n  p95_tfft: 1s\n",
            "here:4: unknown key `targets.p95_tfft`; did you mean `p95_ttft`?",
        ),
        ("name: a\nengine: {modl: m}\n", "here:2: unknown key `engine.modl`; did you mean `model`?"),
        ("engine: {model: m}\n", "here:1: `name` is missing"),
        ("name: Not a name\nengine: {model: m}\n", "here:1: `name`: 'Not a name' is no name: small letters and digits"),
        ("name: a\nengine: {model: m, url: 'http://h'}\n", "either `model`"),
        ("name: a\nengine: {model: m, start: [run]}\n", "`start` needs `url`"),
        (f"{SMALLEST}targets:\n  p95_ttft: 800q\n", "here:4: `targets.p95_ttft`: '800q' is not a duration such as 800ms"),
        (f"{SMALLEST}targets:\n  p95_ttft: 0\n", "here:4: `targets.p95_ttft`: Input should be greater than 0"),
        (f"{SMALLEST}targets:\n  qps: -1\n", "here:4: `targets.qps`"),
        (f"{SMALLEST}targets:\n  memory: 140%\n", "is not a share such as 85%"),
        (f"{SMALLEST}targets:\n  availability: 2\n", "is not a share"),
        (f"{SMALLEST}workload:\n  rate: 1\n  users: 1\n", "give one of `rate`, `ramp`, `trace` (open loop) and `users`"),
        (f"{SMALLEST}workload:\n  classes: []\n", "give `classes` or `prompts`"),
        (f"{SMALLEST}workload:\n  ramp: [0, 4]\n", "here:4: `workload.ramp.0`: Input should be greater than 0"),
        (f"{SMALLEST}workload:\n  trace: a\n  turns: 3\n", "a `trace` has no `turns`"),
        (CLASS % "[9, 2]", "[9, 2] is no range of lengths"),
        (CLASS % "{distribution: normal, mean: 5, spread: 1, msot: 9}", "here:8: unknown key"),
        (CLASS % "{distribution: normal, mean: 5, spread: 1, msot: 9}", "prompt_tokens.msot`; did you mean `most`?"),
        (CLASS % "{distribution: normal, mean: 5, spread: 1}", "prompt_tokens.most` is missing"),
        (CLASS % "{distribution: normal, mean: 50, spread: 1, most: 9}", "the mean 50 is not between 1 and 9"),
        (CLASS % "ten", "'ten' is not a"),
        (f"{SMALLEST}search:\n  window: 0s\n", "here:4: `search.window`"),
        ("name: a\n  engine: b\n", "here:2: not YAML"),
        ("- a\n- b\n", "a recipe is a mapping of keys"),
        ("", "a recipe is a mapping of keys"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(text, "here")
    assert says in str(caught.value)
    assert str(caught.value).startswith("here") and caught.value.hint and caught.value.exit_code == 2


def test_quantities_are_read_as_people_write_them() -> None:
    found = recipe.parse(
        f"{SMALLEST}targets: {{p95_ttft: 800ms, memory: 40GiB, availability: 99%}}\nhost: {{memory: 6GiB}}\n", "here"
    )
    assert (found.targets.p95_ttft, found.targets.memory, found.targets.availability) == (pytest.approx(0.8), 40 * 2**30, 0.99)
    assert found.host.memory == 6 * 2**30


def test_a_recipe_cannot_be_changed_and_its_digest_follows_every_key() -> None:
    first = recipe.parse(SMALLEST, "here")
    with pytest.raises(ValueError, match="frozen"):
        first.name = "b"  # type: ignore[misc]
    assert first.digest() == recipe.parse(SMALLEST, "elsewhere").digest()
    assert first.digest() != first.with_targets(p95_ttft=0.5).digest()


@pytest.mark.parametrize("said", [{}, {"host": {"gpus": 0}}, {"host": {"gpus": 2}}])
def test_whether_a_recipe_says_how_many_gpus_it_takes_stays_so_whatever_is_made_of_it(said: dict[str, Any]) -> None:
    given = recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m"}, **said}), "here")
    aimed = given.with_targets(qps=2)
    made = (given, aimed, recipe.parse(aimed.to_yaml(), "here"))
    assert {(each.host.gpus, each.gpus) for each in made} == {(given.host.gpus, said.get("host", {"gpus": 1})["gpus"])}


def test_what_is_written_of_a_recipe_holds_no_secret_and_is_the_same_recipe() -> None:
    secrets = {
        **{"HF_TOKEN": "hidden-1", "AWS_SECRET_ACCESS_KEY": "hidden-2", "https_proxy": "http://me:hidden-3@proxy:3128"},
        **{"hf_token": "hidden-4", "MY_CREDENTIALS": "hidden-5", "BASIC_AUTH": "hidden-6", "QUEUE": "redis://:hidden-7@h"},
    }
    env = {**secrets, "A": "b"}
    given = recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "env": env}}, sort_keys=False), "a test")
    text = given.to_yaml()
    read = recipe.parse(text, "a test")
    assert "hidden" not in text and read.engine.variables == {"A": "b"}
    assert read.engine.unwritten == given.engine.unwritten == tuple(secrets)
    assert read.digest() == given.digest() and read.to_yaml() == text
    other = given.model_copy(update={"engine": given.engine.model_copy(update={"env": {**env, "A": "c"}})})
    assert other.digest() != given.digest()
    plain = ("TOKENIZERS_PARALLELISM", "VLLM_MAX_TOKENS", "KEYS", "HTTP_PROXY", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD")
    assert not any(is_secret(name, "http://proxy:3128") for name in plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf-token", "hidden"),
        ("ssl-keyfile-password", 1234),
        ("otlp-traces-endpoint", "http://u:hidden@h"),
        ("kv-transfer-config", '{"url":"redis://:hidden@h"}'),
        ("middleware", ["a", "http://u:hidden@h"]),
    ],
)
def test_a_flag_that_is_a_secret_or_holds_one_is_refused(name: str, value: object) -> None:
    with pytest.raises(RecipeError, match=f"`flags.{name}` would be seen by everybody") as caught:
        recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": {name: value}}}), "here")
    assert "hidden" not in str(caught.value)
    harmless = {"ssl-keyfile": "k.pem", "allow-credentials": True, "hf-token": True, "long-prefill-token-threshold": "2k"}
    told = harmless | {"otlp-traces-endpoint": "http://h:4317", "kv-transfer-config": '{"a":"tcp://h:1","b":"c@d"}'}
    assert recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": told}}), "here").engine.flags == told


@pytest.mark.parametrize("value", ["two", 0, -1, 2.5, True, [2]])
def test_a_number_of_ranks_that_is_none_is_refused(value: object) -> None:
    flags = {"tensor-parallel-size": value}
    with pytest.raises(RecipeError, match="`tensor-parallel-size` is .*: it takes a whole number"):
        recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": flags}}), "here")


def test_a_number_in_thousands_is_the_one_that_vllm_reads() -> None:
    flags = {"max-model-len": "8k", "max-num-batched-tokens": "16K", "kv-cache-memory-bytes": "1.5g", "max-num-seqs": 64}
    read = recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": flags}}), "here").engine.flags
    assert read == {**flags, "max-model-len": 8000, "max-num-batched-tokens": 16384, "kv-cache-memory-bytes": 1_500_000_000}
    search = {"restart": {"max-num-batched-tokens": ["16K", 8192], "max-num-seqs": [64, 128]}}
    read = recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m"}, "search": search}), "here").search.restart
    assert read == {"max-num-batched-tokens": [16384, 8192], "max-num-seqs": [64, 128]}
    for value in ("auto", -1, None):
        one = {"name": "r", "engine": {"model": "m", "flags": {"max-model-len": value}}}
        assert recipe.parse(yaml.safe_dump(one), "here").engine.flags == {"max-model-len": value}


def test_ranks_are_those_of_the_parallel_flags() -> None:
    flags = {"tensor-parallel-size": "4", "data-parallel-size": 2, "pipeline-parallel-size": None}
    assert recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": flags}}), "here").engine.ranks == 8


def test_flags_of_the_command_line_are_checked_like_those_of_a_file_and_the_recipes_own_stay() -> None:
    flags = {"dtype": "float16", "max-num-seqs": 64, "max-model-len": 1024}
    first = recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": flags}}), "here")
    second = first.with_flags(**{"max-num-seqs": 8, "max-model-len": "8k"})
    assert second.engine.flags == {"dtype": "float16", "max-num-seqs": 8, "max-model-len": 8000}
    assert (second.with_flags(), first.engine.flags) == (second, flags)
    for name, value, said in [
        ("data-parallel-size", 0, "the flag `data-parallel-size` is 0: it takes a whole number, such as 8"),
        ("speculative-config", {"a": 1}, """the flag `speculative-config` is .*: JSON is written as one text, '{"a": 1}'"""),
        ("seed", date(2026, 1, 2), "the flag `seed` is .*: it takes text, a number, true or false, or a list of these"),
        ("api-key", "a", "the flag `api-key` would be seen by everybody"),
    ]:
        with pytest.raises(UsageError, match=said):
            first.with_flags(**{name: value})
    with pytest.raises(RecipeError, match=r"here:2: `engine.flags`: `speculative-config` is .*: JSON is written as one text"):
        recipe.parse(yaml.safe_dump({"name": "r", "engine": {"model": "m", "flags": {"speculative-config": {"a": 1}}}}), "here")


def test_targets_of_the_command_line_are_checked_like_those_of_a_file() -> None:
    first = recipe.parse(SMALLEST, "here").with_targets(p95_ttft=0.5, qps=None)
    assert (first.targets.p95_ttft, first.targets.qps) == (0.5, None)
    with pytest.raises(UsageError, match="`qps`"):
        first.with_targets(qps=-1)


def keys(schema: dict[str, Any], part: dict[str, Any], where: str = "") -> dict[str, bool]:
    """Every key that a JSON Schema describes, with whether more keys would be allowed beside it."""
    part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    found = {}
    for name, below in part.get("properties", {}).items():
        found[f"{where}{name}"] = bool(part.get("additionalProperties", True))
        found |= keys(schema, below, f"{where}{name}.")
    return found


def test_the_schema_describes_exactly_what_the_models_accept() -> None:
    schema = recipe.schema()
    described = keys(schema, schema)
    assert not any(described.values()), "an unknown key is a mistake for editors too"
    models = {
        "": Recipe,
        **{
            f"{name}.": field.annotation for name, field in Recipe.model_fields.items() if hasattr(field.annotation, "model_fields")
        },
    }
    accepted = {f"{where}{name}" for where, model in models.items() for name in model.model_fields}  # type: ignore[union-attr]
    assert set(described) == accepted


def test_the_schema_is_one_that_validators_take_and_the_recipes_satisfy() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    validator = jsonschema.Draft202012Validator(recipe.schema())
    jsonschema.Draft202012Validator.check_schema(recipe.schema())
    for path in recipe.embedded().values():
        validator.validate(yaml.safe_load(Path(path).read_text()))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"name": "a", "engine": {"model": "m"}, "taregts": {}})


@pytest.mark.parametrize(
    ("flags", "says", "hint"),
    [
        ({"swap-space": 4}, "vLLM 0.32.0 has no flag `swap-space`", "drop it"),
        ({"max-num-sequences": 4}, "has no flag `max-num-sequences`", "did you mean `max-num-seqs`?"),
        ({"dtype": "fp12"}, "`dtype` cannot be 'fp12'", "bfloat16"),
        ({"max-num-seqs": "many"}, "takes a whole number, not 'many'", "write"),
        ({"enforce-eager": "yes"}, "is a switch, 'yes' is not true or false", "enforce-eager: true"),
    ],
)
def test_flags_that_the_engine_would_refuse_are_named(
    known: catalogue.Catalogue, flags: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        known.check(flags, "mine")
    assert says in str(caught.value) and hint in caught.value.hint


def test_lengths_of_a_mix_are_averaged_by_shares_and_the_longest_is_what_can_come() -> None:
    spread = {"distribution": "lognormal", "mean": 100, "spread": 50, "most": 900}
    mix = [
        {"name": "a", "share": 0.6, "prompt_tokens": [10, 30], "output_tokens": 8},
        {"name": "b", "share": 0.2, "prompt_tokens": spread, "output_tokens": [2, 6]},
    ]
    load = Recipe.model_validate({"name": "r", "engine": {"model": "m"}, "workload": {"classes": mix}}).workload
    assert load.mean_lengths() == (pytest.approx((3 * 20 + 100) / 4), pytest.approx((3 * 8 + 4) / 4))
    assert [each.longest for each in load.classes] == [38, 906]


def test_an_interpreter_has_its_whole_path_wherever_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.touch(mode=0o755)
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin" / "theirs"
    link.symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for written in ("bin/theirs", "~/bin/theirs", "theirs", str(link)):
        assert catalogue.interpreter(written) == str(link), "a virtual environment's is a link, and stays one"
    assert catalogue.interpreter("nowhere") == "nowhere"
    assert catalogue.interpreter(None) == sys.executable
