"""Norms and counts over the whole model, each unique parameter once.

A parameter that is sharded over an axis contributes its shards; one that is replicated there contributes from the axis'
rank 0 alone. Which it is follows from its placement (``parameter.spec``). Data-parallel ranks hold equal gradients and
are not added up, unless each has a shard of its own. Over which ranks a sum goes therefore differs between dense and
expert parameters: a *share* is tensors with the groups whose ranks together hold each of their elements once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import Group

_BATCH = 1 << 28  # elements: 1 GB in fp32

Share = tuple[Iterable[Tensor], Sequence[Group]]


def sum_over_model(shares: Iterable[Share], local_sum: Callable[[Iterable[Tensor]], Tensor]) -> Tensor:
    """The sum over the model of what ``local_sum``, a new scalar, makes of each share's tensors.

    Collective: every rank comes with the same groups in the same order, whether it has tensors or not.
    """
    sums = []
    for tensors, groups in shares:
        value = local_sum(tensors)
        for group in groups:
            if group.size > 1:
                dist.all_reduce(value, group=group.handle)
        sums.append(value)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def l2_norm(shares: Iterable[Share], device: torch.device) -> Tensor:
    """L2 norm over all tensors of the model as an fp64 scalar on ``device``.

    One pass over memory: a tensor's sum of squares in fp32 (fp64 for fp64), in an order that depends on its size alone;
    theirs in fp64.
    """

    def squares(tensors: Iterable[Tensor]) -> Tensor:
        norms = [norm.to(torch.float64) for batch in _batches(tensors) for norm in _norms(batch)]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)

    return sum_over_model(shares, squares).sqrt()


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of one dtype, cut so that tensors made for this (masters put together) do not exist all at once."""
    batch: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if batch and (tensor.dtype != batch[0].dtype or elements > _BATCH):
            yield batch
            batch, elements = [], 0
        batch.append(tensor)
        elements += tensor.numel()
    if batch:
        yield batch


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    dtype = None if tensors[0].dtype == torch.float64 else torch.float32
    return torch._foreach_norm(tensors, 2, dtype=dtype)


def count_zeros(shares: Iterable[Share], device: torch.device) -> Tensor:
    """Number of elements that are exactly zero, over the model, as an int64 scalar on ``device``."""

    def zeros(tensors: Iterable[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in tensors:
            total += tensor.numel() - torch.count_nonzero(tensor)
        return total

    return sum_over_model(shares, zeros)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that brings a norm down to ``max_norm``: min(1, max_norm / (norm + 1e-6))."""
    return (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
