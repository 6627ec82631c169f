"""Differentiable collectives of tensor and sequence parallelism over a given group.

Each operator of the table at the end is one half of a conjugate pair: its backward is the forward of its partner. On a
group of one rank it returns its input. The functions before the table are the plain collectives, without autograd; they
communicate on every group, and splits along the first dim may return views.
``mappings.py`` has Megatron-LM's names, which default to the running program's group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.autograd_context import AutogradContext
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_reduce_scatter

Collective = Callable[[Tensor, Group], Tensor]


def identity(x: Tensor, group: Group) -> Tensor:
    """Return ``x``; ``group`` gives all operators the same signature."""
    return x


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Return the all-reduced sum of ``x``; ``x`` is not changed."""
    result = x.contiguous().clone() if x.is_contiguous() else x.contiguous()
    dist.all_reduce(result, group=group.handle)
    return result


def equal_parts(x: Tensor, group: Group, dim: int) -> tuple[Tensor, ...]:
    """Return views of ``x`` split along ``dim``, one per rank; ValueError if the size is not divisible."""
    if x.shape[dim] % group.size:
        raise ValueError(f"dim {dim} of shape {tuple(x.shape)} is not divisible by the {group.name} size {group.size}")
    return x.chunk(group.size, dim=dim)


def split_along_last_dim(x: Tensor, group: Group) -> Tensor:
    return equal_parts(x, group, -1)[group.rank].contiguous()


def all_gather_along_last_dim(x: Tensor, group: Group) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, x.contiguous(), group=group.handle)
    return torch.cat(parts, dim=-1)


def split_along_first_dim(x: Tensor, group: Group) -> Tensor:
    return equal_parts(x, group, 0)[group.rank].contiguous()


def all_gather_along_first_dim(x: Tensor, group: Group) -> Tensor:
    return begin_all_gather(x, group).wait()


def reduce_scatter_along_last_dim(x: Tensor, group: Group) -> Tensor:
    return reduce_scatter_along_first_dim(torch.cat(equal_parts(x, group, -1), dim=0), group)


def reduce_scatter_along_first_dim(x: Tensor, group: Group) -> Tensor:
    return begin_reduce_scatter(x, group).wait()


class _Conjugate(torch.autograd.Function):
    """Applies one collective in forward and its partner in backward."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: Group, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward
        result = forward(x, group)
        return result.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.backward_collective(grad, ctx.group), None, None, None


def conjugate(forward: Collective, backward: Collective) -> Collective:
    """Return the operator that applies ``forward``, and ``backward`` to the gradient."""
    return partial(_conjugate, forward=forward, backward=backward)  # unlike a closure, can be pickled with the layers


def _conjugate(x: Tensor, group: Group, *, forward: Collective, backward: Collective) -> Tensor:
    return x if group.size == 1 else _Conjugate.apply(x, group, forward, backward)


copy_to_region = conjugate(identity, all_reduce_sum)
reduce_from_region = conjugate(all_reduce_sum, identity)
scatter_to_region = conjugate(split_along_last_dim, all_gather_along_last_dim)
gather_from_region = conjugate(all_gather_along_last_dim, split_along_last_dim)
scatter_to_sequence = conjugate(split_along_first_dim, all_gather_along_first_dim)
gather_from_sequence = conjugate(all_gather_along_first_dim, reduce_scatter_along_first_dim)
gather_replicated_from_sequence = conjugate(all_gather_along_first_dim, split_along_first_dim)
"""All-gather the sequence for a computation that every rank repeats: gradients are equal, not partial sums."""
reduce_scatter_to_sequence = conjugate(reduce_scatter_along_first_dim, all_gather_along_first_dim)
gather_last_dim = conjugate(all_gather_along_last_dim, reduce_scatter_along_last_dim)
reduce_scatter_last_dim = conjugate(reduce_scatter_along_last_dim, all_gather_along_last_dim)
