"""Attention of one tile: queries against a block of keys, with the log-sum-exp that lets blocks be merged.

    out = softmax(scale Q K^T) V over the visible keys of the block,    lse = log sum exp(scale Q K^T)

Backward takes the output and the log-sum-exp of *all* keys, with which a block's gradients are its exact share.
``BlockwiseTorch`` is plain torch and the reference; ``FusedBlocks`` calls the cuDNN and flash kernels of torch's SDPA.

Legend: b batch, a query heads, g key/value groups, q queries, k keys, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron.core.context_parallel.tiles import Tile
from megatron.core.rng import DropoutStream

aten = torch.ops.aten


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

    supports_dropout = True

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
    """cuDNN's kernels for tiles without a mask or with a causal square, flash kernels (FlashAttention 2) for bands.

    16-bit inputs on a GPU. ``preferred`` "flash" uses flash kernels for everything. Dropout is not supported: its masks
    would depend on the kernel.
    """

    supports_dropout = False

    def __init__(self, scale: float, preferred: Literal["cudnn", "flash"] = "cudnn") -> None:
        self.scale, self.preferred = scale, preferred

    def _takes_cudnn(self, tile: Tile) -> bool:
        return self.preferred == "cudnn" and (tile.is_full or tile.is_causal_square)

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
        out, lse = aten._flash_attention_forward(
            query, key, value, None, None, tile.num_queries, tile.num_keys, 0.0, False, False, scale=self.scale,
            **_flash_window(tile),
        )[:2]  # fmt: skip
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile,
        dropout: WeightDropout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As :meth:`BlockwiseTorch.backward`; gradients in the inputs' dtype."""
        lse = lse.contiguous()  # the kernels do not look at its strides
        state = torch.zeros(2, dtype=torch.int64, device=query.device)  # of a random generator that is not used
        if self._takes_cudnn(tile):
            return aten._scaled_dot_product_cudnn_attention_backward(
                grad, query, key, value, out, lse.unsqueeze(-1), state[0], state[1], None, None, None,
                tile.num_queries, tile.num_keys, 0.0, not tile.is_full, scale=self.scale,
            )  # fmt: skip
        grad, query, key, value, out = (x.transpose(1, 2) for x in (grad, query, key, value, out))
        grads = aten._flash_attention_backward(
            grad.contiguous(), query, key, value, out.contiguous(), lse, None, None, tile.num_queries, tile.num_keys,
            0.0, False, state.view(torch.uint64), state.view(torch.uint64), scale=self.scale, **_flash_window(tile),
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)  # type: ignore[return-value]


def _flash_window(tile: Tile) -> dict[str, int]:
    """Flash kernels count a band from the lower right corner; -1 is no limit."""
    shift = tile.num_keys - tile.num_queries
    left = -1 if tile.left is None else tile.left + shift
    right = -1 if tile.right is None else tile.right - shift
    return {"window_size_left": left, "window_size_right": right}


BlockKernel = BlockwiseTorch | FusedBlocks


def make_block_kernel(scale: float, backend: str, dtype: torch.dtype, dropout_rate: float) -> BlockKernel:
    """Fused kernels for 16-bit types where there is a GPU, unless the backend is ``unfused`` or ``local``."""
    sixteen_bit = dtype in (torch.bfloat16, torch.float16)
    if backend in ("unfused", "local") or dropout_rate or not sixteen_bit or not torch.cuda.is_available():
        return BlockwiseTorch(scale)
    return FusedBlocks(scale, "flash" if backend == "flash" else "cudnn")


