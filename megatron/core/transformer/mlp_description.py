"""Describes the feed-forward network of ``mlp.py``. Torch-free."""

from __future__ import annotations

from megatron.core.description.model import (
    Config,
    Op,
    Piece,
    Saved,
    activation_bytes,
    dropout_mask,
    gemm,
    linear,
    residual_norm,
)


def is_gated(config: Config) -> bool:
    """Whether the first layer puts out a gate beside the value."""
    return bool(config.swiglu or config.quick_geglu)


def describe_mlp(config: Config, layer_number: int, seq_length: int) -> Piece:
    """Norm, first layer, activation, second layer."""
    hidden, width, item = config.hidden_size, config.ffn_hidden_size, activation_bytes(config)
    gated, narrow = is_gated(config), width // config.tensor_model_parallel_size * item
    wide = narrow * (2 if gated else 1)
    entry, norm_op = residual_norm("pre_mlp_layernorm", config)
    fc1 = linear(
        "mlp.linear_fc1", (2, width) if gated else (width,), hidden, int(gated), bias=config.add_bias_linear
    )  # fmt: skip
    fc2 = linear("mlp.linear_fc2", (hidden,), width, 1, bias=config.add_bias_linear)
    fc1_op = gemm(
        fc1[0], config, seq_length, gradients=wide, saved=(Saved("input of the activation", wide, ("mlp",)),)
    )  # fmt: skip
    fc2_op = gemm(fc2[0], config, seq_length, saved=(dropout_mask(config),))
    # reads and writes of forward and backward pass, in tensors of one width
    passes = 3 + 5 if gated else 2 + 3
    activation = Op(
        "activation", "activation", traffic=passes * narrow, gradients=narrow,
        saved=(Saved("output of the activation", narrow, ("mlp", "mlp_act")),),
    )  # fmt: skip
    return Piece("feed-forward", (*entry, *fc1, *fc2), (norm_op, fc1_op, activation, fc2_op), is_branch=True)
