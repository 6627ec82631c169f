"""Closed forms of a GPT's work and size, from its configuration alone. Torch-free.

The convention for model FLOPs, which throughput and MFU figures are built on:

* a matrix product (m, k) x (k, n) counts 2 m k n; backward counts twice the forward, recomputation not at all;
* causal attention counts half of the full s x s scores, a sliding window only its band: the products that are needed,
not
  those that a kernel may do on top;
* the output layer counts the true vocabulary, not its padding; the embedding look-up, norms, activations and softmax
  count nothing.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention_window import layer_window

ShapeConfig = Any
"""A TransformerConfig, or any configuration with its field names and sizes resolved."""


def gpt_flops_per_sample(config: ShapeConfig, *, vocab_size: int, seq_length: int | None = None) -> float:
    """Forward and backward of one sequence. ``seq_length`` defaults to ``config.seq_length``."""
    length = config.seq_length if seq_length is None else seq_length
    linears = config.num_layers * sum(rows * columns for rows, columns in _layer_matrices(config))
    output = config.hidden_size * vocab_size
    visible = sum(_visible_pairs(config, length, layer_number) for layer_number in range(1, config.num_layers + 1))
    attention = 2 * visible * config.num_attention_heads * config.kv_channels
    return 3.0 * 2.0 * (length * (linears + output) + attention)


def _gated(config: ShapeConfig) -> bool:
    return config.swiglu or config.quick_geglu


def _layer_matrices(config: ShapeConfig) -> list[tuple[int, int]]:
    """(output, input) sizes of the weight matrices of one layer: qkv, proj, fc1, fc2."""
    hidden, width, channels = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    heads, groups = config.num_attention_heads, config.num_query_groups
    return [
        ((heads + 2 * groups) * channels, hidden),
        (hidden, heads * channels),
        (width * (2 if _gated(config) else 1), hidden),
        (hidden, width),
    ]


def _visible_pairs(config: ShapeConfig, length: int, layer_number: int) -> float:
    """Query-key pairs of one layer, by areas: the triangle s^2 / 2, less the triangle to the left of the window."""
    window = layer_window(config.window_size, config.window_attn_skip_freq, layer_number)
    hidden = 0 if window is None or window[0] < 0 else max(0, length - window[0] - 1)
    return (length**2 - hidden**2) / 2


def num_parameters(
    config: ShapeConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    position_embedding_type: str = "learned_absolute",
    share_embeddings_and_output_weights: bool = False,
) -> int:
    """Parameters of the whole model, padding not counted: what a build must add up to."""
    hidden = config.hidden_size
    embeddings = vocab_size * hidden * (1 if share_embeddings_and_output_weights else 2)
    if position_embedding_type == "learned_absolute":
        embeddings += max_sequence_length * hidden
    return embeddings + config.num_layers * layer_parameters(config) + _norm_parameters(config, hidden)


def _norm_parameters(config: ShapeConfig, size: int) -> int:
    return size * (2 if config.normalization == "LayerNorm" else 1)


def layer_parameters(config: ShapeConfig) -> int:
    """Parameters of one layer."""
    matrices = _layer_matrices(config)
    has_bias = [config.add_bias_linear or config.add_qkv_bias, *[config.add_bias_linear] * 3]
    layer = sum(rows * columns for rows, columns in matrices)
    layer += sum(rows for (rows, _), bias in zip(matrices, has_bias) if bias)
    layer += 2 * _norm_parameters(config, config.hidden_size)
    if config.qk_layernorm and not config.qk_l2_norm:
        layer += 2 * _norm_parameters(config, config.kv_channels)
    return layer
