"""Interface of attention kernels, input of their selection (:class:`Request`), and base class of flash kernels.

    out = softmax(scale Q K^T) V over the visible keys,    lse = log sum exp(scale Q K^T)

``attend`` computes full sequences and is differentiable. ``forward`` and ``backward`` compute one block of keys at a
time with the log-sum-exp, for context parallelism, which merges blocks. Without context parallelism only ``attend`` is
called.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, d head dim, e head dim of values; q, k
queries and keys of a tile; n tokens of packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron.core.attention.masks import Mask
from megatron.core.attention.packing import Segments, kernel_window
from megatron.core.attention.tiles import Tile, full_tile
from megatron.core.attention.window import Window
from megatron.core.config.errors import UserError

Form = Literal["whole", "gather", "ring"]
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
NO_SOFT_CAP = "it does not cap logits (--attn-logit-softcapping)"
NO_BIAS = "it gives no gradient of a bias (--position-embedding-type relative)"


@dataclass(frozen=True)
class Request:
    """All inputs of the kernel selection for one layer."""

    backend: str
    """``--attention-backend``."""
    dtype: torch.dtype
    channels: int
    """Head dim, the larger one if keys and values differ: the other is zero-padded to it for most kernels."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None without a GPU."""
    window: Window | None = None
    dropout: float = 0.0
    deterministic: bool = False
    flash_version: int | None = None
    """``--flash-attention-version``."""
    flash_packages: tuple[int, ...] = ()
    """Installed flash-attn versions."""
    form: Form = "whole"
    """Full sequences (``whole``), or key blocks with log-sum-exp, of an all-gather (``gather``) or a ``ring``."""

    sink: bool = False
    """Whether the softmax has an attention sink (``sink.py``)."""
    soft_cap: float | None = None
    """``--attn-logit-softcapping``."""
    cudnn_version: int | None = None
    """Version of torch's cuDNN, 91300 for 9.13; None without cuDNN or GPU."""
    biased: bool = False
    """Whether scores get a bias by distance (``position_bias.py``)."""

    @property
    def unusual_scores(self) -> str | None:
        """Reason why kernels without soft cap and bias do not support the request; None if it has neither."""
        return NO_BIAS if self.biased else None if self.soft_cap is None else NO_SOFT_CAP

    @property
    def situation(self) -> str:
        """Text for logs and errors, such as ``sm_90, bfloat16, head dim 128``, followed by window, attention sinks,
        soft cap, bias by distance and "deterministic" where they apply."""
        where = "no GPU" if self.capability is None else "sm_{}{}".format(*self.capability)
        parts = [where, str(self.dtype).removeprefix("torch."), f"head dim {self.channels}"]
        parts += [] if self.window is None else ["window {},{}".format(*self.window)]
        parts += ["attention sinks"] if self.sink else []
        parts += [] if self.soft_cap is None else [f"logits capped at {self.soft_cap:g}"]
        parts += ["bias by distance"] if self.biased else []
        return ", ".join(parts + (["deterministic"] if self.deterministic else []))

    @property
    def blocks(self) -> bool:
        """Whether the kernel must support key blocks: return the log-sum-exp and compute a block's gradients."""
        return self.form != "whole"

    @property
    def fits_flash(self) -> bool:
        """Whether flash kernels support GPU (sm_80 up), dtype (bf16, fp16), head dim (multiple of 8, at most 256)."""
        on_gpu = self.capability is not None and self.capability >= (8, 0)
        return on_gpu and self.dtype in SIXTEEN_BIT and self.channels % 8 == 0 and self.channels <= 256


