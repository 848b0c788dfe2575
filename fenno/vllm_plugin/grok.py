"""Grok-1 and Grok-2 from vLLM's own layers.

Written from the releases' own descriptions: xAI's JAX code of Grok-1, and Grok-2's config with the serving code that its
release names. docs/grok.md says where vLLM 0.24's Grok differs.
"""

# No `from __future__ import annotations` here: vLLM's compiler reads the annotations of `forward` themselves.
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group, get_pp_group, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids
from vllm.model_executor.model_loader.weight_utils import default_weight_loader, maybe_remap_kv_scale_name
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    PPMissingLayer,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors

from fenno.vllm_plugin import grok_layout, grok_versions
from fenno.vllm_plugin.grok_layout import Grok

# One of vLLM's, so that its handlers show it.
log = init_logger("vllm.fenno.grok")

# Between the layers: what was added last, and the sum of everything before it.
STREAM = ("hidden_states", "residual")


class GrokAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, grok: Grok, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        heads, kv_heads = grok.heads // ranks, max(1, grok.kv_heads // ranks)
        self.sizes = [heads * grok.head, kv_heads * grok.head, kv_heads * grok.head]
        longest = config.model_config.max_model_len
        # Up to this position the temperature is 1, so that a shorter model needs none.
        self.temperature = grok.temperature if 1 < grok.temperature < longest else 0
        quant = config.quant_config
        self.qkv_proj = QKVParallelLinear(
            grok.hidden, grok.head, grok.heads, grok.kv_heads, bias=False, quant_config=quant, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            grok.heads * grok.head, grok.hidden, bias=False, quant_config=quant, prefix=f"{prefix}.o_proj"
        )
        rope = {"rope_type": "default", "rope_theta": grok.rope_base}
        self.rotary_emb = get_rope(grok.head, max_position=longest, rope_parameters=rope, is_neox_style=True)
        self.attn = Attention(
            heads,
            grok.head,
            grok.attention,
            num_kv_heads=kv_heads,
            cache_config=config.cache_config,
            quant_config=quant,
            logits_soft_cap=grok.attention_cap or None,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`positions` [tokens], `x` [tokens, hidden]; returns [tokens, hidden]."""
        qkv, _ = self.qkv_proj(x)
        q, k, v = qkv.split(self.sizes, dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        if self.temperature:
            warmth = torch.log2(positions.clamp(min=self.temperature).float()) / math.log2(self.temperature)
            q = q * warmth.to(q.dtype).unsqueeze(-1)
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class GrokExperts(nn.Module):  # type: ignore[misc]
    """The mixture: softmax over all experts in float32, and the chosen ones' shares as they are, not made to sum to one."""

    def __init__(self, grok: Grok, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.cap = grok.router_cap
        self.gate = ReplicatedLinear(
            grok.hidden, grok.experts, bias=False, params_dtype=torch.float32, quant_config=None, prefix=f"{prefix}.gate"
        )
        self.experts = grok_versions.fused_experts(
            num_experts=grok.experts,
            top_k=grok.active,
            hidden_size=grok.hidden,
            intermediate_size=grok.expert,
            renormalize=False,
            activation="gelu_tanh",
            quant_config=config.quant_config,
            router_logits_dtype=torch.float32,
            ckpt_names=("w1", "w2", "w3"),
            prefix=f"{prefix}.experts",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [tokens, hidden]."""
        logits, _ = self.gate(x.float())
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return self.experts(x, logits)


class GrokMLP(nn.Module):  # type: ignore[misc]
    def __init__(self, grok: Grok, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        quant = config.quant_config
        self.gate_up_proj = MergedColumnParallelLinear(
            grok.hidden, [grok.shared] * 2, bias=False, quant_config=quant, prefix=f"{prefix}.gate_up_proj"
        )
        self.act_fn = GeluAndMul(approximate="tanh")
        self.down_proj = RowParallelLinear(grok.shared, grok.hidden, bias=False, quant_config=quant, prefix=f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: [tokens, hidden]."""
        x, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(x))
        return x


class GrokLayer(nn.Module):  # type: ignore[misc]
    """Attention, then experts (with a dense MLP beside them in Grok-2); each normed before and after."""

    def __init__(self, grok: Grok, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = GrokAttention(grok, config, f"{prefix}.self_attn")
        self.block_sparse_moe = GrokExperts(grok, config, f"{prefix}.block_sparse_moe")
        self.mlp = GrokMLP(grok, config, f"{prefix}.mlp") if grok.shared else None
        self.pre_attn_norm = RMSNorm(grok.hidden, eps=grok.epsilon)
        self.post_attn_norm = RMSNorm(grok.hidden, eps=grok.epsilon)
        self.pre_moe_norm = RMSNorm(grok.hidden, eps=grok.epsilon)
        self.post_moe_norm = RMSNorm(grok.hidden, eps=grok.epsilon)

    def forward(self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream before and after the layer is `x` + `residual`, both [tokens, hidden]; without `residual` it is `x`."""
        if residual is None:
            residual, x = x, self.pre_attn_norm(x)
        else:
            x, residual = self.pre_attn_norm(x, residual)
        x = self.post_attn_norm(self.self_attn(positions, x))
        x, residual = self.pre_moe_norm(x, residual)
        if self.mlp is None:
            x = self.block_sparse_moe(x)
        else:
            # The dense one first: fused experts may write into their input.
            dense = self.mlp(x)
            x = (dense + self.block_sparse_moe(x)) * math.sqrt(0.5)
        return self.post_moe_norm(x), residual


@support_torch_compile
class GrokModel(nn.Module):  # type: ignore[misc]
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        grok = grok_layout.read(vllm_config.model_config.hf_text_config)
        self.multiplier = grok.embedding
        stage = get_pp_group()
        embeds = stage.is_first_rank or (grok.tied and stage.is_last_rank)
        self.embed_tokens = VocabParallelEmbedding(grok.vocab, grok.hidden) if embeds else PPMissingLayer()
        self.start_layer, self.end_layer, self.layers = make_layers(
            grok.layers, lambda prefix: GrokLayer(grok, vllm_config, prefix), prefix=f"{prefix}.layers"
        )
        self.norm = RMSNorm(grok.hidden, eps=grok.epsilon) if stage.is_last_rank else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory([*STREAM], grok.hidden)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.embed_tokens(input_ids) * self.multiplier

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """The last norm's output, [tokens, hidden]; on an earlier pipeline stage what the next one starts from."""
        if get_pp_group().is_first_rank:
            x, residual = (self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds), None
        else:
            assert intermediate_tensors is not None
            x, residual = (intermediate_tensors[name] for name in STREAM)
        for layer in self.layers[self.start_layer : self.end_layer]:
            x, residual = layer(positions, x, residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": x, "residual": residual})
        x, _ = self.norm(x, residual)
        return x


class GrokForCausalLM(nn.Module, SupportsPP):  # type: ignore[misc]
    """What vLLM serves as `Grok1ForCausalLM` (the name of both releases) and `Grok1ModelForCausalLM`."""

    fall_back_to_pt_during_load = False
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.grok = grok = grok_layout.read(vllm_config.model_config.hf_text_config)
        _warn(grok, vllm_config.model_config.max_model_len)
        self.given = _given(vllm_config, grok.experts)
        self.model = GrokModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if get_pp_group().is_last_rank:
            quant = vllm_config.quant_config
            head = ParallelLMHead(grok.vocab, grok.hidden, quant_config=quant, prefix=maybe_prefix(prefix, "lm_head"))
            self.lm_head = head.tie_weights(self.model.embed_tokens) if grok.tied else head
        else:
            self.lm_head = PPMissingLayer()
        # Grok multiplies before it caps and vLLM caps before it multiplies: the same with a cap that much larger.
        cap = grok.final_cap / grok.output if grok.final_cap else None
        self.logits_processor = LogitsProcessor(grok.vocab, scale=grok.output, soft_cap=cap)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As `GrokModel.forward`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[tokens, hidden] -> [tokens, vocabulary]; None on a rank that gathers none."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take whole weights under the names of either release; returns the names of the parameters that got something.

        Raises `ValueError` that names a weight which is missing from this stage, doubled, misshaped, without its scale or none of
        Grok's.
        """
        expected = grok_layout.weights(self.grok)
        parameters = {grok_versions.plain_name(name): (name, value) for name, value in self.named_parameters()}
        seen: set[str] = set()
        eights: list[str] = []
        loaded: set[str] = set()
        for spelt, tensor in weights:
            name = grok_layout.second_name(spelt)
            if name.endswith("_scale"):
                name = maybe_remap_kv_scale_name(name, parameters)
            # No name: a scale of a KV cache that is not quantised here.
            if name is None or grok_layout.unused(name, self.grok):
                continue
            _check(name, tensor, expected, seen)
            seen.add(name)
            if name in expected and tensor.is_floating_point() and tensor.itemsize == 1:
                eights.append(name)
            if not is_pp_missing_parameter(name, self):
                loaded.add(_load(name, tensor, parameters))
        here = [name for name in expected if not is_pp_missing_parameter(name, self)]
        grok_layout.complete(grok_layout.of_experts(here, self.given), seen)
        grok_layout.scaled(eights, seen)
        return loaded


def _given(config: VllmConfig, experts: int) -> set[int] | None:
    """Which of so many experts vLLM's loader gives to this rank, by the conditions of its filter; None where it gives them all."""
    parallel = config.parallel_config
    asked = parallel.enable_expert_parallel and parallel.enable_ep_weight_filter
    # A balanced rank holds copies of any expert, and the loader of files cut for ranks filters nothing.
    if not asked or parallel.enable_eplb or config.load_config.load_format == grok_versions.LOAD_FORMAT:
        return None
    group = get_ep_group()
    own: set[int] | None = compute_local_expert_ids(
        experts, group.world_size, group.rank_in_group, placement=parallel.expert_placement_strategy
    )
    return own


def _warn(grok: Grok, longest: int) -> None:
    """Say what is only nearly right beyond `attn_temperature_len`."""
    if 1 < grok.temperature < longest:
        log.warning(
            "fenno: Grok's attn_temperature_len is %d and the model may get %d tokens long: past it the attention temperature "
            "is applied before the soft cap, where Grok applies it after, so that answers differ slightly from Grok's own. "
            "--max-model-len %d is exact.",
            grok.temperature,
            longest,
            grok.temperature,
        )


def _check(name: str, tensor: torch.Tensor, expected: dict[str, grok_layout.Weight], seen: set[str]) -> None:
    """Raise `ValueError` when `name` came before, has another shape than Grok's or is of an expert that Grok has not."""
    if ".experts." in name and f"{name.rpartition('.')[0]}.weight" not in expected:
        raise ValueError(f"the weight {name} is none of Grok's")
    shape = expected[name].shape if name in expected else tuple(tensor.shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"the weight {name} has the shape {list(tensor.shape)} and should have {list(shape)}; "
            f"files named *-TP-00r.safetensors hold parts: load them with --load-format {grok_versions.LOAD_FORMAT}"
        )
    if name in seen:
        raise ValueError(f"the weight {name} is there twice")


# Weights that are one parameter here, and which part of it they are.
STACKED: dict[str, tuple[str, Any]] = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}


def _load(name: str, tensor: torch.Tensor, parameters: dict[str, tuple[str, Any]]) -> str:
    """Put a checkpoint's weight where it belongs, cut to this rank by vLLM's own loaders; returns the parameter's name."""
    head, experts, rest = name.partition(".experts.")
    if experts:
        expert, part, kind = rest.split(".")
        merged = "w2" if part == "w2" else "w13"
        full, parameter = _find(f"{head}.experts.{merged}_{kind}", name, parameters)
        parameter.weight_loader(parameter, tensor, full, shard_id=part, expert_id=int(expert))
        return full
    for part, (whole, shard) in STACKED.items():
        if part in name:
            full, parameter = _find(name.replace(part, whole), name, parameters)
            parameter.weight_loader(parameter, tensor, shard)
            return full
    full, parameter = _find(name, name, parameters)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
    return full


def _find(name: str, weight: str, parameters: dict[str, tuple[str, Any]]) -> tuple[str, Any]:
    if name not in parameters:
        raise ValueError(f"the weight {weight} is none of Grok's")
    return parameters[name]
