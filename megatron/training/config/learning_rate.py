"""Learning rate and weight decay over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Iterations, NonNegativeFloat, PositiveFloat, Probability, Range, Samples
from megatron.core.schedules.learning_rate import DecayStyle, WeightDecayStyle, WsdDecayStyle


@dataclass(kw_only=True)
class LearningRateConfig(FlagGroup):
    """Learning rate and weight decay schedules"""

    lr: PositiveFloat = flag()
    """Peak learning rate. Required for training."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay and after it."""

    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay after the warmup; WSD stays at the peak and decays at the end."""

    lr_decay_iters: Annotated[int, Range(1, 2**40)] | None = None
    """Iterations, warmup included, until --min-lr is reached; default: --train-iters."""

    lr_decay_samples: Samples | None = None
    """Samples, warmup included, until --min-lr is reached; default: --train-samples."""

    lr_wsd_decay_style: WsdDecayStyle = "exponential"
    """Shape of WSD's final decay."""

    lr_wsd_decay_iters: Annotated[int, Range(1, 2**40)] | None = None
    """Iterations of WSD's final decay."""

    lr_wsd_decay_samples: Samples | None = None
    """Samples of WSD's final decay."""

    lr_warmup_fraction: Probability | None = None
    """Linear warmup, as a fraction of the decay length; excludes --lr-warmup-iters and --lr-warmup-samples."""

    lr_warmup_iters: Iterations = 0
    """Iterations of linear warmup."""

    lr_warmup_samples: Annotated[int, Range(0, 2**40)] = 0
    """Samples of linear warmup."""

    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warmup."""

    override_opt_param_scheduler: bool = flag(
        "--override-opt_param-scheduler", "--override-opt-param-scheduler", default=False
    )
    """On resume, use the schedule of this command line, without requiring it to equal the checkpoint's."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler", default=False
    )
    """On resume, use the checkpoint's schedule and ignore this command line's."""

    start_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the start of a ramp; requires --weight-decay-incr-style other than constant."""

    end_weight_decay: NonNegativeFloat | None = None
    """Weight decay at the end of a ramp."""

    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Shape of the ramp from --start-weight-decay to --end-weight-decay."""
