"""Grok-1 and Grok-2 in a real vLLM on the CPU, beside an independent reference in plain PyTorch."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fenno import process
from fenno.engine import checkpoint, dummy, plugin

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
BAR = 1e-5
# Small enough caps for them to matter at this size, and wide enough weights for routers and attention to choose.
SIZE = dummy.Size(layers=2, hidden=64, heads=4, kv_heads=2, head=32, expert=256, shared=128)
STD = 0.1
SECOND = dummy.grok2(SIZE, "float32") | {
    "attn_logit_softcapping": 2.0,
    "router_logit_softcapping": 0.5,
    "final_logit_softcapping": 3.0,
}
FIRST = dummy.grok1(SIZE, "float32") | {"max_attn_value": 2.0, "attn_output_multiplier": 0.4}


def run(tmp_path: Path, folder: Path, reference: Path, options: dict[str, Any], **more: str) -> tuple[dict[str, Any], str]:
    """How far vLLM's logits of `folder` are from the reference's of `reference`, case by case; and what vLLM said."""
    home = plugin.install(tmp_path / "plugin")
    argv = [sys.executable, str(HERE / "grok_engine.py"), str(folder), str(reference), json.dumps(options)]
    env = plugin.path(home) | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"} | more
    child = process.run(argv, timeout=500, env=env, cwd=tmp_path)
    lines = [line for line in child.stdout.splitlines() if line.startswith("grok:")]
    assert lines, child.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("grok:"))
    # Else a last digit would choose another expert: then take another seed.
    assert found.pop("margin") > 1e-5
    return found, child.stdout + child.stderr


def check(found: dict[str, Any]) -> None:
    print({case: f"{values['error']:.1e}" for case, values in found.items()})
    assert {case: values["error"] for case, values in found.items() if not values["error"] <= BAR} == {}
    # Each case was what it says: all positions, blocks from the cache, prompts in pieces.
    assert (found["one"]["positions"], found["eight"]["positions"]) == (100, 622)
    assert found["cached"]["hits"] > 0
    assert found["chunked"]["steps"] > 598 / 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same random Grok-2 whole and cut for eight ranks, and a Grok-1."""
    home = tmp_path_factory.mktemp("groks")
    checkpoint.make(SECOND, home / "git", python=sys.executable, std=STD)
    checkpoint.make(SECOND, home / "cut", python=sys.executable, std=STD, parts=8)
    checkpoint.make(FIRST, home / "grok-1", python=sys.executable, std=STD)
    return {name: home / name for name in ("git", "cut", "grok-1")}


def test_grok_2_from_files_cut_for_eight_ranks_has_the_references_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    check(run(tmp_path, folders["cut"], folders["git"], {"load_format": "fenno_presharded"})[0])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two processors")
def test_on_two_ranks_grok_2_has_the_references_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    # vLLM's own way to bind them wants a NUMA node a rank.
    first, second = sorted(os.sched_getaffinity(0))[:2]
    options = {"load_format": "fenno_presharded", "tensor_parallel_size": 2}
    check(run(tmp_path, folders["cut"], folders["git"], options, VLLM_CPU_OMP_THREADS_BIND=f"{first}|{second}")[0])


def test_grok_1_has_the_references_logits(folders: dict[str, Path], tmp_path: Path) -> None:
    check(run(tmp_path, folders["grok-1"], folders["grok-1"], {})[0])


def test_past_the_temperatures_length_grok_2_is_nearly_right_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "warm"
    checkpoint.make(SECOND | {"attn_logit_softcapping": 30.0, "attn_temperature_len": 32}, folder, python=sys.executable, std=STD)
    found, said = run(tmp_path, folder, folder, {})
    assert "attn_temperature_len is 32" in said and "--max-model-len 32 is exact" in said
    from grok_reference import Reference

    tokens = random.Random(3).choices(range(256), k=150)
    right, cold = Reference(folder).logits(tokens), Reference(folder, attn_temperature_len=0).logits(tokens)
    without = float((right - cold).abs().max() / right.abs().max())
    print(f"off by {found['eight']['error']:.1e}; without a temperature {without:.1e}")
    assert BAR < found["eight"]["error"] < without / 3


