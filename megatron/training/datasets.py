"""How many samples each split needs, what the data sets are told, and which tokenizer they were made with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from megatron.core import num_microbatches_calculator as batch_sizes
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.tasks.base import NumSamples

logger = logging.getLogger(__name__)


def batch_size_at(cfg: PretrainConfig) -> Callable[[int], int]:
    """consumed samples -> size of the next global batch."""
    return partial(batch_sizes.running_global_batch_size, cfg, data_parallel_size=cfg.data_parallel_size)


def samples_per_split(cfg: PretrainConfig) -> NumSamples:
    """Training samples of the whole run; validation and test samples of one evaluation, which always sees the same ones.

    None stands for one full pass (--full-validation).
    """
    if cfg.skip_train:
        train: int = 0
    elif cfg.train_samples is not None:
        train = cfg.train_samples
    else:
        train = batch_sizes.samples_from_iters(cfg, cfg.train_iters or 0, cfg.data_parallel_size)
    evaluation = None if cfg.full_validation else cfg.eval_iters * (cfg.eval_global_batch_size or 0)
    return train, evaluation, evaluation
