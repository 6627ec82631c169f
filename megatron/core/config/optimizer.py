"""The optimizer's own numbers and formats: weight decay, clipping, moments, loss scaling. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.ranges import INT64_MAX, NonNegativeFloat, PositiveFloat, Probability, Range


@dataclass(kw_only=True)
class RegularizationConfig:
    """Optimizer and regularization"""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Optimizer; adam decouples weight decay (AdamW)."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of matrices; biases and normalization weights are exempt."""

    clip_grad: NonNegativeFloat = 1.0
    """Maximum global L2 norm of the gradients; larger gradients are scaled down. 0: no clipping."""

    adam_beta1: Probability = 0.9
    """Adam: decay of the first moment."""

    adam_beta2: Probability = 0.999
    """Adam: decay of the second moment; usually 0.95 for language models."""

    adam_eps: Annotated[float, Range(0, 1000)] = 1e-8
    """Adam: epsilon, added to the square root of the second moment."""

    sgd_momentum: Probability = 0.9
    """SGD: momentum."""

    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the weights of --qk-layernorm too."""

    use_precision_aware_optimizer: bool = False
    """Store optimizer state in the formats of the next four flags (with or without --use-distributed-optimizer)."""

    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the accumulated gradients (precision-aware optimizer); bf16 requires --grad-reduce-in-bf16."""

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Format of the master weights. Only fp32 is available; next to a bf16 weight it takes 16 bits."""

    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Format of the first moment (precision-aware optimizer): fp32 or bf16."""

    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Format of the second moment (precision-aware optimizer): fp32, or bf16 with an --adam-beta2 up to 0.992."""

    store_param_remainders: bool = True
    """Store bf16 master weights as 2-byte remainders instead of 4-byte copies; results are bit-identical."""

    decoupled_lr: NonNegativeFloat | None = None
    """Learning rate of the embedding and the output layer; default: --lr."""

    decoupled_min_lr: NonNegativeFloat | None = None
    """Lower bound of --decoupled-lr."""


@dataclass(kw_only=True)
class MixedPrecisionConfig:
    """Mixed precision"""

    loss_scale: PositiveFloat | None = None
    """Constant loss scale; default with --fp16: dynamic."""

    initial_loss_scale: PositiveFloat = 2**32
    """Initial value of the dynamic loss scale."""

    min_loss_scale: PositiveFloat = 1.0
    """Minimum of the dynamic loss scale."""

    loss_scale_window: Annotated[float, Range(1, INT64_MAX)] = 1000
    """Iterations without overflow after which the dynamic loss scale doubles."""

    hysteresis: Annotated[int, Range(1, 2**20)] = 2
    """Overflows that are tolerated before the dynamic loss scale is halved."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in float32; enabled automatically with --bf16 unless --grad-reduce-in-bf16 is
    given."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16: half the memory and traffic, less precise sums."""
