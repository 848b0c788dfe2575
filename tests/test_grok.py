"""What a Grok is, its published files, and the random ones: arithmetic, no engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fenno import cli
from fenno.doctor import modelfacts
from fenno.engine import checkpoint, dummy, failures, plugin
from fenno.errors import ProcessError, UsageError
from fenno.vllm_plugin import grok_layout
from fenno.vllm_plugin.grok_layout import Grok, Weight

SIZE = dummy.Size(layers=3, hidden=16, heads=4, kv_heads=2, head=8, expert=32, shared=24, experts=2)


def config(kind: str = "grok2", **changes: Any) -> dict[str, Any]:
    return checkpoint.CONFIGS[kind](SIZE, "float32") | {"vocab_size": 320} | changes


def grok(kind: str = "grok2", **changes: Any) -> Grok:
    return grok_layout.read(SimpleNamespace(**config(kind, **changes)))


def published(kind: str = "grok2", parts: int = 8) -> dict[str, dict[str, tuple[int, ...]]]:
    """File -> name -> shape, as the files on disk would say."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for file, wanted in checkpoint.files(config(kind), parts).items():
        for spelt, _, shape, axis, _, count in wanted:
            cut = [size // count if at == axis and count > 1 else size for at, size in enumerate(shape)]
            files.setdefault(file, {})[spelt] = tuple(cut)
    return files


def test_the_published_sizes_come_out_of_the_published_configs() -> None:
    # Grok-2 is known as 269.5 thousand million parameters; Grok-1 is called 314, which its own shapes are a little above.
    second = dummy.grok2(dummy.Size(64, 8192, 64, 8, 128, 16384, 32768), "bfloat16") | {"vocab_size": 131072}
    first = dummy.grok1(dummy.Size(64, 6144, 48, 8, 128, 32768), "bfloat16") | {"vocab_size": 131072}
    sizes = [
        sum(math.prod(weight.shape) for weight in grok_layout.weights(grok_layout.read(SimpleNamespace(**each))).values())
        for each in (second, first)
    ]
    assert [round(size / 1e9, 1) for size in sizes] == [269.5, 315.7]


def test_what_grok_1_says_otherwise_is_read_and_what_it_has_not_is_off() -> None:
    one = grok("grok1", attn_output_multiplier=0.25, max_attn_value=20.0)
    assert (one.attention, one.attention_cap, one.router_cap, one.final_cap) == (0.25, 20.0, 0.0, 0.0)
    assert (one.shared, one.temperature, one.tied, one.rope_base) == (0, 0, True, 10000.0)
    two = grok(attn_output_multiplier=0.25)
    assert (two.attention, two.attention_cap, two.router_cap, two.final_cap) == (8**-0.5, 30.0, 30.0, 50.0)
    assert (two.shared, two.temperature, two.tied, two.rope_base) == (24, 1024, False, 208533496.0)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_type": "yarn_log"},
        {"attn_logit_softcapping_method": "sigmoid"},
        {"rope_rotate_half_dims": True},
        {"sliding_window_size": 8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_grok_that_computes_otherwise_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        grok(**change)


def test_the_names_of_both_releases_are_one_to_one() -> None:
    names = list(grok_layout.weights(grok()))
    assert [grok_layout.second_name(name) for name in names] == names
    ported = [name for name in names if ".mlp." not in name]
    assert [grok_layout.second_name(grok_layout.first_name(name)) for name in ported] == ported
    assert grok_layout.first_name("model.layers.1.block_sparse_moe.experts.0.w3.weight") == (
        "model.layers.1.moe_block.experts.0.linear_v.weight"
    )
    assert grok_layout.first_name("model.layers.1.self_attn.q_proj.weight") == "model.layers.1.attn.q_proj.weight"
    assert grok_layout.first_name("model.norm.weight") == "model.norm.scale"


def test_a_random_grok_2_has_the_published_files() -> None:
    files = published()
    assert len(files) == 39
    assert set(files["pytorch_model-00000-TP-common.safetensors"]) == {"model.embed_tokens.weight"}
    assert next(iter(files["pytorch_model-00017-TP-common.safetensors"])) == "model.layers.0.block_sparse_moe.gate.weight"
    down = files["pytorch_model-00007-TP-003.safetensors"]
    assert len(down) == SIZE.layers * SIZE.experts
    assert down["model.layers.2.block_sparse_moe.experts.1.w2.weight"] == (16, 32 // 8)
    assert set(published("grok1", 0)) == {"model.safetensors"}


@pytest.mark.parametrize(("kind", "parts"), [("grok2", 8), ("grok2", 2), ("grok2", 0), ("grok1", 0), ("grok1", 4)])
def test_published_files_make_every_weight_whole(kind: str, parts: int) -> None:
    model = grok(kind)
    joined = grok_layout.join(published(kind, parts), model)
    assert {grok_layout.second_name(weight.name) for weight in joined} == set(grok_layout.weights(model))
    cut = [weight for weight in joined if ".experts." in weight.name]
    assert {len(weight.files) for weight in cut} == {parts or 1}
    assert all(list(weight.files) == sorted(weight.files) for weight in cut)
    assert {weight.axis for weight in cut if ".w2." in weight.name or ".linear_1." in weight.name} == {1}


@given(st.sampled_from(sorted(grok_layout.weights(grok()))), st.data())
def test_a_weight_that_is_missing_doubled_or_misshaped_is_named(name: str, data: st.DataObject) -> None:
    files = published()
    where = data.draw(st.sampled_from([file for file, held in files.items() if name in held]))
    kind = data.draw(st.sampled_from(["missing", "doubled", "misshaped"]))
    if kind == "missing":
        del files[where][name]
        says = "lacks the part of rank" if "-TP-00" in where else "the checkpoint lacks"
    elif kind == "doubled":
        files["pytorch_model-00099-TP-common.safetensors"] = {name: files[where][name]}
        says = "is there twice"
    else:
        files[where][name] = (*files[where][name][:-1], files[where][name][-1] + 1)
        says = "has the shape"
    with pytest.raises(ValueError, match=says) as caught:
        grok_layout.join(files, grok())
    assert name in str(caught.value)
    found = failures.explain(f"(Worker pid=1) ERROR 12-01 00:00:00 [core.py:1] ValueError: {caught.value}", 1)
    assert found.name == "weights-grok" and name in found.meaning


def test_a_rank_whose_files_are_all_missing_is_named() -> None:
    files = {file: held for file, held in published().items() if "-TP-003" not in file}
    with pytest.raises(ValueError, match="lacks the part of rank 3 of 8"):
        grok_layout.join(files, grok())
    # Cut for four where eight is meant: the sum is half.
    files = {file: held for file, held in published().items() if file[-19:-12] < "-TP-004" or "common" in file}
    with pytest.raises(ValueError, match=r"w1.weight has the shape \[4, 16\] and should have \[32, 16\]"):
        grok_layout.join(files, grok())


@pytest.mark.parametrize("name", ["layers.0.block_sparse_moe.experts.0.w1.weight_scale", "layers.3.pre_attn_norm.weight"])
def test_parts_that_are_none_of_groks_are_named_and_not_passed_over(name: str) -> None:
    files = published() | {"more.safetensors": {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}}
    grok_layout.join(files, grok())
    files["more.safetensors"][f"model.{name}"] = (1,)
    with pytest.raises(ValueError, match=f"the weight model.{name} is none of Grok's"):
        grok_layout.join(files, grok())


def test_a_weight_in_eight_bits_that_lacks_its_scale_is_named() -> None:
    grok_layout.scaled(["a.weight", "b.weight"], {"a.weight_scale", "b.weight_scale_inv"})
    with pytest.raises(ValueError, match=r"lacks b.weight_scale"):
        grok_layout.scaled(["a.weight", "b.weight"], {"a.weight_scale", "b.input_scale"})


def test_a_rank_that_is_given_its_own_experts_asks_for_all_of_them_and_for_no_other() -> None:
    names = [f"l.{layer}.mlp.experts.{expert}.{part}.weight" for layer in range(2) for expert in range(4) for part in ("w1", "w2")]
    expected = ["norm.weight", *names]
    its = ["norm.weight", *(name for name in names if ".experts.1." in name or ".experts.3." in name)]
    assert grok_layout.of_experts(expected, {1, 3}) == its
    assert grok_layout.of_experts(expected, None) == expected


def test_a_packed_weight_is_not_called_missing() -> None:
    grok_layout.complete(["a.q_proj.weight"], ["a.q_proj.qweight"])
    with pytest.raises(ValueError, match=r"lacks a.q_proj.weight"):
        grok_layout.complete(["a.q_proj.weight"], ["a.k_proj.weight"])
    with pytest.raises(ValueError, match="and 2 more"):
        grok_layout.complete([f"{n}.weight" for n in range(5)], [])


def test_widths_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be cut into 5"):
        checkpoint.files(config(), 5)


def test_weights_of_another_layout_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model-00006-TP-007.safetensors").touch()
    with pytest.raises(UsageError, match="has other weights already: pytorch_model-00006-TP-007.safetensors"):
        checkpoint.make(config(), tmp_path, python=sys.executable, parts=4)


def saying(folder: Path, words: str, code: int) -> str:
    """An interpreter that says so and ends."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "{words}" >&2; exit {code}\n')
    python.chmod(0o755)
    return str(python)


def test_an_interpreter_without_torch_is_named_with_what_to_give(tmp_path: Path) -> None:
    python = saying(tmp_path, "No module named 'torch'", 1)
    with pytest.raises(UsageError, match=f"there is no torch under {python}") as found:
        checkpoint.make(config(), tmp_path / "model", python=python)
    assert "--python PATH" in found.value.hint


def test_what_an_interpreter_only_warns_of_is_no_error(tmp_path: Path) -> None:
    assert checkpoint.make(config(), tmp_path / "model", python=saying(tmp_path, "No module named 'torch.x'", 0))


def test_the_interpreter_may_be_given_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    python = saying(tmp_path, "No module named 'torch'", 1)
    done = CliRunner().invoke(cli.app, ["model", "dummy", "grok2", str(tmp_path / "model"), "--python=~/python"])
    assert str(done.exception) == f"there is no torch under {python}"


def test_a_module_that_is_only_called_like_torch_is_told_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="torchgen"):
        checkpoint.make(config(), tmp_path / "model", python=saying(tmp_path, "No module named 'torchgen'", 1))


def test_the_plugin_registers_grok_only_where_vllm_is() -> None:
    heavy = "[m for m in ('vllm', 'torch', 'transformers') if m in sys.modules]"
    code = f"import sys, fenno.vllm_plugin as it; it.register(); print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_weight_says_its_shape() -> None:
    table = grok_layout.weights(grok())
    assert table["model.layers.0.self_attn.o_proj.weight"] == Weight((16, 32), 1)
    assert table["model.layers.0.mlp.up_proj.weight"] == Weight((24, 16), 0)
    assert "lm_head.weight" not in grok_layout.weights(grok("grok1"))
    assert json.dumps(table)


def test_an_engine_gets_the_plugin_for_a_grok_alone(tmp_path: Path) -> None:
    assert plugin.brings(str(dummy.make("grok2-tiny", tmp_path)))
    assert not plugin.brings(str(dummy.make("grok2-small", tmp_path)))
    assert not plugin.brings("xai-org/grok-2")
    (tmp_path / "config.json").write_text("[]")
    assert not plugin.brings(str(tmp_path))


def test_the_size_of_a_dummy_grok_is_that_of_its_weights() -> None:
    shape = dummy.files(dummy.SHAPES["grok2-tiny"])["config.json"]
    exact = sum(math.prod(weight.shape) for weight in grok_layout.weights(grok_layout.read(SimpleNamespace(**shape))).values())
    assert modelfacts.size(shape) / 4 == pytest.approx(exact, rel=0.01)
