"""Attention: kernel, softmax, query-key normalization, windows, rotary details. Fields only, torch-free."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.cli import flag
from megatron.core.config.ranges import Dim, NonNegativeFloat, PositiveFloat, PositiveInt, Probability


def parse_window(text: str) -> tuple[int, int]:
    """``"127,0"`` -> ``(127, 0)``; also accepts parentheses and a single number for the left side."""
    try:
        parts = [int(part) for part in text.strip("()[] ").replace(" ", ",").split(",") if part]
    except ValueError:
        parts = []
    if len(parts) == 1:
        parts.append(0)
    if len(parts) != 2 or min(parts) < -1 or max(parts) >= 2**31:
        raise ValueError("must be two integers, -1 (unlimited) or larger, such as 127,0")
    return parts[0], parts[1]


_LONGEST_PATTERN = 2048
_PATTERN = "must be an integer or a list of 0 and 1 such as [0]*3+[1]*58"


def parse_layer_pattern(text: str) -> int | list[int]:
    """An integer N ("every N-th layer") or a list of 0 and 1 per layer, also as ``[0]*3+[1]*58`` or ``([1,0])*4``."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # Python 3.10 runs out of "memory" over deep parentheses
        raise ValueError(_PATTERN) from None
    if isinstance(value, list) and (not value or len(value) > _LONGEST_PATTERN or set(value) - {0, 1}):
        raise ValueError(_PATTERN)
    if isinstance(value, int) and not 1 <= value <= _LONGEST_PATTERN:
        raise ValueError(f"must be 1 to {_LONGEST_PATTERN}, or a list of 0 and 1")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    """Integers, lists of integers, sums of lists, and lists times an integer; nothing is executed."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [item.value for item in node.elts if isinstance(item, ast.Constant) and type(item.value) is int]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > _LONGEST_PATTERN:
                raise ValueError(f"is longer than {_LONGEST_PATTERN} layers")
            return left * right
    raise ValueError(_PATTERN)


@dataclass(kw_only=True)
class AttentionConfig:
    """Attention"""

    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """Kernel that computes attention. flash: version 4 or 3 of the flash-attn package where it is installed, else
    torch's FlashAttention 2; fused: cuDNN; unfused or local: plain torch operations, the reference; auto: what was
    measured to be the fastest. What was chosen, and why, is printed at the start."""

    flash_attention_version: Literal[2, 3, 4] | None = None
    """Compute attention with this version of the flash-attn package: 2, 3 for Hopper, or 4 for Hopper and Blackwell."""

    attention_dropout: Probability = 0.1
    """Dropout probability of the attention weights."""

    attention_softmax_in_fp32: bool = False
    """Compute the softmax of attention in float32 also on the unfused path."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """What joins the softmax of attention and is then dropped. vanilla: nothing; off-by-one: a logit of zero;
    learnable: a learned logit per head (attention sinks, GPT-OSS)."""

    softmax_scale: PositiveFloat | None = None
    """Multiplies the products of queries and keys; default: 1 / sqrt(channels of a head). Gemma's
    query_pre_attn_scalar is 1 / the square of it."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Cap the scaled products of queries and keys softly: cap * tanh(products / cap) (Gemma 2). Plain torch operations
    then compute attention."""

    apply_query_key_layer_scaling: bool = False
    """Scale the products of queries and keys by 1 / layer number and undo it in a float32 softmax; for float16."""

    qk_layernorm: bool = False
    """Normalize queries and keys per head before the rotary embedding (Qwen3)."""

    qk_layernorm_across_heads: bool = False
    """Let --qk-layernorm normalize the queries of all heads together, and the keys (OLMo 2). RMSNorm only."""

    qk_l2_norm: bool = False
    """Scale queries and keys of every head to unit length times sqrt(channels), without weights (Llama 4)."""

    window_size: tuple[int, int] | None = flag("--window-size", parse=parse_window, metavar="LEFT,RIGHT")
    """Sliding-window attention: tokens that a token sees to its left and right, such as 127,0; -1 means unlimited."""

    window_attn_skip_freq: int | list[int] | None = flag(
        "--window-attn-skip-freq", parse=parse_layer_pattern, metavar="N|LIST"
    )
    """Layers that keep full attention in spite of --window-size: every N-th, or those with a 0 in a list of 0 and 1."""

    rotary_base_local: PositiveInt | None = None
    """Base of the rotary frequencies, unscaled, in layers with a sliding window (Gemma 3); default: that of all
    layers."""

    rotary_interleaved: bool = False
    """Rotate neighbouring channels (0, 1), (2, 3) ... instead of (0, d/2), (1, d/2 + 1) ..."""

    apply_rope_fusion: bool = flag("--no-rope-fusion", default=True)
    """Plain torch operations for the rotary embedding instead of one kernel that also splits queries, keys and
    values."""

    yarn_original_max_position_embeddings: Dim | None = None
    """Context length that the model was trained with before YaRN stretches it."""

    yarn_beta_fast: PositiveFloat = 32.0
    """YaRN: channels that turn more often than this within the original context stay as they are."""

    yarn_beta_slow: PositiveFloat = 1.0
    """YaRN: channels that turn less often than this within the original context are fully interpolated."""

    yarn_correction_range_round_to_int: bool = flag(
        "--no-yarn-correction-range-round-to-int", default=True, on="--yarn-correction-range-round-to-int"
    )
    """Do not round the channel range that YaRN blends over to whole channels."""

    rotary_scaling_factor: PositiveFloat = 1.0
    """YaRN: factor by which the context is stretched."""

    mscale: NonNegativeFloat = 1.0
    """YaRN: weight of the attention temperature."""

    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN: weight of the attention temperature that acts on all channels (multi-latent attention)."""
