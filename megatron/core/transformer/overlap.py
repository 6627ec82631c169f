"""Tensor- and expert-parallel communication of one half of a micro-batch behind the computation of the other half.

Under sequence parallelism a layer waits four times: positions are gathered before the first GEMM of attention and of
the feed-forward network, and sums are scattered after the last. The sequences of a micro-batch have nothing to do
with each other, so two halves alternate. A layer is six segments per half, each of which ends where a collective is
started or begins where one is waited for:

    norm, gather >   > qkv, attention   proj, scatter >   > add, norm, gather >   > fc1, activation   fc2, scatter >

A mixture of experts has three: route, dispatch >  > experts, combine >  > add.

One half is two segments ahead. So every collective has a segment with GEMMs beside it; in backward, where autograd goes
back the same way, as well. (Collectives need the other half's independent work and not pieces of the same GEMM: a
gather takes longer than the GEMM of query, key and value that it feeds.)

A mixer says where it may stop by being written once, as a generator of segments: :func:`enter`, :func:`leave` and
:func:`finish` start and end its collectives apart only where the context says that another half computes in between.

Legend: s sequence (local), b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.context import ForwardContext

Result = TypeVar("Result")
Segments = Generator[None, None, Result]
"""Computation that may stop where it yields."""


def drain(segments: Segments[Result]) -> Result:
    """The result of a computation that nothing interrupts."""
    while True:
        try:
            next(segments)
        except StopIteration as end:
            return end.value


def can_overlap(first: Any, last: Any) -> bool:
    """Whether the linear layers by which tokens enter and leave a mixer can leave their collectives under way."""
    return isinstance(first, ColumnParallelLinear) and isinstance(last, RowParallelLinear)


def runs_its_segments(module: Any) -> bool:
    """Whether ``forward`` does what ``segments`` does: no subclass of the class with both overrides it alone."""
    written = (vars(kind).keys() & {"forward", "segments"} for kind in type(module).__mro__)
    return "segments" in next(filter(None, written), ())


def segments_of(mixer: Any, x: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
    """Those of ``mixer``; of one whose linear layers have no collectives all at once, since each stop ends the time
    that the other half's collectives have."""
    first = getattr(mixer, "first_linear", None)
    segments = mixer.segments(x, ctx)
    if isinstance(first, ColumnParallelLinear) and not first.traits.gather_input:
        return drain(segments)
    return (yield from segments)


def enter(linear: Any, x: Tensor, ctx: ForwardContext) -> Any:
    """The input of a column-parallel layer, on its way where it has one and work of the other half follows."""
    return linear.gather(x) if ctx.overlap and linear.traits.gather_input else x


def leave(linear: Any, x: Tensor, ctx: ForwardContext) -> Any:
    """The output of a row-parallel layer, for :func:`finish`."""
    output, _ = linear(x, in_flight=True) if ctx.overlap and linear.scatters else linear(x)
    return output


def finish(linear: Any, output: Any, ctx: ForwardContext) -> Tensor:
    """The collectives that :func:`leave` started."""
    return linear.finish(output)[0] if ctx.overlap and linear.scatters else output


def run_two_batch_overlap(layers: Sequence[Any], hidden_states: Tensor, ctx: ForwardContext) -> Tensor:
    """[s, b, h] -> [s, b, h], b even, through ``layers`` that have ``segments(x, ctx)``."""
    inputs = [half.contiguous() for half in hidden_states.chunk(2, dim=1)]
    contexts = ctx.halves(hidden_states.shape[1])
    first, second = (_through(layers, half, own) for half, own in zip(inputs, contexts))
    return torch.cat(alternate(first, second), dim=1)


def _through(layers: Sequence[Any], hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
    for layer in layers:
        hidden_states = yield from layer.segments(hidden_states, ctx)
    return hidden_states


def alternate(first: Segments[Tensor], second: Segments[Tensor]) -> tuple[Tensor, Tensor]:
    """Runs both to their ends, ``first`` two segments ahead."""
    results: dict[Segments[Tensor], Tensor] = {}
    # after these three, whichever is resumed waits for a collective that the other's last segment has hidden
    order = chain((first, second, first), cycle((first, second)))
    while len(results) < 2:
        segments = next(order)
        if segments not in results:
            try:
                next(segments)
            except StopIteration as end:
                results[segments] = end.value
    return results[first], results[second]
