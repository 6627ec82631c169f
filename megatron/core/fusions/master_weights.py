"""Master weights: the fp32 values that an optimizer updates, and the fewer bits in which they may be kept.

A *master* is the exact value of a model weight. Where the model computes in half precision an update is usually smaller
than the weight's last bit, so the master is fp32: a copy (4 bytes), or for bf16 the 16 bits that the weight lacks
(2 bytes, ``Remainder``), from which both are put together without loss:

    fp32 = high * 2^16 + low        weight = high, one more where low >= 2^15;  remainder = low

That is rounding to nearest with halves up. bf16 weights are rounded to nearest with halves to even, which cannot be
undone at halves that went down: one value too many would share a weight. So a master of a bf16 model is never such a
half: where an update ends there (one time in 2^17), the master is the fp32 number below it, which differs by its last
bit and gives the same weight. This holds for masters of every kind, which therefore take the same path bit for bit.

Moments may be kept in bf16: they are widened, updated in fp32, and rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def avoid_even_halves_(main: Tensor) -> Tensor:
    """fp32 numbers halfway between two bf16 ones that would be rounded down become the next below, in place."""
    bits = main.view(torch.int32)
    bits.sub_(((bits & 0x1FFFF) == 0x8000).to(torch.int32))
    return main


def split_fp32(main: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as (bf16, int16 remainder); :func:`join_fp32` undoes it for every bit pattern.

    The first is ``main`` rounded to nearest, if :func:`avoid_even_halves_` has seen it.
    """
    bits = main.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the low half: conversion wraps
    high = (bits >> 16) - (remainder >> 15)  # one more where the low half is at least 2^15
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_fp32(weight: Tensor, remainder: Tensor) -> Tensor:
    """Inverse of :func:`split_fp32`."""
    high = weight.contiguous().view(torch.int16).to(torch.int32) + (remainder >> 15)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


class Master:
    """The model's own memory, which is exact enough (fp32, fp64).

    Args:
        weight: what the model computes with, or the part of it that this rank updates; contiguous.
    """

    kept_dtype: torch.dtype | None = None
    """Data type of ``kept``."""
    avoids_halves = False
    """Whether the model computes with it in bf16."""
    is_live = True
    """Whether :meth:`read` gives the memory in which the exact value lies, rather than a copy."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        self.kept: Tensor | None = None
        """What there is beside the weight, in its shape; given by the owner of the memory before first use."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it is read, written and updated."""
        return self.weight.dtype if self.kept_dtype is None else torch.float32

    def read(self) -> Tensor:
        """The exact value."""
        return self.weight

    def write(self, value: Tensor) -> None:
        """Sets the exact value, and with it the weight. ``value`` may be what :meth:`read` gave, changed in place."""
        if value is not self.weight:
            self.weight.copy_(value)

    def refresh(self) -> None:
        """The weight was changed from outside: the exact value follows."""


class Gathered(Master):
    """fp32 memory that the model computes with in bf16, rounded by others (``fully_shard`` does as it gathers)."""

    avoids_halves = True

    def write(self, value: Tensor) -> None:
        super().write(value)
        avoid_even_halves_(self.weight)


class Copy(Master):
    """An fp32 copy of a half-precision weight."""

    kept_dtype = torch.float32
    kept: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.avoids_halves = weight.dtype == torch.bfloat16

    def read(self) -> Tensor:
        return self.kept

    def write(self, value: Tensor) -> None:
        if value is not self.kept:
            self.kept.copy_(value)
        self.weight.copy_(avoid_even_halves_(self.kept) if self.avoids_halves else self.kept)

    def refresh(self) -> None:
        self.kept.copy_(self.weight)


class Remainder(Master):
    """bf16 weight and the other 16 bits: fp32 in the place of two halves."""

    kept_dtype = torch.int16
    kept: Tensor
    avoids_halves, is_live = True, False

    def read(self) -> Tensor:
        return join_fp32(self.weight, self.kept)

    def write(self, value: Tensor) -> None:
        weight, remainder = split_fp32(avoid_even_halves_(value.to(torch.float32, copy=True)))
        self.weight.copy_(weight)
        self.kept.copy_(remainder)

    def refresh(self) -> None:
        self.kept.zero_()


def master_of(values: Tensor, compute_dtype: torch.dtype, *, split: bool) -> Master:
    """The master of a weight in the memory ``values``, with which the model computes in ``compute_dtype``.

    ``split``: keep the rest of bf16 weights in 16 bits.
    """
    if values.dtype == torch.bfloat16 and split:
        return Remainder(values)
    if values.dtype in (torch.bfloat16, torch.float16):
        return Copy(values)
    return (Gathered if compute_dtype == torch.bfloat16 else Master)(values)


class Updated(NamedTuple):
    """One tensor that an optimizer updates."""

    master: Master
    gradient: Tensor
    moments: tuple[Tensor, ...]

    @property
    def is_plain(self) -> bool:
        """Whether all of its state can be updated where it is."""
        return self.master.is_live and all(moment.dtype == self.master.dtype for moment in self.moments)


class Opened(NamedTuple):
    """Tensors of one dtype (fp32, fp64) for an operator on lists."""

    masters: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]
    """By kind of moment."""


def opened(tensors: Sequence[Updated], factor: Tensor | None) -> Iterator[Opened]:
    """For the body of a loop that updates what it is given in place: what can be updated where it is, all at once, then
    one by one the others, widened before and stored after. Gradients are multiplied by ``factor``, in place where
    they are wide already."""
    plain = [each for each in tensors if each.is_plain]
    for batch in ([plain] if plain else []) + [[each] for each in tensors if not each.is_plain]:
        masters = [each.master.read() for each in batch]
        gradients = [each.gradient.to(main.dtype) for each, main in zip(batch, masters)]
        if factor is not None:
            torch._foreach_mul_(gradients, factor.to(masters[0].dtype))
        kinds = list(zip(*(each.moments for each in batch)))
        moments = [[moment.to(masters[0].dtype) for moment in kind] for kind in kinds]
        yield Opened(masters, gradients, moments)
        for each, main in zip(batch, masters):
            each.master.write(main)
        for kind, values in zip(kinds, moments):
            for moment, value in zip(kind, values):
                if moment is not value:
                    moment.copy_(value)
