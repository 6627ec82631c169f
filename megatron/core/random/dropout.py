"""Layout-independent dropout: the mask depends on an element's position in the global batch, not on rank or time.

Legend: s sequence (local), b batch, h hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.core.autograd_context import AutogradContext
from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.dropout_add import Draw, dropout_add_triton
from megatron.core.random.philox import DropoutStream

COUNTERS_PER_PASS = 1 << 14


@dataclass(frozen=True)
class DropoutCoordinates:
    """Global coordinates of a micro-batch's tokens. Together with layer and site they determine every dropout mask."""

    stream: DropoutStream
    sample_b: Tensor
    """Global sample index, int64 [b]; or int64 [s], per token, if samples are packed into one row (b is 1)."""
    position_s: Tensor
    """Global position of each residual-stream token on this rank, int64 [s]."""


class ScaleByMask(torch.autograd.Function):
    """Return x * mask * scale; saves only the bool mask for backward."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask.view(torch.uint8)).mul_(scale)  # uint8: four times as fast as multiplying by bool

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return (grad * mask.view(torch.uint8)).mul_(ctx.scale), None, None


class Dropout(nn.Module):
    """Inverted dropout: zero with probability ``rate``, else divided by 1 - rate; the identity in eval mode. Adds the
    result to a ``residual`` if given. ``fused`` does both in one kernel, with the same mask. ``first_feature``: global
    index of the first feature of inputs, for the unfused form."""

    def __init__(self, rate: float, *site: str | int, fused: bool = False, first_feature: int = 0) -> None:
        super().__init__()
        self.rate, self.site, self.first_feature = rate, site, first_feature
        self.scale = 1.0 / (1.0 - DropoutStream.exact_rate(rate))
        self._drop = ByDevice(self._drop_in_kernel, self._drop_plain) if fused else self._drop_plain

    def _checked(self, coordinates: DropoutCoordinates | None) -> DropoutCoordinates:
        if coordinates is None:
            raise ValueError(
                f"dropout at {self.site} needs the coordinates of its tokens: pass dropout=DropoutCoordinates(...), "
                f"set the "
                "dropout rates to 0 or call eval()"
            )
        return coordinates

    def forward(self, x: Tensor, coordinates: DropoutCoordinates | None, residual: Tensor | None = None) -> Tensor:
        """Return dropout of ``x`` [s, b, h], plus ``residual`` [s, b, h] if given; in eval mode without dropout.
        Changes neither in place. Raises ValueError in training without ``coordinates``."""
        if not self.training:
            return x if residual is None else residual + x
        return self._drop(x, self._checked(coordinates), residual)

    def _drop_plain(self, x: Tensor, at: DropoutCoordinates, residual: Tensor | None) -> Tensor:
        """Builds the bool mask in steps of bounded memory and saves it for backward."""
        features = range(self.first_feature, self.first_feature + x.shape[-1])
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        step = max(1, COUNTERS_PER_PASS * 8 // max(1, x[0].numel()))
        samples = at.sample_b.view(-1, x.shape[1], 1)
        for first in range(0, len(x), step):
            position = at.position_s[first : first + step, None, None]
            sample = samples if len(samples) == 1 else samples[first : first + step]
            mask[first : first + step] = at.stream.keep_mask(self.rate, self.site, sample, position, 0, features)
        dropped = ScaleByMask.apply(x, mask, self.scale)
        return dropped if residual is None else residual + dropped

    def _drop_in_kernel(self, x: Tensor, at: DropoutCoordinates, residual: Tensor | None) -> Tensor:
        threshold = round(DropoutStream.exact_rate(self.rate) * 65536)
        return dropout_add_triton(x, residual, Draw(at.stream.key(self.site), at.sample_b, at.position_s, threshold))


class NoDropout(nn.Module):
    """Module for rate zero: returns ``x``, plus ``residual`` if given."""

    def forward(self, x: Tensor, coordinates: DropoutCoordinates | None, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else residual + x


class DropoutSettings(Protocol):
    """Settings of :func:`dropout_is_fused`."""

    params_dtype: torch.dtype
    bias_dropout_fusion: bool


def make_dropout(rate: float, *site: str | int, fused: bool = False) -> nn.Module:
    """Build the dropout module of a ``site``: the position in the model with layer number, which selects the mask."""
    return Dropout(rate, *site, fused=fused) if rate else NoDropout()


def dropout_is_fused(config: DropoutSettings) -> bool:
    """Return whether a Triton kernel computes dropout in the residual branches of ``config``'s model."""
    return kernels_serve(config.params_dtype, config.bias_dropout_fusion)
