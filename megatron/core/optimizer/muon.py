"""Muon: momentum, orthogonalized per matrix (Jordan et al. 2024; scaling: Liu et al. 2025, arXiv 2502.16982).

    m <- mu m + (1 - mu) g                            u = m, or with Nesterov (1 - mu) g + mu m
    p <- p - lr wd p - lr s NS(u)                     s: scale by the shape of the matrix, times an extra factor

The element-wise parts are in ``fusions/muon_update.py``.

A weight may hold several matrices: experts always are separate; queries, keys and values of a fused projection are by
default; gate and up and single heads by choice. Matrices are those of the full model: their sizes and values do not
depend on the parallel layout. Each is computed once: the ranks that hold copies or shards of it deal the matrices
(``sharding/deal.py``). ZeRO-1 ranks hold full matrices, and expert-parallel ranks full experts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.fusions.muon_update import MuonStep, choose_muon_update
from megatron.core.fusions.storage import Storage
from megatron.core.fusions.symmetric_product import symmetric_product, symmetric_product_reference
from megatron.core.optimizer.newton_schulz import COEFFICIENTS, factor_dtype, fills_gpu, orthogonalize
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
        self._update = choose_muon_update(storages)

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and momentum of all ``entries`` in place; weight decay is decoupled unless
        ``config.decoupled_weight_decay`` is False. ``conditions.skip`` 1 changes none of them. Does not change
        gradients. Collective over the ranks that hold copies or shards of a matrix. No host sync."""
        config = self.config
        step = MuonStep(
            config.muon_momentum, config.muon_nesterov, config.decoupled_weight_decay, conditions.skip,
            conditions.factor,
        )  # fmt: skip
        for axes, batch in batches(entries):
            directions = self._update.advance(batch, step)
            names = tuple(entry.name for entry in batch)
            if names not in self._deals:  # a step without some gradients has other entries
                self._deals[names] = Deal([entry.shard for entry in batch], axes, batch[0].groups, self._cost)
            factors = self.factors(self._deals[names], directions, batch, conditions.skip)
            self._update.apply(batch, factors, [self.scale(entry.spec) for entry in batch], step)

    def factors(self, deal: Deal, directions: Sequence[Tensor], batch: Sequence[Entry], skip: Tensor) -> list[Tensor]:
        """Return the orthogonal factors for this rank's shards of ``batch``; times :meth:`scale` they are the updates.
        Collective. Undefined if ``skip`` is 1."""
        full = self.orthogonalized(deal.collect(directions), deal.owned_specs)
        results = [self.scaled_down(factor, spec) for factor, spec in zip(full, deal.owned_specs)]
        return deal.give_back(results, directions, factor_dtype(directions[0].dtype, self._precision))

    def orthogonalized(self, directions: Sequence[Tensor], specs: Sequence[ParameterSpec]) -> list[Tensor]:
        """Return the orthogonal factors of all matrices in ``directions``, new tensors in logical shapes."""

        def update(matrices: Tensor) -> Tensor:
            return orthogonalize(matrices, self._steps, self._precision, self._product)

        return map_matrices(update, directions, specs, self.splits)

    def scaled_down(self, factors: Tensor, spec: ParameterSpec) -> Tensor:
        """Return ``factors``, where matrices with a smaller scale are multiplied by the ratio, in place."""
        *_, columns = shape = factors.shape
        scales = [self._matrix_scale(height, columns) for height in matrix_heights(shape, spec, self.splits)]
        if len({*scales}) > 1:
            for (part, _), scale in zip(row_views(factors, spec, self.splits), scales):
                part.mul_(scale / max(scales))
        return factors

    def scale(self, spec: ParameterSpec) -> float:
        """Return the factor of the updates of a parameter: the largest factor among its matrices."""
        shape = spec.shape if spec.part is None else spec.part.rectangle.lengths
        return max(self._matrix_scale(height, shape[-1]) for height in matrix_heights(shape, spec, self.splits))

    def _matrix_scale(self, rows: int, columns: int) -> float:
        return self._scale(rows, columns) * self.config.muon_extra_scale_factor

    def _cost(self, shape: Sequence[int], spec: ParameterSpec) -> float:
        ranges, heights = row_ranges(shape, spec, self.splits), matrix_heights(shape, spec, self.splits)
        columns, blocks = shape[-1], math.prod(shape[:-1]) // sum(rows for rows, _ in ranges)
        return sum(
            blocks * rows // height * min(height, columns) ** 2 * max(height, columns)
            for (rows, _), height in zip(ranges, heights)
        )


def batches(entries: Sequence[Entry], limit: int = _BATCH) -> Iterator[tuple[Axes, list[Entry]]]:
    """Yield ``entries`` whose matrices the same ranks share, in lists of about ``limit`` elements on this rank, with
    the axes of these ranks. Sharing ranks yield the same lists."""
    by_axes: dict[tuple[Axes, torch.dtype], list[Entry]] = {}
    for entry in entries:
        axes = sharing_axes(entry.shard, entry.copies, entry.groups)
        by_axes.setdefault((axes, entry.moments[0].dtype), []).append(entry)
    for (axes, _), sharing in by_axes.items():
        batch: list[Entry] = []
        size = 0
        for entry in sharing:
            batch.append(entry)
            size += entry.shard.parameter.numel() // axes.rows.size  # not this rank's rows: all must agree
            if size >= limit or entry is sharing[-1]:
                yield axes, batch
                batch, size = [], 0


