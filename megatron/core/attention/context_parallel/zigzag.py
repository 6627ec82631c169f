"""Which tokens of a sequence a context-parallel rank holds.

A sequence is cut into 2 * CP chunks, and rank r holds chunks r and 2 * CP - 1 - r: an early and a late one, so that
every rank has the same share of the pairs that a causal mask lets through. A local tensor is the two chunks one after
the other, hence still in ascending order of positions. On one rank it is the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.config.errors import UserError

Spans = tuple[tuple[int, int], ...]
"""Stretches [start, stop) of global positions, ascending."""


def check_length(length: int, size: int) -> None:
    """ValueError where a sequence of ``length`` tokens has no 2 * ``size`` equal chunks."""
    if size > 1 and length % (2 * size):
        nearest = max(length // (2 * size), 1) * 2 * size
        raise UserError(
            f"a sequence of {length} tokens cannot be cut into 2 x context_parallel_size {size} equal chunks; "
            f"nearest length: {nearest}"
        )


def spans(length: int, rank: int, size: int) -> Spans:
    """Global positions of rank ``rank``'s tokens, neighbouring chunks joined."""
    check_length(length, size)
    if size == 1:
        return ((0, length),)
    chunk = length // (2 * size)
    first, second = rank, 2 * size - 1 - rank
    if second == first + 1:
        return ((first * chunk, (second + 1) * chunk),)
    return ((first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk))


def positions(length: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """Global position of each local token, int64 [length / size]."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans(length, rank, size)])


def local_part(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Rank ``rank``'s tokens of a tensor with whole sequences along ``dim``."""
    if size == 1:
        return x
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans(x.shape[dim], rank, size)], dim=dim)


def whole(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The whole sequence from all ranks' parts, in the order of ranks: the inverse of :func:`local_part`."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=dim)
