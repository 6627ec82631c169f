"""Weights by name, and the values that they start from.

Matrices are normal (those that write into the residual stream with std / sqrt(2 layers)) or Xavier-uniform (Glorot and
Bengio 2010) over the whole matrix, for experts over one expert's matrix; embeddings only if they have no separate std.
Norms start at 1, biases at 0, sinks are always normal. The weights of a layer's experts are one tensor, expert by
expert.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference import random_numbers
from tests.reference.settings import Settings

Weights = dict[str, Tensor]


def num_groups(c: Settings) -> int:
    return (c.num_query_groups or 1) if c.group_query_attention else c.num_attention_heads


def head_dim(c: Settings) -> int:
    return c.kv_channels or c.hidden_size // c.num_attention_heads


def has_experts(c: Settings, layer: int) -> bool:
    """Layers from 0: the first and every N-th after it, or those with a 1 in a list."""
    if c.num_experts is None:
        return False
    return bool(c.moe_layer_freq[layer]) if isinstance(c.moe_layer_freq, list) else layer % c.moe_layer_freq == 0


def initial_weights(c: Settings) -> Weights:
    """Weights in fp64."""
    make = Maker(c)
    make.embeddings()
    for layer in range(c.num_layers):
        make.layer(f"decoder.layers.{layer}", has_experts(c, layer))
    make.norm("decoder.final_layernorm", c.hidden_size)
    for depth in range(min(c.mtp_num_layers or 0, 1 if c.mtp_use_repeated_layer else 64)):
        at = f"mtp.layers.{depth}"
        for part in ("enorm", "hnorm", "final_layernorm"):
            make.norm(f"{at}.{part}", c.hidden_size)
        make.matrix(f"{at}.eh_proj.weight", c.hidden_size, 2 * c.hidden_size)
        make.layer(f"{at}.mtp_model_layer", has_experts(c, c.num_layers - 1))
    if c.untie_embeddings_and_output_weights:
        make.matrix("output_layer.weight", c.vocab_size, c.hidden_size)
    if c.output_layer_bias:
        make.weights["output_layer.bias"] = torch.zeros(c.vocab_size, dtype=torch.float64)
    return make.weights


class Maker:
    def __init__(self, c: Settings) -> None:
        self.c, self.weights, self.bias = c, {}, not c.disable_bias_linear
        self.std, self.into_stream = c.init_method_std, c.init_method_std / math.sqrt(2 * c.num_layers)
        self.embedding_std = self.std if c.embedding_init_method_std is None else c.embedding_init_method_std

    def embeddings(self, **more: int) -> None:
        positions = self.c.max_position_embeddings + self.c.learned_position_offset
        tables = {"word": self.c.vocab_size, "position": positions, **more}
        if self.c.position_embedding_type != "learned_absolute":
            del tables["position"]
        for kind, rows in tables.items():
            self.matrix(f"embedding.{kind}_embeddings.weight", rows, self.c.hidden_size, std=self.embedding_std)

    def matrix(self, name: str, *shape: int, std: float | None = None) -> None:
        """[rows, columns], [experts, rows, columns], or the sinks of heads."""
        std = self.std if std is None else std
        key, count = random_numbers.key_of(self.c.seed, "init", name), math.prod(shape)
        has_custom_std = "embeddings" in name and std != self.std
        if self.c.init_method_xavier_uniform and len(shape) > 1 and not has_custom_std:
            values = (2 * random_numbers.uniform(key, count) - 1) * math.sqrt(6 / sum(shape[-2:]))
        else:
            values = std * random_numbers.normal(key, count)
        self.weights[name] = torch.from_numpy(values).view(shape)

    def linear(self, name: str, *shape: int, bias: bool, std: float | None = None) -> None:
        self.matrix(f"{name}.weight", *shape, std=std)
        if bias:
            self.weights[f"{name}.bias"] = torch.zeros(shape[:-1], dtype=torch.float64)

    def norm(self, name: str, width: int) -> None:
        value = 0.0 if self.c.apply_layernorm_1p else 1.0
        self.weights[f"{name}.weight"] = torch.full((width,), value, dtype=torch.float64)
        if self.c.normalization == "LayerNorm" and not self.c.disable_norm_bias:
            self.weights[f"{name}.bias"] = torch.zeros(width, dtype=torch.float64)

    def layer(self, at: str, experts: bool) -> None:
        branches = {"input": "post_self_attention", "pre_mlp": "post_mlp"}
        before = list(branches)[: 1 if self.c.share_parallel_norm else 2] if self.c.norm_placement != "post" else ()
        for part in (*before, *(branches.values() if self.c.norm_placement != "pre" else ())):
            self.norm(f"{at}.{part}_layernorm", self.c.hidden_size)
        (self.latent_attention if self.c.multi_latent_attention else self.attention)(f"{at}.self_attention")
        if self.c.softmax_type == "learnable":
            self.matrix(f"{at}.self_attention.core_attention.softmax_offset", self.c.num_attention_heads)
        (self.experts if experts else self.mlp)(f"{at}.mlp")

    def attention(self, at: str) -> None:
        c, h, d = self.c, self.c.hidden_size, head_dim(self.c)
        rows = (c.num_attention_heads + 2 * num_groups(c)) * d
        self.linear(f"{at}.linear_qkv", rows, h, bias=self.bias or c.add_qkv_bias)
        for part, heads in (("q", c.num_attention_heads), ("k", num_groups(c))) if c.qk_layernorm else ():
            self.norm(f"{at}.{part}_layernorm", d * heads if c.qk_layernorm_across_heads else d)
        self.linear(f"{at}.linear_proj", h, c.num_attention_heads * d, bias=self.bias, std=self.into_stream)

    def latent_attention(self, at: str) -> None:
        c, h, a = self.c, self.c.hidden_size, self.c.num_attention_heads
        parts = {"kv": (c.kv_lora_rank, c.qk_pos_emb_head_dim, a * (c.qk_head_dim + c.v_head_dim))}
        if c.q_lora_rank is None:
            self.matrix(f"{at}.linear_q_proj.weight", a * (c.qk_head_dim + c.qk_pos_emb_head_dim), h)
        else:
            parts["q"] = c.q_lora_rank, 0, a * (c.qk_head_dim + c.qk_pos_emb_head_dim)
        for part, (rank, extra, rows) in parts.items():
            self.matrix(f"{at}.linear_{part}_down_proj.weight", rank + extra, h)
            self.matrix(f"{at}.linear_{part}_up_proj.weight", rows, rank)
            if c.qk_layernorm:
                self.norm(f"{at}.{part}_layernorm", rank)
        self.linear(f"{at}.linear_proj", h, a * c.v_head_dim, bias=self.bias, std=self.into_stream)

    def mlp(self, at: str, width: int | None = None, bias: bool | None = None, *experts: int) -> None:
        c, h = self.c, self.c.hidden_size
        f = width or c.ffn_hidden_size or (int(4 * h * 2 / 3) // 64 * 64 if c.swiglu else 4 * h)
        bias = self.bias if bias is None else bias
        self.linear(f"{at}.linear_fc1", *experts, 2 * f if c.swiglu or c.quick_geglu or c.geglu else f, h, bias=bias)
        self.linear(f"{at}.linear_fc2", *experts, h, f, bias=bias, std=self.into_stream)

    def experts(self, at: str) -> None:
        c = self.c
        self.linear(f"{at}.router", c.num_experts, c.hidden_size, bias=self.bias)
        self.mlp(f"{at}.experts", c.moe_ffn_hidden_size, self.bias, c.num_experts)
        if c.moe_shared_expert_intermediate_size:
            self.mlp(f"{at}.shared_experts", c.moe_shared_expert_intermediate_size, False)
            if c.moe_shared_expert_gate:
                self.matrix(f"{at}.shared_experts.gate_weight", 1, c.hidden_size)
