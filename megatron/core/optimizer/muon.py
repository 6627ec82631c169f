"""Muon: momentum, orthogonalized per matrix (Jordan et al. 2024; scaling: Liu et al. 2025, arXiv 2502.16982).

    g = c gradient                                    c: clipping and unscaling
    m <- mu m + (1 - mu) g                            u = m, or with Nesterov (1 - mu) g + mu m
    p <- p - lr wd p - lr s NS(u)                     s: scale by the shape of the matrix, times an extra factor

A weight may hold several matrices: experts always are separate; queries, keys and values of a fused projection are by
default; gate and up and single heads by choice. Matrices are those of the full model: their sizes and values do not
depend on the parallel layout. Each is computed once: the ranks that hold copies or shards of it deal the matrices
(``sharding/deal.py``). ZeRO-1 ranks hold full matrices, and expert-parallel ranks full experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.fusions.storage import Storage
from megatron.core.fusions.symmetric_product import symmetric_product, symmetric_product_reference
from megatron.core.optimizer.newton_schulz import COEFFICIENTS, orthogonalize
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding.deal import Axes, Deal, sharing_axes
from megatron.core.sharding.placement import ParameterSpec

if TYPE_CHECKING:
    from megatron.core.optimizer.update_rules import Conditions, Entry

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Scale of an update by the sizes of its matrix (rows: outputs), by ``muon_scale_mode``."""

_BATCH = 2**28  # elements, 1 GiB of fp32: bounds the memory of directions and results next to the state


class Splits(NamedTuple):
    """Fused matrices to orthogonalize separately."""

    qkv: bool = True
    heads: bool = False
    gate_up: bool = False


class Rows(NamedTuple):
    """Range of rows in every block of a weight."""

    rows: int
    height: int | None
    """Rows of each matrix in the range; None: the rows of all blocks form one matrix."""


