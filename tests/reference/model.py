"""A decoder-only transformer, from the papers: weights by name, and the loss of every token.

    x = dropout(E[token] + P[position])
    x = x + dropout(attention(norm(x)));  x = x + dropout(mlp(norm(x)))        each layer; pre-norm: Radford et al. 2019
    loss_t = -log softmax(norm(x_t) W^T)[label_t]                              W = E where tied: Press and Wolf 2017

Attention: Vaswani et al. 2017, grouped queries: Ainslie et al. 2023. Norms: Ba et al. 2016, Zhang and Sennrich 2019.
Rotary positions: Su et al. 2021; their scalings: Chen et al. 2023, Peng et al. 2023 (YaRN), Llama 3.1's published
configuration. Activations: Hendrycks and Gimpel 2016, So et al. 2021, Shazeer 2020. Dropout: Srivastava et al. 2014.

Legend: b batch, s sequence (q queries, k keys), h hidden, a heads, g groups of p heads, d head dim, f feed-forward.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import random_numbers
from tests.reference.data import Batch
from tests.reference.settings import Settings

Weights = dict[str, Tensor]


def num_groups(c: Settings) -> int:
    return (c.num_query_groups or 1) if c.group_query_attention else c.num_attention_heads


def head_dim(c: Settings) -> int:
    return c.kv_channels or c.hidden_size // c.num_attention_heads


def initial_weights(c: Settings) -> Weights:
    """fp64. Matrices normal (those that write into the residual stream with std / sqrt(2 layers)) or Xavier-uniform
    (Glorot and Bengio 2010) over the whole matrix, the embeddings only where they have no std of their own; norms 1,
    biases 0."""
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, std: float = c.init_method_std) -> None:
        key, xavier = random_numbers.key_of(c.seed, "init", name), c.init_method_xavier_uniform
        if xavier and not ("embeddings" in name and std != c.init_method_std):
            values = (2 * random_numbers.uniform(key, rows * columns) - 1) * math.sqrt(6 / (rows + columns))
        else:
            values = std * random_numbers.normal(key, rows * columns)
        weights[name] = torch.from_numpy(values).view(rows, columns)

    def linear(name: str, rows: int, columns: int, bias: bool, std: float = c.init_method_std) -> None:
        matrix(f"{name}.weight", rows, columns, std)
        if bias:
            weights[f"{name}.bias"] = torch.zeros(rows, dtype=torch.float64)

    def norm(name: str, width: int) -> None:
        value = 0.0 if c.apply_layernorm_1p else 1.0
        weights[f"{name}.weight"] = torch.full((width,), value, dtype=torch.float64)
        if c.normalization == "LayerNorm":
            weights[f"{name}.bias"] = torch.zeros(width, dtype=torch.float64)

    h, d, bias = c.hidden_size, head_dim(c), not c.disable_bias_linear
    gated = c.swiglu or c.quick_geglu
    f = c.ffn_hidden_size or (int(4 * h * 2 / 3) // 64 * 64 if c.swiglu else 4 * h)
    embedding_std = c.init_method_std if c.embedding_init_method_std is None else c.embedding_init_method_std
    into_stream = c.init_method_std / math.sqrt(2 * c.num_layers)
    matrix("embedding.word_embeddings.weight", c.vocab_size, h, embedding_std)
    if c.position_embedding_type == "learned_absolute":
        matrix("embedding.position_embeddings.weight", c.max_position_embeddings, h, embedding_std)
    for layer in range(c.num_layers):
        at = f"decoder.layers.{layer}"
        norm(f"{at}.input_layernorm", h)
        rows = (c.num_attention_heads + 2 * num_groups(c)) * d
        linear(f"{at}.self_attention.linear_qkv", rows, h, bias or c.add_qkv_bias)
        for part in ("q", "k") if c.qk_layernorm else ():
            norm(f"{at}.self_attention.{part}_layernorm", d)
        linear(f"{at}.self_attention.linear_proj", h, c.num_attention_heads * d, bias, into_stream)
        norm(f"{at}.pre_mlp_layernorm", h)
        linear(f"{at}.mlp.linear_fc1", 2 * f if gated else f, h, bias)
        linear(f"{at}.mlp.linear_fc2", h, f, bias, into_stream)
    norm("decoder.final_layernorm", h)
    if c.untie_embeddings_and_output_weights:
        matrix("output_layer.weight", c.vocab_size, h)
    return weights


class Model:
    """A function of weights and a batch. Dropout only in training."""

    def __init__(self, c: Settings, weights: Weights, batch: Batch, training: bool) -> None:
        self.c, self.weights, self.batch, self.training = c, weights, batch, training

    def losses(self) -> Tensor:
        """Loss of every token [b, s]."""
        c, w, batch = self.c, self.weights, self.batch
        x = w["embedding.word_embeddings.weight"][torch.from_numpy(batch.tokens)]
        if c.position_embedding_type == "learned_absolute":
            x = x + w["embedding.position_embeddings.weight"][torch.from_numpy(batch.positions)]
        x = self.dropout(x, "embedding")
        for layer in range(c.num_layers):
            at = f"decoder.layers.{layer}"
            normed = self.norm(x, f"{at}.input_layernorm")
            branch = self.dropout(self.attention(normed, layer), "layer", layer + 1, "attention output")
            x = (normed if c.apply_residual_connection_post_layernorm else x) + branch
            normed = self.norm(x, f"{at}.pre_mlp_layernorm")
            branch = self.dropout(self.mlp(normed, f"{at}.mlp"), "layer", layer + 1, "mlp output")
            x = (normed if c.apply_residual_connection_post_layernorm else x) + branch
        tied = not c.untie_embeddings_and_output_weights
        output = w["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
        logits = self.norm(x, "decoder.final_layernorm") @ output.T
        log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
        return -log_p.gather(-1, torch.from_numpy(batch.labels)[..., None])[..., 0]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"] + float(self.c.apply_layernorm_1p)
        y = x
        if self.c.normalization == "LayerNorm":
            y = y - y.mean(dim=-1, keepdim=True)
        y = y / (y.square().mean(dim=-1, keepdim=True) + self.c.norm_epsilon).sqrt() * weight
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def dropout(self, x: Tensor, *site: str | int) -> Tensor:
        """Drops entries of [b, s, h], or of attention weights [b, a, q, k]."""
        is_attention = x.dim() == 4
        rate = self.c.attention_dropout if is_attention else self.c.hidden_dropout
        if not self.training or not rate:
            return x
        key = random_numbers.key_of(self.c.seed, "dropout", *site)
        sample, position = self.batch.samples[:, None], torch.arange(self.c.seq_length).numpy()
        row = 0
        if is_attention:
            sample, row = sample[..., None], torch.arange(x.shape[1])[:, None].numpy()
        kept = torch.from_numpy(random_numbers.keep_mask(rate, key, sample, position, row, x.shape[-1]))
        return torch.where(kept, x / random_numbers.kept_share(rate), 0)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        """softmax(Q K^T / sqrt(d)) V. The projection's rows are, group by group, p query heads, a key and a value
        head."""
        c, name, d = self.c, f"decoder.layers.{layer}.self_attention", head_dim(self.c)
        b, s, g = *x.shape[:2], num_groups(c)
        heads = self.linear(x, f"{name}.linear_qkv").view(b, s, g, -1, d)
        query, key, value = heads[:, :, :, :-2], heads[:, :, :, -2:-1], heads[:, :, :, -1:]
        if c.qk_layernorm:
            query, key = self.norm(query, f"{name}.q_layernorm"), self.norm(key, f"{name}.k_layernorm")
        if c.qk_l2_norm:
            query, key = (y / (y.square().mean(-1, keepdim=True) + c.norm_epsilon).sqrt() for y in (query, key))
        if c.position_embedding_type in ("rope", "yarn"):
            query, key = rotated(query, c), rotated(key, c)
        query = query.flatten(2, 3).transpose(1, 2)  # [b, a, q, d]
        key, value = (y.expand(-1, -1, -1, query.shape[1] // g, -1).flatten(2, 3).transpose(1, 2) for y in (key, value))
        scores = query @ key.transpose(2, 3) / math.sqrt(d)
        weights = scores.masked_fill(~self.visible(layer), -torch.inf).softmax(dim=-1)
        mixed = self.dropout(weights, "layer", layer + 1, "attention") @ value
        return self.linear(mixed.transpose(1, 2).flatten(2), f"{name}.linear_proj")

    def visible(self, layer: int) -> Tensor:
        """Keys that a query sees [b, 1, q, k]: not later ones, of its document, at most ``window`` to the left."""
        c, skip = self.c, self.c.window_attn_skip_freq
        place = torch.arange(c.seq_length)
        back = place[:, None] - place
        seen = back >= 0
        windowed = skip is None or (bool(skip[layer]) if isinstance(skip, list) else (layer + 1) % skip != 0)
        if c.window_size is not None and c.window_size[0] >= 0 and windowed:
            seen = seen & (back <= c.window_size[0])
        documents = torch.from_numpy(self.batch.documents)
        return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """Gated forms take gate and linear half from the upper and lower rows of fc1."""
        c, y = self.c, self.linear(x, f"{name}.linear_fc1")
        if c.swiglu or c.quick_geglu:
            gate, half = y.chunk(2, dim=-1)
            if (limit := c.activation_func_clamp_value) is not None:
                gate, half = gate.clamp(max=limit), half.clamp(-limit, limit)
            y = gate * torch.sigmoid((1.0 if c.swiglu else 1.702) * gate) * (half + c.glu_linear_offset)
        elif c.squared_relu:
            y = F.relu(y) ** 2
        elif c.disable_bias_linear or c.no_bias_gelu_fusion:
            y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        else:  # with a bias Megatron-LM's fused kernel takes the approximation
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        return self.linear(y, f"{name}.linear_fc2")


def rotated(x: Tensor, c: Settings) -> Tensor:
    """[b, s, g, p, d]: the first r channels in pairs, by an angle that grows with the position; the rest as it is."""
    width = int(x.shape[-1] * c.rotary_percent)
    turns, temperature = frequencies(c, width)
    angle = torch.outer(torch.arange(x.shape[1]).double() / c.rotary_seq_len_interpolation_factor, turns)[:, None, None]
    cos, sin = angle.cos() * temperature, angle.sin() * temperature
    first, second = slice(0, width // 2), slice(width // 2, width)
    if c.rotary_interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def frequencies(c: Settings, width: int) -> tuple[Tensor, float]:
    """Radians per position of every pair (fp64), and the factor of cosines and sines (YaRN's attention temperature)."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    plain = c.rotary_base ** (-2 * pair / width)
    if c.position_embedding_type == "yarn":
        factor, original = c.rotary_scaling_factor, c.yarn_original_max_position_embeddings or c.max_position_embeddings
        low, high = (
            width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(c.rotary_base))
            for turns in (c.yarn_beta_fast, c.yarn_beta_slow)
        )
        if not c.no_yarn_correction_range_round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        sharpness = [1 + 0.1 * m * math.log(max(factor, 1)) for m in (c.mscale, c.mscale_all_dim)]
        return plain / factor * ramp + plain * (1 - ramp), sharpness[0] / sharpness[1]
    if c.use_rope_scaling:  # Llama 3.1: 8192 positions, low and high frequency factor 1 and 4
        smooth = ((8192 * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        return plain * smooth + plain / c.rope_scaling_factor * (1 - smooth), 1.0
    return plain, 1.0
