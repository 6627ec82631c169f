"""GEMMs whose rows do not depend on each other: forward passes that give a token the same bits in every batch.

GEMM libraries choose the order of sums by the number of rows. Inside of :class:`RowBlocks` every matrix product runs in
blocks of a fixed number of rows, the last one padded with zeros; the position in a block does not change the bits.
Meant for forward passes: weight gradients sum over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ROWS = 32
"""Rows of a block. Also a multiple of vector registers: CPU kernels compute the elements after the last full vector by
another function, so that callers pad their rows to it."""
_LEFT = {aten.mm: 0, aten.addmm: 1}
"""Operator -> index of its left matrix."""


class RowBlocks(TorchDispatchMode):
    """Context in which ``mm`` and ``addmm`` (and ``linear``, which calls them) run in blocks of :data:`ROWS` rows."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        index = _LEFT.get(func.overloadpacket)
        if index is None:
            return func(*args, **kwargs)
        out, left = kwargs.pop("out", None), args[index]
        if index and args[0].dim() > 1 and len(args[0]) > 1:
            raise NotImplementedError("addmm of a matrix: row blocks support a bias")
        run = func if out is None else func.overloadpacket
        result = _in_blocks(left, lambda block: run(*args[:index], block, *args[index + 1 :], **kwargs))
        return result if out is None else out.copy_(result)


def _in_blocks(left: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``product`` of ``left`` [rows, k], computed block by block."""
    padded = F.pad(left, (0, 0, 0, -len(left) % ROWS))
    # copies: kernels may choose by the alignment of the memory
    parts = [product(block.clone(memory_format=torch.contiguous_format)) for block in padded.split(ROWS)]
    return torch.cat(parts)[: len(left)] if parts else product(left)
