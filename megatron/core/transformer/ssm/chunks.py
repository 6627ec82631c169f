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
    connected, start, end = _documents(follows, size, sums.device)
    differences = sums.unsqueeze(-1) - sums.unsqueeze(-2)
    within = differences.masked_fill(~connected, -torch.inf).exp()
    from_start, to_end = sums.exp(), (sums[..., -1:] - sums).exp()
    if start is not None and end is not None:
        from_start, to_end = from_start * start, to_end * end
    return Decays(within, from_start, to_end, from_start[..., -1])


def channel_decays(
    left: Tensor, key: Tensor, log_decay: Tensor, follows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores, start, end) of log-decays per key channel. Scores [m, n, b, h, c, c] sum over channels ``left``
    of token i times ``key`` of token j <= i times its remaining part; start and end [n, b, h, c, k] are as in
    :class:`Decays`.

    Scores do not factor into left exp(G) and key exp(-G), G the cumulative sums: the second exponent overflows. Blocks
    of tokens are merged in pairs instead: tokens of the second one decay since its beginning, tokens of the first one
    until its end. Exponents are sums of log-decays without cancellation.

    Args:
        left: [m, n, b, h, c, k], c a power of two.
        key: [n, b, h, c, k].
        log_decay: g, at most 0, [n, b, h, c, k].
        follows: as in :func:`decays`.
    """
    size = log_decay.shape[-2]
    scores = (left * key).sum(-1)[..., None, None]
    left, key, since = (x.unsqueeze(-2) for x in (left, key, log_decay))  # blocks [..., number, tokens, k]
    until = torch.zeros_like(since)
    while scores.shape[-1] < size:
        (first, second), (before, after) = _pairs(since), _pairs(until)
        block = (_pairs(left)[1] * second.exp()) @ (_pairs(key)[0] * before.exp()).mT
        upper, lower = _pairs(scores)
        rows = torch.cat((upper, torch.zeros_like(block)), -1), torch.cat((block, lower), -1)
        scores = torch.cat(rows, -2)
        since = torch.cat((first, second + first[..., -1:, :]), -2)
        until = torch.cat((before + second[..., -1:, :], after), -2)
        left, key = (x.unflatten(-3, (-1, 2)).flatten(-3, -2) for x in (left, key))
    scores, start, end = (x.squeeze(-3) for x in (scores, since.exp(), until.exp()))
    connected, starts, ends = _documents(follows, size, key.device)
    if starts is not None and ends is not None:
        scores, start, end = scores * connected, start * starts.unsqueeze(-1), end * ends.unsqueeze(-1)
    return scores, start, end


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks [..., number, tokens, k] with even and with odd numbers."""
    return blocks[..., ::2, :, :], blocks[..., 1::2, :, :]


def _documents(follows: Tensor | None, size: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``connected`` [n, b, 1, c, c] or [c, c], whether token j <= i of a chunk belongs to the document of token
    i, and [n, b, 1, c] (None: all) whether a token belongs to the document of the state before the chunk, and to that
    of the chunk's last token."""
    lower = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if follows is None:
        return lower, None, None
    # number of documents that have begun in the chunk; padding continues the last one
    begun = (~in_chunks(follows.unsqueeze(-1), size, value=True)).cumsum(-1)
    return lower & (begun.unsqueeze(-1) == begun.unsqueeze(-2)), begun == 0, begun == begun[..., -1:]
