"""The KV cache's arithmetic against every byte address, plans from what an engine said, and settings in a recipe's text."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from stub.harness import ENGINE

from fenno import recipe
from fenno.engine.inside import canary, kvcache
from fenno.errors import EngineError, RecipeError
from fenno.kv import ask, layout, plan, words
from fenno.kv import settings as written
from fenno.vllm_plugin import grok_versions

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def axes(order: str, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """A dense cache whose axes lie in this order, the outermost first."""
    made, stride = {}, 1
    for name in reversed(order):
        made[name] = (sizes[name], stride)
        stride *= sizes[name]
    return made


SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in "LBHNC"})


@pytest.mark.parametrize(
    ("heads", "head", "latent", "width", "kept"), [(8, 128, 0, 2, 4096), (8, 128, 0, 1, 2048), (128, 128, 576, 2, 1152)]
)
def test_a_layer_keeps_keys_and_values_of_a_token_or_its_latent(heads: int, head: int, latent: int, width: int, kept: int) -> None:
    assert layout.kept(heads, head, latent, width) == kept


@pytest.mark.parametrize(
    ("asked", "width"), [("auto", 4), ("fp8_e4m3", 1), ("int8_per_token_head", 1), ("bfloat16", 2), ("float16", 2), ("nvfp4", None)]
)
def test_a_number_in_the_cache_is_as_wide_as_asked_for_or_as_the_models(asked: str, width: int | None) -> None:
    assert layout.width(asked, 4) == width


@settings(max_examples=150)
@given(order=st.permutations("LBHNC"), sizes=SIZES, read=st.sampled_from(list(layout.READS)))
def test_what_lies_together_is_what_the_addresses_say(order: list[str], sizes: dict[str, int], read: str) -> None:
    made, taken = axes("".join(order), sizes), layout.READS[read]
    ranges = [range(min(taken.get(name, size), size)) for name, (size, _) in made.items()]
    offsets = sorted(sum(i * stride for i, (_, stride) in zip(at, made.values(), strict=True)) for at in itertools.product(*ranges))
    together = next((i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 1), len(offsets))
    assert layout.volume(made, taken) == len(offsets)
    assert layout.run(made, taken) == together


def test_padding_between_blocks_ends_a_run() -> None:
    made = {"C": (4, 1), "N": (8, 4), "H": (2, 32), "B": (10, 100), "L": (3, 1000)}
    assert layout.run(made, {}) == 64
    assert layout.run(made, layout.READS["transfer"]) == 64


def facts(**changed: Any) -> dict[str, Any]:
    """What a GPU engine with Grok-2's cache on one of eight ranks would say, with two layouts that it refuses."""
    sizes = {"L": 64, "B": 1021, "H": 1, "C": 512}
    cells = [
        {"layout": name, "block": block, "kernel": block, "why": why, "axes": axes(name, {**sizes, "N": block})}
        for block in (8, 16, 32, 64, 128)
        for name in LAYOUTS
        for why in ["no such block" if block == 8 else "no such layout" if name in ("BHLNC", "LHBNC") else ""]
    ]
    model = {"layers": 64, "windowed": 0, "window": None, "mla": False, "kv_heads": 8, "head_size": 128, "max_len": 8192}
    return {
        "version": "0.32.0",
        "platform": "cuda",
        "wish": None,
        "model": {**model, "cache_dtype": "bfloat16"},
        "ranks": 8,
        "block": 16,
        "cache_bytes": None,
        "sequences": 256,
        "leaves": False,
        "usual": "FLASH_ATTN",
        "refused": {},
        "backends": {"FLASH_ATTN": {"layout": "LBNHC", "cells": cells}},
        **changed,
    }


def grok(**workload: Any) -> recipe.Recipe:
    return recipe.Recipe.model_validate({"name": "grok", "engine": {"model": "grok"}, "workload": workload})


def test_bytes_are_those_of_the_models_shape() -> None:
    made = plan.make(facts(), grok())
    pair = next(each for each in made["backends"]["FLASH_ATTN"]["legal"] if (each["layout"], each["block"]) == ("LBNHC", 16))
    # 64 layers, one of 8 KV heads on this rank, K and V of 128 in two bytes each.
    assert pair["token"] == 64 * 1 * 2 * 128 * 2
    assert pair["sequence"] == pair["token"] * 8192
    assert pair["tail"] == pair["token"] * 7.5
    assert pair["reads"]["transfer"] == {"run": 16 * 512, "pieces": 64}


