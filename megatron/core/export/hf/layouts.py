"""How one tensor of ours lies in theirs: every split and merge, each said once, as views.

A layout gives, for each of their tensors, views of ours; theirs is these views, leading dims folded, one above the
other. Reading copies into the views, writing out of them, and shapes are those of views without data.

Legend: g groups of query heads, p query heads of a group, d channels of a head, h hidden, f feed-forward, e experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from megatron.core.config.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor


class Layout:
    """One tensor of theirs for one of ours: the same numbers in the same order.

    Args:
        names: theirs, with ``*`` for the layer, then for the expert; ``.weight`` or ``.bias`` is added where the
            table's key names neither.
        transposed: matrices are [in, out] there.
    """

    def __init__(self, *names: str, transposed: bool = False) -> None:
        self.names, self.transposed = names, transposed

    def of(self, shape: tuple[int, ...]) -> Layout:
        """The layout of a weight of ``shape``."""
        return self

    def renamed(self, names: Sequence[str]) -> Layout:
        """The same with other names."""
        layout = copy(self)
        layout.names = tuple(names)
        return layout

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        """For each name the views of ``ours``, from top to bottom."""
        return [[ours]]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        """Their tensor's shape before it is transposed; ``ndim`` is 2 for weights and 1 for the rest."""
        tail = views[0].shape[views[0].ndim - ndim + 1 :] if ndim > 1 else ()
        return (sum(math.prod(view.shape[: view.ndim - len(tail)]) for view in views), *tail)


Weights = dict[str, Layout | str]
"""Our names -> where the tensor lies; a name alone is a :class:`Layout`."""


class Halves(Layout):
    """Gate and linear half of a gated feed-forward network: ours [2, f, h], theirs two tensors; ``whole`` is the name
    of theirs where there is no gate."""

    def __init__(self, *names: str, whole: str = "") -> None:
        super().__init__(*names)
        self.whole = whole

    def of(self, shape: tuple[int, ...]) -> Layout:
        return Layout(self.whole) if self.whole and len(shape) == 2 else self

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        return [[ours[0]], [ours[1]]]


class QueryKeyValue(Layout):
    """Ours [g, (p + 2) * d, h], theirs three tensors, or (one name) one of all queries above all keys and values."""

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        d = config.kv_channels
        assert d is not None
        parts = [ours[:, : -2 * d], ours[:, -2 * d : -d], ours[:, -d:]]
        return [parts] if len(self.names) == 1 else [[part] for part in parts]


class KeyValue(Layout):
    """Keys and values of a cross-attention: ours [g, 2 * d, h], theirs two tensors."""

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        d = config.kv_channels
        return [[ours[:, :d]], [ours[:, d:]]]


class Interleaved(Layout):
    """Experts in one tensor [e, in, out], gate and linear half in turn: ours [e, 2, f, h] and [e, h, f]."""

    def views(self, ours: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        return [[ours.permute(0, *range(ours.ndim - 1, 0, -1))]]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        kept = views[0].shape[:ndim]
        return (*kept, math.prod(views[0].shape[ndim:]))
