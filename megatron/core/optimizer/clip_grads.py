"""Gradient norm, zero count and clipping factor over the full model, counting each element once.

A parameter that is sharded over an axis contributes all shards; a replicated one contributes on rank 0 of the axis
only, as its placement (``parameter.spec``) says. Data-parallel ranks hold equal gradients and are not summed over,
unless gradients are sharded over them. The groups of a sum therefore differ between dense and expert parameters. A
``Share`` pairs local tensors with the groups to all-reduce over, whose ranks together hold each element exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.groups.process_groups import Group

_BATCH = 1 << 28  # elements: 1 GB in fp32

Share = tuple[Iterable[Tensor], Sequence[Group]]


def sum_over_model(shares: Iterable[Share], local_sum: Callable[[Iterable[Tensor]], Tensor]) -> Tensor:
    """Sum ``local_sum(tensors)``, a new 0-d tensor that is all-reduced in place, over all shares and all ranks of their
    groups. Collective: every rank must pass the same groups in the same order, with or without tensors."""
    sums = []
    # no branch on local tensors: a rank without parameters of a share must still join its all-reduces
    for tensors, groups in shares:
        value = local_sum(tensors)
        for group in groups:
            if group.size > 1:
                dist.all_reduce(value, group=group.handle)
        sums.append(value)
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def l2_norm(
    shares: Iterable[Share], device: torch.device, copies: Iterable[Iterable[Tensor]] = itertools.repeat(())
) -> Tensor:
    """Return the L2 norm over all shares and ranks, an fp64 scalar on ``device``. Collective. Norms of single tensors
    are computed in fp32 (fp64 for fp64), in an order that depends only on the size; their squares are summed in fp64.
    Reads memory once and does not wait for the device. ``copies``: per share, tensors that other ranks count; they add
    nothing, but a NaN or infinity in them makes the norm NaN on all ranks."""
    uncounted = iter(copies)

    def squares(tensors: Iterable[Tensor]) -> Tensor:
        # 0 * finite = 0 keeps the bits of the sum; 0 * NaN and 0 * inf are NaN
        return _squares(tensors, device) + 0.0 * _squares(next(uncounted), device)

    return sum_over_model(shares, squares).sqrt()


def _squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    norms = [norm.to(torch.float64) for batch in _batches(tensors) for norm in _norms(batch)]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype with up to one tensor more than ``_BATCH`` elements: a bound of memory if the
    iterable creates tensors (masters joined from two parts)."""
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
    """Return the number of elements equal to zero over all shares and ranks, an int64 scalar on ``device``. Collective
    over the groups of the shares, in order; does not wait for the device."""

    def zeros(tensors: Iterable[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for tensor in tensors:
            total += tensor.numel() - torch.count_nonzero(tensor)
        return total

    return sum_over_model(shares, zeros)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the clipping factor ``min(1, max_norm / (norm + 1e-6))``, a tensor like ``norm``; NaN for a NaN norm."""
    return (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