def test_where_the_cache_never_leaves_nothing_is_worth_changing_and_the_plan_says_why() -> None:
    made = plan.make(facts(), grok())
    assert made["changes"] == []
    assert "no layout saves a copy" in made["why_not"][0]
    assert any("nothing is worth changing" in line for line in words.lines(made))


def test_where_blocks_leave_the_engine_the_layout_with_one_piece_is_worth_it() -> None:
    (change,) = plan.make(facts(leaves=True), grok())["changes"]
    assert (change["means"], change["name"], change["value"]) == ("variable", "VLLM_KV_CACHE_LAYOUT", "BLHNC")
    assert "1 piece(s) instead of 64" in change["why"]
    settled = plan.make(facts(leaves=True, wish="BLNHC"), grok())
    assert settled["changes"] == []


def test_a_large_block_is_worth_changing_only_where_the_cache_can_be_full() -> None:
    (change,) = plan.make(facts(block=128), grok())["changes"]
    assert (change["means"], change["name"], change["value"], change["now"]) == ("flag", "block-size", 16, 128)
    roomy = plan.make(facts(block=128, cache_bytes=256 * 8192 * 32768), grok())
    assert roomy["changes"] == []
    assert "the 256 sequences that may run fit into the cache at once" in roomy["why_not"][1]
    tight = plan.make(facts(block=128, cache_bytes=256 * 8192 * 32768 - 1), grok())
    assert [change["name"] for change in tight["changes"]] == ["block-size"]
    assert (
        plan.make(facts(block=128), grok(classes=[{"name": "l", "share": 1, "prompt_tokens": 8000, "output_tokens": 100}]))[
            "changes"
        ]
        == []
    )


def test_a_layout_and_a_block_that_the_engine_refuses_are_worth_changing() -> None:
    changes = plan.make(facts(wish="LHBNC", block=8), grok())["changes"]
    assert [(change["name"], change["value"]) for change in changes] == [("VLLM_KV_CACHE_LAYOUT", "LBNHC"), ("block-size", 16)]
    assert "no such layout" in changes[0]["why"]
    assert "no such block" in changes[1]["why"]


def test_the_old_names_of_layouts_are_understood() -> None:
    assert plan.make(facts(wish="HND"), grok())["usual"]["layout"] == "LBHNC"


def test_a_pair_that_was_asked_for_is_judged_by_the_engines_words() -> None:
    made = plan.make(facts(), grok())
    assert plan.refusal(made, "BLHNC", 32) is None
    assert plan.refusal(made, "BHLNC", None) == "no such layout"
    assert "legal are the layouts BLHNC" in (plan.refusal(made, "NONSENSE", None) or "")
    assert [change["value"] for change in plan.asked(made, "LBNHC", 32)] == [32]


@pytest.mark.parametrize(
    ("kv", "logits", "says"),
    [
        ({}, {}, ["every number in the KV cache and the logits of 4 layers and 63 tokens is finite"]),
        (
            {"layers": ["a", "b"], "token": 20},
            {},
            ["NaN or Inf in the KV cache of a and 1 more layer(s), from token 20 on (the first is 0)"],
        ),
        ({"layers": ["b"], "token": None}, {}, ["NaN or Inf in the KV cache of b, first seen in the answer"]),
        ({}, {"tokens": [47, 49]}, ["NaN or Inf in the logits after token 47 (the first is 0), and after 1 more"]),
        ({}, {"tokens": []}, ["NaN or Inf in the logits of the answer"]),
    ],
)
def test_what_the_canary_found_is_said_by_layer_and_token(kv: dict[str, Any], logits: dict[str, Any], says: list[str]) -> None:
    found = {"version": "0.32.0", "layers": 4, "tokens": 63, "kv": kv, "logits": logits}
    assert words.canary(found) == says


