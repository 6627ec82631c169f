"""Sharded state dicts of modules that do not describe their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron.compat.library_utils import get_pg_rank, get_pg_size
from megatron.core import parallel_state
from megatron.core.sharding.sharded_tensor import ShardedTensor, module_tensors, with_leading_dims

Offsets = Sequence[tuple[int, int, int]]
"""(Leading axis, index along it, its size), one entry per axis."""


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: dist.ProcessGroup | None = None,
    dp_cp_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return {``prefix`` + name: ShardedTensor} of the tensors in ``state_dict``, which share their memory.

    Args:
        state_dict: local tensors by name.
        prefix: beginning of keys and stored names.
        tensor_parallel_layers_axis_map: {name: dim that tensor-parallel ranks split evenly}; others are replicated.
        sharded_offsets: leading axes that stored tensors have in addition, such as one per layer.
        extra_state_suffix: values of names that end with it are stored as JSON values; None is left out.
        tp_group: tensor-parallel ranks; default: the running program's.
        dp_cp_group: no effect: ranks that hold the same tensors are recognized.

    Raises:
        ValueError: a value is no tensor, or a dim does not exist."""
    split = tensor_parallel_layers_axis_map or {}
    if tp_group is None and dp_cp_group is None and split:
        tp_group = parallel_state.get_tensor_model_parallel_group()
    rank, size = get_pg_rank(tp_group), get_pg_size(tp_group)
    sharded: dict[str, Any] = {}
    for name, value in state_dict.items():
        key = f"{prefix}{name}"
        if name.endswith(extra_state_suffix) and not isinstance(value, Tensor):
            if value is not None:
                sharded[key] = value
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{key}: is a {type(value).__name__}; sharded states hold tensors")
        shape, offsets = list(value.shape), [0] * value.dim()
        if name in split:
            dim = split[name]
            if not 0 <= dim < value.dim():
                raise ValueError(f"{key}: has {value.dim()} dims, tensor_parallel_layers_axis_map names dim {dim}")
            offsets[dim], shape[dim] = rank * shape[dim], size * shape[dim]
        sharded[key] = ShardedTensor(key, value, tuple(shape), tuple(offsets))
    return with_leading_dims(sharded, sharded_offsets)


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: object = None,
    prepend_offsets: Offsets = (),
    tp_group: dist.ProcessGroup | None = None,
    **_: object,
) -> ShardedTensor:
    """Return the stored form of ``tensor``, whose dim ``tp_axis`` tensor-parallel ranks (default: the running
    program's) split evenly. ``prepend_offsets``: see :func:`make_sharded_tensors_for_checkpoint`. Megatron-LM's other
    arguments have no effect: replicas are recognized."""
    sharded = make_sharded_tensors_for_checkpoint({key: tensor}, "", {key: tp_axis}, prepend_offsets, tp_group=tp_group)
    return sharded[key]


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor, key: str, prepend_offsets: Offsets = (), replica_id: object = None, **_: object
) -> ShardedTensor:
    """Return the stored form of ``tensor``, which all tensor-parallel ranks hold; arguments: see above."""
    return make_sharded_tensors_for_checkpoint({key: tensor}, "", sharded_offsets=prepend_offsets)[key]


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return ``module.sharded_state_dict(prefix, sharded_offsets, metadata)`` if the module has that method; else its
    parameters and buffers: parameters of this library's layers by their placement, all other tensors as replicated
    (``tp_group`` has no effect)."""
    if hasattr(module, "sharded_state_dict"):
        return module.sharded_state_dict(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)  # type: ignore[operator,no-any-return]
    tensors = module_tensors(module, prefix=prefix, groups=parallel_state.get_process_groups())
    return with_leading_dims(tensors, sharded_offsets)