def map_matrices(
    function: Callable[[Tensor], Tensor], full: Sequence[Tensor], specs: Sequence[ParameterSpec], splits: Splits
) -> list[Tensor]:
    """Apply ``function`` to all matrices of the parameters ``full``, each in its logical shape (with all or some
    experts). ``function`` maps a batch [k, rows, columns] to new tensors of the same shape; it is called once per shape
    of matrices, or per range of rows if one matrix fills a GPU. Returns tensors of the shapes of ``full``."""
    by_shape: dict[tuple[int, int], list[tuple[int, Tensor, int]]] = {}
    for index, (tensor, spec) in enumerate(zip(full, specs)):
        columns = tensor.shape[-1]
        for number, (part, height) in enumerate(row_views(tensor.contiguous(), spec, splits)):
            by_shape.setdefault((height, columns), []).append((index, part.reshape(-1, height, columns), number))
    results: list[dict[int, Tensor]] = [{} for _ in full]
    for shape, matrices in by_shape.items():
        for batch in [[matrix] for matrix in matrices] if fills_gpu(*shape) else [matrices]:
            stacks = [stack for _, stack, _ in batch]
            outputs = function(stacks[0] if len(stacks) == 1 else torch.cat(stacks))
            for (index, _, number), output in zip(batch, outputs.split([len(stack) for stack in stacks])):
                results[index][number] = output
    return [_joined(parts, tensor, spec, splits) for parts, tensor, spec in zip(results, full, specs)]


def _joined(parts: dict[int, Tensor], like: Tensor, spec: ParameterSpec, splits: Splits) -> Tensor:
    """``parts``: the matrices of each range of rows, by its number."""
    if len(parts) == 1:
        return parts[0].reshape(like.shape)
    result = like.new_empty(like.shape, dtype=parts[0].dtype)
    for number, (target, _) in enumerate(row_views(result, spec, splits)):
        target.copy_(parts[number].reshape(target.shape))
    return result


def row_views(full: Tensor, spec: ParameterSpec, splits: Splits) -> Iterator[tuple[Tensor, int]]:
    """Yield a view [experts, blocks, rows, columns] of each range of rows with matrices in the contiguous ``full``, and
    the rows of each of its matrices, which are consecutive in the view."""
    ranges = row_ranges(full.shape, spec, splits)
    heights = matrix_heights(full.shape, spec, splits)
    blocks = full.view(full.shape[0] if spec.is_expert else 1, -1, sum(part.rows for part in ranges), full.shape[-1])
    start = 0
    for (rows, _), height in zip(ranges, heights):
        yield blocks[:, :, start : start + rows], height
        start += rows


def matrix_heights(shape: Sequence[int], spec: ParameterSpec, splits: Splits) -> list[int]:
    """Return the rows of each matrix in every range of :func:`row_ranges`."""
    ranges = row_ranges(shape, spec, splits)
    blocks = math.prod(shape[1 if spec.is_expert else 0 : -1]) // sum(rows for rows, _ in ranges)
    return [blocks * rows if height is None else height for rows, height in ranges]


def row_ranges(shape: Sequence[int], spec: ParameterSpec, splits: Splits) -> list[Rows]:
    """Return the ranges of a block's rows with the matrices in them. ``shape`` is the logical shape, whose first dim
    counts experts if the parameter has experts. Asserts that a ``SubTensor`` holds full matrices."""
    *stack, rows, _ = shape[1:] if spec.is_expert else shape
    parts = spec.row_parts
    if parts is None:  # leading dims: gate and up
        return [Rows(rows, rows)] if stack and splits.gate_up else [Rows(rows * math.prod(stack), None)]
    if splits.heads:  # heads of equal sizes are computed together
        heads = itertools.groupby(_local_lengths(parts.heads, spec))
        return [Rows(len([*equal]) * height, height) for height, equal in heads]
    assert splits.qkv or spec.part is None, "queries and keys are separate parameters, which no matrix can contain"
    if not splits.qkv:
        return [Rows(sum(parts.matrices), None)]
    return [Rows(rows, None) for rows in _local_lengths(parts.matrices, spec)]


def _local_lengths(parts: Sequence[int], spec: ParameterSpec) -> list[int]:
    """Return the lengths of the parts that this parameter holds: all, or for a ``SubTensor`` those in its rows."""
    if spec.part is None:
        return [*parts]
    first, length = spec.part.rectangle.offsets[-2], spec.part.rectangle.lengths[-2]
    ends = itertools.accumulate(parts)
    local = [size for size, end in zip(parts, ends) if first < end <= first + length]
    assert sum(local) == length, "a part of a weight cuts a matrix"
    return local


serve_other_names(__name__)
