"""Plans of a KV cache from a real vLLM, and pairs of layout and block that it really takes or refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fenno import recipe
from fenno.engine import server
from fenno.engine.inside.canary import prompt
from fenno.errors import EngineError
from fenno.kv import ask, plan, settings

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Any]]:
    chosen = recipe.load(recipe.find("cpu-small"))
    yield plan.make(ask.facts(chosen), chosen)


def test_the_plan_of_the_cpu_engine(made: dict[str, Any]) -> None:
    backend = made["backends"]["CPU_ATTN"]
    assert list(made["backends"]) == ["CPU_ATTN"]
    assert backend["layouts"] == ["LBHNC"]
    assert all(block % 32 == 0 for block in backend["blocks"])
    # Four layers, one KV head of 32, K and V in four bytes each.
    assert {pair["token"] for pair in backend["legal"]} == {4 * 1 * 2 * 32 * 4}
    assert made["changes"] == []
    assert made["why_not"]


def test_eight_ranks_are_planned_on_a_host_that_has_not_got_them() -> None:
    chosen = recipe.load(recipe.find("gpu-grok2-9b"))
    engine = chosen.engine.model_copy(update={"flags": {**chosen.engine.flags, "tensor-parallel-size": 8}})
    made = plan.make(ask.facts(chosen.model_copy(update={"engine": engine})), chosen)
    # Twenty layers, one of eight KV heads of 128 on each rank, K and V in two bytes each.
    assert {pair["token"] for pair in made["backends"]["CPU_ATTN"]["legal"]} == {20 * 1 * 2 * 128 * 2}
    assert made["ranks"] == 8


@pytest.mark.parametrize(("name", "block", "legal"), [("LBHNC", 32, True), ("LBNHC", 128, False), ("LBHNC", 16, False)])
def test_what_the_plan_says_of_a_pair_is_what_a_start_says(
    made: dict[str, Any], name: str, block: int, legal: bool, tmp_path: Path
) -> None:
    assert (plan.refusal(made, name, block) is None) == legal
    chosen = recipe.load(recipe.find("cpu-small"))
    flags, env = {"block-size": block}, {"VLLM_KV_CACHE_LAYOUT": name}
    if legal:
        with server.serving(chosen, tmp_path, flags=flags, env=env) as running:
            running.check()
    else:
        with pytest.raises(EngineError), server.serving(chosen, tmp_path, flags=flags, env=env):
            pass
        said = (tmp_path / "engine.log").read_text()
        assert ("No common block size" if block == 16 else "does not satisfy every supported set") in said


def test_a_second_legal_pair_starts_and_every_number_in_its_cache_is_finite(made: dict[str, Any], tmp_path: Path) -> None:
    assert plan.refusal(made, "LBHNC", 64) is None
    path = tmp_path / "mine.yaml"
    text = recipe.find("cpu-small").read_text()
    path.write_text(settings.written(text, plan.asked(made, "LBHNC", 64), str(path)))
    command = [sys.executable, "-m", "fenno", "patch-kv", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is finite" in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["layers"], found["kv"], found["logits"]) == (4, {}, {})


def test_what_is_no_number_is_named_by_its_layers_and_its_token(tmp_path: Path) -> None:
    import torch
    import transformers

    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=512, max_position_embeddings=256, head_dim=32, **size)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[prompt(512)[20]] = torch.nan
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "mine.yaml"
    flags = "{dtype: float32, enforce-eager: true, skip-tokenizer-init: true}"
    path.write_text(
        f"name: spoilt\nengine:\n  model: {tmp_path / 'model'}\n  flags: {flags}\n  env: {{VLLM_CPU_KVCACHE_SPACE: '1'}}\n"
    )
    found = ask.canary(recipe.load(path))
    assert found["kv"] == {"layers": [f"model.layers.{layer}.self_attn.attn" for layer in (0, 1)], "token": 20}
    assert found["logits"]["tokens"] == list(range(len(prompt(512)) - 1, found["tokens"]))


def test_apply_writes_what_was_asked_for_and_refuses_what_the_engine_would(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = recipe.find("cpu-small").read_text()
    path.write_text(text)
    command = [sys.executable, "-m", "fenno", "patch-kv", "apply", str(path)]
    done = subprocess.run([*command, "--block-size", "32"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["changed"]
    assert recipe.load(path).engine.flags["block-size"] == 32
    refused = subprocess.run([*command, "--layout", "LBNHC"], capture_output=True, text=True, check=False)
    assert refused.returncode == 6
    assert "does not satisfy every supported set" in refused.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "nothing is worth changing" in again.stderr
    assert path.read_text() == text
