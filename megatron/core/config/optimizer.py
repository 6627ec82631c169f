"""Optimizer configuration: weight decay, clipping, moments, loss scaling. Torch-free; dtypes may be torch dtypes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megatron.core.config.absent import TakesSettings
from megatron.core.config.groups import FlagGroup
from megatron.core.config.muon import MuonConfig
from megatron.core.config.ranges import INT64_MAX, NonNegativeFloat, PositiveFloat, Probability, Range


@dataclass(kw_only=True)
class RegularizationConfig(FlagGroup):
    """Optimizer and regularization"""

    optimizer: Literal["adam", "sgd", "lion", "muon", "adaptive_muon"] = "adam"
    """Optimizer; adam decouples weight decay (AdamW), muon and adaptive_muon update hidden matrices, adam the rest."""

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

    lion_beta1: Probability = 0.95
    """Lion: weight of the momentum in the update, whose sign is subtracted."""

    lion_beta2: Probability = 0.98
    """Lion: decay of the momentum."""

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

    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in pinned host memory; updates run on the GPU, slice by slice, with the same
    bits."""

    optimizer_offload_fraction: Annotated[float, Range(0, 1)] = 1.0
    """Fraction of the parameters whose optimizer state is offloaded: the last of the forward pass."""

    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Overlap the update of offloaded state with the next forward pass: modules wait for their own weights only."""

    decoupled_lr: NonNegativeFloat | None = None
    """Learning rate of the embedding and the output layer; default: --lr."""

    decoupled_min_lr: NonNegativeFloat | None = None
    """Lower bound of --decoupled-lr."""


@dataclass(kw_only=True)
class MixedPrecisionConfig(FlagGroup):
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


@dataclass(kw_only=True)
class OptimizerConfig(RegularizationConfig, MuonConfig, MixedPrecisionConfig, metaclass=TakesSettings):
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

    muon_momentum: Probability = 0.95
    """As in the group of the command line, whose default is 0.9."""

    fp8_recipe: str | None = None
    """Accepted for programs; each weight declares its storage."""

    @classmethod
    def in_our_words(cls, settings: dict[str, object]) -> dict[str, object]:
        """Drop a flag of the training loop."""
        return {name: value for name, value in settings.items() if name != "barrier_with_L1_time"}
