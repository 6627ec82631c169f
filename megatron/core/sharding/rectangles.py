"""Rectangles of tensors: what a rank holds, reads or writes of a global one. Torch-free but for the view."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Rectangle(NamedTuple):
    """``offsets[d]`` to ``offsets[d] + lengths[d]`` along every dim. Empty (a length of 0) where a shard is all
    padding."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Rectangle:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """The intersection; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other))
        lengths = tuple(end - offset for end, offset in zip(ends, offsets))
        return None if any(length <= 0 for length in lengths) else Rectangle(offsets, lengths)

    def within(self, shape: Sequence[int]) -> Rectangle:
        """The part of it that lies in a tensor of ``shape`` (the rest is padding)."""
        lengths = tuple(max(0, min(n, total - o)) for o, n, total in zip(*self, shape))
        return Rectangle(tuple(map(min, self.offsets, shape)), lengths)

    def of(self, tensor: Tensor, origin: Sequence[int] | None = None) -> Tensor:
        """This rectangle of ``tensor``, which begins at ``origin`` (0) of the global one. Shares memory."""
        for dim, (offset, length) in enumerate(zip(*self)):
            tensor = tensor.narrow(dim, offset - (origin[dim] if origin else 0), length)
        return tensor


def coverage_problem(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str:
    """Say what is wrong if ``rectangles`` do not hold every element of ``shape`` exactly once; empty if they do."""
    holding = sorted(each for each in rectangles if each.numel)
    held, size = sum(each.numel for each in holding), math.prod(shape)
    if held != size:
        return f"hold {held:,} of its {size:,} elements"
    return "hold some of its elements twice" if _overlap(holding) else ""


def _overlap(ordered: Sequence[Rectangle]) -> bool:
    """Whether two of the rectangles share an element; the sweep along the first dim keeps it near linear."""
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.lengths and other.offsets[0] >= one.offsets[0] + one.lengths[0]:
                break
            if one.intersect(other) is not None:
                return True
    return False
