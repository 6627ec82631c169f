"""Relative positions as a bias on attention's scores (Raffel et al. 2020, section 2.1, and the published code).

Distances key - query share out into buckets: the nearer ones have one each, the others grow by a factor up to the
longest, behind which all are one bucket. Every head has a number per bucket; all layers of a stack use the same table.

Legend: n buckets, a heads (local).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Shard, parameter
from megatron.core.transformer.initial_values import weight_init


class _Table(nn.Module):
    def __init__(self, config: TransformerConfig, num_buckets: int, groups: ProcessGroups) -> None:
        super().__init__()
        self.weight = parameter(
            (num_buckets, config.num_attention_heads), init=weight_init(config), mesh={"tp": Shard(1)}, groups=groups,
            dtype=config.params_dtype,
        )  # fmt: skip


class RelativePositionEmbedding(nn.Module):
    """The table of one stack; tensor-parallel ranks hold their heads."""

    def __init__(self, config: TransformerConfig, num_buckets: int, *, groups: ProcessGroups) -> None:
        super().__init__()
        self.relative_attention_bias = _Table(config, num_buckets, groups)

    @property
    def table(self) -> Tensor:
        """[n, a]."""
        return self.relative_attention_bias.weight


def position_bias(table: Tensor, length: int, *, max_distance: int, bidirectional: bool) -> Tensor:
    """[a, 2 * length - 1], fp32 (fp64 for fp64): of ``table`` [n, a], by distance, for whole sequences of ``length``
    that attend to themselves (``attention/position_bias.py``)."""
    number = buckets(torch.arange(1 - length, length, device=table.device), len(table), max_distance, bidirectional)
    wide = table.to(torch.promote_types(table.dtype, torch.float32))  # all pairs of all layers add to its gradient
    return F.embedding(number, wide).t().contiguous()


def buckets(distance: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Bucket of each ``distance`` (key - query, int64). Bidirectional: the upper half is for keys behind the query;
    else these are at distance 0."""
    offset: Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        offset, distance = (distance > 0) * num_buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # in fp32 and in this order as in the published code: rounding decides between neighbouring buckets
    steps = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (steps * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
