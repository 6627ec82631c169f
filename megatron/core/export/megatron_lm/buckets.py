"""Flat buckets of Megatron-LM's distributed optimizer, cut into the parameters that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.sharding.lazy_tensor import LazyTensor


def unflatten_distributed(
    flat: Mapping[str, LazyTensor], weights: Mapping[str, LazyTensor], args: Mapping[str, Any], where: str
) -> dict[str, dict[str, LazyTensor]]:
    raise CheckpointError(f"{where}: flat buckets")