def loaded(folder: Path) -> dict[str, Any]:
    """What the loader of presharded files hands to a Grok, by name."""
    from torch import nn
    from vllm.config.load import LoadConfig

    from fenno.vllm_plugin import grok_layout, grok_loader

    model = nn.Module()
    model.grok = grok_layout.read(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
    loader = grok_loader.PreshardedLoader(LoadConfig(load_format="fenno_presharded"))
    return dict(loader.get_all_weights(SimpleNamespace(model=str(folder), revision=None), model))


def test_parts_of_eight_ranks_are_joined_to_the_same_weights(folders: dict[str, Path]) -> None:
    whole, joined = loaded(folders["git"]), loaded(folders["cut"])
    assert whole.keys() == joined.keys()
    assert [name for name in whole if not whole[name].equal(joined[name])] == []


def test_a_broken_file_is_named_by_its_weight(folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["cut"].iterdir():
        (tmp_path / path.name).symlink_to(path)
    gone = tmp_path / "pytorch_model-00007-TP-005.safetensors"
    gone.unlink()
    with pytest.raises(ValueError, match=r"experts.0.w2.weight lacks the part of rank 5 of 8"):
        loaded(tmp_path)
    gone.symlink_to(folders["cut"] / "pytorch_model-00006-TP-005.safetensors")
    with pytest.raises(ValueError, match=r"experts.0.w1.weight is there twice"):
        loaded(tmp_path)


def test_a_whole_weight_of_another_shape_or_twice_is_named() -> None:
    import torch

    from fenno.vllm_plugin import grok, grok_layout

    table = {"a.weight": grok_layout.Weight((4, 2), 0)}
    grok._check("a.weight", torch.zeros(4, 2), table, set())
    with pytest.raises(ValueError, match=r"a.weight has the shape \[2, 2\].*--load-format fenno_presharded"):
        grok._check("a.weight", torch.zeros(2, 2), table, set())
    with pytest.raises(ValueError, match=r"a.weight is there twice"):
        grok._check("a.weight", torch.zeros(4, 2), table, {"a.weight"})
    with pytest.raises(ValueError, match=r"b.bias is none of Grok's"):
        grok._load("b.bias", torch.zeros(1), {})
    table = {"a.experts.7.w1.weight": grok_layout.Weight((4, 2), 0)}
    grok._check("a.experts.7.w1.weight_scale", torch.zeros(1), table, set())
    for name in ("a.experts.8.w1.weight", "a.experts.w1.weight"):
        with pytest.raises(ValueError, match=f"{name} is none of Grok's"):
            grok._check(name, torch.zeros(4, 2), table, set())


def stage(folder: Path) -> Any:
    """The last layer of two, without a weight: what a pipeline stage has of the Grok in `folder`."""
    from torch import nn
    from vllm.model_executor.models import utils

    from fenno.vllm_plugin import grok_layout

    # It remembers models by their addresses, which one that is gone leaves to the next.
    utils._model_to_pp_missing_layer_names.clear()
    PPMissingLayer = utils.PPMissingLayer
    model = nn.Module()
    model.grok = grok_layout.read(SimpleNamespace(**json.loads((folder / "config.json").read_text())))
    model.given = None
    model.lm_head, model.model = PPMissingLayer(), nn.Module()
    model.model.embed_tokens, model.model.norm = PPMissingLayer(), PPMissingLayer()
    model.model.layers = nn.ModuleList([PPMissingLayer(), nn.Module()])
    return model


def test_a_rank_asks_for_the_weights_of_its_stage_and_of_its_experts(folders: dict[str, Path]) -> None:
    from fenno.vllm_plugin.grok import GrokForCausalLM

    model = stage(folders["git"])
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.gate_proj\.weight, .* and 33 more"):
        GrokForCausalLM.load_weights(model, [])
    # Six of eight experts are another rank's, each with three weights.
    model.given = {0, 1}
    with pytest.raises(ValueError, match="and 15 more"):
        GrokForCausalLM.load_weights(model, [])


def test_a_rank_is_given_its_own_experts_only_where_the_loader_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    from fenno.vllm_plugin import grok

    monkeypatch.setattr(grok, "get_ep_group", lambda: SimpleNamespace(world_size=4, rank_in_group=1))

    def given(load_format: str = "auto", **flags: Any) -> set[int] | None:
        on = {"enable_expert_parallel": True, "enable_ep_weight_filter": True, "enable_eplb": False}
        parallel = SimpleNamespace(**on | {"expert_placement_strategy": "linear"} | flags)
        config: Any = SimpleNamespace(parallel_config=parallel, load_config=SimpleNamespace(load_format=load_format))
        return grok._given(config, 8)

    assert given() == {2, 3} and given(expert_placement_strategy="round_robin") == {1, 5}
    assert given(enable_eplb=True) is given(enable_expert_parallel=False) is given(enable_ep_weight_filter=False) is None
    assert given("fenno_presharded") is None


def test_scales_of_the_kv_cache_are_taken_and_tables_of_the_rotation_left(folders: dict[str, Path]) -> None:
    import torch
    from torch import nn

    from fenno.vllm_plugin.grok import GrokForCausalLM

    model = stage(folders["grok-1"])
    model.model.layers[1].self_attn = nn.Module()
    model.model.layers[1].self_attn.attn = nn.Module()
    scale = model.model.layers[1].self_attn.attn.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
    at = "model.layers.1.attn."
    weights = {f"{at}k_proj.k_scale": 0.5, f"{at}v_proj.v_scale": 0.5, f"{at}rotary_emb.inv_freq": 0.5}
    with pytest.raises(ValueError, match="the checkpoint lacks"):
        GrokForCausalLM.load_weights(model, [(name, torch.tensor(value)) for name, value in weights.items()])
    assert scale == 0.5


def test_weights_in_eight_bits_are_taken_with_their_scales_alone(folders: dict[str, Path]) -> None:
    import torch

    from fenno.vllm_plugin import grok_layout
    from fenno.vllm_plugin.grok import GrokForCausalLM

    # Everything is another stage's, so that only what is asked for counts.
    model = stage(folders["git"])
    model.model.layers[1] = type(model.lm_head)()
    weights = {name: torch.empty(weight.shape, device="meta") for name, weight in grok_layout.weights(model.grok).items()}
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"the checkpoint lacks {name}_scale"):
        GrokForCausalLM.load_weights(model, weights.items())
    weights[f"{name}_scale"] = torch.ones(())
    assert GrokForCausalLM.load_weights(model, weights.items()) == set()


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (SECOND, {"attn_logit_softcapping": 1e9}),
        (SECOND, {"router_logit_softcapping": None}),
        (SECOND, {"final_logit_softcapping": None}),
        (SECOND, {"embedding_multiplier_scale": 1.0}),
        (SECOND, {"output_multiplier_scale": 1.0}),
        (SECOND, {"residual_moe": False}),
        (SECOND, {"rope_theta": 10000.0}),
        (SECOND, {"attn_temperature_len": 40}),
        (SECOND, {"num_experts_per_tok": 1}),
        (FIRST, {"attn_output_multiplier": 32**-0.5}),
        (FIRST, {"max_attn_value": 1e9}),
        (FIRST, {"router_logit_softcapping": 0.5}),
    ],
    ids=lambda value: "-".join(value) if len(value) == 1 else value["model_type"],
)
def test_every_part_of_the_reference_moves_the_logits_far_more_than_the_bar(
    config: dict[str, Any], change: dict[str, Any], folders: dict[str, Path]
) -> None:
    from grok_reference import Reference

    folder = folders[config["model_type"]]
    tokens = random.Random(3).choices(range(256), k=80)
    right, other = Reference(folder).logits(tokens), Reference(folder, **change).logits(tokens)
    assert float((right - other).abs().max() / right.abs().max()) > 100 * BAR
