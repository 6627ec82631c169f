"""Asynchronous collectives along the first dim, through copy engines if the group has them and the message size fits,
else through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.fusions.sum_parts import sum_all
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.collective_names import all_gather, reduce_scatter
from megatron.core.groups.process_groups import Group


class _Collective:
    """Collective of torch.distributed in flight, with references to its input and output."""

    def __init__(self, work: dist.Work, result: Tensor, source: Tensor) -> None:
        # keep the input: otherwise its memory could be reused for the next allocation while NCCL still reads it
        self._work, self._result, self._source = work, result, source

    def wait(self) -> Tensor:
        self._work.wait()
        return self._result


def _started(start: Callable[..., dist.Work], result: Tensor, source: Tensor, group: Group) -> AsyncHandle:
    return _Collective(start(result, source, group=group.handle, async_op=True), result, source)


def begin_all_reduce(x: Tensor, group: Group) -> AsyncHandle:
    """Start an in-place all-reduce (sum); ``wait()`` gives ``x``. Not for one rank (not checked)."""
    return _Collective(dist.all_reduce(x, group=group.handle, async_op=True), x, x)


def begin_all_gather(x: Tensor, group: Group) -> AsyncHandle:
    """Start an all-gather, [s / n, ...] of every rank -> [s, ...] in rank order; ``wait()`` gives the new tensor. ``x``
    must not change until then. Not for a group of one rank (not checked)."""
    if group.engines is not None and group.engines.carries(x.nbytes):
        return group.engines.all_gather(x)
    gathered = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return _started(all_gather, gathered, x.contiguous(), group)


def begin_reduce_scatter(x: Tensor, group: Group) -> AsyncHandle:
    """Start a reduce-scatter of partial sums over ``group``, [s, ...] -> this rank's [s / n, ...]. ``wait()`` of the
    returned handle gives the new tensor; ``x`` is not changed. Copy engines sum in fp32 and round once, torch in the
    dtype of ``x``. Raises ValueError if s is not divisible by n. Not for a group of one rank (not checked)."""
    if x.shape[0] % group.size:
        raise ValueError(f"sequence length {x.shape[0]} is not divisible by the {group.name} size {group.size}")
    if group.engines is not None and group.engines.carries(x.nbytes // group.size):
        return group.engines.exchange(x.contiguous().chunk(group.size), sum_all)
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return _started(reduce_scatter, part, x.contiguous(), group)


def begin_all_to_all(
    x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int], is_even: bool = False
) -> AsyncHandle:
    """Start an all-to-all over ``group``: send ``send[r]`` consecutive rows of ``x`` to rank r and receive
    ``receive[r]`` rows from it, in rank order. ``wait()`` of the returned handle gives the new tensor. ``is_even``
    promises that all sizes on all ranks are equal, which copy engines require; they then ignore ``send`` and
    ``receive``. Not for a group of one rank (not checked)."""
    # even sizes only: windows grow on all ranks together, and a rank knows only its local sizes
    if is_even and group.engines is not None and group.engines.carries(x.nbytes // group.size):
        return group.engines.exchange(x.contiguous().chunk(group.size), torch.cat)
    result = x.new_empty((sum(receive), *x.shape[1:]))
    source = x.contiguous()
    work = dist.all_to_all_single(result, source, list(receive), list(send), group=group.handle, async_op=True)
    return _Collective(work, result, source)
