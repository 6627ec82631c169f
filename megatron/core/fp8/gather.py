"""All-gathers of fp8 activations along the sequence: one byte per element, and block scales where there are any."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.fusions.fp8_cast import Quantized
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather


class _Gathering:
    """All-gather of one fp8 matrix in flight; a per-tensor scale is equal on all ranks and is not sent."""

    def __init__(self, x: Quantized, group: Group, *, transposed: bool) -> None:
        self.transposed, self.ranks, self.dtype, self.scale = transposed, group.size, x.data.dtype, x.scale
        # not every backend sends fp8
        self.data = begin_all_gather(x.data.view(torch.uint8), group)
        self.scales: AsyncHandle | None = None
        if x.scale.dim() == 2:
            self.scales = begin_all_gather((x.scale.t() if transposed else x.scale).contiguous(), group)

    def wait(self) -> Quantized:
        """Return [s, ..., i], or ``transposed`` [i, t]."""
        data: Tensor = self.data.wait()
        if self.transposed:  # [ranks i, t / ranks] to [i, t]
            data = data.unflatten(0, (self.ranks, -1)).transpose(0, 1).flatten(1)
        scale = self.scale
        if self.scales is not None:
            gathered = self.scales.wait()
            scale = gathered.t() if self.transposed else gathered.t().contiguous().t()
        return Quantized(data.view(self.dtype), scale)


def begin_gather(x: Quantized, group: Group, *, transposed: bool) -> AsyncHandle:
    """Start the all-gather of ``x`` [s / n, ..., i] over ``group`` along its first dim; ``transposed``: ``x`` is a
    transposed copy [i, t / n], gathered along its last dim. With block scales t / n must be a multiple of 128.
    ``wait()`` returns a ``Quantized``."""
    return _Gathering(x, group, transposed=transposed)
