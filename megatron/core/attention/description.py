"""Parameters, FLOPs, traffic and saved activations of self- and cross-attention layers. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.attention.qk_norm import qk_norm
from megatron.core.attention.window import has_rotation, layer_window
from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, input_bytes, linear, norm

SETTINGS = (
    "multi_latent_attention", "num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_layernorm_across_heads", "qk_l2_norm", "softmax_scale",
    "attn_logit_softcapping", "position_embedding_type", "rotary_base", "rotary_base_local", "rotary_percent",
    "rotary_interleaved", "no_rope_freq", "use_rope_scaling", "rope_scaling_factor", "rope_parameters",
    "attention_output_gate", "window_size", "window_attn_skip_freq", "apply_query_key_layer_scaling", "softmax_type",
)  # fmt: skip
"""Configuration fields that determine the layer's weights and the meaning of their values."""


def visible_pairs(config: Config, place: LayerPlace) -> float:
    """Return the number of visible query-key pairs of one sequence, approximated by areas: the triangle s^2 / 2 before
    the diagonal and, unless attention is causal, the one after it, each less the triangle outside the window."""
    length = place.seq_length
    sides = layer_window(config.window_size, config.window_attn_skip_freq, place.layer_number) or (-1, -1)
    limits = sides[:1] if place.causal else sides
    hidden = sum(max(0, length - side - 1) ** 2 for side in limits if side >= 0)
    return (len(limits) * length**2 - hidden) / 2


