"""`fenno.kv.ContiguousCache` beside the caches of transformers, on small random models, and what moves between two ranks.

torch is there where a vLLM is: hence the marker. It is imported by no test without it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fenno import process, recipe
from fenno.errors import CacheError, EngineError
from fenno.kv import measure, words

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "kv"))

from same import LIMIT, MODELS, PROMPT, SIZE, answer, contiguous, made, others, prompts

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
BAR = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy host several threads wait for each other at every one of a small model's many small steps."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One of each."""
    return {name: made(name) for name in MODELS}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_dynamic_and_the_static_cache(models: dict[str, Any], name: str, batch: int) -> None:
    model, given = models[name], prompts(batch)
    tokens, logits = answer(model, given, contiguous(model))
    assert tokens.shape == (batch, LIMIT)
    assert len(set(tokens[0].tolist())) > PROMPT / 2
    for other, cache in others(model).items():
        same, close = answer(model, given, cache)
        assert (tokens == same).all(), other
        assert (logits - close).abs().max().item() <= BAR, other


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_beams_are_those_of_the_dynamic_cache(models: dict[str, Any], name: str) -> None:
    import transformers

    model = models[name]
    options = {"num_beams": 4, "max_new_tokens": 60}
    tokens, _ = answer(model, prompts(2), contiguous(model, step=16), **options)
    same, _ = answer(model, prompts(2), transformers.DynamicCache(config=model.config), **options)
    assert (tokens == same).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_answers_in_half_precision_are_those_of_the_dynamic_cache(models: dict[str, Any], dtype: str) -> None:
    import copy

    import torch
    import transformers

    model = copy.deepcopy(models["Llama"]).to(getattr(torch, dtype))
    cache = contiguous(model)
    tokens, _ = answer(model, prompts(2), cache, max_new_tokens=60)
    same, _ = answer(model, prompts(2), transformers.DynamicCache(config=model.config), max_new_tokens=60)
    assert cache.tensor.dtype == getattr(torch, dtype)
    assert (tokens == same).all()


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_what_is_cropped_is_forgotten_also_beyond_a_window(models: dict[str, Any], name: str) -> None:
    import torch

    model, cache = models[name], contiguous(models[name])
    ids = prompts(1)["input_ids"].repeat(1, 4)
    with torch.no_grad():
        once = model(ids, past_key_values=cache).logits[:, -5:]
        cache.crop(-5)
        assert cache.get_seq_length() == ids.shape[1] - 5
        again = torch.cat([model(token, past_key_values=cache).logits for token in ids[:, -5:].split(1, dim=1)], 1)
    assert (once - again).abs().max().item() <= BAR
    cache.crop(30)
    assert cache.get_seq_length() == 30
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert torch.equal(model(ids, past_key_values=cache).logits[:, -5:], once)