def test_layers_of_later_pipeline_stages_are_named_and_counted_each_once() -> None:
    first, last = ["layers.0", "layers.1"], ["layers.2", "layers.3"]
    ranks = [
        {"layers": first, "bad": [], "logits": []},
        {"layers": first, "bad": ["layers.1"], "logits": []},
        {"layers": last, "bad": last, "logits": [True, False]},
        {"layers": last, "bad": ["layers.3"], "logits": []},
    ]
    assert canary.layers(ranks) == [*first, *last]
    assert canary.layers(ranks, "bad") == ["layers.1", *last]
    assert canary.steps(ranks) == [True, False]


@pytest.mark.parametrize(("limit", "size", "count"), [(8192, 48, 16), (40, 24, 16), (16, 8, 8), (2, 1, 1), (1, 1, 1)])
def test_a_prompt_and_its_answer_fit_a_short_model(limit: int, size: int, count: int) -> None:
    assert canary.lengths(limit) == (size, count)


@pytest.mark.parametrize(
    "shape",
    [
        (2, 9000, 16, 8, 128),  # keys and values first, as vLLM had it up to 0.25
        (9000, 2, 16, 8, 128),
        (9000, 8, 16, 256),
        (3, 5, 2**25 + 1),
        (7,),
        (0, 8, 16),
    ],
)
def test_a_cache_is_looked_at_in_pieces_that_cover_it_whichever_axis_is_long(shape: tuple[int, ...]) -> None:
    pieces = list(canary.pieces(shape))
    spans = [[(cut.start, min(cut.stop, size)) for cut, size in zip(piece, shape, strict=True)] for piece in pieces]
    volumes = [math.prod(end - start for start, end in span) for span in spans]
    assert len(pieces) == len(set(map(tuple, spans)))
    assert sum(volumes) == math.prod(shape)
    assert all(volume <= canary.PIECE for volume in volumes)
    assert len(pieces) <= 4 * math.prod(shape) / canary.PIECE + 15


class OldBackend:
    """The shape of a cache as FLASH_ATTN of vLLM 0.24 has it, which refuses a block that is no multiple of 16."""

    together = False  # keys and values of a head, as from 0.26 on

    @classmethod
    def get_kv_cache_shape(cls, blocks: int, block: int, heads: int, size: int, dtype: str) -> tuple[int, ...]:
        assert block % 16 == 0
        return (blocks, block, heads, 2 * size) if cls.together else (blocks, 2, block, heads, size)

    @classmethod
    def get_kv_cache_stride_order(cls) -> tuple[int, ...]:
        return (0, 2, 1, 3) if cls.together else (0, 1, 3, 2, 4)


class Together(OldBackend):
    together = True


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256, 576])
@pytest.mark.parametrize("backend", [OldBackend, Together])
def test_the_axes_of_an_old_cache_are_told_apart_for_heads_of_any_size(backend: type[OldBackend], size: int) -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(get_num_layers=lambda parallel: 4),
        parallel_config=None,
    )
    made = SimpleNamespace(head_size=size, num_kv_heads=2, block_size=16, dtype=SimpleNamespace(itemsize=2))
    content = 2 * size * (2 if backend.together else 1)
    page = 2 * 16 * 2 * size * 2
    pair = {} if backend.together else {"KV": (2, page // 2)}
    wanted = {"C": (content, 1), "N": (16, content), "H": (2, 16 * content), **pair, "B": (kvcache.NOMINAL, page)}
    assert kvcache._old_axes(config, backend, made) == {**wanted, "L": (4, kvcache.NOMINAL * page)}


def test_the_table_has_a_row_for_every_legal_pair_and_marks_the_present_one() -> None:
    made = plan.make(facts(), grok())
    rows = words.rows(made)
    assert len(rows) == 4 * 4
    assert [row[:3] for row in rows if "*" in row[0]] == [("FLASH_ATTN *", "LBNHC", "16")]
    assert {len(row) for row in rows} == {len(words.HEADER)}
    told = "\n".join(words.lines(made))
    assert "FLASH_ATTN refuses blocks of 8: no such block" in told
    assert "FLASH_ATTN refuses LHBNC, BHLNC: no such layout" in told


def stand_in(folder: Path, **says: str) -> Path:
    """An interpreter that answers for an engine: to each script of fenno's the lines that are given for it, by a shell."""
    cases = "".join(f"*/{script}.py) {lines} ;;\n" for script, lines in says.items())
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in\n*/introspect.py) exec {sys.executable} {ENGINE} "$@" ;;\n{cases}esac\n')
    python.chmod(0o755)
    return python


def test_the_plugin_is_laid_over_a_recipes_own_path_as_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [grok_versions.ARCHITECTURES[0]]}))
    # What the script would import, seen by a shell: whether the first folder on its path has the plugin.
    python = stand_in(tmp_path, canary="""test -d "${PYTHONPATH%%:*}/fenno/vllm_plugin" && echo 'fenno-kv:{"plugin": true}'""")
    engine = {"model": str(tmp_path), "python": str(python), "env": {"PYTHONPATH": "/theirs"}}
    assert ask.canary(recipe.Recipe.model_validate({"name": "grok", "engine": engine})) == {"plugin": True}


