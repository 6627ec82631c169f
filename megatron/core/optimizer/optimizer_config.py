"""Settings of the optimizer. Torch-free at import; dtypes are torch dtypes where a caller gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.config.absent import TakesSettings


@dataclass(kw_only=True)
class OptimizerConfig(metaclass=TakesSettings):
    """Which optimizer, its numbers, and the precision it works in."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam (weight decay decoupled) or sgd."""

    lr: float | None = None
    """Peak learning rate; the schedule sets the current one."""

    min_lr: float | None = None
    """Learning rate at the end of the schedule."""

    decoupled_lr: float | None = None
    """Learning rate of embedding and output layer, where it differs."""

    decoupled_min_lr: float | None = None
    """Lower bound of ``decoupled_lr``."""

    weight_decay: float = 0.01
    """Weight decay of matrices."""

    decoupled_weight_decay: bool = True
    """Shrink weights directly (AdamW); otherwise the decay is added to the gradient (Adam with L2)."""

    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of the query and key normalization too."""

    fp16: bool = False
    """The model computes in float16 with a loss scale."""

    bf16: bool = False
    """The model computes in bfloat16."""

    params_dtype: Any = None
    """torch dtype of the model's parameters; None follows ``fp16`` and ``bf16``."""

    loss_scale: float | None = None
    """Constant loss scale; None with ``fp16``: dynamic."""

    initial_loss_scale: float = 2**32
    """Dynamic loss scale at the start."""

    min_loss_scale: float = 1.0
    """Lower bound of the dynamic loss scale."""

    loss_scale_window: float = 1000
    """Clean iterations after which the dynamic loss scale doubles."""

    hysteresis: int = 2
    """Overflows tolerated before the dynamic loss scale halves."""

    adam_beta1: float = 0.9
    """Decay of the first moment."""

    adam_beta2: float = 0.999
    """Decay of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0: no clipping."""

    log_num_zeros_in_grad: bool = False
    """Count the gradient elements that are zero."""

    apex_parts: list[str] = field(default_factory=list)
    """With "adam" NVIDIA apex computes the update of Adam; other parts are not the optimizer's."""

    exp_avg_dtype: Any = "fp32"
    """Format of the first moment: "fp32" or "bf16", or the torch dtype (where the parameters are not fp64)."""

    exp_avg_sq_dtype: Any = "fp32"
    """Format of the second moment: fp32 or bf16; bf16 loses decays below 2^-8 per step."""

    store_param_remainders: bool = True
    """Keep the fp32 value of a bf16 weight as the 16 bits that the weight lacks, not as a copy: 2 bytes in the place
    of 4, the same numbers."""

    use_distributed_optimizer: bool = False
    """Split optimizer state over the data-parallel ranks."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass already runs."""
