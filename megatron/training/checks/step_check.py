"""The check of a step's losses and gradients and its update: at once, which waits for the device, or one iteration
later (``finite.py``), which does not. One of them is chosen per run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron.core.config.errors import listed
from megatron.core.dist_checkpointing.exchange import all_gather_json
from megatron.core.groups.process_groups import Group
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training.checks.finite import FiniteCheck, check_has_tokens
from megatron.training.checks.gradient_origin import MOST_NAMED, GlobalBatch, RecentBatches
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.observe.metrics import OF_ANOTHER_RANK, check_finite

logger = logging.getLogger(__name__)


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
    the optimizer skips the update. ``overflows``: skipped updates are usual, as the loss scale reacts to them."""

    def __init__(self, world: Group, is_strict: bool, overflows: bool) -> None:
        self.world, self.is_strict, self.overflows = world, is_strict, overflows

    def save(self, iteration: int, size: int, counts: Tensor, batches: Iterator[dict]) -> Iterator[dict]:
        """Return ``batches``; nothing is saved."""
        return batches

    def update(self, optimizer: MegatronOptimizer, values: StepValues) -> StepResult:
        """Raise UserError without tokens, NonFiniteError for losses; wait for the update."""
        place = f"iteration {values.iteration} (samples from {values.consumed_samples} on)"
        check_has_tokens(values.num_tokens.item(), place)
        if self.is_strict:
            sums = {name: pair[0] for name, pair in values.losses.items()}
            samples = values.consumed_samples
            check_finite(sums, iteration=values.iteration, rank=self.world.rank, consumed_samples=samples)
        updated, grad_norm, num_zeros = optimizer.step()
        if not updated:
            self._report(place, values.losses)
        return StepResult(not updated, False, grad_norm, num_zeros)

    def _report(self, place: str, losses: Mapping[str, Tensor]) -> None:
        """Log why an update was skipped. Collective."""
        local = [name for name in losses if name + OF_ANOTHER_RANK in losses]
        names = [name for name in local if not bool(losses[name][0].isfinite())]
        ranks = [f"rank {rank} ({', '.join(of)})" for rank, of in enumerate(all_gather_json(names, self.world)) if of]
        if ranks:
            logger.warning("%s: no update: losses are not finite on %s", place, listed(ranks, most=MOST_NAMED))
        elif not self.overflows:
            text = "no update: gradients are not finite though all losses are"
            fix = "without --no-check-for-nan-in-loss-and-grad the run stops there and names the ranks"
            logger.warning("%s: %s; %s", place, text, fix)

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


def choose_check(cfg: PretrainConfig, world: Group, find_ranks: Callable[[GlobalBatch], str]) -> StepCheck:
    """Return the check of a run. With fp16 the loss scale reacts to overflows at once."""
    is_strict, fp16 = cfg.training.check_for_nan_in_loss_and_grad, cfg.model.fp16
    return DelayedCheck(world.rank, find_ranks) if is_strict and not fp16 else ImmediateCheck(world, is_strict, fp16)
