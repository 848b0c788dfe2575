"""Grok-1 and Grok-2 in plain PyTorch and float32, from their published descriptions: slow, whole sequences, no cache.

It shares no line with fenno's own: it reads config.json and the safetensors files itself, and knows both releases' names.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


class Reference:
    """`changes` replaces fields of the config, to see what each of them is good for."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.config = json.loads((folder / "config.json").read_text()) | changes
        # The least that decided between an expert taken and one left: rounding may turn less than this.
        self.margin = math.inf
        self.first = self.config["model_type"] == "grok-1"
        self.weights = {name: value.float() for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary], before any sampling."""
        c, w = self.config, self.weights
        h = w["model.embed_tokens.weight"][tokens] * c["embedding_multiplier_scale"]
        for number in range(c["num_hidden_layers"]):
            at = f"model.layers.{number}."
            h = h + self.norm(at + "post_attn_norm", self.attention(at, self.norm(at + "pre_attn_norm", h)))
            h = h + self.norm(at + "post_moe_norm", self.feed_forward(at, self.norm(at + "pre_moe_norm", h)))
        h = self.norm("model.norm", h)
        head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
        out = h @ head.T * c["output_multiplier_scale"]
        cap = c.get("final_logit_softcapping")
        return cap * torch.tanh(out / cap) if cap else out

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        factor = self.weights[name + (".scale" if self.first else ".weight")]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * factor

    def attention(self, at: str, x: torch.Tensor) -> torch.Tensor:
        c, at = self.config, at + ("attn." if self.first else "self_attn.")
        size, length = c["head_dim"], len(x)
        q, k, v = (
            (x @ self.weights[f"{at}{kind}_proj.weight"].T).view(length, -1, size).transpose(0, 1) for kind in ("q", "k", "v")
        )
        q, k = self.rotate(q), self.rotate(k)
        each = len(q) // len(k)
        k, v = k.repeat_interleave(each, 0), v.repeat_interleave(each, 0)
        scores = q @ k.transpose(1, 2) * (c["attn_output_multiplier"] if self.first else size**-0.5)
        cap = c["max_attn_value"] if self.first else c["attn_logit_softcapping"]
        scores = cap * torch.tanh(scores / cap)
        long = c.get("attn_temperature_len", 0)
        if long:
            positions = torch.arange(length).clamp(min=1)
            warm = torch.where(positions > long, torch.log2(positions.float()) / math.log2(long), 1.0)
            scores = scores * warm[None, :, None]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        return out @ self.weights[f"{at}o_proj.weight"].T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        speeds = self.config.get("rope_theta", 10000.0) ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * speeds
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)

    def feed_forward(self, at: str, x: torch.Tensor) -> torch.Tensor:
        moe = self.mixture(at + ("moe_block." if self.first else "block_sparse_moe."), x)
        if not self.config.get("residual_moe"):
            return moe
        return (moe + self.gated(x, *(at + f"mlp.{part}_proj" for part in ("gate", "up", "down")))) / math.sqrt(2)

    def mixture(self, at: str, x: torch.Tensor) -> torch.Tensor:
        router = x @ self.weights[at + "gate.weight"].T
        cap = self.config.get("router_logit_softcapping")
        shares = (cap * torch.tanh(router / cap) if cap else router).softmax(-1)
        best, chosen = shares.topk(self.config["num_experts_per_tok"])
        last = shares.topk(self.config["num_experts_per_tok"] + 1).values[:, -2:]
        self.margin = min(self.margin, float((last[:, 0] - last[:, 1]).min()))
        names = ("linear", "linear_v", "linear_1") if self.first else ("w1", "w3", "w2")
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for share, expert in zip(best[token], chosen[token].tolist(), strict=True):
                out[token] += share * self.gated(x[token], *(f"{at}experts.{expert}.{name}" for name in names))
        return out

    def gated(self, x: torch.Tensor, gate: str, up: str, down: str) -> torch.Tensor:
        w = {name: self.weights[name + ".weight"].T for name in (gate, up, down)}
        left = x @ w[gate]
        bent = 0.5 * left * (1 + torch.tanh(math.sqrt(2 / math.pi) * (left + 0.044715 * left**3)))
        return (bent * (x @ w[up])) @ w[down]
