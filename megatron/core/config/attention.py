"""Attention: kernel, softmax, query-key normalization, windows, rotary details. Fields only, torch-free."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Dim, NonNegativeFloat, PositiveFloat, Probability, Range, RotaryBase
from megatron.core.config.rope_parameters import parse_rope_parameters


def parse_window(text: str) -> tuple[int, int]:
    """Convert ``"127,0"``, also in parentheses or brackets, or the left side only (right side 0). Raises ValueError
    unless there are two integers from -1 (unlimited) to below 2^31."""
    try:
        parts = [int(part) for part in text.strip("()[] ").replace(" ", ",").split(",") if part]
    except ValueError:
        parts = []
    if len(parts) == 1:
        parts.append(0)
    check_window(parts)
    return parts[0], parts[1]


def check_window(window: Sequence[int]) -> None:
    """Raise ValueError unless ``window`` has two integers from -1 (unlimited) to below 2^31."""
    if len(window) != 2 or min(window) < -1 or max(window) >= 2**31:
        raise ValueError("must be two integers, -1 (unlimited) or larger, such as 127,0")


_LONGEST_PATTERN = 2048
_PATTERN = "must be an integer or a list of 0 and 1 such as [0]*3+[1]*58"


def parse_layer_pattern(text: str) -> int | list[int]:
    """Convert text to an integer N ("every N-th layer") or a list of 0 and 1 per layer, also written as
    ``[0]*3+[1]*58`` or ``([1,0])*4``. Raises ValueError for other text, an empty or a too long list."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # Python 3.10 runs out of "memory" over deep parentheses
        raise ValueError(_PATTERN) from None
    check_layer_pattern(value)
    return value


def check_layer_pattern(pattern: int | list[int]) -> None:
    """Raise ValueError unless ``pattern`` is an integer from 1 to 2048 or a list of as many zeros and ones."""
    if isinstance(pattern, list) and (not pattern or len(pattern) > _LONGEST_PATTERN or set(pattern) - {0, 1}):
        raise ValueError(_PATTERN)
    if isinstance(pattern, int) and not 1 <= pattern <= _LONGEST_PATTERN:
        raise ValueError(f"must be 1 to {_LONGEST_PATTERN}, or a list of 0 and 1")


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluate integers, lists, their sums and lists times an integer; ValueError for others. Executes no code."""
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
class AttentionConfig(FlagGroup):
    """Attention"""

    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """Attention kernel. flash: flash-attn 4 or 3 if installed, else torch's FlashAttention 2; fused: cuDNN; unfused or
    local: plain torch operations, the reference; auto: the fastest measured. The choice and its reasons are logged at
    the start."""

    flash_attention_version: Literal[2, 3, 4] | None = None
    """Version of the flash-attn package that computes attention: 2, 3 (Hopper), or 4 (Hopper and Blackwell)."""

    attention_dropout: Probability = 0.1
    """Dropout probability of the attention weights."""

    attention_softmax_in_fp32: bool = False
    """Compute the softmax of unfused attention in float32 too."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sink. vanilla: none; off-by-one: a zero logit; learnable: a learned logit per head (GPT-OSS). The
    sink's weight is dropped after the softmax."""

    softmax_scale: PositiveFloat | None = None
    """Scale of the query-key scores; default: 1 / sqrt(head channels). For Gemma: 1 / sqrt(query_pre_attn_scalar)."""

    attn_logit_softcapping: PositiveFloat | None = None
    """Soft cap of the scaled query-key scores: cap * tanh(scores / cap) (Gemma 2). Attention then uses plain torch
    operations."""

    qk_clip: bool = False
    """After each optimizer step scale query and key weights of heads whose maximum logit exceeds the threshold."""

    qk_clip_threshold: PositiveFloat = 100.0
    """QK-Clip: maximum attention logit."""

    qk_clip_alpha: Annotated[float, Range(0, 1)] = 0.5
    """QK-Clip: exponent of the factor of queries; keys have 1 - alpha."""

    log_max_attention_logit: bool = False
    """Log the maximum attention logit of each layer."""

    apply_query_key_layer_scaling: bool = False
    """Scale query-key scores by 1 / layer number and undo it in a float32 softmax (for float16)."""

    qk_layernorm: bool = False
    """Normalize queries and keys per head before the rotary embedding (Qwen3)."""

    qk_layernorm_across_heads: bool = False
    """Let --qk-layernorm normalize the queries of all heads together, and likewise the keys (OLMo 2). RMSNorm only."""

    qk_l2_norm: bool = False
    """Scale queries and keys of every head to unit length times sqrt(channels), without weights (Llama 4)."""

    window_size: tuple[int, int] | None = flag(
        "--window-size", parse=parse_window, check=check_window, metavar="LEFT,RIGHT"
    )
    """Sliding-window attention: tokens to the left and right that a token attends to, such as 127,0; -1: unlimited."""

    window_attn_skip_freq: int | list[int] | None = flag(
        "--window-attn-skip-freq", parse=parse_layer_pattern, check=check_layer_pattern, metavar="N|LIST"
    )
    """Layers with full attention despite --window-size: every N-th, or those with a 0 in a list of 0 and 1."""

    rotary_base_local: RotaryBase | None = None
    """Base of the rotary frequencies in layers with a sliding window, never scaled (Gemma 3); default: the base of all
    layers."""

    rotary_interleaved: bool = False
    """Rotate adjacent channels (0, 1), (2, 3) ... instead of (0, d/2), (1, d/2 + 1) ..."""

    no_rope_freq: int | list[int] | None = flag(
        "--no-rope-freq", parse=parse_layer_pattern, check=check_layer_pattern, metavar="N|LIST"
    )
    """Layers without rotary positions despite --position-embedding-type rope (SmolLM3): every N-th, or those with a 1
    in a list of 0 and 1."""

    apply_rope_fusion: bool = flag("--no-rope-fusion", default=True)
    """Fused kernel for the rotary embedding, which also splits queries, keys and values."""

    yarn_original_max_position_embeddings: Dim | None = None
    """YaRN: context length of the original training."""

    yarn_beta_fast: PositiveFloat = 32.0
    """YaRN: channels with more rotations than this within the original context are not scaled."""

    yarn_beta_slow: PositiveFloat = 1.0
    """YaRN: channels with fewer rotations than this within the original context are fully interpolated."""

    yarn_correction_range_round_to_int: bool = flag(
        "--no-yarn-correction-range-round-to-int", default=True, on="--yarn-correction-range-round-to-int"
    )
    """Rounding of YaRN's blended range to whole channels."""

    rotary_scaling_factor: PositiveFloat = 1.0
    """YaRN: factor by which the context is extended."""

    mscale: NonNegativeFloat = 1.0
    """YaRN: weight of the attention temperature."""

    mscale_all_dim: NonNegativeFloat = 0.0
    """YaRN: weight of the attention temperature that applies to all channels (multi-latent attention)."""

    rope_parameters: str | None = flag("--rope-parameters", check=parse_rope_parameters, metavar="JSON")
    """Rotary scaling of Hugging Face models by the length of a row (rope_type dynamic or longrope), as a JSON object
    with the keys of transformers' rope_parameters; rows of --seq-length tokens select short or long factors."""
