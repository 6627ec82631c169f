"""Relative positions as an attention-score bias (Raffel et al. 2020, section 2.1, and the published code).

Distances key - query map to buckets: one bucket per small distance, then logarithmically growing ranges up to the
maximum distance; larger distances share the last bucket. Each head has one value per bucket, and all layers of a stack
share the table.

Legend: n buckets, a heads (local)."""

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
            (num_buckets, config.num_attention_heads),
            init=weight_init(config),
            mesh={"tp": Shard(1)},
            groups=groups,
            dtype=config.params_dtype,
        )


class RelativePositionEmbedding(nn.Module):
    """Relative-position table of one stack, split by heads over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, num_buckets: int, *, groups: ProcessGroups) -> None:
        super().__init__()
        self.relative_attention_bias = _Table(config, num_buckets, groups)

    @property
    def table(self) -> Tensor:
        """This rank's heads, [n, a]."""
        return self.relative_attention_bias.weight


def position_bias(table: Tensor, length: int, *, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bias by distance, [a, 2 * length - 1], fp32 (fp64 for an fp64 table), from ``table`` [n, a], for
    self-attention over full sequences of ``length`` (see ``attention/position_bias.py``)."""
    number = buckets(torch.arange(1 - length, length, device=table.device), len(table), max_distance, bidirectional)
    wide = table.to(torch.promote_types(table.dtype, torch.float32))  # all pairs of all layers add to its gradient
    return F.embedding(number, wide).t().contiguous()


def buckets(distance: Tensor, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the int64 bucket of each ``distance`` (key - query). Bidirectional: keys after the query use the upper
    half of the buckets. Otherwise those keys map to distance 0."""
    offset: Tensor | int = 0
    if bidirectional:
        num_buckets //= 2
        offset, distance = (distance > 0) * num_buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    # same fp32 operations in the same order as the published code: rounding decides between neighboring buckets
    steps = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (steps * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
