"""Settings of the optimizer. Torch-free at import; dtypes are torch dtypes where a caller gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.absent import TakesSettings
from megatron.core.config.optimizer import MixedPrecisionConfig, RegularizationConfig


@dataclass(kw_only=True)
class OptimizerConfig(RegularizationConfig, MixedPrecisionConfig, metaclass=TakesSettings):
    """Which optimizer, its numbers, and the precision it works in."""

    lr: float | None = None
    """Peak learning rate; the schedule sets the current one."""

    min_lr: float | None = None
    """Learning rate at the end of the schedule."""

    decoupled_weight_decay: bool = True
    """Shrink weights directly (AdamW); otherwise the decay is added to the gradient (Adam with L2)."""

    fp16: bool = False
    """The model computes in float16 with a loss scale."""

    bf16: bool = False
    """The model computes in bfloat16."""

    params_dtype: Any = None
    """torch dtype of the model's parameters; None follows ``fp16`` and ``bf16``."""

    log_num_zeros_in_grad: bool = False
    """Count the gradient elements that are zero."""

    apex_parts: list[str] = field(default_factory=list)
    """With "adam" NVIDIA apex computes the update of Adam; other parts are not the optimizer's."""

    exp_avg_dtype: Any = "fp32"
    """Format of the first moment: "fp32" or "bf16", or the torch dtype (where the parameters are not fp64)."""

    exp_avg_sq_dtype: Any = "fp32"
    """Format of the second moment: fp32 or bf16; bf16 loses decays below 2^-8 per step."""

    use_distributed_optimizer: bool = False
    """Split optimizer state over the data-parallel ranks."""

    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass already runs."""
