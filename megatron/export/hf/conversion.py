"""Lazy conversion between HF tensors of a family and local tensors, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.sharding.lazy_tensor import LazyTensor
from megatron.export.hf.family import Family, transformer_config
from megatron.export.hf.layouts import TensorLayout
from megatron.export.interchange import with_counters


@dataclass(frozen=True)
class HFTensor:
    """One HF tensor that is a part of a local tensor."""

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    index: int
    """Index of the HF tensor in the layout's names."""
    expert: int | None
    """Expert index (row of the local tensor); None: not per expert."""
    config: TransformerConfig

    def views(self, local: Tensor) -> list[Tensor]:
        """Return the views of the local tensor (or of its first row, the expert's) that form this HF tensor."""
        return self.layout.views(local if self.expert is None else local[0], self.config)[self.index]

    def fill(self, local: Tensor, tensor: Tensor) -> None:
        """Copy the HF tensor into its views of the full ``local`` tensor, in place, cast to its dtype."""
        views = self.views(local if self.expert is None else local[self.expert :])
        tensor = tensor.T if self.is_transposed else tensor
        rows = [len(tensor) * view.numel() // tensor.numel() for view in views]
        for view, piece in zip(views, tensor.split(rows)):
            view.copy_(piece.reshape(view.shape))

    def extract(self, local: LazyTensor | Tensor) -> Tensor:
        """Return the HF tensor, contiguous; may share memory with ``local``: the full local tensor, or for one expert's
        part a lazy tensor or only its row [1, …]."""
        if isinstance(local, LazyTensor):
            assert self.expert is not None
            local = local.rows(self.expert, self.expert + 1)
        shape = self.shape[::-1] if self.is_transposed else self.shape
        views = self.views(local)
        joined = torch.cat([view.reshape(-1, *shape[1:]) for view in views]) if len(views) > 1 else views[0]
        joined = joined.reshape(shape)
        return (joined.T if self.is_transposed else joined).contiguous()

    @property
    def is_transposed(self) -> bool:
        return self.layout.transposed and len(self.shape) == 2


@dataclass(frozen=True)
class Placement:
    """One local tensor and the HF tensors that form it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFTensor, ...]

    @property
    def is_copy(self) -> bool:
        """Whether the single HF tensor has the same elements in the same order, so that reshape is enough."""
        return len(self.parts) == 1 and type(self.parts[0].layout) is TensorLayout and not self.parts[0].is_transposed


def placements(family: Family, settings: Mapping[str, object]) -> list[Placement]:
    """Return the placements of all tensors of a model; ``settings`` must be completed."""
    config = transformer_config(settings)
    return [
        Placement(name, shape, tuple(_parts(name, shape, layout, config)))
        for name, shape, layout in family.layouts(settings)
    ]


def _parts(name: str, shape: tuple[int, ...], layout: TensorLayout, config: TransformerConfig) -> Iterator[HFTensor]:
    """Yield the HF tensors of one local tensor, per expert if the names contain ``*``; shapes by the meta device."""
    per_expert = "*" in layout.names[0]
    sample = torch.empty(shape, device="meta")
    ndim = 2 if name.endswith("weight") else 1
    views = layout.views(sample[0] if per_expert else sample, config)
    shapes = [layout.shape(group, min(ndim, group[0].ndim)) for group in views]
    if layout.transposed:
        shapes = [size[::-1] if len(size) == 2 else size for size in shapes]
    for expert in range(shape[0]) if per_expert else [None]:
        for index, (hf_name, size) in enumerate(zip(layout.names, shapes)):
            yield HFTensor(hf_name.replace("*", str(expert)), size, layout, index, expert, config)


def to_local(plan: Sequence[Placement], tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert HF tensors, checked for names and shapes, to lazy local tensors ``model.…``; adds router counters."""
    return with_counters({f"model.{placement.name}": _merged(placement, tensors) for placement in plan})


def _merged(placement: Placement, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
    """Return the local tensor, in the dtype of its first part; every read reads all of its HF tensors."""
    first = tensors[placement.parts[0].name]
    if placement.is_copy:
        return LazyTensor(placement.shape, first.dtype, lambda: first.read().reshape(placement.shape))

    def read() -> Tensor:
        local = torch.empty(placement.shape, dtype=first.dtype)
        for part in placement.parts:
            part.fill(local, tensors[part.name].read())
        return local

    return LazyTensor(placement.shape, first.dtype, read)


def to_hf(plan: Sequence[Placement], tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert local tensors ``model.…`` to lazy HF tensors, in the order of ``plan``. The last local tensor stays in
    memory until its last part is read, so that reading in this order reads each once; experts are read row by row."""
    latest: dict[str, Tensor] = {}

    def read(name: str, part: HFTensor) -> Tensor:
        if part.expert is not None:
            return part.extract(tensors[name])
        if name not in latest:
            latest.clear()
            latest[name] = tensors[name].read()
        tensor = part.extract(latest[name])
        if part.index == len(part.layout.names) - 1:
            latest.clear()
        return tensor

    result = {}
    for placement in plan:
        name = f"model.{placement.name}"
        for part in placement.parts:
            result[part.name] = LazyTensor(
                part.shape,
                tensors[name].dtype,
                lambda name=name, part=part: read(name, part),  # type: ignore[misc]
            )
    return result


def expected(plan: Sequence[Placement]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all HF tensors."""
    return {part.name: part.shape for placement in plan for part in placement.parts}


def same_values(one: LazyTensor, other: LazyTensor | None) -> bool:
    """Return whether both tensors exist with equal shapes and values; compares about 4 million elements at a time."""
    if other is None or one.shape != other.shape:
        return False
    step = max(2**22 // max(one.shape[-1], 1), 1)
    starts = range(0, one.shape[0], step)
    ends = [min(start + step, one.shape[0]) for start in starts]
    return all(torch.equal(one.rows(*place), other.rows(*place)) for place in zip(starts, ends))
