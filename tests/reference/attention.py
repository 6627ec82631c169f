"""Attention: softmax(Q K^T / sqrt(d)) V, with grouped heads or latents.

Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; multi-head latent attention: DeepSeek-V2 (2024), section 2.1;
sinks: GPT-OSS's published code, and Miller 2023. Rotary positions: Su et al. 2021; their scalings: Chen et al. 2023,
Peng et al. 2023 (YaRN), Llama 3.1's published configuration.

Legend: b batch, s sequence (q queries, k keys), h hidden, a heads, g groups of p heads, d head dim. ``net`` is the
model: its ``linear``, ``norm`` and ``dropout``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.settings import Settings
from tests.reference.weights import head_dim, num_groups

UNSEEN = -1e300
"""A score whose weight is 0; a query of padding that sees nothing stays finite."""


def attention(net, x: Tensor, at: str, number: int, source: Tensor | None = None) -> Tensor:
    """[b, s, h] -> [b, s, h] in layer ``number``, from 1; keys and values of ``source`` [b, k, h] where it is given."""
    c, softmax_scale = net.c, 1.0
    if source is not None:
        query, key, value = crossed_heads(net, x, source, at)
    elif c.multi_latent_attention:
        query, key, value = latent_heads(net, x, at)
        softmax_scale = sharpness(c, c.mscale_all_dim) ** 2
    else:
        query, key, value = grouped_heads(net, x, at, number)
    scores = query @ key.transpose(2, 3) * (c.softmax_scale or softmax_scale / math.sqrt(query.shape[-1]))
    scores = capped(scores, c.attn_logit_softcapping) + (0 if source is not None else net.position_bias())
    observed = net.visible(number) if source is None else net.visible_of_source()
    scores = scores.masked_fill(~observed, UNSEEN)
    if c.softmax_type != "vanilla":  # one more logit per head, dropped after the softmax
        learned = net.weights.get(f"{at}.core_attention.softmax_offset")
        sink = scores.new_zeros(1) if learned is None else learned
        scores = torch.cat((scores, sink.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    mixed = net.dropout(weights, *net.site(number), "attention" if source is None else "cross attention") @ value
    return net.linear(mixed.transpose(1, 2).flatten(2), f"{at}.linear_proj")


def crossed_heads(net, x: Tensor, source: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query [b, a, q, d], key and value [b, a, k, d]: rows of queries head by head, of a key and a value per head."""
    c, d = net.c, head_dim(net.c)
    query = net.linear(x, f"{at}.linear_q").unflatten(-1, (-1, d)).transpose(1, 2)
    pairs = net.linear(source, f"{at}.linear_kv").unflatten(-1, (num_groups(c), 2, d)).transpose(1, 2)
    key, value = (pairs[..., part, :].repeat_interleave(query.shape[1] // pairs.shape[1], 1) for part in (0, 1))
    return query, key, value


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def grouped_heads(net, x: Tensor, at: str, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value [b, a, s, d]. The projection's rows are, group by group, p query heads, a key and a value
    head."""
    c, d = net.c, head_dim(net.c)
    b, s, g = *x.shape[:2], num_groups(c)
    heads = net.linear(x, f"{at}.linear_qkv").view(b, s, g, -1, d)
    query, key, value = heads[:, :, :, :-2], heads[:, :, :, -2:-1], heads[:, :, :, -1:]
    if c.qk_layernorm:
        if c.qk_layernorm_across_heads:
            query, key = query.flatten(2), key.flatten(2)
        query, key = net.norm(query, f"{at}.q_layernorm"), net.norm(key, f"{at}.k_layernorm")
        query, key = query.reshape(b, s, g, -1, d), key.reshape(b, s, g, 1, d)
    if c.qk_l2_norm:
        query, key = (y / (y.square().mean(-1, keepdim=True) + c.norm_epsilon).sqrt() for y in (query, key))
    if c.position_embedding_type in ("rope", "yarn") and not skips_rotation(c, number):
        is_yarn, width = c.position_embedding_type == "yarn", int(d * c.rotary_percent)
        if c.rotary_base_local is not None and has_window(c, number):
            c = Settings(**{**vars(c), "rotary_base": c.rotary_base_local, "use_rope_scaling": False,
                            "rotary_seq_len_interpolation_factor": 1})  # fmt: skip
            is_yarn = False
        query, key = (rotated(y, c, is_yarn, width, c.rotary_interleaved) for y in (query, key))
    query = query.flatten(2, 3).transpose(1, 2)
    key, value = (y.expand(-1, -1, -1, query.shape[1] // g, -1).flatten(2, 3).transpose(1, 2) for y in (key, value))
    return query, key, value


def latent_heads(net, x: Tensor, at: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [b, a, s, qk_head_dim + qk_pos_emb_head_dim], value [b, a, s, v_head_dim].

    A narrow latent per token, normalized, gives what has no position; only the last channels of queries, and one key
    for all heads that comes from x directly, are rotated.
    """
    c, a = net.c, net.c.num_attention_heads
    plain, transposed = c.qk_head_dim, c.qk_pos_emb_head_dim

    def up(latent: Tensor, part: str) -> Tensor:
        latent = net.norm(latent, f"{at}.{part}_layernorm") if c.qk_layernorm else latent
        return net.linear(latent, f"{at}.linear_{part}_up_proj").unflatten(-1, (a, -1))

    if c.q_lora_rank is None:
        query = net.linear(x, f"{at}.linear_q_proj").unflatten(-1, (a, -1))
    else:
        query = up(net.linear(x, f"{at}.linear_q_down_proj"), "q")
    latent, shared = net.linear(x, f"{at}.linear_kv_down_proj").split((c.kv_lora_rank, transposed), dim=-1)
    key, value = up(latent, "kv").split((plain, c.v_head_dim), dim=-1)
    is_yarn = c.rope_type != "rope"
    width = transposed if is_yarn else int(transposed * c.rotary_percent)
    of_query, of_key = (rotated(y, c, is_yarn, width, True) for y in (query[..., plain:], shared[:, :, None]))
    query = torch.cat((query[..., :plain], of_query), dim=-1)
    key = torch.cat((key, of_key.expand(-1, -1, a, -1)), dim=-1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def has_window(c: Settings, number: int) -> bool:
    skip = c.window_attn_skip_freq
    windowed = skip is None or (bool(skip[number - 1]) if isinstance(skip, list) else number % skip != 0)
    return c.window_size is not None and windowed


def skips_rotation(c: Settings, number: int) -> bool:
    """Return whether a layer has no positions (NoPE): each n-th layer, or each layer that a list marks with 1."""
    skip = c.no_rope_freq
    return bool(skip[number - 1]) if isinstance(skip, list) else skip is not None and number % skip == 0


def in_reach(c: Settings, number: int, length: int, causal: bool) -> Tensor:
    """Keys that a query sees by its position [q, k]: not later ones if ``causal``, at most the window to both sides."""
    place = torch.arange(length)
    back = place[:, None] - place
    observed = back >= 0 if causal else torch.ones_like(back, dtype=torch.bool)
    if has_window(c, number):
        left, right = c.window_size
        observed = observed & (back <= left if left >= 0 else True) & (-back <= right if right >= 0 else True)
    return observed


def rotated(x: Tensor, c: Settings, is_yarn: bool, width: int, interleaved: bool) -> Tensor:
    """[b, s, ..., d]: the first channels in pairs, by an angle that grows with the position; the rest as it is."""
    turns, temperature = frequencies(c, is_yarn, width)
    angle = torch.outer(torch.arange(x.shape[1]).double() / c.rotary_seq_len_interpolation_factor, turns)
    angle = angle.view(-1, *[1] * (x.dim() - 3), width // 2)
    cos, sin = angle.cos() * temperature, angle.sin() * temperature
    first, second = slice(0, width // 2), slice(width // 2, width)
    if interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def sharpness(c: Settings, weight: float) -> float:
    """Return YaRN's attention temperature for an extended context."""
    return 1 + 0.1 * weight * math.log(max(c.rotary_scaling_factor, 1))


def frequencies(c: Settings, is_yarn: bool, width: int) -> tuple[Tensor, float]:
    """Radians per position of every pair (fp64), and the factor of cosines and sines."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    plain = c.rotary_base ** (-2 * pair / width)
    if is_yarn:
        original = c.yarn_original_max_position_embeddings or c.max_position_embeddings
        low, high = (
            width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(c.rotary_base))
            for turns in (c.yarn_beta_fast, c.yarn_beta_slow)
        )
        if not c.no_yarn_correction_range_round_to_int:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        stretched = plain / c.rotary_scaling_factor * ramp + plain * (1 - ramp)
        return stretched, sharpness(c, c.mscale) / sharpness(c, c.mscale_all_dim)
    if c.use_rope_scaling:  # Llama 3.1: 8192 positions, low and high frequency factor 1 and 4
        smooth = ((8192 * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        return plain * smooth + plain / c.rope_scaling_factor * (1 - smooth), 1.0
    return plain, 1.0