def test_one_replica_is_asked_whatever_the_recipe_says_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = """echo "fenno-kv:[\\"$*\\"]\""""
    python = stand_in(tmp_path, canary=said, kvcache=said)
    flags = {"data-parallel-size": 4, "max-num-seqs": 2}
    chosen = recipe.Recipe.model_validate({"name": "x", "engine": {"model": "m", "python": str(python), "flags": flags}})
    for answer in (ask.canary(chosen), ask.facts(chosen)):
        assert " ".join(answer).split(".py ")[1] == "m --max-num-seqs 2"


def test_a_script_finds_what_lies_beside_it_whatever_the_shell_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    python = stand_in(tmp_path, kvcache="""echo 'fenno-kv:"'"${PYTHONSAFEPATH-unset}"'"'""")
    assert ask.facts(recipe.Recipe.model_validate({"name": "x", "engine": {"model": "m", "python": str(python)}})) == "unset"


def test_what_takes_long_is_said_when_there_is_an_engine_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told: list[str] = []
    engine = {"model": "m", "python": str(tmp_path / "nothing")}
    with pytest.raises(EngineError, match="cannot be asked"):
        ask.facts(recipe.Recipe.model_validate({"name": "x", "engine": engine}), told.append)
    assert told == []
    engine["python"] = str(stand_in(tmp_path, kvcache="echo 'fenno-kv:{}'"))
    ask.facts(recipe.Recipe.model_validate({"name": "x", "engine": engine}), told.append)
    assert told[-1].startswith("asking this vLLM about its KV cache")


def test_a_script_that_breaks_is_not_said_to_be_a_refusal_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = stand_in(tmp_path, canary="echo 'ValueError: no such layer' >&2", kvcache="echo 'ValueError: no such flag' >&2")
    chosen = recipe.Recipe.model_validate({"name": "x", "engine": {"model": "m", "python": str(python)}})
    with pytest.raises(EngineError, match="the engine's KV cache cannot be looked at: ValueError: no such layer"):
        ask.canary(chosen)
    with pytest.raises(EngineError, match="the engine cannot be asked about its KV cache: ValueError: no such flag"):
        ask.facts(chosen)


def test_a_model_that_is_not_here_is_named_as_the_cause_and_not_a_librarys_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    offline = "huggingface_hub.errors.LocalEntryNotFoundError: outgoing traffic has been disabled"
    python = stand_in(tmp_path, kvcache=f"echo '{offline}' >&2; echo 'Check your internet connection' >&2; exit 1")
    chosen = recipe.Recipe.model_validate({"name": "x", "engine": {"model": "org/model", "python": str(python)}})
    with pytest.raises(EngineError, match="The model is not on this disk") as found:
        ask.facts(chosen)
    assert found.value.cause == "hub-offline" and "hf download" in found.value.hint


def transferred(*right: bool) -> dict[str, Any]:
    """What two ranks would say that moved a step and a cache."""
    row = {"layout": "one tensor", "how": "send, one message", "messages": 1, "bytes": 8, "seconds": 1e-3, "share": 0.5}
    rows = [{**row, "what": what, "right": fine} for what, fine in zip(("step", "cache"), right, strict=True)]
    link = {"bytes": 8, "bytes_per_second": 1e9}
    return {"backend": "gloo", "device": "cpu", "ranks": 2, "torch": "2.13.0", "shape": {}, "link": link, "rows": rows}


