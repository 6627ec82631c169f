"""AdamW in one pass over memory (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

    g = c gradient                        c: clipping and unscaling
    p <- p - lr wd p                      (decoupled; else g <- g + wd p)
    m <- b1 m + (1 - b1) g                v <- b2 v + (1 - b2) g^2
    p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The kernel reads gradient, master and moments once and writes master, moments and the model weight: 28 bytes per
parameter with fp32 gradients and moments and a split master, 20 with bf16 moments. A table of addresses in device
memory lists the tensors, so that all tensors of one parameter group and format need one launch. c, the skip flag and
the step count stay on the device: no host sync.

Elements are updated independently, without sums, so that the bits do not depend on the parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.storage import Copy, FSDPStorage, OptimizerEntry, Remainder, Storage, as_fp32_lists, by_rates


class AdamStep(NamedTuple):
    """Settings of one step, common to all entries. Tensors are 0-d, on the parameters' device."""

    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    step: Tensor
    """fp32: t, including this update."""
    skip: Tensor
    """fp32: 1 skips the update (nothing is written), 0 applies it."""
    factor: Tensor | None
    """Multiplier of gradients; None for 1."""


AdamUpdate = Callable[[Sequence[OptimizerEntry], AdamStep], None]


def adam_reference_(entries: Sequence[OptimizerEntry], step: AdamStep) -> None:
    """Update masters, model weights and both moments in place with torch's fused operator (AdamW or Adam with L2
    decay). Low-precision state is widened to copies and written back. Gradients are multiplied by ``step.factor``, in
    place if they have the masters' dtype. ``step.skip`` 1 changes no weights or moments, but still scales gradients."""
    update: Any = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    for (lr, weight_decay), group in by_rates(entries).items():
        for masters, gradients, (exp_avgs, exp_avg_sqs) in as_fp32_lists(group, step.factor):
            update(
                masters, gradients, exp_avgs, exp_avg_sqs, [], [step.step] * len(masters), lr=lr,
                beta1=step.beta1, beta2=step.beta2, weight_decay=weight_decay, eps=step.eps, amsgrad=False,
                maximize=False, grad_scale=None, found_inf=step.skip,
            )  # fmt: skip


_KERNEL_STORAGES = (Storage, FSDPStorage, Copy, Remainder)
"""Kinds that the kernel reads and writes; exact types, because a subclass may write its weight differently."""
_FIELDS = 6  # gradient, weight, kept, first moment, second moment: addresses; number of elements
_BLOCK, _NUM_WARPS = 4096, 8

