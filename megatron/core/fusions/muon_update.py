"""Element-wise parts of Muon: before the orthogonalization (``advance``) and after it (``apply``).

    g = c gradient (without decoupled decay: + wd p)    c: clipping and unscaling
    m <- mu m + (1 - mu) g                              u = m, or with Nesterov (1 - mu) g + mu m
    p <- p - lr wd p - lr s o                           o: orthogonal factor of u, bf16 or fp32; s: scale

The kernels read and write every tensor once: 16 bytes per parameter for ``advance`` with fp32 gradients, 10 for
``apply`` with split masters and bf16 factors. Elements are updated independently, so that the bits do not depend on the
parallel layout. The skip flag and c stay on the device: no host sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.address_table import AddressTables, fits_kernels, is_read_by_kernels
from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.storage import OptimizerEntry, Storage

if triton is not None:
    from megatron.core.fusions.address_table import TRITON_TYPES, load_master, locate_block, pointers, store_master


class MuonStep(NamedTuple):
    """Settings of one step, common to all entries. Tensors are 0-d, on the parameters' device."""

    momentum: float
    nesterov: bool
    decoupled: bool
    skip: Tensor
    """fp32: 1 skips the update (nothing is written), 0 applies it."""
    factor: Tensor | None
    """Multiplier of gradients; None for 1."""


class MuonUpdate:
    """Both parts in torch operations, for storages of every kind. Entries have one moment, the momentum."""

    def advance(self, entries: Sequence[OptimizerEntry], step: MuonStep) -> list[Tensor]:
        """Update momenta and return the directions u, new tensors shaped as the shards, whose values are undefined if
        the step is skipped. Changes neither gradients nor masters."""
        return [self._advance(entry, step) for entry in entries]

    def apply(
        self, entries: Sequence[OptimizerEntry], factors: Sequence[Tensor], scales: Sequence[float], step: MuonStep
    ) -> None:
        """Update masters and model weights by the orthogonal ``factors``, shaped as the shards, times ``scales``."""
        for entry, factor, scale in zip(entries, factors, scales):
            master = entry.storage.read()
            decay = entry.lr * entry.weight_decay if step.decoupled else 0.0
            entry.write(step.skip, master - decay * master - entry.lr * scale * factor.to(master.dtype))

    def _advance(self, entry: OptimizerEntry, step: MuonStep) -> Tensor:
        gradient = entry.scaled_gradient(step.factor, decoupled=step.decoupled)
        updated = torch.lerp(entry.moments[0], gradient, 1.0 - step.momentum)
        direction = torch.lerp(gradient, updated, step.momentum) if step.nesterov else updated
        entry.write(step.skip, None, updated)
        return direction


if triton is not None:

    @triton.jit
    def _advance_kernel(
        table, chunks, scalars, decay, momentum, rest,
        GRADIENT: tl.constexpr, NESTEROV: tl.constexpr, DECOUPLED: tl.constexpr, WEIGHT: tl.constexpr,
        KEPT_BITS: tl.constexpr, AVOID_TIES: tl.constexpr, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """``scalars``: skip (1: writes nothing), gradient factor."""
        row, at, inside = locate_block(table, chunks, scalars, ALIGNMENT, FIELDS, BLOCK)
        gradient_at = pointers(tl.load(row + 2), GRADIENT, at, ALIGNMENT)
        momentum_at = pointers(tl.load(row + 3), tl.float32, at, ALIGNMENT)
        direction_at = pointers(tl.load(row + 4), tl.float32, at, ALIGNMENT)
        g = tl.load(gradient_at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars + 1)
        m = tl.load(momentum_at, mask=inside, other=0.0)
        if not DECOUPLED:
            g += decay * load_master(tl.load(row), tl.load(row + 1), at, inside, KEPT_BITS, ALIGNMENT)
        m += rest * (g - m)
        tl.store(momentum_at, m, mask=inside)
        tl.store(direction_at, g + momentum * (m - g) if NESTEROV else m, mask=inside)

    @triton.jit
    def _apply_kernel(
        table, chunks, scalars, rate, decay,
        FACTOR: tl.constexpr, WEIGHT: tl.constexpr, KEPT_BITS: tl.constexpr, AVOID_TIES: tl.constexpr,
        ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """p - decay p - rate o. ``scalars`` as above."""
        row, at, inside = locate_block(table, chunks, scalars, ALIGNMENT, FIELDS, BLOCK)
        weight, extra = tl.load(row), tl.load(row + 1)
        factor_at = pointers(tl.load(row + 2), FACTOR, at, ALIGNMENT)
        p = load_master(weight, extra, at, inside, KEPT_BITS, ALIGNMENT)
        p -= decay * p + rate * tl.load(factor_at, mask=inside, other=0.0).to(tl.float32)
        store_master(weight, extra, at, inside, p, WEIGHT, KEPT_BITS, AVOID_TIES, ALIGNMENT)


class TritonMuonUpdate(MuonUpdate):
    """Both parts by kernels, one launch per format and numbers; entries of other storages in torch operations."""

    def __init__(self) -> None:
        self._before, self._after = AddressTables(), AddressTables()

    def advance(self, entries: Sequence[OptimizerEntry], step: MuonStep) -> list[Tensor]:
        directions = [
            torch.empty_like(entry.moments[0]) if is_read_by_kernels(entry.storage) else self._advance(entry, step)
            for entry in entries
        ]
        groups: dict[float, list[tuple[Storage, tuple[Tensor, ...]]]] = {}
        for entry, direction in zip(entries, directions):
            if is_read_by_kernels(entry.storage):
                decay = 0.0 if step.decoupled else entry.weight_decay
                groups.setdefault(decay, []).append((entry.storage, (entry.gradient, entry.moments[0], direction)))
        scalars = _device_scalars(step)
        for decay, group in groups.items():
            for table in self._before.find(group):
                _advance_kernel[table.grid](
                    table.rows, table.chunks, scalars, float(decay), step.momentum, 1.0 - step.momentum,
                    GRADIENT=TRITON_TYPES[table.format.operands[0]], NESTEROV=step.nesterov, DECOUPLED=step.decoupled,
                    **table.constants,
                )  # fmt: skip
        return directions

    def apply(
        self, entries: Sequence[OptimizerEntry], factors: Sequence[Tensor], scales: Sequence[float], step: MuonStep
    ) -> None:
        groups: dict[tuple[float, float], list[tuple[Storage, tuple[Tensor, ...]]]] = {}
        for entry, factor, scale in zip(entries, factors, scales):
            if is_read_by_kernels(entry.storage):
                decay = entry.lr * entry.weight_decay if step.decoupled else 0.0
                groups.setdefault((entry.lr * scale, decay), []).append((entry.storage, (factor,)))
            else:
                super().apply([entry], [factor], [scale], step)
        scalars = _device_scalars(step)
        for (rate, decay), group in groups.items():
            for table in self._after.find(group):
                _apply_kernel[table.grid](
                    table.rows, table.chunks, scalars, float(rate), float(decay),
                    FACTOR=TRITON_TYPES[table.format.operands[0]], **table.constants,
                )  # fmt: skip


def _device_scalars(step: MuonStep) -> Tensor:
    """fp32 [skip, factor]."""
    factor = torch.ones_like(step.skip) if step.factor is None else step.factor.to(step.skip.dtype)
    return torch.stack([step.skip, factor])


def choose_muon_update(storages: Sequence[Storage]) -> MuonUpdate:
    """Return Triton kernels if they can read ``storages`` (:func:`fits_kernels`), else torch operations."""
    return TritonMuonUpdate() if fits_kernels(storages) else MuonUpdate()
