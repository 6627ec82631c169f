"""Parameters, FLOPs and saved activations of linear attention. Torch-free."""

from __future__ import annotations

from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear

SETTINGS = (
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
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
    rule = Op(
        "other", "delta rule", 6.0 * place.seq_length * values * key * value,
        traffic=16.0 * item * heads * mixed // tp, gradients=float(width),
        saved=(Saved("convolved, decays and chunks", _chunk_bytes(config), ("delta_rule",)),),
    )  # fmt: skip
    gated = Op(
        "norm", "gated norm", traffic=12.0 * item * output, saved=(Saved("normed", 12.0 * output, ("gdn_norm_out",)),)
    )
    kept = (Saved("delta rule", output * item),)
    ops = (
        gemm(into[0], config, place.seq_length, gradients=width, saved=(Saved("projections", width),)),
        rule, gated, gemm(out[0], config, place.seq_length, saved=kept),
    )  # fmt: skip
    return Piece("linear attention", (*into, conv, *vectors, norm, *out), ops, settings=SETTINGS)


def _chunk_bytes(config: Config) -> float:
    """Return the bytes per token on this rank that the plain torch form saves in fp32: taps of the convolution, queries
    and keys per value head, matrices of a chunk, states."""
    heads, values, tp = config.linear_num_key_heads, config.linear_num_value_heads, config.tensor_model_parallel_size
    key, value, item = config.linear_key_head_dim, config.linear_value_head_dim, activation_bytes(config)
    convolved = (2 * heads * key + values * value) * config.linear_conv_kernel_dim * item
    chunk = 64
    per_head = 4 * (6 * key + 4 * value + 4 * chunk + key * value / chunk)
    return (convolved + values * per_head) / tp