def describe_attention(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes, in construction order) and ops of self-attention: QKV
    projection, rotary embedding if this layer has one, core attention, output projection. Forward FLOPs count one
    sequence over all ranks, bytes one token on this rank. Parameters include head norms and sinks; head norms have no
    op."""
    heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
    hidden, tp, item = config.hidden_size, config.tensor_model_parallel_size, activation_bytes(config)
    query = heads // tp * channels
    key_value = 2 * max(groups // tp, 1) * channels
    qkv = linear(
        "linear_qkv",
        (groups, ((1 + config.attention_output_gate) * heads // groups + 2) * channels),
        hidden,
        0,
        bias=config.add_bias_linear or config.add_qkv_bias,
        shared=2 * channels,
        row_parts=((1 + config.attention_output_gate) * heads // groups * channels, channels, channels),
    )
    proj = linear("linear_proj", (hidden,), heads * channels, 1, bias=config.add_bias_linear)
    gates = query * config.attention_output_gate
    inputs = (query + key_value + gates) * item
    saved_qkv = Saved("query, key and value", inputs, offload=("core_attn",))
    ops = [
        gemm(qkv[0], config, place.seq_length, gradients=inputs, saved=(saved_qkv,)),
        attention_core(config, place, query, key_value // 2, query),
        gemm(proj[0], config, place.seq_length, saved=mixed_values(config, query)),
    ]
    if gates:  # queries, keys and values are copied; the product saves gates, their sigmoid and the mixed values
        copies = Saved("gates", (3 * query + key_value) * item)
        ops.insert(2, Op("activation", "gate", traffic=10.0 * item * query, saved=(copies,)))
    if place.rotary and has_rotation(config.no_rope_freq, place.layer_number):
        ops.insert(1, Op("rotary", "rotary", traffic=4.0 * item * (query + key_value / 2)))
    head_norms: list[Param] = []
    if (kind := qk_norm(config)) in ("standard", "across_heads"):
        head_norms = [param for name in ("q_layernorm", "k_layernorm") for param in norm(name, channels, config)]
    if kind == "across_heads":
        widths = (heads * channels, groups * channels)
        head_norms = [replace(param, shape=(width,), mesh={"tp": 0}) for param, width in zip(head_norms, widths)]
    return Piece("attention", (*qkv, *head_norms, *sink_params(config), *proj), tuple(ops), settings=SETTINGS)


def describe_cross_attention(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` of cross-attention: query projection, projection of the encoder's output to keys and values,
    core attention over ``place.source_length`` keys, output projection. Forward FLOPs count one sequence over all
    ranks, bytes one query token on this rank. No rotary embedding, norms or sinks."""
    heads, groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
    hidden, tp, item = config.hidden_size, config.tensor_model_parallel_size, activation_bytes(config)
    query, key_value = heads // tp * channels, 2 * max(groups // tp, 1) * channels
    bias, longer = config.add_bias_linear, place.source_length / place.seq_length
    to_query = linear("linear_q", (heads * channels,), hidden, 0, bias=bias)
    to_pairs = linear("linear_kv", (groups, 2 * channels), hidden, 0, bias=bias, row_parts=(channels, channels))
    proj = linear("linear_proj", (hidden,), heads * channels, 1, bias=bias)
    queries, pairs = query * item, longer * key_value * item
    ops = (
        gemm(to_query[0], config, place.seq_length, gradients=queries, saved=(Saved("query", queries),)),
        gemm(to_pairs[0], config, place.source_length, gradients=pairs, saved=(Saved("key and value", pairs),)),
        attention_core(config, place, query, key_value // 2, query, num_keys=place.source_length),
        gemm(proj[0], config, place.seq_length, saved=mixed_values(config, query)),
    )
    return Piece("cross-attention", (*to_query, *to_pairs, *proj), ops, settings=SETTINGS)


def sink_params(config: Config) -> list[Param]:
    """Return the parameter of learned attention sinks (one logit per head); empty without learned sinks."""
    learned = config.softmax_type == "learnable"
    return [Param("core_attention.softmax_offset", (config.num_attention_heads,), {"tp": 0}, ndim=1)] if learned else []


def is_unfused(config: Config) -> bool:
    """Return whether the settings select unfused attention on full sequences: by backend, dropout or soft cap."""
    is_asked_for = config.attention_backend in ("unfused", "local")
    return bool(config.attention_dropout or config.attn_logit_softcapping) or is_asked_for


def in_blocks(config: Config) -> bool:
    """Return whether attention merges the outputs of key blocks: with context parallelism or sinks."""
    return config.context_parallel_size > 1 or config.softmax_type != "vanilla"


PHILOX_BYTES = 203.0
"""Bytes per query-key pair that drawing a dropout mask moves: ten rounds in int64 operations, eight pairs a counter."""


def unfused_traffic(config: Config) -> tuple[float, float]:
    """Return the bytes per head and query-key pair that unfused attention moves in the forward and the backward pass,
    without GEMMs. Key blocks are computed in fp32, and their backward pass recomputes scores and dropout masks."""
    dropout, capped = bool(config.attention_dropout), bool(config.attn_logit_softcapping)
    if in_blocks(config):
        return 37 + 44 * capped + dropout * (PHILOX_BYTES + 20), 63 + 52 * capped + dropout * (PHILOX_BYTES + 32)
    item = activation_bytes(config)
    softmax = (24 if item < 4 else 8) * (config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling)
    forward = (4.5 + 6 * capped) * item + softmax + dropout * (PHILOX_BYTES + 2 * item)
    return forward, (6 + 7 * capped + 4.5 * dropout) * item + softmax


def _computed_keys(config: Config, place: LayerPlace, num_keys: int) -> float:
    """Return the keys per query that unfused attention computes, of zig-zag key blocks only visible ones."""
    if num_keys or not in_blocks(config) or not place.causal:
        return num_keys or place.seq_length
    return visible_pairs(config, place) / place.seq_length * (1 + 0.5 / config.context_parallel_size)


def mixed_values(config: Config, elements: int) -> tuple[Saved, ...]:
    """Describe the saved output of core attention, ``elements`` per token, and in fp8 a copy."""
    copy = input_bytes(config) if input_bytes(config) < activation_bytes(config) else 0
    return (Saved("mixed values", elements * (activation_bytes(config) + copy), offload=("core_attn", "attn_proj")),)


def attention_core(config: Config, place: LayerPlace, query: int, key: int, output: int, *, num_keys: int = 0) -> Op:
    """Describe core attention (between the projections): forward FLOPs of one sequence over all ranks, gradient bytes,
    and activation bytes per token saved in addition to its inputs: the log-sum-exp, and with context parallelism or
    sinks the output; otherwise, if unfused, scores and copies instead. Only unfused attention has traffic, and
    gradients of scores. ``query``, ``key`` and ``output`` are elements per token on this rank. ``num_keys``: length of
    the other sequence in cross-attention, all visible; 0 for self-attention."""
    pairs = float(place.seq_length * num_keys) if num_keys else visible_pairs(config, place)
    tp = config.tensor_model_parallel_size
    item, heads = activation_bytes(config), config.num_attention_heads // tp
    saved_bytes, gradients, traffic = 4.0 * heads, float(output * item), 0.0  # log-sum-exp
    if is_unfused(config):
        keys = _computed_keys(config, place, num_keys)
        traffic = heads * keys * sum(unfused_traffic(config))
        # full sequences: gradients of weights and of scores; blocks: five fp32 tensors of a tile of half the queries
        block = (num_keys or place.seq_length) / (2 * config.context_parallel_size)
        gradients += heads * (10 * block if in_blocks(config) else 2 * item * keys)
    if in_blocks(config):
        saved_bytes += output * item  # the merged output of blocks, saved in its own memory layout
    elif is_unfused(config):
        copies = (query + key) * item  # queries and scaled keys, copied to the layout of the GEMM
        scores = (2 * item + 1 if config.attention_dropout else item) + (item if config.attn_logit_softcapping else 0)
        saved_bytes = heads * (num_keys or place.seq_length) * scores + copies
    saved = (Saved("attention", saved_bytes, ("core_attn",), ("core_attn",)),)
    flops = 2.0 * pairs * tp * (query + output)
    return Op("attention", "attention", flops, traffic=traffic, gradients=gradients, saved=saved)
