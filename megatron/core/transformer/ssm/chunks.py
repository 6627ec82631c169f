"""Chunks of a linear recurrence ``S_t = exp(g_t) S_(t-1) + k_t v_t^T``: within a chunk of tokens the recurrence is a
product of matrices, between chunks it carries the state S. What a chunk adds, and what it forgets, depends on the sums
of the log-decays g and on where documents begin.

All sums are differences of two cumulative sums whose later one is subtracted last, so that exponents never exceed 0.

Legend: s sequence, b batch, h heads, n chunks, c tokens of a chunk, k channels of a key, v of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Decays(NamedTuple):
    """Remaining part of a token's contribution, per head; 0 across the beginning of a document."""

    within: Tensor
    """[n, b, h, c, c]: of token j at token i >= j of the same chunk, 1 on the diagonal; 0 for j > i."""
    start: Tensor
    """[n, b, h, c]: of the state before the chunk, at each token."""
    end: Tensor
    """[n, b, h, c]: of each token, at the end of the chunk."""
    total: Tensor
    """[n, b, h]: of the state before the chunk, at its end."""


def in_chunks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Return ``x`` [s, b, h, ...] as [n, b, h, c, ...], padded with ``value`` to full chunks."""
    missing = -len(x) % size
    if missing:
        x = F.pad(x, [*[0, 0] * (x.ndim - 1), 0, missing], value=value)
    return x.unflatten(0, (-1, size)).movedim(1, 3)


def from_chunks(x: Tensor, length: int) -> Tensor:
    """Return ``x`` [n, b, h, c, ...] as [s, b, h, ...], without the tokens after ``length``."""
    return x.movedim(3, 1).flatten(0, 1)[:length]


def decays(log_decay: Tensor, follows: Tensor | None, size: int) -> Decays:
    """Return the decays of chunks of ``size`` tokens.

    Args:
        log_decay: g of each token, [s, b, h], at most 0, in the dtype of the result.
        follows: whether a token follows another one of its document, bool [s, b]; None: all tokens do, the first one
            follows the state.
    """
    sums = in_chunks(log_decay, size).cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=sums.device).tril()
    connected, start, end = lower, None, None
    if follows is not None:
        # number of documents that have begun in the chunk; padding continues the last one
        begun = (~in_chunks(follows.unsqueeze(-1), size, value=True)).cumsum(-1)
        connected = lower & (begun.unsqueeze(-1) == begun.unsqueeze(-2))
        start, end = begun == 0, begun == begun[..., -1:]
    differences = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    within = differences.masked_fill(~connected, -torch.inf).exp()
    from_start, to_end = sums.exp(), (sums[..., -1:] - sums).exp()
    if start is not None and end is not None:
        from_start, to_end = from_start * start, to_end * end
    return Decays(within, from_start, to_end, from_start[..., -1])
