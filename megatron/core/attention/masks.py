"""Which keys a query may see, as bool masks (True: may not).

Legend: q query positions, k key positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.window import Window


def hidden_mask(
    num_queries: int, num_keys: int, *, causal: bool, window: Window | None, device: torch.device | None = None
) -> Tensor | None:
    """[q, k], or None where everything is seen. The last query stands at the last key's position."""
    left, right = window or (-1, -1)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    distance = torch.arange(num_keys, device=device)[None, :] - torch.arange(
        num_keys - num_queries, num_keys, device=device
    ).unsqueeze(1)
    mask = torch.zeros(num_queries, num_keys, dtype=torch.bool, device=device)
    if right >= 0:
        mask |= distance > right
    if left >= 0:
        mask |= distance < -left
    return mask


def document_mask(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """[b, 1, s, s]: pairs of tokens of different documents. Dense, for the reference path only."""
    tokens = torch.arange(batch * length, device=cu_seqlens.device)
    document = torch.bucketize(tokens, cu_seqlens[1:].to(tokens.dtype), right=True).view(batch, 1, length)
    return document.unsqueeze(-1) != document.unsqueeze(-2)
