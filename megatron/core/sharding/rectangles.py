"""Rectangles (n-d index ranges) of global tensors that a rank holds, reads or writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Rectangle(NamedTuple):
    """Index range ``offsets[d]`` to ``offsets[d] + lengths[d]`` along every dim d; empty for shards of padding only."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Rectangle:
        """Return the rectangle that covers a full tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """Return the intersection with ``other``; None if it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other))
        lengths = tuple(end - offset for end, offset in zip(ends, offsets))
        return None if any(length <= 0 for length in lengths) else Rectangle(offsets, lengths)

    def within(self, shape: Sequence[int]) -> Rectangle:
        """Clip to a tensor of ``shape``, i.e. drop the padding; the result may be empty."""
        lengths = tuple(max(0, min(n, total - o)) for o, n, total in zip(*self, shape))
        return Rectangle(tuple(map(min, self.offsets, shape)), lengths)

    def of(self, tensor: Tensor, origin: Sequence[int] | None = None) -> Tensor:
        """Return the view of ``tensor`` for this rectangle. ``origin`` is the position of ``tensor`` in the global
        tensor (default: 0 along every dim)."""
        for dim, (offset, length) in enumerate(zip(*self)):
            tensor = tensor.narrow(dim, offset - (origin[dim] if origin else 0), length)
        return tensor


def coverage_problem(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str:
    """Return "" if ``rectangles`` cover every element of ``shape`` exactly once, else a verb phrase for an error."""
    nonempty = sorted(rectangle for rectangle in rectangles if rectangle.numel)
    covered, size = sum(rectangle.numel for rectangle in nonempty), math.prod(shape)
    if covered != size:
        return f"hold {covered:,} of its {size:,} elements"
    return "hold some of its elements twice" if _overlap(nonempty) else ""


def _overlap(ordered: Sequence[Rectangle]) -> bool:
    """``ordered``: sorted by offsets, without empty rectangles; the sweep over dim 0 is then close to linear."""
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.lengths and other.offsets[0] >= one.offsets[0] + one.lengths[0]:
                break
            if one.intersect(other) is not None:
                return True
    return False
