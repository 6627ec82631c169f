"""Two-batch overlap: communication of one half of a micro-batch overlaps with the computation of the other half.

Under sequence parallelism a layer has four exposed collectives: all-gathers before the first GEMM of attention and of
the feed-forward network, and reduce-scatters after their last. Sequences are independent, so two halves of a
micro-batch alternate. Each half of a layer is six segments. A segment ends where a collective starts, or begins where
one is awaited:

  norm, gather >   > qkv, attention   proj, scatter >   > add, norm, gather >   > fc1, activation   fc2, scatter >

An MoE has three: route, dispatch >  > experts, combine >  > add.

One half is two segments ahead, so every collective overlaps with a segment that has GEMMs, in backward too, where
autograd runs in the reverse order. (Chunks of the same GEMM would not suffice: an all-gather takes longer than the QKV
GEMM that it feeds.)

A mixer is written once, as a generator of segments. :func:`enter`, :func:`leave` and :func:`finish` leave its
collectives in flight only if the context says that another half is interleaved.

Legend: s sequence (local), b batch, h hidden."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.sites import Sited

Result = TypeVar("Result")
Segments = Generator[None, None, Result]
"""Computation that may be suspended where it yields."""


def drain(segments: Segments[Result]) -> Result:
    """Run ``segments`` to the end without interruption and return its result."""
    while True:
        try:
            next(segments)
        except StopIteration as end:
            return end.value


class Segmented(Sited, nn.Module):
    """Layer or mixer that is written as a generator of segments; ``forward`` runs them without interruption."""

    def __init__(self) -> None:
        super().__init__()
        self.open_sites()

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Compute ``forward`` as a generator that yields where a collective may be in flight."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, ctx: ForwardContext = NO_CONTEXT) -> Tensor:
        segments = self.segments(hidden_states, ctx)
        while True:  # as ``drain``, one frame less in every trace
            try:
                next(segments)
            except StopIteration as end:
                return end.value


def can_overlap(first: object, last: object) -> bool:
    """Return whether the first and last linear layer of a mixer can leave their collectives in flight."""
    return isinstance(first, ColumnParallelLinear) and isinstance(last, RowParallelLinear)


def runs_its_segments(module: object) -> bool:
    """Return whether no subclass overrides ``forward`` without ``segments``."""
    written = (vars(kind).keys() & {"forward", "segments"} for kind in type(module).__mro__)
    return "segments" in next(filter(None, written), ())


def input_reader(mixer: nn.Module) -> nn.Module | None:
    """Return the only layer that reads the mixer's input, its ``first_linear``. None if the mixer declares none, and
    for subclasses that replace the computation but not the declaration."""
    for kind in type(mixer).__mro__:
        if vars(kind).keys() & {"forward", "segments"}:
            return mixer.first_linear if "first_linear" in vars(kind) else None  # type: ignore[return-value]
    return None


def mixer_segments(mixer: Any, x: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
    """Return the segments of ``mixer``. A mixer whose linear layers have no collectives runs as one segment, because
    each yield would end the time in which the other half's collectives can overlap."""
    first = getattr(mixer, "first_linear", None)
    segments = mixer.segments(x, ctx)
    if isinstance(first, ColumnParallelLinear) and not first.traits.gather_input:
        return drain(segments)
    return (yield from segments)


def enter(linear: ColumnParallelLinear, x: Tensor, ctx: ForwardContext) -> Tensor | AsyncHandle:
    """Return the input of a column-parallel layer: with overlap a handle of its all-gather in flight, else ``x``."""
    return linear.gather(x) if ctx.overlap and linear.traits.gather_input else x


def leave(linear: RowParallelLinear, x: Tensor, ctx: ForwardContext) -> Tensor | AsyncHandle:
    """Return the output of a row-parallel layer for :func:`finish`: with overlap its reduce-scatter is in flight."""
    output, _ = linear(x, in_flight=True) if ctx.overlap and linear.scatters else linear(x)
    return output


def finish(linear: RowParallelLinear, output: Any, ctx: ForwardContext) -> Tensor:
    """Wait for the collective that :func:`leave` started and return the output."""
    return linear.finish(output)[0] if ctx.overlap and linear.scatters else output


def run_two_batch_overlap(layers: Sequence[nn.Module], hidden_states: Tensor, ctx: ForwardContext) -> Tensor:
    """Run ``layers`` with ``segments(x, ctx)`` on [s, b, h], b even, and return the same shape. Collectives of the two
    halves run in an order that all ranks share."""
    inputs = [half.contiguous() for half in hidden_states.chunk(2, dim=1)]
    contexts = ctx.halves(hidden_states.shape[1])
    first, second = (_through(layers, half, context) for half, context in zip(inputs, contexts))
    return torch.cat(alternate(first, second), dim=1)


def _through(layers: Sequence[Any], hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
    for layer in layers:
        hidden_states = yield from layer.segments(hidden_states, ctx)
    return hidden_states


def alternate(first: Segments[Tensor], second: Segments[Tensor]) -> tuple[Tensor, Tensor]:
    """Run both generators to the end and return their results, (of ``first``, of ``second``). ``first`` begins two
    segments ahead; then they alternate, so that each half's collective overlaps with a segment of the other half."""
    results: dict[Segments[Tensor], Tensor] = {}
    # after these three steps, each resumed half waits for a collective that overlapped with the other half's last
    # segment
    order = chain((first, second, first), cycle((first, second)))
    while len(results) < 2:
        segments = next(order)
        if segments not in results:
            try:
                next(segments)
            except StopIteration as end:
                results[segments] = end.value
    return results[first], results[second]
