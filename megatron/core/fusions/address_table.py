"""Kernels over many tensors: a table of addresses in device memory gives all tensors of equal dtypes one launch.

A row of the table belongs to one weight. It holds the addresses of the weight, of its extra master storage (0 if none)
and of further operands, then the number of elements. ``chunks`` names the row and the block of BLOCK elements of each
program. Kernels read and write masters of all built-in storages by :func:`load_master` and :func:`store_master`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.storage import Copy, FSDPStorage, Remainder, Storage
from megatron.core.host_memory import copied

_KINDS = (Storage, FSDPStorage, Copy, Remainder)
"""Built-in kinds, which kernels read and write."""
BLOCK, NUM_WARPS = 4096, 8

if triton is not None:

    @triton.jit
    def locate_block(table, chunks, skip, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
        """Return this program's row of the table, its element numbers, and the mask of those that exist: none if the
        number at ``skip`` is 1. ALIGNMENT divides all addresses (bytes) and sizes (elements), for wide accesses."""
        chunk = chunks + tl.program_id(0).to(tl.int64) * 2
        row = table + tl.load(chunk).to(tl.int64) * FIELDS
        at = tl.load(chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size = tl.load(row + FIELDS - 1) * (1 - tl.load(skip).to(tl.int64))
        return row, at, at < tl.multiple_of(size, ALIGNMENT)

    @triton.jit
    def pointers(address, DTYPE: tl.constexpr, at, ALIGNMENT: tl.constexpr):
        """Return the pointers to elements ``at`` of the tensor at ``address``."""
        return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT) + at

    @triton.jit
    def load_master(weight, extra, at, inside, KEPT_BITS: tl.constexpr, ALIGNMENT: tl.constexpr):
        """Return the fp32 masters. KEPT_BITS of extra storage: 0, 16 (remainder) or 32 (fp32 copy)."""
        if KEPT_BITS == 16:
            # the stored weight is one too high where its low half is at least 2^15 (rounded up): undo it, as join_fp32
            low = tl.load(pointers(extra, tl.int16, at, ALIGNMENT), mask=inside, other=0).to(tl.int32)
            high = tl.load(pointers(weight, tl.int16, at, ALIGNMENT), mask=inside, other=0).to(tl.int32)
            high -= (low < 0).to(tl.int32)
            p = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
        elif KEPT_BITS == 32:
            p = tl.load(pointers(extra, tl.float32, at, ALIGNMENT), mask=inside, other=0.0)
        else:
            p = tl.load(pointers(weight, tl.float32, at, ALIGNMENT), mask=inside, other=0.0)
        return p

    @triton.jit
    def store_master(
        weight, extra, at, inside, p, WEIGHT: tl.constexpr, KEPT_BITS: tl.constexpr, AVOID_TIES: tl.constexpr,
        ALIGNMENT: tl.constexpr,
    ):  # fmt: skip
        """Write masters ``p`` and model weights at ``at`` where ``inside``. KEPT_BITS 0: ``p`` to the fp32 weight; 32:
        ``p`` to ``extra``, rounded to the weight; 16: split over both. AVOID_TIES changes ``p`` before, as
        ``nudge_rounding_ties_``: a tie that bf16 rounds down could not be rebuilt from weight and remainder."""
        bits = p.to(tl.int32, bitcast=True)
        if AVOID_TIES:
            bits -= ((bits & 0x1FFFF) == 0x8000).to(tl.int32)
        if KEPT_BITS == 16:
            low = bits.to(tl.int16)
            tl.store(pointers(extra, tl.int16, at, ALIGNMENT), low, mask=inside)
            high = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
            tl.store(pointers(weight, tl.int16, at, ALIGNMENT), high, mask=inside)
        else:
            p = bits.to(tl.float32, bitcast=True)
            if KEPT_BITS == 32:
                tl.store(pointers(extra, tl.float32, at, ALIGNMENT), p, mask=inside)
                tl.store(pointers(weight, WEIGHT, at, ALIGNMENT), p.to(WEIGHT), mask=inside)
            else:
                tl.store(pointers(weight, tl.float32, at, ALIGNMENT), p, mask=inside)

    TRITON_TYPES = {
        torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    }  # fmt: skip


class Format(NamedTuple):
    """Properties of one row that select the kernel."""

    weight: torch.dtype
    kept_bits: int
    avoids_ties: bool
    operands: tuple[torch.dtype, ...]
    alignment: int
    """16 if it divides every address (in bytes) and size (in elements), else 1."""


class Table(NamedTuple):
    """Addresses of the tensors of one format, on the device."""

    format: Format
    rows: Tensor
    """int64 [tensors, fields]: addresses and size."""
    chunks: Tensor
    """int32 [programs, 2]: (tensor index, block index) of each program."""

    @property
    def grid(self) -> tuple[int]:
        """Launch grid."""
        return (self.chunks.shape[0],)

    @property
    def constants(self) -> dict[str, object]:
        """Constants of :func:`locate_block` and :func:`store_master`, and the number of warps."""
        kind = self.format
        return {
            "WEIGHT": TRITON_TYPES[kind.weight], "KEPT_BITS": kind.kept_bits, "AVOID_TIES": kind.avoids_ties,
            "ALIGNMENT": kind.alignment, "FIELDS": 3 + len(kind.operands), "BLOCK": BLOCK, "num_warps": NUM_WARPS,
        }  # fmt: skip


Operands = Sequence[tuple[Storage, tuple[Tensor, ...]]]
"""Storage and further operands of each weight."""


class AddressTables:
    """Cache of tables, by the address of a group's first weight. Keeps no tensors alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, list[Table]]] = {}

    def find(self, group: Operands) -> list[Table]:
        """Rebuild and copy to the device if an address, size or dtype differs (each step with new memory)."""
        rows = [_row(*operands) for operands in group]
        key = rows, [_dtypes(*operands) for operands in group]  # the same memory may hold a tensor of another dtype
        first = rows[0][0]
        cached = self._known.get(first)
        if cached is None or cached[0] != key:
            self._known[first] = cached = (key, list(_tables(group, rows)))
        return cached[1]


