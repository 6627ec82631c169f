"""The check of a step's losses and gradients and its update: at once, which waits for the device, or one iteration
later (``finite.py``), which does not. One of them is chosen per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training.checks.finite import FiniteCheck, check_has_tokens
from megatron.training.checks.gradient_origin import GlobalBatch, RecentBatches
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.observe.metrics import check_finite


class StepValues(NamedTuple):
    """What a step has computed before its update."""

    iteration: int
    consumed_samples: int
    """Samples consumed before this iteration."""
    losses: Mapping[str, Tensor]
    """``name -> [sum, count]`` for messages: of this rank first, then of all ranks."""
    totals: Mapping[str, Tensor]
    """``name -> [sum, count]`` over all ranks."""
    num_tokens: Tensor
    """Tokens that contribute to a loss, over all ranks."""


class StepResult(NamedTuple):
    """The update of a step; tensors are on the device."""

    skipped: bool
    invalid: Tensor | bool
    """Whether the update was skipped, not yet read; False if ``skipped`` says it."""
    grad_norm: Tensor | float | None
    num_zeros: Tensor | int | None


class StepCheck(Protocol):
    """Check and update of each step. Methods are collective."""

    def save(self, iteration: int, size: int, counts: Tensor, batches: Iterator[dict]) -> Iterator[dict]:
        """Return ``batches``, the micro-batches of a global batch of ``size`` samples (:class:`GlobalBatch`)."""
        ...

    def update(self, optimizer: MegatronOptimizer, values: StepValues) -> StepResult:
        """Step the optimizer unless a value is not finite."""
        ...

    def read(self, keep: int = 0) -> None:
        """Raise if a value so far, without the last ``keep`` iterations, was not finite."""
        ...


class ImmediateCheck:
    """Reads values before the update. ``is_strict``: raise for losses that are not finite; else, and for gradients,
    the optimizer skips the update."""

    def __init__(self, rank: int, is_strict: bool) -> None:
        self.rank, self.is_strict = rank, is_strict

    def save(self, iteration: int, size: int, counts: Tensor, batches: Iterator[dict]) -> Iterator[dict]:
        """Return ``batches``; nothing is saved."""
        return batches

    def update(self, optimizer: MegatronOptimizer, values: StepValues) -> StepResult:
        """Raise UserError without tokens, NonFiniteError for losses; wait for the update."""
        place = f"iteration {values.iteration} (samples from {values.consumed_samples} on)"
        check_has_tokens(values.num_tokens.item(), place)
        if self.is_strict:
            sums = {name: pair[0] for name, pair in values.losses.items()}
            check_finite(sums, iteration=values.iteration, rank=self.rank, consumed_samples=values.consumed_samples)
        updated, grad_norm, num_zeros = optimizer.step()
        return StepResult(not updated, False, grad_norm, num_zeros)

    def read(self, keep: int = 0) -> None:
        """Do nothing: each update has read its values."""


class DelayedCheck:
    """Holds updates back on the device and reads values later. ``find_ranks`` runs an iteration again and returns a
    sentence with the ranks of its invalid gradients."""

    def __init__(self, rank: int, find_ranks: Callable[[GlobalBatch], str]) -> None:
        self.finite, self.recent, self.find_ranks = FiniteCheck(rank), RecentBatches(), find_ranks

    def save(self, iteration: int, size: int, counts: Tensor, batches: Iterator[dict]) -> Iterator[dict]:
        """Return ``batches``, which are saved as they are read."""
        return self.recent.save(iteration, size, counts, batches)

    def update(self, optimizer: MegatronOptimizer, values: StepValues) -> StepResult:
        """Queue the values and the update; no device sync."""
        update = optimizer.update(self.finite.skip_update(values.totals, values.num_tokens))
        self.finite.note(
            values.iteration, values.consumed_samples, values.losses, values.num_tokens, update.found_nonfinite
        )
        return StepResult(False, *update)

    def read(self, keep: int = 0) -> None:
        """Wait for the values of earlier iterations; raise UserError or NonFiniteError for the first invalid one."""
        self.finite.read(keep, lambda iteration: self.find_ranks(self.recent.of_iteration(iteration)))


def choose_check(cfg: PretrainConfig, rank: int, find_ranks: Callable[[GlobalBatch], str]) -> StepCheck:
    """Return the check of a run. With fp16 the loss scale reacts to overflows at once."""
    if cfg.training.check_for_nan_in_loss_and_grad and not cfg.model.fp16:
        return DelayedCheck(rank, find_ranks)
    return ImmediateCheck(rank, cfg.training.check_for_nan_in_loss_and_grad)
