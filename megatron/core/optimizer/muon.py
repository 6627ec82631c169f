"""Muon: momentum, orthogonalized per matrix (Jordan et al. 2024; scaling: Liu et al. 2025, arXiv 2502.16982).

    g = c gradient                                    c: clipping and unscaling
    m <- mu m + (1 - mu) g                            u = m, or with Nesterov (1 - mu) g + mu m
    p <- p - lr wd p - lr s NS(u)                     s: scale by the shape of the matrix, times an extra factor

A weight may hold several matrices: experts always are separate; queries, keys and values of a fused projection are by
default; gate and up and single heads by choice. Matrices are those of the full model: their sizes and values do not
depend on the parallel layout. Tensor-parallel and FSDP ranks gather u and compute each matrix repeatedly; ZeRO-1 ranks
compute only the matrices in their shards, and expert-parallel ranks only their experts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.fusions.storage import Storage
from megatron.core.optimizer.newton_schulz import COEFFICIENTS, orthogonalize
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.sharding.placement import ParameterSpec

if TYPE_CHECKING:
    from megatron.core.optimizer.update_rules import Conditions, Entry

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Scale of an update by the sizes of its matrix (rows: outputs), by ``muon_scale_mode``."""

_LOCAL = ("ep",)  # experts are separate matrices: expert-parallel ranks need not gather them


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

    def update(self, entries: Sequence[Entry], conditions: Conditions) -> None:
        """Update masters, model weights and momentum of all ``entries`` in place; weight decay is decoupled unless
        ``config.decoupled_weight_decay`` is False. ``conditions.skip`` 1 changes none of them. Does not change
        gradients. All-gathers directions over the ranks that split a matrix. No host sync."""
        mu, applies = self.config.muon_momentum, conditions.skip == 0
        for each in entries:
            (momentum,) = each.moments
            master, gradient = each.storage.read(), each.gradient.to(momentum.dtype)
            if conditions.factor is not None:
                gradient = gradient * conditions.factor.to(momentum.dtype)
            if not self.config.decoupled_weight_decay:
                gradient = gradient + each.weight_decay * master
            updated = torch.lerp(momentum, gradient, 1.0 - mu)
            direction = torch.lerp(gradient, updated, mu) if self.config.muon_nesterov else updated
            momentum.copy_(torch.where(applies, updated, momentum))
            step = each.local(self.orthogonalized(each.full(direction, _LOCAL), each.spec), _LOCAL)
            decay = each.lr * each.weight_decay if self.config.decoupled_weight_decay else 0.0
            # where, not a factor of zero: a skipped step may have NaN in the gradient
            each.storage.write(torch.where(applies, master - decay * master - each.lr * step, master))

    def orthogonalized(self, direction: Tensor, spec: ParameterSpec) -> Tensor:
        """Return the scaled orthogonal factors of all matrices in ``direction``, which has the logical shape of the
        parameter; a new tensor of this shape."""

        def update(matrices: Tensor) -> Tensor:
            scale = self._scale(*matrices.shape[-2:]) * self.config.muon_extra_scale_factor
            return scale * orthogonalize(matrices, self._steps, self._precision)

        return map_matrices(update, direction, spec, self.splits)


def map_matrices(function: Callable[[Tensor], Tensor], full: Tensor, spec: ParameterSpec, splits: Splits) -> Tensor:
    """Apply ``function`` to all matrices of ``full``, a parameter in its logical shape (with all or some experts).
    ``function`` maps a batch [k, rows, columns] of equal shapes to a batch of the same shape. Returns a new tensor of
    the shape of ``full``."""
    ranges = row_ranges(full.shape, spec, splits)
    experts, columns = full.shape[0] if spec.is_expert else 1, full.shape[-1]
    blocks = full.reshape(experts, -1, sum(each.rows for each in ranges), columns)
    result, start = torch.empty_like(blocks), 0
    for rows, height in ranges:
        part = slice(start, start + rows)
        matrices = blocks[:, :, part].reshape(experts if height is None else -1, height or -1, columns)
        result[:, :, part] = function(matrices).reshape(experts, -1, rows, columns)
        start += rows
    return result.view(full.shape)


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