def _row(storage: Storage, operands: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Addresses of weight, extra master storage (0 if none) and operands, then the number of elements."""
    extra = 0 if storage.kept is None else storage.kept.data_ptr()
    return storage.weight.data_ptr(), extra, *(operand.data_ptr() for operand in operands), storage.weight.numel()


def _dtypes(storage: Storage, operands: tuple[Tensor, ...]) -> tuple[object, ...]:
    """What selects the kernel besides addresses, and whether stored values avoid ties."""
    extra = None if storage.kept is None else storage.kept.dtype
    return storage.weight.dtype, extra, storage.nudges_ties, *(operand.dtype for operand in operands)


def _tables(group: Operands, rows: Sequence[tuple[int, ...]]) -> Iterator[Table]:
    """One table per format. Copies to the device do not block the host."""
    formats: dict[Format, list[tuple[int, ...]]] = {}
    for (storage, operands), row in zip(group, rows):
        formats.setdefault(_format(storage, operands, row), []).append(row)
    device = group[0][0].weight.device
    for kind, rows_of_format in formats.items():
        table = torch.tensor(rows_of_format, dtype=torch.int64)
        counts = (table[:, -1] + BLOCK - 1) // BLOCK
        which = torch.repeat_interleave(torch.arange(len(rows_of_format)), counts)
        block = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        chunks = torch.stack([which, block], dim=1).to(torch.int32)
        yield Table(kind, copied(table, device), copied(chunks, device))


def _format(storage: Storage, operands: tuple[Tensor, ...], row: tuple[int, ...]) -> Format:
    """Asserts that all tensors are contiguous."""
    extra, weight = storage.kept, storage.weight
    parts = (weight, extra, *operands)
    assert all(part is None or part.is_contiguous() for part in parts), "the kernel runs over flat memory"
    assert all(part.numel() == weight.numel() for part in operands)
    kept_bits = 0 if extra is None else 8 * extra.element_size()
    alignment = 1 if any(number % 16 for number in row) else 16
    return Format(weight.dtype, kept_bits, storage.nudges_ties, tuple(operand.dtype for operand in operands), alignment)


def is_read_by_kernels(storage: Storage) -> bool:
    """Return whether kernels may read and write ``storage``: a built-in kind, or one that inherits its methods."""
    kind = type(storage)
    return any(kind.read is storage_kind.read and kind.write is storage_kind.write for storage_kind in _KINDS)


def fits_kernels(storages: Sequence[Storage]) -> bool:
    """Return whether Triton is installed and all weights that kernels may read are contiguous, on a GPU, and either
    fp32 or half precision with an fp32 copy or remainder; False without any."""
    readable = [storage for storage in storages if is_read_by_kernels(storage)]
    return triton is not None and bool(readable) and all(
        storage.weight.is_cuda and storage.weight.is_contiguous()
        and (storage.weight.dtype == torch.float32 or isinstance(storage, Copy | Remainder))
        for storage in readable
    )  # fmt: skip
