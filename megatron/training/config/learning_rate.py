"""Learning rate and weight decay over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.cli import flag


@dataclass(kw_only=True)
class LearningRateConfig:
    """Learning rate and weight decay schedules"""

    lr: float = flag()
    """Peak learning rate. Required for training."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay and after it."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after the warmup; WSD stays at the peak and decays at the end."""

    lr_decay_iters: int | None = None
    """Iterations, warmup included, until --min-lr is reached; default: --train-iters."""

    lr_decay_samples: int | None = None
    """Samples, warmup included, until --min-lr is reached; default: --train-samples."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's final decay."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's final decay."""

    lr_wsd_decay_samples: int | None = None
    """Samples of WSD's final decay."""

    lr_warmup_fraction: float | None = None
    """Share of the decay length that the learning rate grows linearly in; excludes the next two."""

    lr_warmup_iters: int = 0
    """Iterations that the learning rate grows linearly in."""

    lr_warmup_samples: int = 0
    """Samples that the learning rate grows linearly in."""

    lr_warmup_init: float = 0.0
    """Learning rate that the warmup starts from."""

    override_opt_param_scheduler: bool = flag(
        "--override-opt_param-scheduler", "--override-opt-param-scheduler", default=False
    )
    """On resume, take the schedule of this command line rather than require it to equal the checkpoint's."""

    use_checkpoint_opt_param_scheduler: bool = flag(
        "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler", default=False
    )
    """On resume, take the schedule of the checkpoint and ignore this command line's."""

    start_weight_decay: float | None = None
    """Weight decay at the start of a ramp; needs --weight-decay-incr-style other than constant."""

    end_weight_decay: float | None = None
    """Weight decay at the end of a ramp."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from --start-weight-decay to --end-weight-decay."""
