"""A local tensor and the rectangle of a named global tensor that it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.sharding.flat_pieces import flat_pieces, local_stretch, spec_or_replicated
from megatron.core.sharding.placement import ParameterSpec, global_name, local_chunk, local_view

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


def replicated(name: str, tensor: Tensor) -> ShardedTensor:
    """A tensor that is whole on every rank that has it."""
    return ShardedTensor(name, tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)


def from_spec(name: str, tensor: Tensor, spec: ParameterSpec | None, groups: ProcessGroups) -> ShardedTensor:
    """The chunk of a parameter, or of a gradient or moment of its shape; without a spec it is replicated."""
    if spec is None:
        return replicated(name, tensor)
    view = local_view(tensor, spec, groups)
    return ShardedTensor(name, view, tuple(spec.shape), tuple(local_chunk(spec, groups).offsets))


def module_tensors(
    module: nn.Module, *, prefix: str = "", groups: ProcessGroups = SINGLE_PROCESS, rounded: bool = False
) -> dict[str, ShardedTensor]:
    """Parameters, by placement, and persistent buffers (replicated) of ``module`` under ``prefix`` + global name.

    The copy of a tied parameter goes by the name of the one it copies; parts of one tensor share its name, under keys
    of their own. ``rounded``: weights that are kept more exactly than the model computes with (``fully_shard``) are
    copies in the model's own dtype, as a checkpoint holds them; otherwise all tensors are live.
    """
    tensors: dict[str, ShardedTensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        local, start, stop = local_stretch(value)
        if rounded:
            local = local.to(getattr(value, "compute_dtype", local.dtype))
        tensors |= stretch_tensors(name, local, value, (start, stop), prefix=prefix, groups=groups)
    return tensors


def stretch_tensors(
    name: str, flat: Tensor, parameter: Tensor, stretch: tuple[int, int], *, prefix: str = "",
    groups: ProcessGroups = SINGLE_PROCESS,
) -> dict[str, ShardedTensor]:  # fmt: skip
    """Rectangles of a stretch (begin, end) of the local memory of the parameter called ``name``.

    ``flat`` holds the stretch: weights, gradients or moments, in any shape.
    """
    spec = getattr(parameter, "spec", None)
    whole = prefix + global_name(name, spec)
    pieces = flat_pieces(spec_or_replicated(parameter), groups, *stretch)
    shape = tuple(spec_or_replicated(parameter).shape)
    is_one = stretch == (0, parameter.numel())
    return {
        prefix + _key(name, spec) + ("" if is_one else f"@{index}"): ShardedTensor(
            whole, piece.view(flat), shape, piece.chunk.offsets
        )
        for index, piece in enumerate(pieces)
    }


def _key(name: str, spec: ParameterSpec | None) -> str:
    """The global name, but each part of a tensor has its own."""
    return name if spec is not None and spec.part is not None else global_name(name, spec)
