"""What a really served vLLM counts, refuses and remembers. One start for the whole file."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fenno import recipe
from fenno.engine import metrics, server
from fenno.errors import LoadError
from fenno.load import endpoint, job, loadtest, run
from fenno.load.plan import Plan
from fenno.recipe import Recipe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM in this Python"),
]

# The limit of a hang, no measure: a host may stand still for a minute.
LONG = 300.0
RECIPE = """
name: chat
engine:
  model: dummy:grok2-small
  flags: {load-format: dummy, dtype: float32, max-model-len: 1024, enforce-eager: true}
  env: {VLLM_CPU_KVCACHE_SPACE: "1"}
workload:
  endpoint: chat
  users: 3
  turns: 2
  timeout: 300s
  classes:
    - {name: one, share: 60%, prompt_tokens: {distribution: normal, mean: 60, spread: 30, least: 20, most: 150}, output_tokens: 8}
    - {name: two, share: 40%, prompt_tokens: [20, 90], output_tokens: [10, 20]}
"""


@pytest.fixture(scope="module")
def chat() -> Recipe:
    return recipe.parse(RECIPE, "here")


@pytest.fixture(scope="module")
def engine(chat: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    with server.serving(chat, tmp_path_factory.mktemp("engine")) as running:
        yield running


def plan(chosen: Recipe, engine: server.Server, **options: Any) -> Plan:
    return dataclasses.replace(job.plan(chosen, **options), url=engine.url, model=engine.model)


def test_chat_prompts_have_their_length_by_the_engines_own_count(chat: Recipe, engine: server.Server, tmp_path: Path) -> None:
    fitted = endpoint.fitted(plan(chat, engine, requests=12, warmup=0.5))
    assert fitted.overhead > 0, "a template adds something"
    assert fitted.forced == ("ignore_eos", "min_tokens")
    result = run.run(fitted, tmp_path)
    document = job.document(result, chat.targets)
    assert (document["completed"], document["prompt_mismatch"], document["flags"]) == (12, 0.0, [])
    firsts = {r.id: r for r in result.records if "." not in r.id}
    later = [r for r in result.records if r.ok and r.id.endswith(".2")]
    assert later, "conversations went on"
    for second in later:
        first = firsts[second.id.removesuffix(".2")]
        assert (second.prompt_tokens or 0) > (first.prompt_tokens or 0) + 20, "all that was said, and 20 letters or more"


def apart(parts: dict[str, Any]) -> int:
    """By how many first tokens the two sides differ."""
    both = parts["first_tokens"]
    return abs(both["client"] - both["engine"])


def undisturbed(document: dict[str, Any]) -> bool:
    """Whether the server was asked and answered each second, and few requests were counted by one side alone: on a host that stood
    still meanwhile, neither is."""
    side, parts = document["server"], document["time_to_first_token"]
    if not parts or side["notes"] or document["outage_seconds"]:
        return False
    return bool(apart(parts) <= 2 + 0.1 * parts["first_tokens"]["client"] and parts["outside"] > 0)


def test_both_sides_agree_about_a_real_engine(chat: Recipe, engine: server.Server, tmp_path: Path) -> None:
    fitted = endpoint.fitted(plan(chat, engine, users=3, duration=10.0, warmup=1.0))
    # The longer a window, the less one answer at its edge, or a moment in which nobody was asked, is of the whole.
    for seconds in (10.0, 20.0, 60.0):
        longer = dataclasses.replace(fitted, duration=seconds, arm=f"{seconds:g} s")
        document = loadtest.measure(longer, engine, chat, tmp_path / f"{seconds:g}")
        if undisturbed(document):
            break
    side, parts = document["server"], document["time_to_first_token"]
    assert (side["notes"], document["outage_seconds"]) == ([], 0)
    assert apart(parts) <= 2 + 0.1 * parts["first_tokens"]["client"], "but for those on their way at a scrape"
    assert 1 <= side["running"]["max"] <= 3 + document["probes"]["asked"], "three users and the probes"
    assert 0 <= side["kv_cache_usage"]["max"] < 1
    assert side["preemptions"] == 0
    assert side["memory"]["max"] > 2**28
    assert side["generation_tokens"] > 0
    assert parts["outside"] > 0, "nothing reaches the client before the engine has made it"
    assert min(parts["queue"], parts["prefill"]) >= 0
    assert parts["engine"] == pytest.approx(parts["queue"] + parts["prefill"] + parts["rest"], abs=0.01)
    assert parts["sentence"].startswith("of ")


def test_a_trace_finds_its_shared_blocks_in_the_prefix_cache(chat: Recipe, engine: server.Server, tmp_path: Path) -> None:
    lines = [{"timestamp": 100 * i, "input_length": 600 + i, "output_length": 3, "hash_ids": [7, 100 + i]} for i in range(4)]

    def played(name: str, part: list[dict[str, Any]]) -> dict[str, Any]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in part))
        completions = chat.model_copy(update={"workload": job.changed(chat.workload, {"endpoint": "completions", "turns": 1})})
        # An arm of its own, also when it is tried again: no prompt is in the cache yet.
        fitted = endpoint.fitted(plan(completions, engine, trace=str(path), warmup=0.0, arm=tmp_path.name))
        result = run.run(fitted, tmp_path / name)
        return job.document(result, completions.targets)

    # The first is over when the others are sent: in one trace that would be a matter of the engine's speed.
    first = played("first", lines[:1])
    before = metrics.scrape(engine.url, timeout=LONG)
    others = played("others", lines[1:])
    hits = metrics.delta(before, metrics.scrape(engine.url, timeout=LONG)).prefix_cache_hits
    assert [(part["completed"], part["prompt_mismatch"]) for part in (first, others)] == [(1, 0.0), (3, 0.0)]
    assert hits is not None
    assert 3 * 500 <= hits <= 3 * 520, "the 512 tokens that three requests share with the first"


def test_what_the_engine_cannot_hold_is_named(chat: Recipe, engine: server.Server) -> None:
    longer = chat.model_copy(update={"workload": job.changed(chat.workload, {"turns": 7})})
    with pytest.raises(LoadError, match="class one may need 1106 tokens, and the server's max-model-len is 1024"):
        endpoint.fitted(plan(longer, engine, requests=1))
