"""Keeps ``megatron.compat.num_microbatches_calculator`` at the current global batch: entry scripts ask it."""

from __future__ import annotations

from megatron.compat.num_microbatches_calculator import follow_batch_schedule, update_num_microbatches
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.hooks.base import Hook, RunInfo
from megatron.training.observe.metrics import StepMetrics
from megatron.training.train_state import TrainState


class BatchPositionHook(Hook):
    """``get_num_microbatches()`` is that of the batch being trained."""

    def __init__(self, cfg: PretrainConfig) -> None:
        self.cfg = cfg

    def on_train_start(self, run: RunInfo) -> None:
        follow_batch_schedule(self.cfg, self.cfg.data_parallel_size, run.state.consumed_train_samples)

    def on_step(self, state: TrainState, metrics: StepMetrics) -> None:
        update_num_microbatches(state.consumed_train_samples)
