"""Stops a run at a loss or a gradient norm that is NaN or infinite, without the host waiting for the device.

The device itself holds the update back, and every later one (:meth:`FiniteCheck.skip_update`). What the host needs for
its message travels behind the iteration's work and is read one iteration later, or at once before anything is logged,
evaluated or saved: the weights are then still those before the iteration in question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.training.observe.metrics import OF_ANOTHER_RANK, NonFiniteError, check_finite


class _Iteration(NamedTuple):
    iteration: int
    consumed_samples: int
    """Before it."""
    names: list[str]
    values: Tensor
    """fp64 on the host, valid once ``copied``: a loss sum per name, then whether the update was held back."""
    copied: torch.cuda.Event | None


class FiniteCheck:
    """The check of one rank; all ranks come to the same result in the same call.

    Args:
        rank: for the message.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._held: Tensor | None = None
        self._waiting: deque[_Iteration] = deque()

    def skip_update(self, losses: Mapping[str, Tensor]) -> Tensor | None:
        """A bool on the device: one of these loss sums is not finite, or an earlier iteration was held back.

        ``losses``: ``name -> [sum, count]`` over all ranks.
        """
        reasons = [~pair[0].isfinite() for pair in losses.values()]
        reasons += [] if self._held is None else [self._held]
        return torch.stack(reasons).any() if reasons else None

    def note(self, iteration: int, consumed_samples: int, losses: Mapping[str, Tensor], held: Tensor) -> None:
        """Start to bring an iteration's loss sums (``name -> [sum, count]``) and ``held`` (bool) to the host."""
        self._held = held
        values = torch.stack([*(pair[0].double() for pair in losses.values()), held.double()])
        copied = None
        if values.is_cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = on_host.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append(_Iteration(iteration, consumed_samples, list(losses), values, copied))

    def read(self, keep: int = 0) -> None:
        """Raise :class:`NonFiniteError` for the first iteration that was held back; ``keep`` the newest unread."""
        while len(self._waiting) > keep:
            each = self._waiting.popleft()
            if each.copied is not None:
                each.copied.synchronize()
            *sums, held = (float(value) for value in each.values.numpy())
            check_finite(
                dict(zip(each.names, sums)), iteration=each.iteration, rank=self.rank,
                consumed_samples=each.consumed_samples,
            )  # fmt: skip
            if held:
                raise NonFiniteError(
                    f"iteration {each.iteration} (samples from {each.consumed_samples} on): the gradient norm is not"
                    " finite though the loss is. The weights have not been updated. Lower --lr or raise the warm-up;"
                    " --no-check-for-nan-in-loss-and-grad skips such updates instead"
                )


def named_by_origin(local: Mapping[str, Tensor], everywhere: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's own loss sums, then those over all ranks: the rank whose own it is says so."""
    return {**local, **{name + OF_ANOTHER_RANK: pair for name, pair in everywhere.items()}}
