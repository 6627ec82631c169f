"""Attention of one tile: queries against a block of keys, with the log-sum-exp that lets blocks be merged.

    out = softmax(scale Q K^T) V over the visible keys of the block,    lse = log sum exp(scale Q K^T)

Backward takes the output and the log-sum-exp of *all* keys, with which a block's gradients are its exact share.
``BlockwiseTorch`` is plain torch and the reference; ``FusedBlocks`` calls the cuDNN and flash kernels of torch's SDPA.

Legend: b batch, a query heads, g key/value groups, q queries, k keys, d head dim.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.attention.context_parallel import zigzag
from megatron.core.attention.context_parallel.packing import Segments, kernel_window
from megatron.core.attention.context_parallel.tiles import Tile, Visibility, plan_tiles
from megatron.core.extensions.cudnn import cudnn_takes_lengths
from megatron.core.random.philox import DropoutStream

aten = torch.ops.aten
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights as a function of global positions: no form or layout changes a mask."""

    stream: DropoutStream
    rate: float
    site: tuple[str | int, ...]
    first_head: int
    """Global number of the first local head."""
    sample_b: Tensor
    """Global sample counter, int64 [b]."""

    def factors(self, tile: Tile, num_heads: int, dtype: torch.dtype) -> Tensor:
        """[b, a, q, k]: 0 where dropped, else 1 / (1 - rate). Tiles must not join stretches of the sequence."""
        device = self.sample_b.device
        positions = torch.arange(tile.query_position, tile.query_position + tile.num_queries, device=device)
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=device)
        keys = range(tile.key_position, tile.key_position + tile.num_keys)
        samples = self.sample_b if tile.row is None else self.sample_b[tile.row : tile.row + 1]
        keep = [
            self.stream.keep_mask(self.rate, self.site, sample, positions[None, :, None], heads[:, None, None], keys)
            for sample in samples
        ]
        return torch.stack(keep).to(dtype) / (1.0 - DropoutStream.exact_rate(self.rate))