class Kernel(Protocol):
    """Attention implementation with fixed options; calls pass tensors and mask."""

    scale: float
    """Factor of QK^T."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] to [s, b, a, e]; differentiable. Raises
        UserError if the kernel does not support ``mask.hidden`` (a dense mask)."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Attend to the pairs of ``tile``: query [b, a, q, d], key [b, g, k, d], value [b, g, k, e] -> out [b, a, q, e]
        and lse [b, a, q] in at least fp32. Not differentiable; see :meth:`backward`."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, ...]:
        """Return this tile's contribution to the gradients of query, key, value and, if set, the bias. ``out`` and
        ``lse`` must be the merged results over *all* blocks: the contributions then sum to the exact gradients."""
        ...


class FlashKernel:
    """Base of flash kernels: bands relative to the lower right corner, packed documents in one variable-length call. A
    subclass implements ``_flash`` (differentiable if it supports full sequences) and ``_flash_backward``. Tensors are
    bf16 or fp16 on a GPU with a contiguous last dim; other strides are arbitrary, so that the outputs of projection and
    rotary embedding are read without copies. The output is dense in the order of the queries' dims. Dropout is not
    supported, because its masks would depend on the kernel."""

    packs_documents = True
    """Whether documents of 16-bit tensors on GPUs are one variable-length call."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Tensor]:
        """Run the kernel: query [b, q, a, d], key and value [b, k, g, .] -> out [b, q, a, .], lse [b, a, q]. Packed:
        query [n, a, d] -> out [n, a, .], lse [a, n]. ``shape`` is (query bounds, key bounds, longest query segment,
        longest key segment); bounds are cumulative lengths int32 [documents + 1], or None if not packed."""
        raise NotImplementedError

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: Window) -> tuple:
        """Return dQ, dK and dV; ``tensors`` are grad, query, key, value, out, shaped as in :meth:`_flash`."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] to [s, b, a, e], within documents if ``mask``
        has any; differentiable if ``_flash`` is. Raises UserError for dense masks. The mask must have no dropout and no
        bias."""
        assert mask.dropout is None and mask.bias is None
        if mask.hidden is not None:
            raise UserError(
                "attention_mask: flash-attn takes no dense masks; describe documents by packed_seq_params, windows by "
                "window_size, or choose --attention-backend auto"
            )
        if mask.documents is not None:
            return self._documents(query, key, value, mask)
        tile = full_tile(len(query), len(key), mask.visibility)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self.forward(query, key, value, tile)[0].permute(2, 0, 1, 3)

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend within each document of ``mask`` in one variable-length call: no computation across documents. Tensors
        are as in :meth:`attend`; for more than one row inputs are copied to [b * s, ...]. The window of ``mask``
        applies within documents. No host sync."""
        documents = mask.documents
        assert documents is not None and documents.cu_seqlens_q is not None
        length, batch = query.shape[:2]
        max_lengths = documents.max_seqlen_q or length, documents.max_seqlen_kv or len(key)
        before, after = mask.visibility.limits
        window = -1 if before is None else before, -1 if after is None else after
        bounds = documents.cu_seqlens_q, documents.cu_seqlens_k
        # [s, b, ...] -> [b * s, ...]: each document must be contiguous; a view if b is 1, else a copy
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out, _ = self._flash(query, key, value, (*bounds, *max_lengths), window)
        return out.unflatten(0, (batch, length)).transpose(0, 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Attend to the pairs of ``tile``: query [b, a, q, d], key [b, g, k, d], value [b, g, k, e] -> out [b, a, q, e]
        in the inputs' dtype and lse [b, a, q] fp32. Differentiable if ``_flash`` is."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = self._flash(query, key, value, (None, None, tile.num_queries, tile.num_keys), kernel_window(tile))
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tile's contributions to the gradients of query, key and value in the inputs' dtype, with the
        shapes of the inputs [b, heads, tokens, .]. ``out`` and ``lse`` must be merged over all blocks."""
        tensors = [x.transpose(1, 2) for x in (grad, query, key, value, out)]
        shape = None, None, tile.num_queries, tile.num_keys
        # the kernels ignore the strides of lse
        grads = self._flash_backward(tensors, lse.contiguous(), shape, kernel_window(tile))
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)

    def forward_packed(self, query: Tensor, key: Tensor, value: Tensor, at: Segments) -> tuple[Tensor, Tensor]:
        """Attend within each segment of ``at``, in one call: concatenated query [n, a, d], key and value [m, g, .] ->
        out [n, a, e] and fp32 lse [n, a]."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        out, lse = self._flash(query, key, value, shape, at.window)
        return out, lse.t()

    def backward_packed(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, at: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of :meth:`forward_packed`; ``out`` and ``lse`` are merged over all blocks."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        return self._flash_backward([grad, query, key, value, out], lse.t().contiguous(), shape, at.window)
