"""Parameters, FLOPs and saved activations of linear attention and state-space mixers. Torch-free."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from megatron.core.description.model import Config, LayerPlace, Op, Param, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, linear

SETTINGS = (
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_norm_epsilon",
    "linear_allow_neg_eigval",
)  # fmt: skip
"""Configuration fields that determine the layer's weights and the meaning of their values."""


class MixerSizes(NamedTuple):
    """Sizes of a mixer with an input projection in blocks, a convolution of some of its rows, and an output
    projection."""

    blocks: int
    """Groups of heads, which tensor-parallel ranks split."""
    parts: tuple[int, ...]
    """Rows of each matrix of ``in_proj`` in a block."""
    convolved: slice
    """Parts that the convolution reads."""
    taps: int
    """Tokens that the convolution sees."""
    outputs: int
    """Channels that ``out_proj`` reads."""
    adapters: tuple[int, ...]
    """Rows of ``in_proj`` in a block that a low-rank adapter covers."""
    has_bias: bool = False
    """Whether the convolution has a bias."""


def delta_sizes(config: Config, per_head: tuple[int, ...]) -> MixerSizes:
    """Return the sizes of linear attention: queries, keys and values, then rows ``per_head`` of each key head."""
    heads, values, value = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    parts = (config.linear_key_head_dim, config.linear_key_head_dim, values // heads * value, *per_head)
    return MixerSizes(heads, parts, slice(3), config.linear_conv_kernel_dim, values * value, parts)


def gated_delta_net_rows(config: Config) -> tuple[int, ...]:
    """Return the rows per key head: gates z, b, a."""
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    return per_key * config.linear_value_head_dim, per_key, per_key


def describe_gated_delta_net(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes) and ops of the gated delta net: input projection, convolution
    and delta rule, gated norm, output projection. The recurrence counts 6 FLOPs per element of the state; chunks do
    more."""
    sizes = delta_sizes(config, gated_delta_net_rows(config))
    return _describe_delta_mixer(config, place, sizes, (config.linear_num_value_heads,), keys=9, matrices=7)


def describe_kimi_delta_attention(config: Config, place: LayerPlace) -> Piece:
    """Return the ``Piece`` of Kimi delta attention: as :func:`describe_gated_delta_net`, with products of low rank."""
    heads, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    tp, item = config.tensor_model_parallel_size, activation_bytes(config)
    latent = Saved("latent", value / (tp if config.sequence_parallel else 1) * item)
    params: list[Param] = []
    ops: list[Op] = []
    for name, rows in (("f", key), ("g", value)):
        down, width = Param(f"{name}_a_proj.weight", (value, config.hidden_size)), heads * rows // tp * item
        (up,) = linear(f"{name}_b_proj", (heads, rows), value, 0, bias=False, row_parts=(rows,))
        product = gemm(up, config, place.seq_length, gradients=width, saved=(latent, Saved("product", width)))
        params, ops = [*params, down, up], [*ops, gemm(down, config, place.seq_length), product]
    piece = _describe_delta_mixer(config, place, delta_sizes(config, (1,)), (heads, key), keys=27.5, matrices=1.5)
    return replace(piece, params=(*piece.params, *params), ops=(*ops, *piece.ops))


def _describe_delta_mixer(
    config: Config, place: LayerPlace, sizes: MixerSizes, biases: tuple[int, ...], *, keys: float, matrices: float
) -> Piece:
    """Return the ``Piece`` of a ``DeltaMixer`` with ``dt_bias`` of shape ``biases``; ``keys`` and ``matrices`` as for
    :func:`_chunk_bytes`."""
    values, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    vectors = [Param("norm.weight", (value,), ndim=1)]
    vectors += [Param(name, rows, {"tp": 0}, ndim=1) for name, rows in (("dt_bias", biases), ("A_log", (values,)))]
    kernels = _has_kernels(config, key, value)
    kept = _chunk_bytes(config, sizes, values, key, value, keys=keys, matrices=matrices)
    if kernels:
        unit_vectors = 2 * config.linear_num_key_heads * key * activation_bytes(config)
        channels = 12 * values * key if len(biases) > 1 else 0  # decays, and what softplus and the rate read
        kept = _kernel_bytes(config, sizes, values, unit_vectors + channels)
    chunks, flops = _kept("convolved, decays and chunks", kept, "delta_rule"), 6.0 * values * key * value
    return replace(
        _describe_mixer(config, place, sizes, vectors, chunks, flops, "gdn_norm_out", kernels=kernels),
        name="linear attention", settings=SETTINGS,
    )  # fmt: skip


MAMBA_SETTINGS = ("hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")


def mamba_sizes(config: Config) -> MixerSizes:
    """Return the sizes of Mamba-2."""
    groups, state = config.mamba_num_groups, config.mamba_state_dim
    per_group = config.mamba_num_heads // groups
    inner = per_group * config.mamba_head_dim
    parts = inner, inner, state, state, per_group
    return MixerSizes(groups, parts, slice(1, 4), 4, groups * inner, (sum(parts),), True)  # files have one matrix


def describe_mamba(config: Config, place: LayerPlace) -> Piece:
    """Return a ``Piece`` with parameters (global shapes) and ops of Mamba-2: input projection, convolution and
    recurrence, gated norm, output projection. The recurrence counts 4 FLOPs per element of the state; chunks do more.
    """
    heads, state, channels, sizes = (
        config.mamba_num_heads, config.mamba_state_dim, config.mamba_head_dim, mamba_sizes(config)
    )  # fmt: skip
    vectors = [Param(name, (heads,), {"tp": 0}, ndim=1) for name in ("dt_bias", "A_log", "D")]
    vectors.append(Param("norm.weight", (sizes.outputs,), {"tp": 0}, ndim=1))
    kernels = _has_kernels(config, state, channels)
    kept = _chunk_bytes(config, sizes, heads, state, channels, keys=3.5, matrices=3.7)
    if kernels:  # x in fp32, dt x
        kept = _kernel_bytes(config, sizes, heads, (4 + activation_bytes(config)) * sizes.outputs)
    chunks, flops = _kept("convolved and chunks", kept, "ssm"), 4.0 * heads * state * channels
    return replace(
        _describe_mixer(config, place, sizes, vectors, chunks, flops, "mamba_norm_out", kernels=kernels),
        name="Mamba-2", settings=MAMBA_SETTINGS,
    )  # fmt: skip


def _describe_mixer(
    config: Config, place: LayerPlace, sizes: MixerSizes, vectors: list[Param], chunks: Saved, flops: float, norm: str,
    *, kernels: bool,
) -> Piece:  # fmt: skip
    """Return the ``Piece`` of a ``RecurrentMixer``, whose recurrence has ``flops`` per token and saves ``chunks``;
    ``norm`` is the site of its gated norm. Plain torch saves three fp32 tensors there, ``kernels`` the input, which
    stays if the norm is recomputed."""
    tp, item, channels = config.tensor_model_parallel_size, activation_bytes(config), sum(sizes.parts[sizes.convolved])
    in_rows = (sizes.blocks, sum(sizes.parts))
    into = linear("in_proj", in_rows, config.hidden_size, 0, bias=False, row_parts=sizes.adapters)
    out = linear("out_proj", (config.hidden_size,), sizes.outputs, 1, bias=False)
    conv = [Param("conv1d.weight", (sizes.blocks, channels, 1, sizes.taps), {"tp": 0}, ndim=3)]
    conv += [Param("conv1d.bias", (sizes.blocks, channels), {"tp": 0}, ndim=1)] if sizes.has_bias else []
    width, output = math.prod(in_rows) // tp * item, sizes.outputs // tp
    rule = Op(
        "recurrence", "recurrence", place.seq_length * flops, traffic=16.0 * item * sizes.blocks * channels // tp,
        gradients=float(width), saved=(chunks,),
    )  # fmt: skip
    normed = _kept("normed", 0.0 if kernels else 12.0 * output, norm)
    saved = (normed, Saved("recurrence", output * item)) if kernels else (normed,)
    ops = (
        gemm(into[0], config, place.seq_length, gradients=width, saved=(Saved("projections", width),)),
        rule, Op("norm", "gated norm", traffic=(8.0 if kernels else 12.0) * item * output, saved=saved),
        gemm(out[0], config, place.seq_length, saved=(Saved("recurrence", output * item),)),
    )  # fmt: skip
    return Piece("mixer", (*into, *conv, *out, *vectors), ops)


def _kept(name: str, size: float, site: str) -> Saved:
    """Return what a site saves, which it recomputes or offloads if it is named."""
    return Saved(name, size, (site,), (site,))


def _has_kernels(config: Config, key: int, value: int) -> bool:
    """Whether kernels compute the recurrence on Hopper GPUs (``fusions/linear_attention.py``)."""
    return config.bf16 and key in (64, 128) and value % 16 == 0


def _kernel_bytes(config: Config, sizes: MixerSizes, heads: int, further: float) -> float:
    """Return the bytes per token on this rank that the layer saves with kernels: outputs of the convolution, whose
    inputs are the projections, numbers per head, and ``further`` bytes of all ranks. Measured
    (``test_descriptions.py``)."""
    mixed = activation_bytes(config) * sizes.blocks * sum(sizes.parts[sizes.convolved])
    return (mixed + 40 * heads + further) / config.tensor_model_parallel_size


def _chunk_bytes(
    config: Config, sizes: MixerSizes, heads: int, key: int, value: int, *, keys: float, matrices: float
) -> float:
    """Return the bytes per token on this rank that the plain torch form saves: six tensors of the convolution's
    channels, and in fp32 per head ``keys`` tensors of keys, 2.5 of values, ``matrices`` of a chunk, states. Measured
    (``test_descriptions.py``)."""
    mixed = sizes.blocks * sum(sizes.parts[sizes.convolved])
    per_head = 4 * (keys * key + 2.5 * value + matrices * CHUNK + key * value / CHUNK)
    return (6 * mixed * activation_bytes(config) + heads * per_head) / config.tensor_model_parallel_size


CHUNK = 64
"""Tokens of a chunk."""
