"""A local tensor and the rectangle of a named global tensor that it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.flat_pieces import flat_pieces, local_stretch
from megatron.core.sharding.placement import ParameterSpec, global_name, spec_or_replicated
from megatron.core.sharding.rectangles import Rectangle

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""safetensors' names."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ShardedTensor:
    """``local`` is ``global[offsets[0] : offsets[0] + local.shape[0], …]`` of the tensor called ``name``.

    Ranks may hold equal or different rectangles; together they must cover the global tensor exactly once, copies apart.
    """

    name: str
    local: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def rectangle(self) -> Rectangle:
        """Its place in the global tensor."""
        return Rectangle(self.offsets, tuple(self.local.shape))

    def __post_init__(self) -> None:
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
    module: nn.Module, *, groups: ProcessGroups, prefix: str = "", rounded: bool = False
) -> dict[str, ShardedTensor]:
    """Parameters, by placement, and persistent buffers (replicated) of ``module`` under ``prefix`` + global name.

    The copy of a tied parameter goes by the name of the one it copies; parts of one tensor share its name, under keys
    of their own. ``rounded``: weights that are kept more exactly than the model computes with (``fully_shard``) are
    copies in the model's own dtype, as a checkpoint holds them; otherwise all tensors are live.
    """
    tensors: dict[str, ShardedTensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            tensors |= stored_tensors(name, value, groups=groups, prefix=prefix, rounded=rounded)
    return tensors


def stored_tensors(
    name: str, parameter: Tensor, *, groups: ProcessGroups, prefix: str = "", rounded: bool = False
) -> dict[str, ShardedTensor]:
    """What this rank stores of a parameter (or buffer): one rectangle, or of rows that ``fully_shard`` cut several."""
    local, *stretch = local_stretch(parameter)
    if rounded:
        local = local.to(getattr(parameter, "compute_dtype", local.dtype))
    return stretch_tensors(name, local, parameter, (stretch[0], stretch[1]), prefix=prefix, groups=groups)


def stretch_tensors(
    name: str, flat: Tensor, parameter: Tensor, stretch: tuple[int, int], *, groups: ProcessGroups, prefix: str = ""
) -> dict[str, ShardedTensor]:  # fmt: skip
    """Rectangles of a stretch (begin, end) of the local memory of the parameter called ``name``.

    ``flat`` holds the stretch: weights, gradients or moments, in any shape.
    """
    spec = spec_or_replicated(parameter)
    whole, key, shape = prefix + global_name(name, spec), prefix + _key(name, spec), tuple(spec.shape)
    is_one = stretch == (0, parameter.numel())
    return {
        key if is_one else f"{key}@{index}": ShardedTensor(whole, local, shape, rectangle.offsets)
        for index, (rectangle, local) in enumerate(flat_pieces(spec, groups, stretch, flat))
    }


def _key(name: str, spec: ParameterSpec) -> str:
    """The global name, but each part of a tensor has its own."""
    return global_name(name, spec) if spec.part is None else name
