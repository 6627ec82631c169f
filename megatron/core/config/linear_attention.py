"""Linear attention (which layers have it, sizes of its heads) and gated softmax attention. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.attention import check_layer_pattern, parse_layer_pattern
from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, NonNegativeFloat


@dataclass(kw_only=True)
class LinearAttentionConfig(OptionalGroup):
    """Linear and gated attention"""

    experimental_attention_variant: Literal["gated_delta_net", "gdn", "kda"] | None = None
    """Linear attention in place of softmax attention, in the layers that --linear-attention-freq selects: the gated
    delta net (Qwen3-Next, Qwen3.5), or Kimi delta attention, kda (Kimi Linear)."""

    linear_attention_freq: int | list[int] | None = flag(
        "--linear-attention-freq", parse=parse_layer_pattern, check=check_layer_pattern, metavar="N|LIST"
    )
    """Layers with softmax attention: every N-th; or a list with 1 for linear and 0 for softmax attention; default: all
    layers have linear attention."""

    linear_conv_kernel_dim: Dim = 4
    """Tokens that the causal convolution before linear attention sees."""

    linear_key_head_dim: Dim = 128
    """Channels of a query or key head of linear attention."""

    linear_value_head_dim: Dim = 128
    """Channels of a value head of linear attention."""

    linear_num_key_heads: Dim = 16
    """Query and key heads of linear attention."""

    linear_num_value_heads: Dim = 32
    """Value heads of linear attention, a multiple of --linear-num-key-heads."""

    linear_norm_epsilon: NonNegativeFloat | None = None
    """Epsilon of the gated norm of linear attention; default: --norm-epsilon."""

    linear_allow_neg_eigval: bool = False
    """Double beta, the strength of linear attention's corrections: in [0, 2] (OLMo-Hybrid)."""

    attention_output_gate: bool = False
    """Multiply the output of softmax attention by the sigmoid of a gate, which the query projection computes too
    (Qwen3-Next)."""


def has_linear_attention(config: LinearAttentionConfig, layer_number: int) -> bool:
    """Whether a layer (from 1) has linear attention."""
    pattern = config.linear_attention_freq
    if config.experimental_attention_variant is None:
        return False
    if pattern is None:
        return True
    return layer_number % pattern != 0 if isinstance(pattern, int) else bool(pattern[layer_number - 1])
