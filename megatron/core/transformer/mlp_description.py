"""Description of the feed-forward network of ``mlp.py``. Torch-free."""

from __future__ import annotations

from megatron.core.description.model import Config, LayerPlace, Op, Piece, Saved
from megatron.core.description.parts import activation_bytes, gemm, input_bytes, linear

SETTINGS = (
    "ffn_hidden_size",
    "add_bias_linear",
    "swiglu",
    "squared_relu",
    "relu",
    "quick_geglu",
    "geglu",
    "exact_gelu",
    "activation_func_clamp_value",
    "glu_linear_offset",
)
"""Settings that the weights of the feed-forward network depend on."""


def describe_mlp(config: Config, place: LayerPlace, *, width: int | None = None) -> Piece:
    """Describe fc1, activation and fc2, per tensor-parallel rank. ``width``: intermediate size of the full layer; None:
    ``ffn_hidden_size``."""
    hidden, width, item = config.hidden_size, width or config.ffn_hidden_size, activation_bytes(config)
    gated, narrow = config.gated_linear_unit, width // config.tensor_model_parallel_size * item
    wide = narrow * (2 if gated else 1)
    out = (2, width) if gated else (width,)
    fc1 = linear("linear_fc1", out, hidden, int(gated), bias=config.add_bias_linear)
    fc2 = linear("linear_fc2", (hidden,), width, 1, bias=config.add_bias_linear)
    input_of_activation = Saved("input of the activation", wide)
    fc1_op = gemm(fc1[0], config, place.seq_length, gradients=wide, saved=(input_of_activation,))
    # reads and writes of forward and backward pass, in tensors of one width
    passes = 3 + 5 if gated else 2 + 3
    # ReLU goes backward by its output: of the two only one is kept, whichever is not computed again
    output = narrow // item * input_bytes(config)
    outputs = () if config.relu else (Saved("output of the activation", output, ("mlp_act",)),)
    activation = Op("activation", "activation", traffic=passes * narrow, gradients=narrow, saved=outputs)
    ops = (fc1_op, activation, gemm(fc2[0], config, place.seq_length))
    return Piece("feed-forward", (*fc1, *fc2), ops, settings=SETTINGS)
