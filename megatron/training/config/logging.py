"""Settings of logging: quantities, destinations and intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.cli import flag
from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import PositiveInt, Range


@dataclass(kw_only=True)
class LoggingConfig(FlagGroup):
    """Logging"""

    log_interval: PositiveInt = 100
    """Iterations between log lines; losses are averaged over them."""

    log_throughput: bool = False
    """Log TFLOP/s per GPU."""

    log_params_norm: bool = False
    """Log the norm of all weights."""

    log_num_zeros_in_grad: bool = False
    """Log the number of zero gradient elements."""

    log_progress: bool = False
    """Append the numbers of tokens and FLOPs so far to <save>/progress.txt at every checkpoint."""

    timing_log_level: Literal[0, 1, 2] = 0
    """Detail of the timers; 1 and 2 synchronize with the device."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Timers of all ranks: maximum, minimum and maximum, or every rank."""

    barrier_with_L1_time: bool = flag("--no-barrier-with-level-1-timing", default=True)
    """Barrier before level-1 timers."""

    write_report: bool = flag("--no-report", default=True)
    """Write report.html, a page about the run, next to its metrics when training ends."""

    log_layer_statistics_interval: PositiveInt | None = None
    """Iterations between norms of each layer's weights, gradients and updates, and its maximum attention logit."""

    console: Literal["auto", "live", "lines"] = "auto"
    """Standard output: log lines, or a live view; auto: live view on a terminal with the rich package."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard's event files."""

    tensorboard_log_interval: PositiveInt = 1
    """Iterations between points in TensorBoard."""

    tensorboard_queue_size: Annotated[int, Range(1, 2**31 - 1)] = 1000
    """Events that TensorBoard buffers before it writes."""

    log_timers_to_tensorboard: bool = False
    """Write timers to TensorBoard."""

    log_loss_scale_to_tensorboard: bool = flag(
        "--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard", default=True
    )
    """Write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write validation perplexity to TensorBoard."""

    log_memory_to_tensorboard: bool = False
    """Write device memory to TensorBoard."""

    log_memory_interval: PositiveInt | None = None
    """Iterations between log lines about device memory."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of ranks to TensorBoard."""

    wandb_project: str | None = None
    """Log to this Weights & Biases project."""

    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run. Required with --wandb-project."""

    wandb_save_dir: str | None = None
    """Directory for Weights & Biases' files; default: <save>/wandb."""

    wandb_entity: str | None = None
    """Weights & Biases team or user."""

    logging_level: Annotated[int, Range(0, 100)] | None = None
    """Level of Python's logging, such as 10 (debug) or 20 (info)."""
