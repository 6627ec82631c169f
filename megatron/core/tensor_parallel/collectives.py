"""Collectives along the first dim that are started in one place and finished in another: through copy engines where the
group has them and the message is worth it, else through its torch.distributed handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from megatron.core.fusions.sum_parts import sum_all
from megatron.core.groups.collective_names import all_gather, reduce_scatter
from megatron.core.groups.process_groups import Group


class UnderWay(Protocol):
    """What was started. What it reads and writes lives as long."""

    def finish(self) -> Tensor:
        """The result, complete (on CUDA: in stream order). To be called once."""


class _Collective:
    """A collective of torch.distributed."""

    def __init__(self, start: Callable[..., Any], result: Tensor, source: Tensor, group: Group) -> None:
        self._result, self._source = result, source
        self._work = start(result, source, group=group.handle, async_op=True)

    def finish(self) -> Tensor:
        self._work.wait()
        return self._result


def begin_all_gather(x: Tensor, group: Group) -> UnderWay:
    """[s / n, ...] of every rank -> [s, ...]."""
    if group.engines is not None and group.engines.carries(x.nbytes):
        return group.engines.all_gather(x)
    whole = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return _Collective(all_gather, whole, x.contiguous(), group)


def begin_reduce_scatter(x: Tensor, group: Group) -> UnderWay:
    """Partial sums [s, ...] of every rank -> this rank's [s / n, ...] of the sum."""
    if x.shape[0] % group.size:
        raise ValueError(f"sequence length {x.shape[0]} is not divisible by the {group.name} size {group.size}")
    if group.engines is not None and group.engines.carries(x.nbytes // group.size):
        return group.engines.exchange(x.contiguous().chunk(group.size), sum_all)
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return _Collective(reduce_scatter, part, x.contiguous(), group)
