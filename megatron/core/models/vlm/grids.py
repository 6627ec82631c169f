"""Patches of packed images: their places, on the host.

An image of h x w patches (multiples of the merge size m) is a list of squares of m x m patches, row by row; so are the
patches within a square. Every square becomes one image token.

Legend: i images, n patches of all images, t image tokens of all images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Grids:
    """Heights and widths of images, in patches."""

    sizes: Tensor
    """int64 [i, 2] on the host."""
    merge: int
    class_tokens: int = 0
    """Image tokens of an image before the tokens of its patches."""

    @cached_property
    def patches(self) -> Tensor:
        """Patches of each image, int64 [i]."""
        return self.sizes.prod(1)

    @property
    def tokens(self) -> Tensor:
        """Image tokens of each image, int64 [i]."""
        return self.patches // self.merge**2 + self.class_tokens

    @property
    def bounds(self) -> Tensor:
        """First patch of each image, and the number of patches, int32 [i + 1]."""
        return F.pad(self.patches.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def coordinates(self) -> Tensor:
        """Row and column of each patch in its image, int64 [n, 2]."""
        merge, sizes = self.merge, self.sizes.repeat_interleave(self.patches, 0)
        number = torch.arange(len(sizes)) - self.bounds[:-1].long().repeat_interleave(self.patches)
        square, place = number // merge**2, number % merge**2
        squares_wide = sizes[:, 1] // merge
        row = square // squares_wide * merge + place // merge
        return torch.stack((row, square % squares_wide * merge + place % merge), dim=1)

    def resampled(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the entries of a table of ``side`` x ``side`` positions that a patch is interpolated from, int64
        [n, 4], and their weights, fp32 [n, 4]: bilinear, the corners of image and table coincide."""
        steps = (self.sizes - 1).clamp(min=1).repeat_interleave(self.patches, 0)
        places = self.coordinates.float() * (side - 1) / steps
        low = places.floor().long()
        high, share = (low + 1).clamp(max=side - 1), places - low
        rows, columns = (torch.stack((low[:, axis], high[:, axis]), 1) for axis in (0, 1))
        row_weights, column_weights = (torch.stack((1 - share[:, axis], share[:, axis]), 1) for axis in (0, 1))
        entries = rows[:, :, None] * side + columns[:, None, :]
        return entries.flatten(1), (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
