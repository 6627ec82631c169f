"""Optimizer configuration. Importing it does not import torch; dtype fields accept torch dtypes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron import serve_other_names
from megatron.core.config.absent import TakesSettings
from megatron.core.config.optimizer import MixedPrecisionConfig, RegularizationConfig


@dataclass(kw_only=True)
class OptimizerConfig(RegularizationConfig, MixedPrecisionConfig, metaclass=TakesSettings):
    """Optimizer kind, hyperparameters and precision. Fields follow Megatron-LM."""

    lr: float | None = None
    """Peak learning rate; the scheduler sets the current one."""

    min_lr: float | None = None
    """Final learning rate of the schedule."""

    decoupled_weight_decay: bool = True
    """Whether weight decay is decoupled (AdamW); otherwise it is added to the gradient (Adam with L2)."""

    fp16: bool = False
    """Whether the model computes in fp16, with loss scaling."""

    bf16: bool = False
    """Whether the model computes in bf16."""

    params_dtype: Any = None
    """torch dtype of the model's parameters; None: from ``fp16`` and ``bf16``."""

    log_num_zeros_in_grad: bool = False
    """Whether to count zero gradient elements in every step."""

    apex_parts: list[str] = field(default_factory=list)
    """Components that use NVIDIA Apex; the optimizer reads only "adam" (Apex's fused Adam)."""

    exp_avg_dtype: Any = "fp32"
    """Storage dtype of the first moment: "fp32", "bf16" or the torch dtype. fp64 parameters keep fp64."""

    exp_avg_sq_dtype: Any = "fp32"
    """Storage dtype of the second moment: "fp32", "bf16" or the torch dtype. bf16 rounds away decays below 2^-8 per
    step."""

    use_distributed_optimizer: bool = False
    """Whether optimizer state is sharded over the data-parallel ranks (ZeRO-1)."""

    overlap_param_gather: bool = False
    """Whether the all-gather of updated weights overlaps with the next forward."""


serve_other_names(__name__)