def test_a_way_that_brought_other_bytes_is_said_in_a_sentence() -> None:
    assert words.wrong(transferred(True, True)) == ""
    assert words.wrong(transferred(True, False)) == "what came is not what was sent: the cache as one tensor by send, one message"


@pytest.mark.scenario
@pytest.mark.parametrize(("right", "code"), [(True, 0), (False, 1)])
def test_a_benchmark_whose_bytes_are_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool, code: int) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = {"kvcache": f"{kvcache.MARK}{json.dumps(facts())}", "bench": json.dumps(transferred(True, right))}
    for name, line in said.items():
        (tmp_path / name).write_text(f"{line}\n")
    python = stand_in(tmp_path, **{name: f"cat {tmp_path / name}" for name in said})
    (tmp_path / "mine.yaml").write_text(f"name: x\nengine:\n  model: m\n  python: {python}\n")
    done, found, told = fenno("patch-kv", "bench", tmp_path / "mine.yaml")
    assert (done, found["rows"][1]["right"]) == (code, right), told
    assert ("what came is not what was sent: the cache" in told) is not right


CHANGES = [
    {"means": "variable", "name": "VLLM_KV_CACHE_LAYOUT", "value": "BLHNC"},
    {"means": "flag", "name": "block-size", "value": 32},
]
RECIPES = {
    "bare": "name: x\nengine:\n  model: m\n",
    "both": """name: x
# why
engine:
    model: m   # here
    flags:
        # first
        max-model-len: 10
    env:
        A: '1'
""",
    "there": """name: x
engine:
  model: m
  flags:
    block-size:  128 # ours
    dtype: float32
  env:
    VLLM_KV_CACHE_LAYOUT: HND
""",
    "no newline at the end": "name: x\nengine:\n  model: m\n  flags:\n    block-size: 64",
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_settings_are_written_into_a_recipe_and_taken_out_to_the_byte(name: str) -> None:
    text = RECIPES[name]
    after = written.written(text, CHANGES, name)
    engine = recipe.parse(after, name).engine
    assert engine.flags["block-size"] == 32
    assert engine.env["VLLM_KV_CACHE_LAYOUT"] == "BLHNC"
    assert written.present(after) == {"block-size": "32", "VLLM_KV_CACHE_LAYOUT": "BLHNC"}
    before = recipe.parse(text, name).engine
    assert {k: v for k, v in engine.flags.items() if k != "block-size"} == {
        k: v for k, v in before.flags.items() if k != "block-size"
    }
    assert written.without(after) == text
    assert written.written(after, CHANGES, name) == after


@pytest.mark.parametrize("path", list(recipe.embedded().values()), ids=lambda path: path.stem)
def test_every_shipped_recipe_can_be_written_to(path: Path) -> None:
    text = path.read_text()
    after = written.written(text, CHANGES, path.name)
    assert recipe.parse(after, path.name).engine.flags["block-size"] == 32
    assert written.without(after) == text


def test_a_recipe_in_one_line_is_refused_by_name() -> None:
    for text in ("{name: x, engine: {model: m}}\n", "name: x\nengine:\n  model: m\n  flags: {dtype: float32}\n"):
        assert yaml.safe_load(text)
        with pytest.raises(RecipeError, match="not written one key a line"):
            written.written(text, CHANGES[1:], "x.yaml")


def fenno(*command: object) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run([sys.executable, "-m", "fenno", *map(str, command)], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}, done.stderr


@pytest.mark.scenario
def test_a_recipe_that_ships_is_not_written_to(tmp_path: Path) -> None:
    code, _, told = fenno("patch-kv", "revert", "cpu-small")
    assert code == 2
    assert "fenno recipe show cpu-small" in told


@pytest.mark.scenario
def test_status_and_revert_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(written.written(RECIPES["both"], CHANGES, "mine"))
    assert fenno("patch-kv", "status", path)[1]["settings"] == {"block-size": "32", "VLLM_KV_CACHE_LAYOUT": "BLHNC"}
    assert fenno("patch-kv", "revert", path)[1]["changed"]
    assert path.read_text() == RECIPES["both"]
    assert fenno("patch-kv", "status", path)[1]["settings"] == {}
