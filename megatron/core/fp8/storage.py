"""Storage whose all-gather over data-parallel ranks sends fp8 copies (--fp8-param-gather): one byte instead of two.

Each rank casts its shard of the updated weights with the scales of the full weights, for which the ranks exchange
largest magnitudes. GEMMs read the gathered bytes. A cast after gathering would give the same bytes, so that results are
bit-identical. A rank keeps the weights of its shards, with their exact values for the optimizer, as without fp8; other
weights exist only on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fp8.products import dequantize
from megatron.core.fp8.scales import raise_over
from megatron.core.fusions.fp8_cast import (
    BLOCK,
    E4M3,
    LARGEST,
    Quantized,
    Scale,
    amax_parts,
    block_factors,
    cast_factor,
    cast_flat,
    to_fp8,
)
from megatron.core.fusions.storage import Copy, OwnedRange, Remainder, Storage
from megatron.core.groups.process_groups import Group


class Epoch:
    """Counter of the times at which the weights of a model chunk may have changed: steps, updates, loads."""

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        self.number += 1


class WeightCopy:
    """When copies or scales of weights were computed; decides whether they still belong to the values."""

    def __init__(self) -> None:
        self._made_at: tuple[int, ...] | None = None

    def valid_for(self, epoch: Epoch, weights: Sequence[Tensor] = ()) -> bool:
        """Whether neither the epoch, nor memory, version or gathered bytes of a weight have changed since
        :meth:`made_for`. torch counts versions, but not what kernels of the optimizer write: these end an epoch."""
        return self._made_at == _state(epoch, weights)

    def made_for(self, epoch: Epoch, weights: Sequence[Tensor] = ()) -> None:
        """Note that copies of ``weights`` have just been made."""
        self._made_at = _state(epoch, weights)


def _state(epoch: Epoch, weights: Sequence[Tensor]) -> tuple[int, ...]:
    gathers = (0 if (copy := fp8_copy(weight)) is None else copy.num_gathers for weight in weights)
    places = (part for weight in weights for part in (weight.data_ptr(), weight._version))
    return epoch.number, *gathers, *places


class GatheredCopy:
    """fp8 copy of a weight [o, i]; the attribute ``fp8_copy`` of the parameter. ``square``: one scale per 128 x 128
    block instead of one. ``groups``: tensor-parallel ranks that hold other parts with the same scale."""

    def __init__(self, shape: tuple[int, ...], *, square: bool, groups: Sequence[Group]) -> None:
        self.shape, self.square, self.groups = shape, square, groups
        self.payload: Tensor | None = None
        """Gathered bytes, uint8 [o, i]; None without data-parallel ranks."""
        self.factor: Tensor | None = None
        """fp32 [1] or [ceil(o / 128), ceil(i / 128)]; None before the first gather."""
        self.inverse: Tensor | None = None
        self.rows: Tensor | None = None
        """This rank's part of ``payload``, which FSDP gathers, uint8."""
        self.num_gathers = 0

    @property
    def quantized(self) -> Quantized | None:
        """The copy; None before the first gather."""
        if self.payload is None or self.inverse is None:
            return None
        return Quantized(self.payload.view(E4M3), self.inverse)

    @property
    def num_scales(self) -> int:
        return -(-self.shape[0] // BLOCK) * -(-self.shape[1] // BLOCK) if self.square else 1

    def amax(self, values: Tensor, start: int) -> Tensor:
        """Return the largest magnitudes of the flat ``values`` of the range from element ``start``, fp32 [num_scales],
        0 for blocks outside of it."""
        if not values.numel():
            return torch.zeros(self.num_scales, device=values.device)
        if not self.square:
            return amax_parts(values).amax().view(1)
        blocks, first = self._blocks(values, start)
        amaxes = torch.zeros(self._grid(), device=values.device)
        amaxes[first : first + len(blocks)] = blocks.abs().amax((1, 3))
        return amaxes.view(-1)

    def set_scales(self, amax: Tensor) -> None:
        """Set the scales from the largest magnitudes of the full weight, fp32 [num_scales]."""
        largest = LARGEST[E4M3]
        self.factor = block_factors(amax, largest).view(self._grid()) if self.square else cast_factor(amax, largest)
        self.inverse = 1.0 / self.factor
        self.num_gathers += 1

    def cast(self, values: Tensor, start: int) -> Tensor:
        """Return the flat ``values`` of the range from element ``start`` in fp8, as uint8 [n]."""
        assert self.factor is not None and self.inverse is not None, "scales come before casts"
        if not self.square:
            return cast_flat(values, E4M3, Scale(self.factor, self.inverse)).view(torch.uint8)
        blocks, first = self._blocks(values, start)
        factor = self.factor[first : first + len(blocks), None, :, None]
        width, skipped = self.shape[1], start - first * BLOCK * self.shape[1]
        rows = to_fp8(blocks, factor, E4M3).view(torch.uint8).flatten(0, 1).flatten(1)[:, :width]
        return rows.reshape(-1)[skipped : skipped + values.numel()]

    def _grid(self) -> tuple[int, int]:
        return -(-self.shape[0] // BLOCK), -(-self.shape[1] // BLOCK)

    def _blocks(self, values: Tensor, start: int) -> tuple[Tensor, int]:
        """Return fp32 [rows of blocks, 128, blocks per row, 128] that ``values`` touch (else zeros), first row."""
        width = self.shape[1]
        stripe = BLOCK * width
        first, stop = start // stripe, -(-(start + values.numel()) // stripe)
        flat = F.pad(values.float(), (start - first * stripe, stop * stripe - start - values.numel()))
        matrix = F.pad(flat.view(-1, width), (0, -width % BLOCK))
        return matrix.view(stop - first, BLOCK, -1, BLOCK), first


def fp8_copy(parameter: Tensor) -> GatheredCopy | None:
    """Return the fp8 copy of a parameter that declares it."""
    return getattr(parameter, "fp8_copy", None)


def exchange_scales(copies: Sequence[GatheredCopy], parts: Sequence[Tensor], group: Group) -> None:
    """Set the scales of ``copies`` from the largest magnitudes ``parts`` of each on this rank. Collective over
    ``group``, which holds other ranges, and the tensor-parallel ranks."""
    amax = raise_over(torch.cat([*parts]), (group, *copies[0].groups))
    for copy, part in zip(copies, amax.split([copy.num_scales for copy in copies])):
        copy.set_scales(part.clone())


class Fp8Gathered(Storage):
    """Storage whose payload is the fp8 copy; declared for weights, built as ``Fp8Remainder`` or ``Fp8Copy``."""

    gathers_copies = True
    payload_bytes: ClassVar[int | None] = 1
    shard: OwnedRange | None = None
    """Range of the parameter, set before the first payload."""

    @classmethod
    def build(cls, weight: Tensor, *, split: bool) -> Storage:
        return (Fp8Remainder if split and weight.dtype == torch.bfloat16 else Fp8Copy)(weight)

    @classmethod
    def adopt(cls, parameter: Tensor, payload: Tensor) -> None:
        copy = fp8_copy(parameter)
        assert copy is not None, "declared without a copy"
        copy.payload = payload.view(copy.shape)

    @classmethod
    @torch.no_grad()
    def prepare(cls, parameters: Sequence[Tensor], shards: Sequence[OwnedRange], group: Group) -> None:
        """Exchange the largest magnitudes of all ``parameters`` and set their scales. Collective, also over ``tp``."""
        copies = [copy for parameter in parameters if (copy := fp8_copy(parameter)) is not None]
        by_parameter = {id(shard.parameter): shard for shard in shards}
        parts = [
            copy.amax(shard.values, shard.start)
            if (shard := by_parameter.get(id(parameter))) is not None
            else torch.zeros(copy.num_scales, device=parameter.device)
            for parameter, copy in zip(parameters, copies)
        ]
        exchange_scales(copies, parts, group)
        for shard in shards:
            storage = getattr(shard, "storage", None)
            if isinstance(storage, Fp8Gathered):
                storage.shard = shard

    @classmethod
    @torch.no_grad()
    def install_copy(cls, parameter: Tensor) -> None:
        copy = fp8_copy(parameter)
        if copy is not None and (quantized := copy.quantized) is not None:
            parameter.copy_(dequantize(quantized, parameter.dtype))

    def payload(self) -> Tensor:
        assert self.shard is not None, "prepare() comes before payloads"
        copy = fp8_copy(self.shard.parameter)
        assert copy is not None
        return copy.cast(self.shard.values, self.shard.start).view(-1, 1)


class Fp8Remainder(Fp8Gathered, Remainder):
    """bf16 weight and 16-bit remainder; fp8 copies are gathered."""


class Fp8Copy(Fp8Gathered, Copy):
    """Half-precision weight and fp32 copy; fp8 copies are gathered."""
