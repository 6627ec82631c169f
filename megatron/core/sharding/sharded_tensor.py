"""Local tensors with their names and positions in global tensors, as stored in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.flat_pieces import flat_pieces, flat_range
from megatron.core.sharding.placement import ParameterSpec, global_name, spec_or_replicated
from megatron.core.sharding.rectangles import Rectangle

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Storable dtypes by their safetensors names; their sizes are in ``dist_checkpointing/manifest.py``."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

T = TypeVar("T")


@dataclass(frozen=True)
class ShardedTensor:
    """Local tensor that holds ``global[offsets[0] : offsets[0] + local.shape[0], …]`` of the global tensor ``name``.
    Ranks may hold equal (replicated) or disjoint rectangles; together they must cover the global tensor. The
    constructor raises ValueError if the rectangle exceeds the global shape or the dtype cannot be stored."""

    name: str
    local: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rectangle(self) -> Rectangle:
        """Rectangle of the global tensor that ``local`` holds."""
        return Rectangle(self.offsets, tuple(self.local.shape))

    def __post_init__(self) -> None:
        """Raise ValueError unless rectangle, ``local`` and shape fit, and the dtype can be stored (``DTYPES``)."""
        inside = len(self.offsets) == len(self.global_shape) == self.local.ndim and all(
            offset >= 0 and offset + length <= total
            for offset, length, total in zip(self.offsets, self.local.shape, self.global_shape)
        )
        if not inside:
            raise ValueError(
                f"{self.name}: a shard of shape {tuple(self.local.shape)} at {self.offsets} does not lie in a tensor "
                f"of shape {self.global_shape}"
            )
        if self.local.dtype not in DTYPE_NAMES:
            raise ValueError(f"{self.name}: {self.local.dtype} cannot be stored")


def module_tensors(
    module: nn.Module,
    *,
    groups: ProcessGroups,
    prefix: str = "",
    rounded: bool = False,
    includes: Callable[[str], bool] = bool,
) -> dict[str, ShardedTensor]:
    """Return the parameters and persistent buffers of ``module`` as sharded tensors, named ``prefix`` + global name.
    Parameters follow their placement; buffers are replicated. A tied copy has the name of the original parameter.
    Several local parameters that hold parts of one global tensor have its name, but distinct dict keys. The tensors are
    live. With ``rounded``, weights stored in higher precision than the compute dtype (fp32 shards of FSDP) are instead
    copies in the compute dtype, which is the checkpoint's format. ``includes`` selects by global name; default: all."""
    tensors: dict[str, ShardedTensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and includes(global_name(name, spec_or_replicated(value))):
            tensors |= stored_tensors(name, value, groups=groups, prefix=prefix, rounded=rounded)
    return tensors


def stored_tensors(
    name: str, parameter: Tensor, *, groups: ProcessGroups, prefix: str = "", rounded: bool = False
) -> dict[str, ShardedTensor]:
    """Return this rank's shard of a parameter or buffer as sharded tensors by key, named ``prefix`` + global name: live
    views, or with ``rounded`` copies in the compute dtype if that differs (FSDP). Usually one rectangle; FSDP shards of
    folded stacked weights can give several, and a shard of padding none."""
    local, *span = flat_range(parameter)
    if rounded:
        local = local.to(getattr(parameter, "compute_dtype", local.dtype))
    return flat_range_tensors(name, local, parameter, (span[0], span[1]), prefix=prefix, groups=groups)


def flat_range_tensors(
    name: str, flat: Tensor, parameter: Tensor, span: tuple[int, int], *, groups: ProcessGroups, prefix: str = ""
) -> dict[str, ShardedTensor]:
    """Convert the element range ``span`` (begin, end) of a parameter's local memory, with values ``flat`` in any shape,
    to sharded tensors by key; views of a contiguous ``flat``. Keys are ``prefix`` + global name (for a part of a global
    tensor: the local name ``name``), with ``@index`` appended if the range is not the full parameter."""
    spec = spec_or_replicated(parameter)
    full_name, key, shape = prefix + global_name(name, spec), prefix + _key(name, spec), tuple(spec.shape)
    is_one = span == (0, parameter.numel())
    return {
        key if is_one else f"{key}@{index}": ShardedTensor(full_name, local, shape, rectangle.offsets)
        for index, (rectangle, local) in enumerate(flat_pieces(spec, groups, span, flat))
    }


def _key(name: str, spec: ParameterSpec) -> str:
    return global_name(name, spec) if spec.part is None else name


def with_leading_dims(tensors: Mapping[str, T], offsets: Sequence[tuple[int, int, int]]) -> dict[str, T]:
    """Return ``tensors`` with the leading dims that ``offsets`` adds to stored tensors: (axis, index of the local part,
    number of parts) for the axes 0, 1, …, in any order. Other values stay. Raises ValueError for other axes."""
    ordered = sorted(offsets)
    if [axis for axis, _, _ in ordered] != [*range(len(ordered))]:
        raise ValueError(f"sharded_offsets {list(offsets)}: the axes must be 0, 1, ... without gaps")
    leading = tuple(index for _, index, _ in ordered), tuple(size for _, _, size in ordered)

    def moved(value: T) -> T:
        if not isinstance(value, ShardedTensor):
            return value
        local = value.local[(None,) * len(ordered)]
        shape, start = leading[1] + tuple(value.global_shape), leading[0] + tuple(value.offsets)
        return replace(value, local=local, global_shape=shape, offsets=start)

    return {key: moved(value) for key, value in tensors.items()} if ordered else dict(tensors)
