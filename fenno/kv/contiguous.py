"""A KV cache for transformers in one tensor, in the article's order: layers, KV heads, batch, sequence, head size.

A step writes its tokens into their places and attention reads views of the tensor: nothing is concatenated. A GPU that gets one
token at a time waits for its host, so what a step costs is what it calls: once for a layer, and for all views in advance.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from fenno.errors import CacheError

KINDS = ("full_attention", "sliding_attention")
BATCH, SEQUENCE = 3, 4  # axes of the tensor
AHEAD = 32  # tokens whose views are made at once, at most


class Block:
    """The tensor of all layers: (2, layers, KV heads, batch, tokens, head size), keys before values.

    It is allocated when the first keys come, which say what a config does not: heads on this rank, rows with their beams,
    dtype, device. `step` is the tokens it grows by, `limit` the most it may hold.
    """

    def __init__(self, windows: list[int | None], limit: int, step: int) -> None:
        self.windows = windows  # of each layer, None for full attention
        self.limit = limit
        self.step = step
        self.put(None)

    def __getstate__(self) -> dict[str, Any]:
        """Without views: a copy needs its own, of its own tensor."""
        return {name: getattr(self, name) for name in ("windows", "limit", "step", "tensor")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.put(self.tensor)

    def put(self, tensor: torch.Tensor | None) -> None:
        """Another tensor instead of this one, which no view keeps any longer."""
        self.tensor = tensor
        self.views: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # of each layer, by the tokens before
        if tensor is not None:
            # All heads on one axis, to be split into those of each layer: keys after each other and then values, (batch,
            # 2 x layers x KV heads, tokens, head size), and keys beside values, (2, batch, layers x KV heads, tokens, head size).
            self._flat = tensor.flatten(0, 2).transpose(0, 1)
            self._pairs = tensor.flatten(1, 2).transpose(1, 2)
            self.is_key = torch.tensor([True, False], device=tensor.device).view(2, 1, 1, 1, 1)

    def prepare(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The views of all layers for keys and values like these behind `start` tokens. Raises what `room` does.

        Where one token follows another those of the tokens after it are made as well, twice as many each time: in a row each takes
        half as long as between other work.
        """
        new = keys.shape[-2]
        self.room(keys, values, start + new)
        assert self.tensor is not None
        ahead = min(2 * len(self.views), AHEAD) if new == 1 and start - 1 in self.views else 1
        last = min(start + ahead, self.tensor.shape[SEQUENCE] - new + 1)
        self.views = {}  # before the new ones are made, which then get their memory
        self.views = {at: self._views(at, new) for at in range(start, last)}
        self.new, self.shape, self.key_type, self.value_type = new, keys.shape, keys.dtype, values.dtype
        # At a token a call is dearer than its bytes; of a prompt `torch.where` would read twice as many.
        self.at_once = new == 1 and keys.dtype == values.dtype
        return self.views[start]

    def _views(self, start: int, new: int) -> list[tuple[torch.Tensor, ...]]:
        """Of each layer the place of `new` tokens, (2, batch, KV heads, tokens, head size), and what attention reads."""
        layers, end = len(self.windows), start + new
        heads = [self._pairs.shape[2] // layers] * layers
        places = self._pairs.narrow(3, start, new).split_with_sizes(heads, 2)
        shown = {}
        for window in set(self.windows):
            first = first_shown(window, start)
            # Not what autograd tracks as views: they are read, and only where no gradients are kept.
            both = self._flat.narrow(2, first, end - first).unsafe_split_with_sizes(heads * 2, 1)
            shown[window] = list(zip(places, both[:layers], both[layers:], strict=True))
        return [shown[window][layer] for layer, window in enumerate(self.windows)]

    def cut(self, layer: int, start: int, end: int) -> torch.Tensor:
        """One layer's keys [0] and values [1] from token `start` to `end`: (2, batch, KV heads, tokens, head size)."""
        assert self.tensor is not None
        return self.tensor.select(1, layer).narrow(SEQUENCE - 1, start, end - start).transpose(1, 2)

    def allocate(self, keys: torch.Tensor) -> None:
        """Room for the first `step` tokens of keys (batch, KV heads, tokens, head size), and of values like them."""
        batch, heads, _, size = keys.shape
        with torch.inference_mode(False):  # or it could be written to in inference mode alone
            self.put(keys.new_zeros(2, len(self.windows), heads, batch, self.step, size))

    def room(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Have room for tokens up to `end`. Raises `CacheError` where that is too many, or their shape is another's."""
        if end > self.limit:
            raise CacheError(f"{end} tokens do not fit into a cache of {self.limit}", "make it with a larger max_cache_len")
        if keys.shape != values.shape:
            raise CacheError(
                f"keys of {tuple(keys.shape)} and values of {tuple(values.shape)} do not lie in one block",
                "use the cache that transformers makes by itself for this model",
            )
        if self.tensor is None:
            self.allocate(keys)
        tensor = self.tensor
        assert tensor is not None
        batch, heads, _, size = keys.shape
        shape = tensor.shape
        there = (shape[2], shape[BATCH], shape[-1], tensor.dtype)
        if (heads, batch, size, keys.dtype) != there:
            raise CacheError(
                f"{heads} heads of {size} for a batch of {batch} in {keys.dtype} came to a cache of {there[0]} heads of {there[2]} "
                f"for a batch of {there[1]} in {there[3]}",
                "make a cache for each batch; layers that differ in their heads need the cache that transformers makes by itself",
            )
        if end > shape[SEQUENCE]:
            self.put(self._grown(tensor, end))

    def _grown(self, old: torch.Tensor, end: int) -> torch.Tensor:
        """The same with as many more steps as `end` needs; old and new exist at once while it is copied."""
        shape = list(old.shape)
        shape[SEQUENCE] = min(-(-end // self.step) * self.step, self.limit)
        with torch.inference_mode(False):
            new = old.new_zeros(shape)
        new[..., : old.shape[SEQUENCE], :] = old
        return new


def first_shown(window: int | None, length: int) -> int:
    """The oldest token that the one after `length` others attends to."""
    return 0 if window is None else max(length - window + 1, 0)


class ContiguousLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's part of the block. Attention gets views that end with the newest token.

    A sliding layer keeps all tokens, so that it can be cropped, and shows those of its window.
    """

    is_croppable = True

    def __init__(self, block: Block, index: int, window: int | None) -> None:
        super().__init__()
        self.block = block
        self.index = index
        self.window = window
        self.is_sliding = window is not None
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        if self.block.tensor is None:
            self.block.allocate(key_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the cache's, with views of this layer alone, made when they are used."""
        start = self.length
        end = start + key_states.shape[-2]
        self.block.room(key_states, value_states, end)
        place = self.block.cut(self.index, start, end)
        place[0].copy_(key_states)
        place[1].copy_(value_states)
        self.length = end
        self.is_initialized = True
        shown = self.block.cut(self.index, first_shown(self.window, start), end)
        return shown[0], shown[1]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """How many tokens attention will get, and the position of the first. Before 5.0 positions come instead of their number."""
        new = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        first = first_shown(self.window, self.length)
        return self.length + new - first, first

    def get_seq_length(self, cache_position: Any = None) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.block.limit

    def get_max_cache_shape(self) -> int:
        return self.block.limit

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens; a number above 0 is how many stay, as versions before 5.18 have it."""
        kept = self.length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self.length = max(min(kept, self.length), 0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows of the batch in the order of `beam_idx`, within the block."""
        if self.block.tensor is not None and self.length:
            used = self.block.tensor[:, self.index, ..., : self.length, :]
            used.copy_(used.index_select(BATCH - 1, beam_idx.to(used.device)))


class ContiguousCache(Cache):  # type: ignore[misc]
    """For `generate(past_key_values=ContiguousCache(model.config, 4096))`, and for calls of the model.

    `max_cache_len`: tokens of a sequence, prompt and answer; more are refused with `CacheError`, and what was stored stays.
    `step`: allocate room for so many tokens, and for so many more whenever they are used up; None: all at once.
    Raises `CacheError` for a model whose layers are not all full or sliding attention.
    """

    is_compileable = False

    def __init__(self, config: Any, max_cache_len: int, *, step: int | None = None) -> None:
        if max_cache_len < 1 or (step is not None and step < 1):
            raise CacheError(f"a cache of {max_cache_len} tokens in steps of {step} holds nothing", "give whole numbers above 0")
        windows = _windows(config.get_text_config(decoder=True))
        self.block = Block(windows, max_cache_len, min(step or max_cache_len, max_cache_len))
        self._sliding = [window is not None for window in windows]
        super().__init__(layers=[ContiguousLayer(self.block, index, window) for index, window in enumerate(windows)])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's (batch, KV heads, new tokens, head size); returns what attention reads, of the same axes.

        Room is looked at where views are made; else only whether these are like those that the views are for.
        Raises `CacheError` for tokens that do not fit, and for another shape than the block's.
        """
        layer = self.layers[layer_idx]
        # Where gradients are kept, a view must be newer than what was written before it; a compiler makes no kernel of a view.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return layer.update(key_states, value_states)  # type: ignore[no-any-return]
        block, start, shape = self.block, layer.length, key_states.shape
        views = block.views.get(start)
        if (
            views is None
            or shape != block.shape
            or shape != value_states.shape
            or key_states.dtype != block.key_type
            or value_states.dtype != block.value_type
        ):
            views = block.prepare(start, key_states, value_states)
        place, keys, values = views[layer_idx]
        if block.at_once:
            torch.where(block.is_key, key_states, value_states, out=place)
        else:
            place[0].copy_(key_states)
            place[1].copy_(value_states)
        layer.length = start + block.new
        layer.is_initialized = True
        return keys, values

    # A step asks several times for these; the class above goes through all layers for each answer.
    @property
    def is_sliding(self) -> list[bool]:
        return self._sliding

    def get_seq_length(self, layer_idx: int = 0, cache_position: Any = None) -> int:
        return self.layers[layer_idx].length  # type: ignore[no-any-return]

    @classmethod
    def for_model(cls, model: Any, max_cache_len: int, *, step: int | None = None) -> ContiguousCache:
        """The same for a model that is ready for it; one in training mode is refused."""
        if model.training:
            raise CacheError(
                "the model is in training mode: dropout is on, gradient checkpointing keeps no cache", "call model.eval()"
            )
        return cls(model.config, max_cache_len, step=step)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The block (2, layers, KV heads, batch, tokens, head size), None before the first keys. It is another after growing."""
        return self.block.tensor

    def span(self, first: int = 0) -> torch.Tensor:
        """A view of all layers' tokens from `first` on: (2, layers, KV heads, batch, tokens, head size). For `fenno.kv.transfer`.

        Raises `CacheError` before the first keys.
        """
        if self.block.tensor is None:
            raise CacheError("nothing is in this cache yet", "call the model with it first")
        return self.block.tensor[..., first : self.get_seq_length(), :]

    def append(self, part: torch.Tensor) -> None:
        """Store what `span` gave elsewhere behind the tokens that are here. Raises `CacheError` as a step does."""
        if part.shape[1] != len(self.layers):
            raise CacheError(f"{part.shape[1]} layers came to a cache of {len(self.layers)}", "make it for the same model")
        for index, layer in enumerate(self.layers):
            layer.update(part[0, index].transpose(0, 1), part[1, index].transpose(0, 1))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times, in a new block."""
        if self.block.tensor is not None:
            with torch.inference_mode(False):
                self.block.put(self.block.tensor.repeat_interleave(repeats, dim=BATCH))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """These rows of the batch alone, in a new block."""
        if self.block.tensor is not None:
            with torch.inference_mode(False):
                self.block.put(self.block.tensor[:, :, :, indices])


def _windows(config: Any) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    window = getattr(config, "sliding_window", None)
    usual = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or usual
    other = sorted(set(kinds) - set(KINDS))
    if other or getattr(config, "num_kv_shared_layers", None):
        raise CacheError(
            f"a {config.model_type} has layers that do not keep their own keys and values: {', '.join(other) or 'shared ones'}",
            "use the cache that transformers makes by itself for this model",
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]
