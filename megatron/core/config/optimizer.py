"""The optimizer's own numbers and formats: weight decay, clipping, moments, loss scaling. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.ranges import NonNegativeFloat, PositiveFloat, Probability, Range


@dataclass(kw_only=True)
class RegularizationConfig:
    """Optimizer and regularization"""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer; adam decouples weight decay (AdamW)."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices; biases and normalization weights are exempt."""

    clip_grad: NonNegativeFloat = 1.0
    """Scale gradients down to at most this global L2 norm; 0 turns clipping off."""

    adam_beta1: Probability = 0.9
    """Adam: decay of the first moment."""

    adam_beta2: Probability = 0.999
    """Adam: decay of the second moment; language models usually take 0.95."""

    adam_eps: NonNegativeFloat = 1e-8
    """Adam: added to the root of the second moment."""

    sgd_momentum: Probability = 0.9
    """SGD: momentum."""

    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of --qk-layernorm too."""

    use_precision_aware_optimizer: bool = False
    """Keep optimizer state in the formats of the next four flags (with or without --use-distributed-optimizer)."""

    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the accumulated gradients (precision-aware optimizer); bf16 needs --grad-reduce-in-bf16."""

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Format of the optimizer's weights; only fp32, which takes 16 bits beside each bf16 weight, is available."""

    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Format of the first moment (precision-aware optimizer): fp32 or bf16."""

    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Format of the second moment (precision-aware optimizer): fp32, or bf16 with an --adam-beta2 up to 0.992."""

    store_param_remainders: bool = True
    """Keep the fp32 value of every bf16 weight as a copy of 4 bytes, not as the 2 bytes that the weight lacks; the
    numbers are the same."""

    decoupled_lr: NonNegativeFloat | None = None
    """Learning rate of the embedding and the output layer, where it differs from --lr."""

    decoupled_min_lr: NonNegativeFloat | None = None
    """Lower bound of --decoupled-lr."""


@dataclass(kw_only=True)
class MixedPrecisionConfig:
    """Mixed precision"""

    loss_scale: PositiveFloat | None = None
    """Constant loss scale; left out, --fp16 adapts it."""

    initial_loss_scale: PositiveFloat = 2**32
    """Dynamic loss scale at the start."""

    min_loss_scale: PositiveFloat = 1.0
    """Lower bound of the dynamic loss scale."""

    loss_scale_window: Annotated[float, Range(1)] = 1000
    """Clean iterations after which the dynamic loss scale doubles."""

    hysteresis: Annotated[int, Range(1, 2**20)] = 2
    """Overflows that the dynamic loss scale tolerates before it halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in float32; on by itself with --bf16 unless --grad-reduce-in-bf16 is given."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16: half the memory and traffic, coarser sums."""
