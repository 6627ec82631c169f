"""Parameters, FLOPs and saved activations of linear attention and state-space mixers. Torch-free."""

from __future__ import annotations

from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear

SETTINGS = (
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_norm_epsilon",
    "linear_allow_neg_eigval",
)  # fmt: skip
"""Configuration fields that determine the layer's weights and the meaning of their values."""


def describe_gated_delta_net(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes, in construction order) and ops of the gated delta net: input
    projection, convolution and delta rule, gated norm, output projection. FLOPs of the delta rule are those of the
    recurrence, 6 per element of the state; chunks do more."""
    heads, values, tp = config.linear_num_key_heads, config.linear_num_value_heads, config.tensor_model_parallel_size
    key, value, item = config.linear_key_head_dim, config.linear_value_head_dim, activation_bytes(config)
    per_key = values // heads
    mixed = 2 * key + per_key * value
    parts = (key, key, per_key * value, per_key * value, per_key, per_key)
    into = linear("in_proj", (heads, sum(parts)), config.hidden_size, 0, bias=False, row_parts=parts)
    out = linear("out_proj", (config.hidden_size,), values * value, 1, bias=False)
    vectors = tuple(Param(name, (values,), {"tp": 0}, ndim=1) for name in ("dt_bias", "A_log"))
    conv = Param("conv1d.weight", (heads, mixed, 1, config.linear_conv_kernel_dim), {"tp": 0}, ndim=3)
    norm = Param("norm.weight", (value,), ndim=1)
    width, output = heads * sum(parts) // tp * item, values * value // tp
    kept = _chunk_bytes(config, mixed * heads, values, key, value, keys=9, matrices=7)
    chunks = _kept("convolved, decays and chunks", kept, "delta_rule")
    rule = Op(
        "recurrence", "delta rule", 6.0 * place.seq_length * values * key * value,
        traffic=16.0 * item * heads * mixed // tp, gradients=float(width),
        saved=(chunks,),
    )  # fmt: skip
    gated = Op(
        "norm", "gated norm", traffic=12.0 * item * output, saved=(_kept("normed", 12.0 * output, "gdn_norm_out"),)
    )
    normed = (Saved("delta rule", output * item),)
    ops = (
        gemm(into[0], config, place.seq_length, gradients=width, saved=(Saved("projections", width),)),
        rule, gated, gemm(out[0], config, place.seq_length, saved=normed),
    )  # fmt: skip
    return Piece("linear attention", (*into, conv, *out, *vectors, norm), ops, settings=SETTINGS)


def describe_kimi_delta_attention(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes) and ops of Kimi delta attention: input projection, convolution
    and delta rule, products of low rank, gated norm, output projection. FLOPs as of the gated delta net."""
    heads, tp, item = config.linear_num_key_heads, config.tensor_model_parallel_size, activation_bytes(config)
    key, value, hidden = config.linear_key_head_dim, config.linear_value_head_dim, config.hidden_size
    mixed, parts, tokens = 2 * key + value, (key, key, value, 1), place.seq_length
    into = linear("in_proj", (heads, sum(parts)), hidden, 0, bias=False, row_parts=parts)
    conv = Param("conv1d.weight", (heads, mixed, 1, config.linear_conv_kernel_dim), {"tp": 0}, ndim=3)
    out = linear("out_proj", (hidden,), heads * value, 1, bias=False)
    low, products = [], []
    latent = value / (tp if config.sequence_parallel else 1) * item
    for name, rows in (("f", key), ("g", value)):
        down = Param(f"{name}_a_proj.weight", (value, hidden))
        (up,) = linear(f"{name}_b_proj", (heads, rows), value, 0, bias=False, row_parts=(rows,))
        wide = heads * rows // tp * item
        low += [down, up]
        saved = Saved("latent", latent), Saved("product", wide)
        products += [gemm(down, config, tokens), gemm(up, config, tokens, gradients=wide, saved=saved)]
    vectors = Param("dt_bias", (heads, key), {"tp": 0}, ndim=1), Param("A_log", (heads,), {"tp": 0}, ndim=1)
    norm = Param("norm.weight", (value,), ndim=1)
    width, output = heads * sum(parts) // tp * item, heads * value // tp
    kept = _chunk_bytes(config, mixed * heads, heads, key, value, keys=27.5, matrices=1.5)
    rule = Op(
        "recurrence", "delta rule", 6.0 * tokens * heads * key * value, traffic=16.0 * item * heads * mixed // tp,
        gradients=float(width), saved=(_kept("convolved, decays and chunks", kept, "delta_rule"),),
    )  # fmt: skip
    normed = _kept("normed", 12.0 * output, "gdn_norm_out")
    ops = (
        gemm(into[0], config, tokens, gradients=width, saved=(Saved("projections", width),)), *products, rule,
        Op("norm", "gated norm", traffic=12.0 * item * output, saved=(normed,)),
        gemm(out[0], config, tokens, saved=(Saved("delta rule", output * item),)),
    )  # fmt: skip
    return Piece("linear attention", (*into, conv, *out, *low, *vectors, norm), ops, settings=SETTINGS)


