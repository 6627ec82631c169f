"""Collectives of sequence parallelism that are started in one place and waited for in another.

    flight = start_all_gather(x, group)         backward: waits for the reduce-scatter of the gradient
    ... anything else ...
    y = flight.wait()                           backward: starts that reduce-scatter

and the other way round for ``start_reduce_scatter``. Start and end are two nodes of the graph. Autograd runs backward
nodes in the reverse order of their creation, so what ran while the collective was under way in forward, or rather its
backward pass, runs while the conjugate collective is under way in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_reduce_scatter

Start = Callable[[Tensor, Group], AsyncHandle]


class InFlight:
    """A started collective; :meth:`wait` must be called once."""

    def __init__(self, x: Tensor, group: Group, forward: Start, backward: Start) -> None:
        self.group, self.forward, self.backward = group, forward, backward
        self.under_way: AsyncHandle | None = None
        self._started: Tensor | None = _Begin.apply(x, self)

    def wait(self) -> Tensor:
        """The result. Afterwards nothing here refers to the graph, whose nodes refer to this object: without a cycle
        memory is free as soon as backward is done with it."""
        started, self._started = self._started, None
        return _End.apply(started, self)

    def take(self) -> AsyncHandle:
        """What is under way, which is then forgotten here."""
        under_way, self.under_way = self.under_way, None
        assert under_way is not None, "waited for twice"
        return under_way


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        flight.under_way = flight.forward(x, flight.group)
        return _stand_in(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.flight.take().wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, flight: InFlight) -> Tensor:
        ctx.flight = flight
        return flight.take().wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flight = ctx.flight
        flight.under_way = flight.backward(grad, flight.group)
        return _stand_in(grad), None


def _stand_in(like: Tensor) -> Tensor:
    """What goes from the one node to the other while the result is under way in the flight."""
    return like.new_empty(())


def start_all_gather(x: Tensor, group: Group) -> InFlight:
    """[s / n, ...] of every rank -> [s, ...]."""
    return InFlight(x, group, begin_all_gather, begin_reduce_scatter)


def start_reduce_scatter(x: Tensor, group: Group) -> InFlight:
    """Partial sums [s, ...] of every rank -> this rank's [s / n, ...] of the sum."""
    return InFlight(x, group, begin_reduce_scatter, begin_all_gather)