def keys_and_values(batch: int, tokens: int, heads: int = 2, size: int = 16) -> tuple[Any, Any]:
    import torch

    return torch.randn(batch, heads, tokens, size), torch.randn(batch, heads, tokens, size)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_token_that_is_taken_back_is_stored_again_in_any_mode_of_torch(models: dict[str, Any], name: str) -> None:
    import torch

    model, given = models[name], prompts(2)["input_ids"]
    cache = contiguous(model)
    said = []
    with torch.no_grad():
        model(given, past_key_values=cache)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            said.append(model(given[:, :1], past_key_values=cache).logits.tolist())
        cache.crop(-1)
    assert said[1:] == said[:1] * 3


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """The names of what torch is called for in this block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Noted(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Noted():
        yield calls


@pytest.mark.parametrize(("name", "windows"), [("Llama", 1), ("Gemma2", 2)])
def test_where_tokens_follow_each_other_one_makes_the_views_of_many_and_each_layer_stores_in_one_call(
    models: dict[str, Any], name: str, windows: int
) -> None:
    import torch

    cache = contiguous(models[name])
    said = []
    with torch.no_grad():
        for tokens in (20, 5, 1, 1, 1, 1, 1, 1, 1):
            new = keys_and_values(2, tokens)
            with noted() as calls:
                for layer in range(3):
                    cache.update(*new, layer)
            said.append(calls)
    # The places, and what is shown: with sliding windows that is cut a second time.
    views = ["slice", "split_with_sizes"] + ["slice", "unsafe_split_with_sizes"] * windows
    assert said[1] == views + ["select", "copy_"] * 6
    assert said[2:] == [views * ahead + ["where"] * 3 for ahead in (1, 2, 0, 4, 0, 0, 0)]


def test_tokens_between_several_at_once_make_no_views_that_are_not_used(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"])
    with torch.no_grad(), noted() as calls:  # as a draft that guesses right now and then
        for tokens in (2, 1, 2, 1, 2, 1):
            for layer in range(3):
                cache.update(*keys_and_values(2, tokens), layer)
    assert calls.count("unsafe_split_with_sizes") == 6


@pytest.mark.parametrize("way", ["deep copy", "pickle"])
def test_a_copy_of_a_cache_goes_its_own_way(models: dict[str, Any], way: str) -> None:
    import copy
    import pickle

    import torch

    cache = contiguous(models["Llama"])
    pairs = [keys_and_values(2, 1) for _ in range(4)]
    with torch.no_grad():
        for pair in pairs[:2]:
            for layer in range(3):
                cache.update(*pair, layer)
        assert len(pickle.dumps(cache)) < 2 * cache.tensor.nbytes + 100_000
        twin = copy.deepcopy(cache) if way == "deep copy" else pickle.loads(pickle.dumps(cache))
        stored = [which.update(*pair, 0) for which, pair in ((cache, pairs[2]), (twin, pairs[3]))]
    for (keys, values), last in zip(stored, pairs[2:], strict=True):
        assert torch.equal(keys, torch.cat([pair[0] for pair in (*pairs[:2], last)], dim=2))
        assert torch.equal(values, torch.cat([pair[1] for pair in (*pairs[:2], last)], dim=2))
    assert torch.equal(twin.tensor[1, 0, :, :, 2].transpose(0, 1), pairs[3][1][:, :, 0])


def test_what_was_stored_in_inference_mode_can_be_followed_outside_of_it(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"], step=5)
    pairs = [keys_and_values(2, 3) for _ in range(4)]
    for pair, mode in zip(pairs, (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.no_grad), strict=True):
        with mode():
            keys, _ = cache.update(*pair, 0)
    assert torch.equal(keys, torch.cat([keys for keys, _ in pairs], dim=2))


def test_keys_that_autocast_made_wider_than_values_are_stored_with_them(models: dict[str, Any]) -> None:
    import torch

    keys, values = keys_and_values(2, 3)
    cache = contiguous(models["Llama"])
    with torch.no_grad():
        for wide, narrow in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            cache.reset()
            cache.block.put(None)
            stored = cache.update(keys.to(wide), values.to(narrow), 0)
            assert torch.equal(stored[0], keys.to(wide))
            assert torch.equal(stored[1], values.to(narrow).to(wide))


def test_all_layers_lie_in_one_tensor_in_the_articles_order_and_a_step_concatenates_nothing(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"])
    new = keys_and_values(2, 5)
    cache.update(*new, 0)
    block = cache.tensor
    assert block.shape == (2, 3, 2, 2, LIMIT, 16)  # keys and values, layers, KV heads, batch, sequence, head size
    assert torch.equal(block[1, 0, 1, :, :5], new[1][:, 1])
    with noted() as calls:
        keys, values = cache.update(*keys_and_values(2, 1), 0)
    assert "cat" not in calls and "copy_" in calls
    with torch.no_grad(), noted() as calls:  # as in `generate`
        keys, values = cache.update(*keys_and_values(2, 1), 0)
    assert "cat" not in calls and "where" in calls
    assert keys.shape == values.shape == (2, 2, 7, 16)
    assert cache.tensor is block
    assert {keys.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()} == {block.untyped_storage().data_ptr()}


def test_what_would_overflow_is_refused_and_what_was_stored_stays(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"], 10, step=4)
    for layer in range(3):
        cache.update(*keys_and_values(1, 9), layer)
    assert cache.tensor.shape[4] == 10  # the last step is cut short: no more is allocated than may be used
    before = cache.tensor.clone()
    with pytest.raises(CacheError, match="11 tokens do not fit into a cache of 10"):
        cache.update(*keys_and_values(1, 2), 0)
    assert cache.get_seq_length() == 9
    assert torch.equal(cache.tensor, before)
    cache.update(*keys_and_values(1, 1), 0)


@pytest.mark.parametrize(("batch", "heads", "size"), [(2, 2, 16), (1, 4, 16), (1, 2, 8)])
def test_keys_of_another_shape_are_refused(models: dict[str, Any], batch: int, heads: int, size: int) -> None:
    cache = contiguous(models["Llama"])
    cache.update(*keys_and_values(1, 1), 0)
    with pytest.raises(CacheError, match="came to a cache of 2 heads of 16 for a batch of 1"):
        cache.update(*keys_and_values(batch, 1, heads, size), 1)


def test_values_of_another_shape_than_their_keys_are_refused(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"])
    with torch.no_grad():  # as in `generate`, where only what differs from the layer before is looked at
        cache.update(*keys_and_values(1, 1), 0)
        with pytest.raises(CacheError, match="do not lie in one block"):
            cache.update(keys_and_values(1, 1)[0], keys_and_values(1, 2)[1], 1)


def test_rows_of_the_batch_are_repeated_and_chosen(models: dict[str, Any]) -> None:
    import torch

    cache = contiguous(models["Llama"])
    keys, values = keys_and_values(2, 3)
    cache.update(keys, values, 0)
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.tensor[0, 0, :, :, :3].transpose(0, 1), keys.repeat_interleave(2, 0))
    with torch.no_grad():  # as in `generate`, where views are kept for the other layers of a step
        cache.update(*keys_and_values(4, 1), 1)
    old = weakref.ref(cache.tensor)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert old() is None, "the block before is kept beside the new one"
    assert torch.equal(cache.tensor[1, 0, :, :, :3].transpose(0, 1), values[[1, 0]])


def test_models_that_keep_something_else_are_refused() -> None:
    import transformers

    from fenno.kv import ContiguousCache

    other = transformers.Qwen2Config(**SIZE, layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(CacheError, match="linear_attention"):
        ContiguousCache(other, 10)
    with pytest.raises(CacheError, match=r"keys of \(1, 2, 1, 24\) and values of \(1, 2, 1, 16\)"):
        ContiguousCache(transformers.LlamaConfig(**SIZE), 10).update(keys_and_values(1, 1, size=24)[0], keys_and_values(1, 1)[1], 0)


def test_a_model_in_training_mode_is_refused_since_gradient_checkpointing_there_fills_no_cache(models: dict[str, Any]) -> None:
    import copy

    from fenno.kv import ContiguousCache

    model = copy.deepcopy(models["Llama"]).train()
    with pytest.raises(CacheError, match="training mode"):
        ContiguousCache.for_model(model, LIMIT)
    model.gradient_checkpointing_enable()
    cache = ContiguousCache(model.config, LIMIT)
    ids = prompts(1)["input_ids"]
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.eval()(ids, past_key_values=cache)
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_compiled_step_is_one_graph_for_any_length(models: dict[str, Any], name: str) -> None:
    import torch
    from torch._dynamo.testing import CompileCounter

    model, counted = models[name], CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, backend=counted, fullgraph=True)
    ids = prompts(1)["input_ids"].repeat(1, 3)
    logits, graphs = [], []
    with torch.no_grad():
        for step in (model.forward, compiled):
            cache = contiguous(model)
            model(ids[:, :20], past_key_values=cache)
            for at in range(20, 60):
                logits.append(step(ids[:, at : at + 1], past_key_values=cache).logits)
                graphs.append(counted.frame_count)
    assert (torch.stack(logits[:40]) - torch.stack(logits[40:])).abs().max().item() <= BAR
    # The second length makes it a variable, and a window that is full another kind of step: after that nothing is compiled.
    assert graphs[-1] == graphs[-20] <= 4


def test_a_cache_and_a_step_go_from_rank_to_rank_and_all_ranks_gather_each_others() -> None:
    child = process.run([sys.executable, str(HERE / "kv_ranks.py")], timeout=300, env={"PYTHONPATH": str(HERE.parent)})
    line = next((line for line in child.stdout.splitlines() if line.startswith("ranks:")), None)
    assert line, child.stderr[-4000:]
    first, second = json.loads(line.removeprefix("ranks:"))
    gathers = {f"all-gather torch.{name}": True for name in ("float32", "bfloat16", "float16")}
    assert first == {"layers": True, **gathers}
    assert second == {"cache": True, "step": True, "next logits": True, "layers": True, **gathers}


def test_transfers_are_timed_under_the_engines_interpreter_and_say_that_no_gpu_took_part() -> None:
    chosen = recipe.load(recipe.find("cpu-small"))
    model = {"layers": 3, "kv_heads": 2, "head_size": 16, "cache_dtype": "bfloat16"}
    found = measure.transfers(chosen, model, batch=2, tokens=8)
    token = 2 * 3 * 2 * 2 * 16 * 2
    assert (found["backend"], found["device"], found["ranks"]) == ("gloo", "cpu", 2)
    assert {(row["what"], row["bytes"]) for row in found["rows"]} == {("step", token), ("cache", 8 * token)}
    assert {(row["layout"], row["messages"]) for row in found["rows"]} == {("one tensor", 1), ("a tensor a layer", 6)}
    assert all(0 < row["low"] <= row["seconds"] <= row["high"] and row["share"] > 0 for row in found["rows"])
    assert all(row["right"] for row in found["rows"])
    title, rows = words.transfers(found)
    assert "no GPUs" in title
    assert len(rows) == len(found["rows"]) == 10
    with pytest.raises(EngineError, match="the ranks ended early: .*no_such_type"):
        measure.transfers(chosen, model | {"cache_dtype": "no_such_type"}, batch=2, tokens=8)