if triton is not None:

    @triton.jit
    def _adam_kernel(
        table, chunks, scalars, lr, decay, beta1, rest1, beta2, rest2, eps,
        GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, KEPT_BITS: tl.constexpr, FIRST: tl.constexpr,
        SECOND: tl.constexpr, DECOUPLED: tl.constexpr, AVOID_HALVES: tl.constexpr, ALIGNMENT: tl.constexpr,
        FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Update moments, master and model weight of BLOCK elements of one tensor in place, the block and tensor that
        ``chunks`` names for this program. ``scalars``: skip (1: writes nothing), gradient factor, 1 - b1^t, sqrt(1 -
        b2^t). KEPT_BITS: extra master storage, 0, 16 (remainder) or 32 (fp32 copy). ALIGNMENT divides all addresses
        (bytes) and sizes (elements), for wide accesses."""
        chunk = chunks + tl.program_id(0).to(tl.int64) * 2
        row = table + tl.load(chunk).to(tl.int64) * FIELDS
        at = tl.load(chunk + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        size = tl.load(row + 5) * (1 - tl.load(scalars).to(tl.int64))  # 0 if the update is skipped
        inside = at < tl.multiple_of(size, ALIGNMENT)
        factor, bias1, root2 = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        gradient_at = tl.multiple_of(tl.load(row).to(tl.pointer_type(GRADIENT)), ALIGNMENT) + at
        first_at = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(FIRST)), ALIGNMENT) + at
        second_at = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(SECOND)), ALIGNMENT) + at

        weight_address, kept_address = tl.load(row + 1), tl.load(row + 2)
        if KEPT_BITS == 16:
            high_at = tl.multiple_of(weight_address.to(tl.pointer_type(tl.int16)), ALIGNMENT) + at
            low_at = tl.multiple_of(kept_address.to(tl.pointer_type(tl.int16)), ALIGNMENT) + at
            # the stored weight is one too high where its low half is at least 2^15 (rounded up): undo it, as join_fp32
            low = tl.load(low_at, mask=inside, other=0).to(tl.int32)
            high = tl.load(high_at, mask=inside, other=0).to(tl.int32) - (low < 0).to(tl.int32)
            p = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
        elif KEPT_BITS == 32:
            master_at = tl.multiple_of(kept_address.to(tl.pointer_type(tl.float32)), ALIGNMENT) + at
            p = tl.load(master_at, mask=inside, other=0.0)
        else:
            master_at = tl.multiple_of(weight_address.to(tl.pointer_type(tl.float32)), ALIGNMENT) + at
            p = tl.load(master_at, mask=inside, other=0.0)

        g = tl.load(gradient_at, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second_at, mask=inside, other=0.0).to(tl.float32)
        if DECOUPLED:
            p -= (lr * decay) * p
        else:
            g += decay * p
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p -= (lr / bias1) * m / (tl.sqrt(v) / root2 + eps)
        tl.store(first_at, m.to(FIRST), mask=inside)
        tl.store(second_at, v.to(SECOND), mask=inside)

        # as nudge_rounding_ties_: a tie that bf16 rounds down could not be rebuilt from weight and remainder
        bits = p.to(tl.int32, bitcast=True)
        if AVOID_HALVES:
            bits -= ((bits & 0x1FFFF) == 0x8000).to(tl.int32)
        if KEPT_BITS == 16:
            low = bits.to(tl.int16)
            tl.store(low_at, low, mask=inside)
            tl.store(high_at, ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16), mask=inside)
        else:
            p = bits.to(tl.float32, bitcast=True)
            tl.store(master_at, p, mask=inside)
            if KEPT_BITS == 32:
                weight_at = tl.multiple_of(weight_address.to(tl.pointer_type(WEIGHT)), ALIGNMENT) + at
                tl.store(weight_at, p.to(WEIGHT), mask=inside)

    _TRITON_TYPES = {
        torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    }  # fmt: skip


class _Format(NamedTuple):
    gradient: torch.dtype
    weight: torch.dtype
    kept_bits: int
    nudges_ties: bool
    first: torch.dtype
    second: torch.dtype
    alignment: int
    """16 if it divides every address (in bytes) and size (in elements), else 1."""


class _Table(NamedTuple):
    """Addresses of the tensors of one format, on the device."""

    format: _Format
    rows: Tensor
    """int64 [tensors, fields]: addresses and size."""
    chunks: Tensor
    """int32 [programs, 2]: (tensor index, block index) of each program."""


class TritonAdam:
    """:data:`AdamUpdate` by the Triton kernel. Address tables are cached and rebuilt when a tensor has moved."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[list[tuple[int, ...]], list[_Table]]] = {}
        """Addresses and tables of a group, by the address of its first weight: slices of offloaded state are separate
        calls."""

    @torch.no_grad()
    def __call__(self, entries: Sequence[OptimizerEntry], step: AdamStep) -> None:
        """Update masters, model weights and moments of all ``entries`` in place, one launch per (learning rate, weight
        decay) and format; entries of declared storages by :func:`adam_reference_`, which may scale their gradients.
        ``step.skip`` 1 writes nothing. No host sync. Keeps address tables per group."""
        scalars = _device_scalars(step)
        adam_reference_([each for each in entries if type(each.storage) not in _KERNEL_STORAGES], step)
        own = [each for each in entries if type(each.storage) in _KERNEL_STORAGES]
        for (lr, weight_decay), group in by_rates(own).items():
            for table in self._current(group):
                kind = table.format
                _adam_kernel[(table.chunks.shape[0],)](
                    table.rows, table.chunks, scalars, float(lr), float(weight_decay), step.beta1,
                    1.0 - step.beta1, step.beta2, 1.0 - step.beta2, step.eps, GRADIENT=_TRITON_TYPES[kind.gradient],
                    WEIGHT=_TRITON_TYPES[kind.weight], KEPT_BITS=kind.kept_bits, FIRST=_TRITON_TYPES[kind.first],
                    SECOND=_TRITON_TYPES[kind.second], DECOUPLED=step.decoupled,
                    AVOID_HALVES=kind.nudges_ties, ALIGNMENT=kind.alignment, FIELDS=_FIELDS, BLOCK=_BLOCK,
                    num_warps=_NUM_WARPS,
                )  # fmt: skip

    def _current(self, tensors: Sequence[OptimizerEntry]) -> list[_Table]:
        """Return the address tables of a group, from the cache if all addresses and sizes are as before, else
        rebuilt and copied to the device (every step if gradients are allocated anew). Keeps no tensors alive."""
        # addresses and sizes only: a tensor of another dtype in the same place would be read with the old dtype
        rows = [_row(each) for each in tensors]
        first = rows[0][1]
        known = self._tables.get(first)
        if known is None or known[0] != rows:
            self._tables[first] = known = (rows, list(_tables(tensors, rows)))
        return known[1]


def _row(each: OptimizerEntry) -> tuple[int, ...]:
    """Return the addresses of gradient, weight, extra master storage (0 if none), first and second moment, and the
    number of elements: one row of a table."""
    kept = each.storage.kept
    first, second = each.moments
    return (
        each.gradient.data_ptr(), each.storage.weight.data_ptr(), 0 if kept is None else kept.data_ptr(),
        first.data_ptr(), second.data_ptr(), each.gradient.numel(),
    )  # fmt: skip


def _tables(tensors: Sequence[OptimizerEntry], rows: Sequence[tuple[int, ...]]) -> Iterator[_Table]:
    """Group ``tensors``, with their address ``rows``, by format and yield one table per format on the tensors' device.
    Copies to the device do not block the host."""
    formats: dict[_Format, list[tuple[int, ...]]] = {}
    for each, row in zip(tensors, rows):
        formats.setdefault(_format(each, row), []).append(row)
    device = tensors[0].gradient.device if tensors else torch.device("cpu")
    for kind, own in formats.items():
        table = torch.tensor(own, dtype=torch.int64)
        counts = (table[:, -1] + _BLOCK - 1) // _BLOCK
        which = torch.repeat_interleave(torch.arange(len(own)), counts)
        block = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
        chunks = torch.stack([which, block], dim=1).to(torch.int32)
        yield _Table(kind, _to_device(table, device), _to_device(chunks, device))


def _format(each: OptimizerEntry, row: tuple[int, ...]) -> _Format:
    """Return the dtypes, bits of extra master storage, tie handling and alignment of one tensor, which select the
    kernel. ``row`` is its address row. Asserts that all tensors are contiguous."""
    kept = each.storage.kept
    first, second = each.moments
    parts = (each.gradient, each.storage.weight, kept, first, second)
    assert all(part is None or part.is_contiguous() for part in parts), "the kernel runs over flat memory"
    kept_bits = 0 if kept is None else 8 * kept.element_size()
    alignment = 1 if any(number % 16 for number in row) else 16
    weight, avoids = each.storage.weight.dtype, each.storage.nudges_ties
    return _Format(each.gradient.dtype, weight, kept_bits, avoids, first.dtype, second.dtype, alignment)


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    # the pinned copy may be freed at once: torch's host allocator reuses it only after the copy to the device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _device_scalars(step: AdamStep) -> Tensor:
    """Return fp32 [skip, factor, 1 - b1^t, sqrt(1 - b2^t)], computed in fp64: 1 - 0.999^t is inaccurate in fp32."""
    t = step.step.to(torch.float64)
    factor = torch.ones_like(t) if step.factor is None else step.factor.to(torch.float64)
    corrections = (1.0 - step.beta1**t, (1.0 - step.beta2**t).sqrt())
    return torch.stack([step.skip.to(torch.float64), factor, *corrections]).to(torch.float32)


def choose_adam(storages: Sequence[Storage]) -> AdamUpdate:
    """Return the update for ``storages``: the Triton kernel if it is installed and all weights in built-in storages are
    contiguous, on a GPU, and either fp32 or half precision with an fp32 copy or remainder; else torch's fused
    operator."""
    own = [each for each in storages if type(each) in _KERNEL_STORAGES]
    fits = triton is not None and bool(own) and all(
        each.weight.is_cuda and each.weight.is_contiguous()
        and (each.weight.dtype == torch.float32 or isinstance(each, Copy | Remainder))
        for each in own
    )  # fmt: skip
    return TritonAdam() if fits else adam_reference_
