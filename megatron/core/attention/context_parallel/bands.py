"""Run-time test of a kernel on the band tiles that a sliding window creates in ring attention."""

from __future__ import annotations

import torch

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.kernels.base import Kernel
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.tiles import Visibility, plan_tiles


@torch.no_grad()
def bands_are_right(kernel: Kernel, scale: float, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``kernel``, built with ``scale``, matches :class:`UnfusedAttention` on random inputs, forward and
    backward, with a relative L2 error below 2 % per tensor (NaN: False). Tests every band tile of a two-rank ring with
    chunks of 128 tokens and windows of 40, 150 and 300 keys, by 4 heads in 2 groups. Waits for the device."""
    length, reference = 512, UnfusedAttention(scale)
    spans = [zigzag.spans(length, rank, 2) for rank in range(2)]
    bands = {
        tile
        for window in (40, 150, 300)
        for queries in spans
        for keys in spans
        for tile in plan_tiles(queries, keys, Visibility(True, (window, 0)), length)
        if tile.left is not None
    }
    generator = torch.Generator().manual_seed(0)
    for tile in sorted(bands, key=str):
        sizes = [(4, tile.num_queries), (2, tile.num_keys), (2, tile.num_keys), (4, tile.num_queries)]
        query, key, value, grad = (
            torch.randn(1, *size, channels, generator=generator).to(device, dtype) for size in sizes
        )
        expected = reference.forward(query, key, value, tile)
        results = kernel.forward(query, key, value, tile)
        out = expected[0].to(dtype)
        pairs = [
            *zip(results, expected, strict=True),
            *zip(
                kernel.backward(grad, query, key, value, out, expected[1], tile),
                reference.backward(grad, query, key, value, out, expected[1], tile),
                strict=True,
            ),
        ]
        if not all((x.float() - y.float()).norm() < 2e-2 * y.float().norm() for x, y in pairs):
            return False
    return True