class BlockwiseTorch:
    """Separate torch operations in fp32 (fp64 for fp64 inputs)."""

    packs_documents = False

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def _scores(self, query: Tensor, key: Tensor, tile: Tile) -> Tensor:
        """Scaled scores [b, g, p, q, k] (p query heads per group), -inf where hidden."""
        grouped = query.unflatten(1, (key.shape[1], -1))
        scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * self.scale
        if tile.is_full:
            return scores
        distance = torch.arange(tile.num_keys, device=query.device) - torch.arange(
            tile.num_queries, device=query.device
        ).unsqueeze(1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if tile.left is not None:
            hidden |= distance < -tile.left
        if tile.right is not None:
            hidden |= distance > tile.right
        return scores.masked_fill(hidden, -torch.inf)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, dropout: WeightDropout | None = None
    ) -> tuple[Tensor, Tensor]:
        """query [b, a, q, d], key and value [b, g, k, d] -> out [b, a, q, d], lse [b, a, q], fp32 or fp64."""
        query, key, value = (_wide(x) for x in (query, key, value))
        scores = self._scores(query, key, tile)
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = torch.exp(scores - lse)
        if dropout is not None:
            weights *= dropout.factors(tile, query.shape[1], weights.dtype).view_as(weights)
        return torch.matmul(weights, value.unsqueeze(2)).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        dropout: WeightDropout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of query, key and value, fp32 or fp64; ``out`` and ``lse`` are those over all blocks."""
        grad, query, key, value, out = (_wide(x) for x in (grad, query, key, value, out))
        groups = (key.shape[1], -1)
        weights = torch.exp(self._scores(query, key, tile) - lse.unflatten(1, groups).unsqueeze(-1))
        # sum_k dP_k P_k over all blocks, dropout included
        delta = (grad * out).sum(-1, keepdim=True).unflatten(1, groups)
        grad = grad.unflatten(1, groups)
        grad_weights = torch.matmul(grad, value.unsqueeze(2).transpose(-1, -2))
        dropped = weights
        if dropout is not None:
            factors = dropout.factors(tile, query.shape[1], weights.dtype).view_as(weights)
            dropped, grad_weights = weights * factors, grad_weights * factors
        grad_value = torch.matmul(dropped.transpose(-1, -2), grad).sum(2)
        grad_scores = weights * (grad_weights - delta) * self.scale
        grad_query = torch.matmul(grad_scores, key.unsqueeze(2)).flatten(1, 2)
        grad_key = torch.matmul(grad_scores.transpose(-1, -2), query.unflatten(1, groups)).sum(2)
        return grad_query, grad_key, grad_value


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class FusedBlocks:
    """cuDNN's kernels for tiles without a mask or with a causal square, of lengths that it takes; flash kernels
    (FlashAttention 2) for all others, for bands and, many at once, for documents.

    16-bit inputs on a GPU. ``preferred`` "flash" uses flash kernels for everything. Dropout is not supported: its masks
    would depend on the kernel.
    """

    packs_documents = True

    def __init__(self, scale: float, preferred: Literal["cudnn", "flash"] = "cudnn") -> None:
        self.scale, self.preferred = scale, preferred

    def _takes_cudnn(self, tile: Tile) -> bool:
        fits = cudnn_takes_lengths(tile.num_queries, tile.num_keys)
        return self.preferred == "cudnn" and fits and (tile.is_full or tile.is_causal_square)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, dropout: WeightDropout | None = None
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`BlockwiseTorch.forward`; out in the inputs' dtype, lse fp32."""
        assert dropout is None
        if self._takes_cudnn(tile):
            out, lse = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, not tile.is_full, False, scale=self.scale
            )[:2]
            return out, lse.reshape(lse.shape[:3])
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = self._flash(query, key, value, (None, None, tile.num_queries, tile.num_keys), kernel_window(tile))
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        dropout: WeightDropout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As :meth:`BlockwiseTorch.backward`; gradients in the inputs' dtype."""
        lse = lse.contiguous()  # the kernels do not look at its strides
        if self._takes_cudnn(tile):
            unused = torch.zeros((), dtype=torch.int64, device=query.device)
            return aten._scaled_dot_product_cudnn_attention_backward(
                grad, query, key, value, out, lse.unsqueeze(-1), unused, unused, None, None, None,
                tile.num_queries, tile.num_keys, 0.0, not tile.is_full, scale=self.scale,
            )  # fmt: skip
        tensors = [x.transpose(1, 2) for x in (grad, query, key, value, out)]
        shape = None, None, tile.num_queries, tile.num_keys
        grads = self._flash_backward(tensors, lse, shape, kernel_window(tile))
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)

    def forward_packed(self, query: Tensor, key: Tensor, value: Tensor, at: Segments) -> tuple[Tensor, Tensor]:
        """query [t, a, d], key and value [u, g, d], one segment after the other -> out [t, a, d], lse [t, a]."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        out, lse = self._flash(query, key, value, shape, at.window)
        return out, lse.t()

    def backward_packed(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, at: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, in their shapes."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        return self._flash_backward([grad, query, key, value, out], lse.t().contiguous(), shape, at.window)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: tuple[int, int]) -> tuple:
        """[b, q, a, d] or packed [t, a, d]; ``shape`` are the boundaries (or None) and the longest segments."""
        return aten._flash_attention_forward(
            query, key, value, *shape, 0.0, False, False, scale=self.scale,
            window_size_left=window[0], window_size_right=window[1],
        )[:2]  # fmt: skip

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: tuple[int, int]) -> tuple:
        grad, query, key, value, out = tensors
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        return aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out.contiguous(), lse, *shape, 0.0, False, random_state,
            lse.new_empty(0), scale=self.scale, window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip


BlockKernel = BlockwiseTorch | FusedBlocks


def make_block_kernel(
    scale: float, backend: str, dtype: torch.dtype, *, channels: int, dropout_rate: float, ring_window: bool = False
) -> BlockKernel:
    """Fused kernels for 16-bit types where there is a GPU, unless the backend is ``unfused`` or ``local``, weights are
    dropped, or the kernels do not take heads of so many channels. For a ring with a sliding window (``ring_window``)
    they must first get its bands right on this device."""
    sixteen_bit = dtype in (torch.bfloat16, torch.float16)
    if backend in ("unfused", "local") or dropout_rate or not sixteen_bit or not torch.cuda.is_available():
        return BlockwiseTorch(scale)
    if channels % 8 or channels > 256:
        logger.warning("context parallelism: no fused kernel takes %d channels per head; using plain torch", channels)
        return BlockwiseTorch(scale)
    # cuDNN's backward takes at most 128 channels and does not repeat its bits
    flash = backend == "flash" or channels > 128 or torch.are_deterministic_algorithms_enabled()
    preferred: Literal["cudnn", "flash"] = "flash" if flash else "cudnn"
    if ring_window and not bands_are_right_here(preferred, channels, dtype):
        logger.warning(
            "context parallelism: this GPU's flash kernels are wrong on the bands of a ring with a sliding window; "
            "using plain torch there (--cp-comm-type allgather is faster)"
        )
        return BlockwiseTorch(scale)
    return FusedBlocks(scale, preferred)


@functools.lru_cache(maxsize=16)
def bands_are_right_here(preferred: Literal["cudnn", "flash"], channels: int, dtype: torch.dtype) -> bool:
    """:func:`bands_are_right` of fused kernels on the current GPU, found out once."""
    scale = channels**-0.5
    return bands_are_right(FusedBlocks(scale, preferred), scale, channels, dtype, torch.device("cuda"))


@torch.no_grad()
def bands_are_right(
    kernel: BlockKernel, scale: float, channels: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``kernel`` agrees with plain torch, to the rounding of ``dtype``, forward and backward, on every band
    that rings of two ranks make of three windows: narrower than a chunk, wider, wider than two."""
    length, reference = 512, BlockwiseTorch(scale)
    spans = [zigzag.spans(length, rank, 2) for rank in range(2)]
    bands = {
        tile
        for window in (40, 150, 300) for queries in spans for keys in spans
        for tile in plan_tiles(queries, keys, Visibility(True, (window, 0)), length) if tile.left is not None
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for tile in sorted(bands, key=str):
        sizes = [(4, tile.num_queries), (2, tile.num_keys), (2, tile.num_keys), (4, tile.num_queries)]
        query, key, value, grad = (
            torch.randn(1, *size, channels, generator=generator).to(device, dtype) for size in sizes
        )
        expected = reference.forward(query, key, value, tile)
        found = kernel.forward(query, key, value, tile)
        out = expected[0].to(dtype)
        pairs = [
            *zip(found, expected, strict=True),
            *zip(
                kernel.backward(grad, query, key, value, out, expected[1], tile),
                reference.backward(grad, query, key, value, out, expected[1], tile), strict=True,
            ),
        ]  # fmt: skip
        if not all((x.float() - y.float()).norm() < 2e-2 * y.float().norm() for x, y in pairs):
            return False
    return True
