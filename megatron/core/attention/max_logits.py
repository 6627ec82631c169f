"""Maximum attention logit of each head since the last reset, for QK-Clip and logs.

The scores are computed a second time, in blocks of queries, so that any attention kernel can be used: the cost is Q K^T
of the visible half, about a quarter of the forward pass, plus a block of scores in memory. Pairs that are hidden by
packed documents or a dense mask count too: the result is then an upper bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.attention.masks import hidden_pairs
from megatron.core.attention.tiles import Visibility, full_tile

_BLOCK = 1024
"""Queries per block: at 8 heads and 8,192 keys, 128 MiB of bf16 scores."""


class MaxLogits:
    """Accumulator of one core attention: ``values`` [a] in fp32 (fp64 for fp64), -inf before the first call.
    Recomputation may call it again: a maximum does not change."""

    def __init__(self, scale: float, visibility: Visibility, layer_number: int) -> None:
        self.scale, self.visibility, self.layer_number = scale, visibility, layer_number
        self.values: Tensor | None = None

    @torch.no_grad()
    def add(self, query: Tensor, key: Tensor) -> None:
        """Take the maximum over the visible pairs of query [s, b, a, d] and key [t, b, g, d]. No host sync."""
        num_queries, _, heads, _ = query.shape
        grouped = query.unflatten(2, (key.shape[2], -1)).permute(1, 2, 3, 0, 4)  # [b, g, p, s, d]
        keys = key.permute(1, 2, 3, 0).unsqueeze(2)
        hidden = hidden_pairs(full_tile(num_queries, key.shape[0], self.visibility), query.device)
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.values is None:
            self.values = query.new_full((heads,), -torch.inf, dtype=wide)
        for start in range(0, num_queries, _BLOCK):
            scores = torch.matmul(grouped[..., start : start + _BLOCK, :], keys)
            if hidden is not None:
                scores = scores.masked_fill_(hidden[start : start + _BLOCK], -torch.inf)
            maximum = scores.amax((0, 3, 4)).flatten().to(wide) * self.scale
            self.values.copy_(torch.maximum(self.values, maximum))

    def take(self, like: Tensor, heads: int) -> Tensor:
        """Return the maxima [a] and start again; without calls -inf on the device of ``like``."""
        if self.values is None:
            return torch.full((heads,), -torch.inf, device=like.device)
        taken = self.values.clone()
        self.values.fill_(-torch.inf)
        return taken