MAMBA_SETTINGS = ("hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")


def describe_mamba(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes, in construction order) and ops of Mamba-2: input projection,
    convolution and recurrence, gated norm, output projection. The recurrence counts 4 FLOPs per element of the state;
    chunks do more."""
    heads, groups, tp = config.mamba_num_heads, config.mamba_num_groups, config.tensor_model_parallel_size
    state, channels, item = config.mamba_state_dim, config.mamba_head_dim, activation_bytes(config)
    per_group = heads // groups
    inner = per_group * channels
    parts, mixed = (inner, inner, state, state, per_group), inner + 2 * state
    into = linear("in_proj", (groups, sum(parts)), config.hidden_size, 0, bias=False, row_parts=parts)
    out = linear("out_proj", (config.hidden_size,), heads * channels, 1, bias=False)
    vectors = tuple(Param(name, (heads,), {"tp": 0}, ndim=1) for name in ("dt_bias", "A_log", "D"))
    conv = Param("conv1d.weight", (groups, mixed, 1, 4), {"tp": 0}, ndim=3)
    conv_bias = Param("conv1d.bias", (groups, mixed), {"tp": 0}, ndim=1)
    norm = Param("norm.weight", (heads * channels,), {"tp": 0}, ndim=1)
    width, output = groups * sum(parts) // tp * item, heads * channels // tp
    kept = _chunk_bytes(config, mixed * groups, heads, state, channels, keys=3.5, matrices=3.7)
    chunks = _kept("convolved and chunks", kept, "ssm")
    scan = Op(
        "recurrence",
        "state space",
        4.0 * place.seq_length * heads * state * channels,
        traffic=16.0 * item * groups * mixed // tp,
        gradients=float(width),
        saved=(chunks,),
    )
    normed = _kept("normed", 12.0 * output, "mamba_norm_out")
    gated = Op("norm", "gated norm", traffic=12.0 * item * output, saved=(normed,))
    saved = (Saved("state space", output * item),)
    ops = (
        gemm(into[0], config, place.seq_length, gradients=width, saved=(Saved("projections", width),)),
        scan,
        gated,
        gemm(out[0], config, place.seq_length, saved=saved),
    )
    params = (*into, conv, conv_bias, *out, *vectors, norm)
    return Piece("Mamba-2", params, ops, settings=MAMBA_SETTINGS)


def _kept(name: str, size: float, site: str) -> Saved:
    """Return what a site saves, which it recomputes or offloads if it is named."""
    return Saved(name, size, (site,), (site,))


def _chunk_bytes(
    config: Config, mixed: int, heads: int, key: int, value: int, *, keys: float, matrices: float
) -> float:
    """Return the bytes per token on this rank that the plain torch form saves: six tensors of the convolution's
    ``mixed`` channels, and in fp32 per head ``keys`` tensors of keys, 2.5 of values, ``matrices`` of a chunk, states.
    Measured (``test_descriptions.py``)."""
    per_head = 4 * (keys * key + 2.5 * value + matrices * CHUNK + key * value / CHUNK)
    return (6 * mixed * activation_bytes(config) + heads * per_head) / config.tensor_model_parallel_size


CHUNK = 64
"""Tokens of a chunk."""
