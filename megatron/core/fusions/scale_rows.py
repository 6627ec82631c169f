"""Multiply rows of a weight and its master in place, as far as their factors differ from 1.

Rows with factor 1 keep their bits and are not read: on a GPU a kernel skips them, on a CPU the host looks at the
factors first. The host does not wait for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.address_table import BLOCK, NUM_WARPS, fits_kernels, is_read_by_kernels
from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.storage import Storage

if triton is not None:
    from megatron.core.fusions.address_table import TRITON_TYPES, load_master, store_master

    @triton.jit
    def _scale_rows_kernel(
        weight, extra, factors, first, size, columns, WEIGHT: tl.constexpr, KEPT_BITS: tl.constexpr,
        AVOID_TIES: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """``weight``, ``extra``: addresses, as ``load_master``; ``first``: first element in the full rows."""
        weight, extra = tl.cast(weight, tl.int64), tl.cast(extra, tl.int64)  # low addresses arrive in 32 bits
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        factor = tl.load(factors + (first + at) // columns, mask=inside, other=1.0)
        inside &= factor != 1.0  # a block without such elements reads and writes nothing
        p = load_master(weight, extra, at, inside, KEPT_BITS, 1)
        store_master(weight, extra, at, inside, p * factor, WEIGHT, KEPT_BITS, AVOID_TIES, 1)


def scale_rows(storage: Storage, factors: Tensor, columns: int, first: int) -> None:
    """Multiply the weight of ``storage`` and its master by ``factors`` [rows] of the rows of ``columns`` elements. The
    storage holds elements from number ``first`` of these rows."""
    if not factors.is_cuda and bool((factors == 1.0).all()):
        return
    if is_read_by_kernels(storage) and fits_kernels([storage]):
        scale_rows_triton(storage, factors, columns, first)
        return
    master = storage.read()
    elements = torch.arange(first, first + master.numel(), device=factors.device)
    storage.write(master * factors[elements // columns].to(master.dtype).view_as(master))


def scale_rows_triton(storage: Storage, factors: Tensor, columns: int, first: int) -> None:
    """:func:`scale_rows` by a kernel, for a built-in storage that ``fits_kernels`` accepts."""
    weight, extra = storage.weight, storage.kept
    size = weight.numel()
    if size:
        _scale_rows_kernel[(triton.cdiv(size, BLOCK),)](
            weight.data_ptr(), 0 if extra is None else extra.data_ptr(), factors.float(), first, size, columns,
            WEIGHT=TRITON_TYPES[weight.dtype], KEPT_BITS=0 if extra is None else 8 * extra.element_size(),
            AVOID_TIES=storage.nudges_ties, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
