"""Rotary positions with three axes: time, row and column of a token (Qwen2-VL, arXiv 2409.12191), interleaved over the
pairs of channels (Qwen3-VL). Text has the same position on all axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.attention.rotary import RotaryEmbedding, RotaryTables
from megatron.core.host_memory import copied


def pair_axes(sections: Sequence[int], pairs: int) -> Tensor:
    """Return the axis by which each of ``pairs`` turns, int64 [pairs]: 0, 1, 2, 0, … as long as the section of the axis
    has pairs left, else 0."""
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def axes_tables(rotary: RotaryEmbedding, positions: Tensor, sections: Sequence[int]) -> RotaryTables:
    """Return the tables [s, b, 1, r / 2] at ``positions`` int64 [b, s, 3] (time, row, column)."""
    frequencies = rotary.frequencies(positions.device)
    axes = copied(pair_axes(sections, len(frequencies)), positions.device)
    turned = positions.transpose(0, 1).index_select(-1, axes)
    angles = (turned.double() / rotary.interpolation * frequencies).unsqueeze(2)
    return RotaryTables(angles.cos().to(rotary.dtype), angles.sin().to(rotary.dtype))
