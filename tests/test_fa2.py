"""What would be compiled of FlashAttention-2 for a model, from its config alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fenno.errors import BuildError, FennoError, UsageError
from fenno.fa2 import need, plan, tiles
from fenno.fa2.lattice import Switch, Tile, Unit, kernels, units
from fenno.fa2.releases import NEWEST, RELEASES, release

LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN2_72B = {
    **LLAMA_3_70B,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 80,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
GROK_1 = {
    "model_type": "grok-1",
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GROK_2 = {
    **LLAMA_3_70B,
    "architectures": ["Grok1ForCausalLM"],
    "model_type": "git",
    "head_dim": 128,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 50,
    "router_logit_softcapping": 30.0,
    "sliding_window_size": -1,
}
GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
VISION = {"text_config": LLAMA_3_70B, "vision_config": {"hidden_size": 1280, "num_heads": 16}}


def planned(config: dict[str, Any], *, memory: float = 128e9, cores: int = 16, **options: Any) -> plan.Plan:
    version, archs = options.pop("version", NEWEST), options.pop("archs", ("80",))
    wanted = need.of(config, "the model", options.pop("dtype", None))
    return plan.make(wanted, release(version), archs, cores=cores, memory=int(memory), consumer="transformers", **options)


# Counted in objects of head size 128 and bfloat16: forward, forward causal, split, split causal.
@pytest.mark.parametrize(
    ("off", "counts"),
    [
        ((), [39, 26, 66, 42]),
        (("dropout",), [28, 16, 66, 42]),
        (("dropout", "alibi", "local"), [12, 12, 34, 34]),
        (("dropout", "alibi", "local", "uneven_k"), [12, 12, 19, 19]),
        (("dropout", "alibi", "local", "uneven_k", "softcap"), [6, 6, 13, 13]),
    ],
)
def test_the_kernels_of_a_unit_are_as_many_as_the_compiler_makes(off: tuple[Switch, ...], counts: list[int]) -> None:
    both = [Unit(direction, 128, "bf16", causal) for direction in ("fwd", "fwd_split") for causal in (False, True)]
    assert [len(kernels(unit, RELEASES["2.8.3.post2"], off)) for unit in both] == counts


@pytest.mark.parametrize(("version", "count"), [("2.6.3", 84), ("2.7.2.post1", 84), ("2.7.4.post1", 84), ("2.8.3.post2", 72)])
def test_a_stock_build_has_as_many_units_as_its_setup_names(version: str, count: int) -> None:
    assert len(set(units(RELEASES[version].heads))) == count


@pytest.mark.parametrize("version", RELEASES)
def test_a_switch_that_is_compiled_out_never_adds_a_kernel(version: str) -> None:
    for unit in units(RELEASES[version].heads):
        counts = [
            len(kernels(unit, RELEASES[version], off)) for off in ((), ("dropout",), ("dropout", "alibi", "local", "softcap"))
        ]
        assert counts[0] >= counts[1] >= counts[2] > 0


@pytest.mark.parametrize(
    ("config", "sizes", "kept"),
    [
        (LLAMA_3_70B, (128,), set()),
        (QWEN2_72B, (128,), set()),
        (GROK_1, (128,), {"softcap"}),
        (GROK_2, (128,), {"softcap"}),
        (GEMMA_2, (256,), {"softcap", "local"}),
        ({**GEMMA_2, "sliding_window": None, "layer_types": ["sliding_attention", "full_attention"]}, (256,), {"softcap", "local"}),
        (
            {"model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "torch_dtype": "bfloat16"},
            (256,),
            {"softcap", "local"},
        ),
        ({**QWEN2_72B, "use_sliding_window": True}, (128,), {"local"}),
        ({**LLAMA_3_70B, "max_attn_value": 30.0}, (128,), {"softcap"}),
        ({**LLAMA_3_70B, "attn_config": {"alibi": True}}, (128,), {"alibi"}),
        ({"model_type": "bloom", "n_head": 32, "hidden_size": 4096}, (128,), {"alibi"}),
        (VISION, (80, 128), set()),
    ],
)
def test_what_a_model_needs_stays_and_what_it_does_not_goes(config: dict[str, Any], sizes: tuple[int, ...], kept: set[str]) -> None:
    made = planned(config)
    assert made.need.sizes == sizes
    fills = {"uneven_k"} if set(sizes) <= set(made.heads) else set()
    assert set(made.off) == ({"dropout", "alibi", "local", "softcap"} - kept) | fills


def test_grok_and_llama_take_four_units_and_the_kernels_of_the_table() -> None:
    assert (len(planned(GROK_2).units), planned(GROK_2).kernels) == (4, 62)
    assert planned(LLAMA_3_70B).kernels == 38
    assert planned(GROK_2).stock_units == 72


def test_a_head_size_between_two_kernels_keeps_the_larger_one_and_its_uneven_form() -> None:
    made = planned({**LLAMA_3_70B, "head_dim": 160})
    assert made.heads == (192,)
    assert "uneven_k" not in made.off
    assert planned({**LLAMA_3_70B, "head_dim": 160}, version="2.7.4.post1").heads == (160,)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DEEPSEEK_V2, "heads of 192 for queries and keys, 128 for values, 576 in its compressed form"),
        ({**LLAMA_3_70B, "head_dim": 512}, "heads of 512, and FlashAttention-2 has kernels up to 256"),
        ({**LLAMA_3_70B, "torch_dtype": "float32"}, "runs in float32"),
    ],
)
def test_a_model_that_flash_attention_cannot_run_is_refused_with_the_reason(config: dict[str, Any], says: str) -> None:
    with pytest.raises(BuildError, match=says):
        planned(config)


def test_a_config_without_a_dtype_keeps_both_and_an_option_decides() -> None:
    config = {key: value for key, value in LLAMA_3_70B.items() if key != "torch_dtype"}
    assert planned(config).need.dtypes == ("bf16", "fp16")
    assert planned(config, dtype="half").need.dtypes == ("fp16",)
    assert planned({**config, "dtype": "bfloat16"}, dtype="auto").need.dtypes == ("bf16",)


def test_memory_limits_the_jobs_and_too_little_is_said() -> None:
    assert planned(LLAMA_3_70B).jobs == 6
    assert planned(LLAMA_3_70B, memory=9e9).jobs == 2
    assert planned(LLAMA_3_70B, cores=1).jobs == 1
    with pytest.raises(BuildError, match="one compiler takes 4.3 GB, and 4.0 GB may be used"):
        planned(LLAMA_3_70B, memory=4e9)


def test_the_measured_units_are_predicted_as_they_were_measured() -> None:
    off: tuple[Switch, ...] = ("dropout", "alibi", "local", "uneven_k")
    seconds = [plan.unit_seconds(Unit("fwd", 128, "bf16", False), release(NEWEST), which) for which in ((), off)]
    assert seconds == pytest.approx([423.5, 139.3])
    assert plan.unit_seconds(Unit("fwd_split", 128, "bf16", True), release(NEWEST), off) == pytest.approx(162.8)
    assert planned(GROK_2).stock_seconds > 20 * planned(GROK_2).seconds


def test_jobs_share_the_work_and_two_architectures_take_twice_the_time() -> None:
    assert plan.wall([4, 3, 2, 1], 2) == 5
    one, two = planned(GROK_2), planned(GROK_2, archs=("80", "90"))
    device = one.seconds - plan.HOST_UNIT - plan.STUBS
    assert two.seconds == pytest.approx(one.seconds + device, rel=0.15)
    assert "arch=compute_90,code=sm_90" in two.nvcc_flags


def test_both_compilers_get_the_same_switches() -> None:
    made = planned(GROK_2)
    switches = [flag for flag in made.cxx_flags if flag.startswith("-D")]
    assert switches == [flag for flag in made.nvcc_flags if flag.startswith("-D")]
    assert "-DFLASHATTENTION_DISABLE_DROPOUT" in switches
    assert "-DFLASHATTENTION_DISABLE_SOFTCAP" not in switches


@pytest.mark.parametrize(
    ("text", "found"),
    [("sm_80", ("80",)), ("sm_86,sm_89", ("80",)), ("80,sm_90a", ("80", "90")), ("sm_103", ("100",)), ("sm_120", ("120",))],
)
def test_an_architecture_gets_the_code_that_runs_on_it(text: str, found: tuple[str, ...]) -> None:
    assert plan.codes(text) == found


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [("sm_75", BuildError, "does not run on sm_75"), ("sm_990", BuildError, "does not run"), ("gfx90a", UsageError, "--arch")],
)
def test_a_gpu_without_kernels_is_refused(text: str, kind: type[FennoError], says: str) -> None:
    with pytest.raises(kind, match=says):
        plan.codes(text)


def test_a_release_that_cannot_be_trimmed_is_refused() -> None:
    with pytest.raises(UsageError, match="2.5.8 has no soft cap"):
        release("2.5.8")
    with pytest.raises(UsageError, match="does not know flash-attn 9.9"):
        release("9.9")


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fenno", "build-fa2", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_the_command_plans_from_a_folder_and_from_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GROK_2))
    done = command("--model", tmp_path, "--plan", "--arch", "sm_90")
    made = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, made["kernels"], made["archs"], made["consumer"]["imports_it"]) == (0, 62, ["sm_90"], True)
    assert "soft cap: attn_logit_softcapping is 30" in done.stderr
    done = command("grok-article-a100x8", "--plan", "--arch", "sm_80", "--json")
    made = json.loads(done.stdout)
    assert (made["consumer"]["imports_it"], done.stderr) == (False, "")
    assert "vllm.vllm_flash_attn" in made["consumer"]["why"]


def test_a_folder_without_a_config_is_one_sentence(tmp_path: Path) -> None:
    done = command("--model", tmp_path, "--plan", "--arch", "sm_90")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no config.json" in done.stderr
    (tmp_path / "config.json").write_text("{")
    done = command("--model", tmp_path, "--plan", "--arch", "sm_90")
    assert done.returncode == 2 and "is no JSON" in done.stderr


def test_what_a_trimmed_build_is_timed_against_is_the_same_units_with_upstreams_flags() -> None:
    trimmed = tiles.with_tiles(planned(LLAMA_3_70B), {Unit("fwd", 128, "bf16", False): (Tile(32, 64, 2),)})
    made = plan.with_stock_flags(trimmed)
    assert made.units == trimmed.units
    assert (made.kernels, dict(made.tiles)) == (173, {})
    assert not [flag for flag in (*made.cxx_flags, *made.nvcc_flags) if "DISABLE" in flag]
    assert made.seconds > 3 * planned(LLAMA_3_70B).seconds
    assert made.wall <= made.seconds
