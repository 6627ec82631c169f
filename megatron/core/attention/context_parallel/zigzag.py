"""Zig-zag sharding of sequences over context-parallel ranks.

A sequence is split into 2 * CP chunks, and rank r holds chunks r and 2 * CP - 1 - r: an early and a late one, which
balances the causal attention work of ranks. A local tensor concatenates both chunks, so that its positions are
ascending. One rank holds the full sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.config.errors import UserError

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of global positions, ascending."""


def check_length(length: int, size: int) -> None:
    """Raise UserError if ``length`` tokens cannot be split into 2 * ``size`` equal chunks; the message names the
    nearest length. One rank takes any length."""
    if size > 1 and length % (2 * size):
        nearest = max(length // (2 * size), 1) * 2 * size
        raise UserError(
            f"a sequence of {length} tokens cannot be cut into 2 x context_parallel_size {size} equal chunks; "
            f"nearest length: {nearest}"
        )


def spans(length: int, rank: int, size: int) -> Spans:
    """Return the global position ranges [start, stop) of rank ``rank`` of ``size`` in a sequence of ``length`` tokens,
    ascending: two chunks, or one range if the chunks are adjacent or ``size`` is 1. Raises UserError as
    :func:`check_length`."""
    check_length(length, size)
    if size == 1:
        return ((0, length),)
    chunk = length // (2 * size)
    first, second = rank, 2 * size - 1 - rank
    if second == first + 1:
        return ((first * chunk, (second + 1) * chunk),)
    return ((first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk))


def positions(length: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the global position of each local token, int64 [length / size], for sequences of ``length`` tokens."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans(length, rank, size)])


def local_part(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return rank ``rank``'s zig-zag tokens of ``x``, full sequences along ``dim``: a copy, or ``x`` itself for one
    rank."""
    if size == 1:
        return x
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans(x.shape[dim], rank, size)], dim=dim)


def merge_parts(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Reassemble natural-order sequences from all ranks' zig-zag ``parts``, in rank order: a copy, or the one part
    itself; inverse of :func:`local_part`."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=dim)
