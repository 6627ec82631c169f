"""Stop a run at a NaN or infinite loss or gradient norm, without a device sync per step.

The device skips that optimizer step and every later one (:meth:`FiniteCheck.skip_update`). The values for the message
are copied to the host asynchronously and read one iteration later, or at once before logging, evaluation or a save. The
weights are then still those before the failing iteration."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.training.observe.metrics import OF_ANOTHER_RANK, NonFiniteError, check_finite

logger = logging.getLogger(__name__)


class _Iteration(NamedTuple):
    iteration: int
    consumed_samples: int
    """Samples consumed before this iteration."""
    names: list[str]
    values: Tensor
    """fp64 on the host, valid once ``copied``: a loss sum per name, number of tokens, whether the step was skipped."""
    copied: torch.cuda.Event | None


class FiniteCheck:
    """Finite check of one rank; all ranks reach the same result in the same call.

    Args:
        rank: rank named in the message."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._held: Tensor | None = None
        self._waiting: deque[_Iteration] = deque()

    def skip_update(self, losses: Mapping[str, Tensor], num_tokens: Tensor) -> Tensor:
        """Return a 0-d bool tensor: whether a loss sum is not finite, no token contributes to the loss (both over all
        ranks), or an earlier iteration was skipped. No device sync. ``losses``: ``name -> [sum, count]``."""
        reasons = [num_tokens == 0, *(~pair[0].isfinite() for pair in losses.values())]
        reasons += [] if self._held is None else [self._held]
        return torch.stack(reasons).any()

    def note(
        self, iteration: int, consumed_samples: int, losses: Mapping[str, Tensor], num_tokens: Tensor, held: Tensor
    ) -> None:
        """Queue the values of one iteration for `read`: loss sums, tokens and ``held`` (bool: update skipped), which
        the next `skip_update` reads. Starts an asynchronous copy to pinned host memory in fp64; no device sync."""
        self._held = held
        values = torch.stack([*(pair[0].double() for pair in losses.values()), num_tokens.double(), held.double()])
        copied = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append(_Iteration(iteration, consumed_samples, list(losses), values, copied))

    def read(self, keep: int = 0, find_ranks: Callable[[int], str] | None = None) -> None:
        """Check the noted iterations in order, except the newest ``keep``, and raise for the first one with an invalid
        value. Waits for their copies only. Raises UserError if no token contributed to the loss,
        :class:`NonFiniteError` for a loss sum or a gradient norm that is not finite.

        Args:
            keep: number of iterations that are not checked.
            find_ranks: returns a sentence for the message about a gradient norm, from the number of the iteration.
                Called on all ranks, and only if the gradient norm of that iteration is not finite."""
        while len(self._waiting) > keep:
            step = self._waiting.popleft()
            if step.copied is not None:
                step.copied.synchronize()
            *sums, num_tokens, held = (float(value) for value in step.values.numpy())
            iteration, samples = step.iteration, step.consumed_samples
            place = f"iteration {iteration} (samples from {samples} on)"
            check_has_tokens(num_tokens, place)
            losses = dict(zip(step.names, sums))
            check_finite(losses, iteration=iteration, rank=self.rank, consumed_samples=samples)
            if held:
                problem = f"{place}: the gradient norm is not finite though the loss is"
                ranks = ""
                if find_ranks is not None:
                    logger.warning("%s; running the iteration again to find the ranks", problem)
                    ranks = f"{find_ranks(iteration)}. "
                raise NonFiniteError(
                    f"{problem}. {ranks}The weights have not been updated. Lower --lr or raise the warm-up;"
                    " --no-check-for-nan-in-loss-and-grad skips such updates instead"
                )


def check_has_tokens(num_tokens: float, where: str) -> None:
    """Raise UserError if no token contributes to a loss, because its mean is then undefined."""
    if num_tokens == 0:
        raise UserError(
            f"{where}: no token contributes to the loss, as every loss mask is 0. The weights have not been updated; "
            "look at these samples (tools/check_dataset.py reports empty documents)"
        )


def named_by_origin(local: Mapping[str, Tensor], everywhere: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local loss sums, then the sums over all ranks under names that mark another rank as the origin. The
    first non-finite entry thus shows whether this rank caused it."""
    return {**local, **{name + OF_ANOTHER_RANK: pair for name, pair in everywhere.items()}}
