"""Weights of losses, known before the forward pass.

A task has named losses, each a sum over its own tokens or samples. The valid ones of the global batch are counted
before the forward pass, so that every loss gets its final weight as data: loss scale / count.

Legend: b batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import Group

LossPairs = Mapping[str, tuple[Tensor, Tensor]]
"""Losses of a micro-batch by name: (sum, differentiable; count)."""


class LossWeights(Mapping[str, Tensor]):
    """Weight of each named loss in the current global batch, 0-d fp64 tensors on ``device``. Their addresses never
    change, so that CUDA graphs and models may keep references; :meth:`set` rewrites the values."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.values_by_position = torch.ones(len(names), dtype=torch.float64, device=device)
        self._by_name = dict(zip(names, self.values_by_position.unbind()))

    def __getitem__(self, name: str) -> Tensor:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def set(self, values: Tensor) -> None:
        """Copy ``values`` [losses] in place, in stream order; no backward pass may still need the old ones."""
        self.values_by_position.copy_(values)


def weighted_sum(losses: LossPairs, weights: Mapping[str, Tensor] | None) -> Tensor:
    """Return the sum of weight times loss sum over the names in both ``losses`` and ``weights``, from which backward
    starts. Losses without a weight are only logged, weights without a loss ignored. ``weights`` None: all weigh 1."""
    terms = [pair[0] for pair in losses.values()]
    if weights is not None:
        terms = [losses[name][0] * weight for name, weight in weights.items() if name in losses]
    return sum(terms[1:], terms[0])


class AuxLossWeights(NamedTuple):
    """Weights of auxiliary losses in a micro-batch."""

    tokens_b: Tensor
    """fp32 [b]: valid tokens of each full sequence, over all tensor- and context-parallel ranks. If the main loss is a
    mean over this rank's tokens, they sum to the number of context-parallel ranks."""
    scale: Tensor
    """0-d: factor of the main loss (of its sum or mean) before backward."""
    samples: tuple[Tensor, Tensor] | None = None
    """If samples are packed into one row: the sample of each of this rank's tokens of the residual stream, int64 [s],
    b for padding; and the tokens of each full sample, int64 [b]. None: each row is a sample."""


class MainLoss(NamedTuple):
    """What a model with auxiliary losses must know of the main loss, which its caller computes. By default the caller
    differentiates the sum over the ``loss_mask`` that it passes to the model, or without a mask the mean."""

    scale: Tensor | None = None
    """0-d: factor of the sum (or mean) before backward; None: 1."""
    tokens_b: Tensor | None = None
    """[b]: valid tokens of each full sequence; [samples] of a row of packed samples. None: counted from ``loss_mask``,
    all-reduced over context parallelism."""
    is_mean: bool = False
    """Whether the main loss is a mean over this rank's tokens even if the model gets a loss mask."""

    def aux_weights(self, loss_mask: Tensor | None, device: torch.device, batch: int, cp: Group) -> AuxLossWeights:
        """Return the weights of auxiliary losses for ``batch`` sequences. Valid tokens: ``tokens_b`` if set; else CP
        size / ``batch`` per sequence for a mean or without ``loss_mask``; else the row sums of ``loss_mask`` [b, s],
        this context-parallel rank's part, all-reduced over ``cp``. The scale defaults to 1."""
        if self.tokens_b is not None:
            tokens_b = self.tokens_b
        elif self.is_mean or loss_mask is None:  # each context-parallel rank adds a mean
            tokens_b = torch.full((batch,), cp.size / batch, device=device)
        else:
            tokens_b = loss_mask.sum(1, dtype=torch.float32)
            if cp.size > 1:
                dist.all_reduce(tokens_b, group=cp.handle)
        return AuxLossWeights(tokens_b, torch.ones((), device=device) if self.scale is None else self.scale)
