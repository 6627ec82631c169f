"""Collectives of sequence and expert parallelism that are started in one place and waited for in another.

    handle = start_all_gather(x, group)         backward: waits for the reduce-scatter of the gradient
    ... anything else ...
    y = handle.wait()                           backward: starts that reduce-scatter

and the other way round for ``start_reduce_scatter``; ``start_all_to_all`` is its own conjugate. Start and end are two
nodes of the graph. Autograd runs backward nodes in the reverse order of their creation, so what ran while the
collective was under way in forward, or rather its backward pass, runs while the conjugate collective is under way in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_all_to_all, begin_reduce_scatter

Start = Callable[[Tensor, Group], AsyncHandle]


class AutogradHandle:
    """A started collective that is part of autograd's graph: an ``AsyncHandle`` whose result has a gradient."""

    def __init__(self, x: Tensor, group: Group, forward: Start, backward: Start) -> None:
        self.group, self.forward, self.backward = group, forward, backward
        self.running: AsyncHandle | None = None
        self._started: Tensor | None = _Begin.apply(x, self)

    def wait(self) -> Tensor:
        """The result. To be called once."""
        # the graph refers to this object: a reference back would be a cycle that only the garbage collector finds
        # (with --manual-gc, which runs it rarely, gathered inputs would fill the memory)
        started, self._started = self._started, None
        return _End.apply(started, self)

    def take(self) -> AsyncHandle:
        """The collective under way, of forward or of backward; at most one is at a time."""
        running, self.running = self.running, None
        assert running is not None, "waited for twice"
        return running


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: AutogradHandle) -> Tensor:
        ctx.handle = handle
        handle.running = handle.forward(x, handle.group)
        return _stand_in(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # ``grad`` is the stand-in's; the gradient of x is what the collective that ``_End`` started brings
        return ctx.handle.take().wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, handle: AutogradHandle) -> Tensor:
        ctx.handle = handle
        return handle.take().wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        handle = ctx.handle
        handle.running = handle.backward(grad, handle.group)
        return _stand_in(grad), None


def _stand_in(like: Tensor) -> Tensor:
    """What goes from the one node to the other while the result is under way in the handle."""
    return like.new_empty(())


def start_all_gather(x: Tensor, group: Group) -> AutogradHandle:
    """[s / n, ...] of every rank -> [s, ...]."""
    return AutogradHandle(x, group, begin_all_gather, begin_reduce_scatter)


def start_reduce_scatter(x: Tensor, group: Group) -> AutogradHandle:
    """Partial sums [s, ...] of every rank -> this rank's [s / n, ...] of the sum."""
    return AutogradHandle(x, group, begin_reduce_scatter, begin_all_gather)


def start_all_to_all(
    x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int], is_even: bool = False
) -> AutogradHandle:
    """``send`` rows for each rank -> ``receive`` rows from each rank; ``is_even``: as many between any two ranks."""
    there = partial(begin_all_to_all, send=send, receive=receive, is_even=is_even)
    return AutogradHandle(x, group, there, partial(there, send=receive, receive=send))
