"""Mapping between local and Hugging Face tensor layouts; splits and merges are views.

A layout returns, for each HF tensor, views of the local tensor; the HF tensor is the concatenation of these views with
their leading dims folded. Import copies into the views, export copies from them; shapes come from meta-device views.

Legend: g groups of query heads, p query heads of a group, d channels of a head, h hidden, f feed-forward, e experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from megatron.core.config.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from torch import Tensor


class TensorLayout:
    """Layout of one HF tensor with the same elements in the same order as the local tensor.

    Args:
        names: HF names, with ``*`` for the layer, then for the expert; ``.weight`` or ``.bias`` is appended if the
            table's key has neither.
        transposed: whether HF matrices are [in, out]."""

    def __init__(self, *names: str, transposed: bool = False) -> None:
        self.names, self.transposed = names, transposed

    def of(self, shape: tuple[int, ...]) -> TensorLayout:
        """Return the layout for a local tensor of ``shape``."""
        return self

    def renamed(self, names: Sequence[str]) -> TensorLayout:
        """Return a copy of this layout with other HF names."""
        layout = copy(self)
        layout.names = tuple(names)
        return layout

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        """Return, for each HF name, the views of the local tensor in concatenation order."""
        return [[local]]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        """Return the HF tensor's shape before transposition; ``ndim`` is 2 for weights, 1 for other tensors."""
        tail = views[0].shape[views[0].ndim - ndim + 1 :] if ndim > 1 else ()
        return (sum(math.prod(view.shape[: view.ndim - len(tail)]) for view in views), *tail)


Weights = dict[str, TensorLayout | str]
"""Local name -> layout; a string is the HF name of a plain :class:`TensorLayout`."""


class Halves(TensorLayout):
    """Gated MLP: local [2, f, h] (gate, linear), two HF tensors; ``ungated`` is the HF name of an ungated MLP."""

    def __init__(self, *names: str, ungated: str = "") -> None:
        super().__init__(*names)
        self.ungated = ungated

    def of(self, shape: tuple[int, ...]) -> TensorLayout:
        return TensorLayout(self.ungated) if self.ungated and len(shape) == 2 else self

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        return [[local[0]], [local[1]]]


class QueryKeyValue(TensorLayout):
    """QKV: local [g, (p + 2) * d, h]; three HF tensors, or, with one name, all queries, then keys, then values."""

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        d = config.kv_channels
        assert d is not None
        parts = [local[:, : -2 * d], local[:, -2 * d : -d], local[:, -d:]]
        return [parts] if len(self.names) == 1 else [[part] for part in parts]


class KeyValue(TensorLayout):
    """Keys and values of cross-attention: local [g, 2 * d, h], two HF tensors."""

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        d = config.kv_channels
        return [[local[:, :d]], [local[:, d:]]]


class Interleaved(TensorLayout):
    """All experts in one HF tensor [e, in, out] with interleaved gate and linear columns; local [e, 2, f, h], [e, h,
    f]."""

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        return [[local.permute(0, *range(local.ndim - 1, 0, -1))]]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        leading = views[0].shape[:ndim]
        return (*leading, math.prod(views[0].shape[ndim:]))


class Stacked(TensorLayout):
    """All experts in one HF tensor [e, out, in]; local [e, 2, f, h] (gate, linear) or [e, h, f]."""

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        experts, *rows, columns = views[0].shape
        return experts, math.prod(rows), columns


class BlockParts(TensorLayout):
    """Stacked projections: local [blocks, rows, h], each block with some rows of every matrix.

    Args:
        names: HF tensors.
        parts: indices of the matrices in each HF tensor.
        sizes: function of the configuration -> rows of each matrix in a block.
        interleaved: an HF tensor has its matrices block by block; else all rows of one matrix before the next."""

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[Sequence[int]],
        sizes: Callable[[TransformerConfig], Sequence[int]],
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__(*names)
        self.parts, self.sizes, self.interleaved = parts, sizes, interleaved

    def views(self, local: Tensor, config: TransformerConfig) -> list[list[Tensor]]:
        sizes = self.sizes(config)
        if not self.interleaved:
            matrices = local.split([*sizes], dim=1)
            return [[matrices[index] for index in indices] for indices in self.parts]
        starts = [sum(sizes[: indices[0]]) for indices in self.parts]
        ends = [sum(sizes[: indices[-1] + 1]) for indices in self.parts]
        return [[local[:, start:end]] for start, end in zip(starts, ends)]

    def shape(self, views: Sequence[Tensor], ndim: int) -> tuple[int, ...]:
        """The weight of a convolution [blocks, rows, 1, taps] keeps its dim of 1."""
        return super().shape(views, 3 if views[0].ndim == 4 else ndim)
