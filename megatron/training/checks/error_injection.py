"""Injected errors (--error-injection-rate): a finite loss is reported as NaN, which tests the stop and the restart."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron.core.pipeline_parallel.results import MicroBatchResult
from megatron.training.components import Components
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.training import TrainingConfig

logger = logging.getLogger(__name__)


class ErrorInjection:
    """Errors of one rank, on average one in ``error_injection_rate`` iterations.

    Iterations follow from ``seed`` and the data-parallel rank ``rank``, so that tensor-parallel ranks, which have the
    same losses, inject the same errors. A ``persistent_error`` returns in the same iteration after a restart, a
    ``transient_error`` only by chance, because it also depends on ``first_iteration``. A ``correct_result`` is logged
    only."""

    def __init__(self, training: TrainingConfig, seed: int, rank: int, first_iteration: int) -> None:
        self.rate, self.kind = training.error_injection_rate, training.error_injection_type
        self._key = seed, rank, first_iteration if self.kind == "transient_error" else 0

    def __call__(self, losses: dict[str, Tensor], iteration: int) -> dict[str, Tensor]:
        draw = np.random.default_rng((*self._key, iteration)).integers(self.rate)
        if draw or not losses:
            return losses
        logger.warning("iteration %d: injecting error type %s", iteration, self.kind)
        if self.kind == "correct_result":
            return losses
        return {name: pair * pair.new_tensor([math.nan, 1.0]) for name, pair in losses.items()}


def with_injected_errors(
    forward_backward: Callable[..., list[MicroBatchResult]], cfg: PretrainConfig, parts: Components
) -> Callable[..., list[MicroBatchResult]]:
    """Return ``forward_backward``; with --error-injection-rate its first micro-batch reports the errors."""
    if not cfg.training.error_injection_rate:
        return forward_backward
    state = parts.state
    inject = ErrorInjection(cfg.training, cfg.model.seed, parts.groups.dp_cp.rank, state.iteration + 1)

    def failing(**inputs: object) -> list[MicroBatchResult]:
        results = forward_backward(**inputs)
        first = [replace(result, logged=inject(result.logged, state.iteration + 1)) for result in results[:1]]
        return first + results[1:]

    return failing