class Muon:
    """Update rule of hidden matrices. Raises UserError for a precision or mode that is not supported."""

    owns: ClassVar[Literal["elements", "matrices"]] = "matrices"

    def __init__(self, config: OptimizerConfig, storages: Sequence[Storage]) -> None:
        if config.muon_fp32_matmul_prec == "low":
            raise UserError("muon_fp32_matmul_prec low: torch has no precision below bf16; use medium")
        self.config = config
        self.moment_dtypes = {"momentum_buffer": torch.float32}
        self.splits = Splits(config.muon_split_qkv, config.muon_split_qkv_per_head, config.muon_split_gate_up)
        self._steps = COEFFICIENTS[config.muon_coefficient_type].take(config.muon_num_ns_steps)
        self._scale, self._precision = SCALES[config.muon_scale_mode], config.muon_fp32_matmul_prec
        self._product = symmetric_product if config.muon_use_syrk else symmetric_product_reference
        self._deals: dict[tuple[str, ...], Deal] = {}

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and momentum of all ``entries`` in place; weight decay is decoupled unless
        ``config.decoupled_weight_decay`` is False. ``conditions.skip`` 1 changes none of them. Does not change
        gradients. Collective over the ranks that hold copies or shards of a matrix. No host sync."""
        applies = conditions.skip == 0
        for axes, batch in batches(entries):
            directions = [self._advance(each, conditions, applies) for each in batch]
            names = tuple(each.name for each in batch)
            if names not in self._deals:  # a step without some gradients has other entries
                self._deals[names] = Deal([each.shard for each in batch], axes, batch[0].groups, self._cost)
            for each, step in zip(batch, self._deals[names].run(directions, self.orthogonalized)):
                master = each.storage.read()
                decay = each.lr * each.weight_decay if self.config.decoupled_weight_decay else 0.0
                # where, not a factor of zero: a skipped step may have NaN in the gradient
                each.storage.write(torch.where(applies, master - decay * master - each.lr * step, master))

    def _advance(self, entry: Entry, conditions: Conditions, applies: Tensor) -> Tensor:
        """Update the momentum and return the direction u, a new tensor shaped as the shard."""
        (momentum,), mu = entry.moments, self.config.muon_momentum
        gradient = entry.gradient.to(momentum.dtype)
        if conditions.factor is not None:
            gradient = gradient * conditions.factor.to(momentum.dtype)
        if not self.config.decoupled_weight_decay:
            gradient = gradient + entry.weight_decay * entry.storage.read()
        updated = torch.lerp(momentum, gradient, 1.0 - mu)
        direction = torch.lerp(gradient, updated, mu) if self.config.muon_nesterov else updated
        momentum.copy_(torch.where(applies, updated, momentum))
        return direction

    def orthogonalized(self, directions: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> list[Tensor]:
        """Return the scaled orthogonal factors of all matrices in each of ``directions``, parameters in their logical
        shapes; new tensors of these shapes."""

        def update(matrices: Tensor) -> Tensor:
            scale = self._scale(*matrices.shape[-2:]) * self.config.muon_extra_scale_factor
            return scale * orthogonalize(matrices, self._steps, self._precision, self._product)

        return map_matrices(update, directions, specs, self.splits)

    def _cost(self, shape: Sequence[int], spec: ParameterSpec) -> float:
        """Return the relative cost of Newton-Schulz for all matrices of a parameter."""
        ranges, columns = row_ranges(shape, spec, self.splits), shape[-1]
        blocks = math.prod(shape[:-1]) // sum(each.rows for each in ranges)
        heights = [
            (blocks * rows, 1) if height is None else (height, blocks * rows // height) for rows, height in ranges
        ]
        return sum(count * min(rows, columns) ** 2 * max(rows, columns) for rows, count in heights)


def batches(entries: Sequence[Entry], limit: int = _BATCH) -> Iterator[tuple[Axes, list[Entry]]]:
    """Yield ``entries`` whose matrices the same ranks share, in lists of about ``limit`` elements on this rank, with
    the axes of these ranks. Sharing ranks yield the same lists."""
    by_axes: dict[tuple[Axes, torch.dtype], list[Entry]] = {}
    for each in entries:
        by_axes.setdefault((sharing_axes(each.shard, each.copies, each.groups), each.moments[0].dtype), []).append(each)
    for (axes, _), own in by_axes.items():
        batch: list[Entry] = []
        size = 0
        for each in own:
            batch.append(each)
            size += each.shard.parameter.numel() // axes.rows.size  # not this rank's rows: all must agree
            if size >= limit or each is own[-1]:
                yield axes, batch
                batch, size = [], 0


def map_matrices(
    function: Callable[[Tensor], Tensor], full: Sequence[Tensor], specs: Sequence[ParameterSpec], splits: Splits
) -> list[Tensor]:
    """Apply ``function`` to all matrices of the parameters ``full``, each in its logical shape (with all or some
    experts). ``function`` maps a batch [k, rows, columns] to a batch of the same shape; it is called once per shape of
    matrices. Returns new tensors of the shapes of ``full``."""
    results = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in full]
    by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for each, result, spec in zip(full, results, specs):
        ranges = row_ranges(each.shape, spec, splits)
        experts, columns, start = each.shape[0] if spec.is_expert else 1, each.shape[-1], 0
        shape = experts, -1, sum(part.rows for part in ranges), columns
        for rows, height in ranges:
            source, target = (x.view(shape)[:, :, start : start + rows] for x in (each.contiguous(), result))
            matrices = source.reshape(experts if height is None else -1, height or -1, columns)
            by_shape.setdefault((matrices.shape[1], columns), []).append((matrices, target))
            start += rows
    for found in by_shape.values():
        outputs = function(torch.cat([matrices for matrices, _ in found]))
        for (_, target), output in zip(found, outputs.split([len(matrices) for matrices, _ in found])):
            target.copy_(output.reshape(target.shape))
    return results


def row_ranges(shape: Sequence[int], spec: ParameterSpec, splits: Splits) -> list[Rows]:
    """Return the ranges of a block's rows with the matrices in them. ``shape`` is the logical shape, whose first dim
    counts experts if the parameter has experts. Asserts that a ``SubTensor`` holds full matrices."""
    *stack, rows, _ = shape[1:] if spec.is_expert else shape
    parts = spec.row_parts
    if parts is None:  # leading dims: gate and up
        return [Rows(rows, rows)] if stack and splits.gate_up else [Rows(rows * math.prod(stack), None)]
    if splits.heads:  # heads of equal sizes are computed together
        found = [(len([*each]) * height, height) for height, each in itertools.groupby(_held(parts.heads, spec))]
        return [Rows(*each) for each in found]
    assert splits.qkv or spec.part is None, "queries and keys are separate parameters, which no matrix can contain"
    if not splits.qkv:
        return [Rows(sum(parts.matrices), None)]
    return [Rows(each, None) for each in _held(parts.matrices, spec)]


def _held(parts: Sequence[int], spec: ParameterSpec) -> list[int]:
    """Return the lengths in ``parts`` that this parameter holds: all, or for a ``SubTensor`` those in its rows."""
    if spec.part is None:
        return [*parts]
    first, length = spec.part.rectangle.offsets[-2], spec.part.rectangle.lengths[-2]
    ends = itertools.accumulate(parts)
    held = [size for size, end in zip(parts, ends) if first < end <= first + length]
    assert sum(held) == length, "a part of a weight cuts a matrix"
    return held


serve_other_names(__name__)
