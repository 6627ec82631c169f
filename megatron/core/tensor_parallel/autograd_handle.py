"""Differentiable collectives that start and finish at separate points of the forward pass.

  handle = start_all_gather(x, group)         backward: waits for the reduce-scatter of the gradient
  ... anything else ...
  y = handle.wait()                           backward: starts that reduce-scatter

``start_reduce_scatter`` is the reverse, and ``start_all_to_all`` is its own conjugate. Start and end are two nodes of
the graph. Autograd runs backward nodes in the reverse order of their creation. Work that overlapped with the collective
in forward therefore overlaps, in its backward, with the conjugate collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.core.autograd_context import AutogradContext
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_all_to_all, begin_reduce_scatter

Start = Callable[[Tensor, Group], AsyncHandle]


class AutogradHandle:
    """Collective in flight that is part of autograd's graph: an ``AsyncHandle`` whose result has a gradient."""

    def __init__(self, x: Tensor, group: Group, forward: Start, backward: Start) -> None:
        self.group, self.forward, self.backward = group, forward, backward
        self.running: AsyncHandle | None = None
        self._started: Tensor | None = _Begin.apply(x, self)

    def wait(self) -> Tensor:
        """Wait (on CUDA: in stream order) and return the result, differentiable. A second call is an AssertionError."""
        # drop the reference: the graph refers to this object, and a cycle would be freed only by the garbage collector
        # (with --manual-gc it runs rarely, and gathered inputs would fill the memory)
        started, self._started = self._started, None
        return _End.apply(started, self)

    def take(self) -> AsyncHandle:
        """Return the collective in flight, of forward or backward, and clear it. At most one is in flight at a time."""
        running, self.running = self.running, None
        assert running is not None, "waited for twice"
        return running


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, handle: AutogradHandle) -> Tensor:
        ctx.handle = handle
        handle.running = handle.forward(x, handle.group)
        return _stand_in(x)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # ``grad`` is the placeholder's, without data; the gradient of x is the result of the collective that ``_End``
        # started
        return ctx.handle.take().wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, started: Tensor, handle: AutogradHandle) -> Tensor:
        ctx.handle = handle
        return handle.take().wait()

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        handle = ctx.handle
        handle.running = handle.backward(grad, handle.group)
        return _stand_in(grad), None


def _stand_in(like: Tensor) -> Tensor:
    """Empty tensor that connects the two nodes in the graph while the handle holds the data."""
    return like.new_empty(())


def start_all_gather(x: Tensor, group: Group) -> AutogradHandle:
    """Start a differentiable all-gather, [s / n, ...] of every rank -> [s, ...]. The gradient is reduce-scattered."""
    return AutogradHandle(x, group, begin_all_gather, begin_reduce_scatter)


def start_reduce_scatter(x: Tensor, group: Group) -> AutogradHandle:
    """Start a differentiable reduce-scatter of partial sums, [s, ...] -> [s / n, ...]; all-gathers the gradient."""
    return AutogradHandle(x, group, begin_reduce_scatter, begin_all_gather)


def start_all_to_all(
    x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int], is_even: bool = False
) -> AutogradHandle:
    """Start a differentiable all-to-all of ``send`` rows to and ``receive`` rows from each rank; ``is_even``: all sizes
    on all ranks are equal. The gradient returns by the inverse all-to-all."""
    exchange = partial(begin_all_to_all, send=send, receive=receive, is_even=is_even)
    return AutogradHandle(x, group, exchange, partial(exchange, send=receive, receive=send))
