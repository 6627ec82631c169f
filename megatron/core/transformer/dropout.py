"""Dropout whose mask depends on where a value stands in the global batch, not on which rank computes it or when.

Legend: s sequence (local), b batch, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.rng import DropoutStream

_COUNTERS_PER_PASS = 1 << 14


@dataclass(frozen=True)
class DropoutCoordinates:
    """Where the tokens of a micro-batch stand: all that a mask depends on, besides layer and site."""

    stream: DropoutStream
    sample_b: Tensor
    """Global sample counter, int64 [b]."""
    position_s: Tensor
    """Global position of each token of the residual stream on this rank, int64 [s]."""
    query_position_s: Tensor
    """Global position of each query of attention on this rank: more than the above under sequence parallelism."""


class _ScaleByMask(torch.autograd.Function):
    """x * mask * scale, keeping only the bool mask for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask.view(torch.uint8)).mul_(scale)  # four times as fast as a product with a bool tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return (grad * mask.view(torch.uint8)).mul_(ctx.scale), None, None


class Dropout(nn.Module):
    """Inverted dropout: zero with probability ``rate``, else divided by 1 - rate. The identity when evaluating."""

    def __init__(self, rate: float, *site: str | int) -> None:
        super().__init__()
        self.rate, self.site = rate, site

    def _scaled(self, x: Tensor, mask: Tensor) -> Tensor:
        return _ScaleByMask.apply(x, mask, 1.0 / (1.0 - DropoutStream.exact_rate(self.rate)))

    def _checked(self, coordinates: DropoutCoordinates | None) -> DropoutCoordinates:
        if coordinates is None:
            raise ValueError(
                f"dropout at {self.site} needs the coordinates of its tokens: pass dropout=DropoutCoordinates(...), "
                f"set the "
                "dropout rates to 0 or call eval()"
            )
        return coordinates

    def forward(self, x: Tensor, coordinates: DropoutCoordinates | None) -> Tensor:
        """``x`` [s, b, h]."""
        if not self.training:
            return x
        at = self._checked(coordinates)
        features = range(x.shape[-1])
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        step = max(1, _COUNTERS_PER_PASS * 8 // max(1, x[0].numel()))
        for first in range(0, len(x), step):
            position = at.position_s[first : first + step, None, None]
            sample = at.sample_b[None, :, None]
            mask[first : first + step] = at.stream.keep_mask(self.rate, self.site, sample, position, 0, features)
        return self._scaled(x, mask)


class AttentionDropout(Dropout):
    """Dropout of attention weights; the mask also depends on the global head and the key's position."""

    def __init__(self, rate: float, *site: str | int, first_head: int = 0) -> None:
        super().__init__(rate, *site)
        self.first_head = first_head

    def forward(self, x: Tensor, coordinates: DropoutCoordinates | None) -> Tensor:
        """``x`` [b, heads, queries, keys], keys at positions 0, 1, ..."""
        if not self.training:
            return x
        at = self._checked(coordinates)
        keys = range(x.shape[-1])
        position = at.query_position_s[None, :, None]
        rows = torch.arange(self.first_head, self.first_head + x.shape[1], device=x.device)[:, None, None]
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        step = max(1, _COUNTERS_PER_PASS * 8 // max(1, x[0, 0].numel()))
        for batch in range(x.shape[0]):
            for first in range(0, x.shape[1], step):
                mask[batch, first : first + step] = at.stream.keep_mask(
                    self.rate, self.site, at.sample_b[batch], position, rows[first : first + step], keys
                )
        return self._scaled(x, mask)


class NoDropout(nn.Module):
    """What a rate of zero builds."""

    def forward(self, x: Tensor, coordinates: DropoutCoordinates | None) -> Tensor:
        return x


def make_dropout(rate: float, *site: str | int) -> nn.Module:
    """``site`` names the place in the model, layer number included."""
    return Dropout(rate, *site) if rate else NoDropout()
