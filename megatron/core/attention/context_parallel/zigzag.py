"""Order of the tokens of a sequence over context-parallel ranks, as plain functions of rank and size.

``zigzag``      2 * CP chunks, of which rank r holds chunks r and 2 * CP - 1 - r: an early and a late one, which
                balances the causal attention work of ranks
``contiguous``  CP chunks, one per rank

A local tensor concatenates the rank's chunks, so that its positions are ascending. One rank holds the full sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron.core.config.errors import UserError

Spans = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of global positions, ascending."""
Order = Literal["zigzag", "contiguous"]
CHUNKS: dict[Order, int] = {"zigzag": 2, "contiguous": 1}
"""Chunks of a sequence per rank."""


def check_length(length: int, size: int, order: Order = "zigzag") -> None:
    """Raise UserError if ``length`` tokens cannot be split into equal chunks, ``CHUNKS[order]`` per rank; the message
    names the nearest length. One rank takes any length."""
    chunks = CHUNKS[order] * size
    if size > 1 and length % chunks:
        nearest = max(length // chunks, 1) * chunks
        raise UserError(
            f"a sequence of {length} tokens cannot be cut into {CHUNKS[order]} x context_parallel_size {size} equal "
            f"chunks; nearest length: {nearest}"
        )


def spans(length: int, rank: int, size: int, order: Order = "zigzag") -> Spans:
    """Return the global position ranges [start, stop) of rank ``rank`` of ``size`` in a sequence of ``length`` tokens,
    ascending: one per chunk, or one range if the chunks are adjacent or ``size`` is 1."""
    check_length(length, size, order)
    if size == 1:
        return ((0, length),)
    chunk = length // (CHUNKS[order] * size)
    first, second = rank, 2 * size - 1 - rank
    if order == "contiguous":
        return ((rank * chunk, (rank + 1) * chunk),)
    if second == first + 1:
        return ((first * chunk, (second + 1) * chunk),)
    return ((first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk))


def positions(
    length: int, rank: int, size: int, device: torch.device | str | None = None, order: Order = "zigzag"
) -> Tensor:
    """Return the global position of each local token, int64 [length / size], for sequences of ``length`` tokens."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans(length, rank, size, order)])


def local_part(x: Tensor, rank: int, size: int, dim: int = 1, order: Order = "zigzag") -> Tensor:
    """Return rank ``rank``'s tokens of ``x``, full sequences along ``dim``: a copy, or ``x`` itself for one rank."""
    if size == 1:
        return x
    ranges = spans(x.shape[dim], rank, size, order)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim=dim)


def merge_parts(parts: Sequence[Tensor], dim: int = 1, order: Order = "zigzag") -> Tensor:
    """Return natural-order sequences of all ranks' ``parts``, in rank order; inverse of :func:`local_part`."""
    if len(parts) == 1:
        return parts[0]
    if order == "contiguous":
        return torch.cat([*parts], dim=dim)
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=dim)
