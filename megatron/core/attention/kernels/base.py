"""The one interface of attention kernels, what a choice among them depends on, and what flash kernels share.

    out = softmax(scale Q K^T) V over the visible keys,    lse = log sum exp(scale Q K^T)

A kernel attends over whole sequences (``attend``, differentiable) and, where it gives the log-sum-exp, over one block
of keys at a time (``forward``, ``backward``): blocks are what context parallelism merges. One rank has nothing to
merge: ``attend`` is the whole of it.

Legend: s, t sequence of queries and of keys, b batch, a query heads, g key/value groups, d head dim, e head dim of
values; q, k queries and keys of a tile; n tokens of packed documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron.core.attention.masks import Mask
from megatron.core.attention.packing import Segments, kernel_window
from megatron.core.attention.tiles import Tile, whole_tile
from megatron.core.attention.window import Window
from megatron.core.config.errors import UserError

Form = Literal["whole", "gather", "ring"]
SIXTEEN_BIT = (torch.bfloat16, torch.float16)
NO_SOFT_CAP = "it does not cap logits (--attn-logit-softcapping)"
NO_BIAS = "it gives no gradient of a bias (--position-embedding-type relative)"


@dataclass(frozen=True)
class Request:
    """Everything that the choice of a kernel depends on."""

    backend: str
    """``--attention-backend``."""
    dtype: torch.dtype
    channels: int
    """Head dim; the larger one where keys and values differ, to which kernels of equal ones get the other filled up."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU; None: there is none."""
    window: Window | None = None
    dropout: float = 0.0
    deterministic: bool = False
    flash_version: int | None = None
    """``--flash-attention-version``."""
    flash_packages: tuple[int, ...] = ()
    """Versions of flash-attn that are installed."""
    form: Form = "whole"
    """Whole sequences, or blocks of keys that are merged: in a ring, or all at once (an all-gather)."""

    sink: bool = False
    """Whether a sink joins the softmax (``sink.py``)."""
    soft_cap: float | None = None
    """``--attn-logit-softcapping``."""
    cudnn_version: int | None = None
    """Torch's cuDNN, 91300 for 9.13; None: it has none."""
    biased: bool = False
    """Whether scores get a bias by distance (``position_bias.py``)."""

    @property
    def unusual_scores(self) -> str | None:
        """Why a kernel of scaled products alone cannot serve; None where it can."""
        return NO_BIAS if self.biased else None if self.soft_cap is None else NO_SOFT_CAP

    @property
    def situation(self) -> str:
        """``sm_90, bfloat16, head dim 128``."""
        where = "no GPU" if self.capability is None else "sm_{}{}".format(*self.capability)
        parts = [where, str(self.dtype).removeprefix("torch."), f"head dim {self.channels}"]
        parts += [] if self.window is None else ["window {},{}".format(*self.window)]
        parts += ["attention sinks"] if self.sink else []
        parts += [] if self.soft_cap is None else [f"logits capped at {self.soft_cap:g}"]
        parts += ["bias by distance"] if self.biased else []
        return ", ".join(parts + (["deterministic"] if self.deterministic else []))

    @property
    def blocks(self) -> bool:
        """Whether the kernel must give the log-sum-exp and the gradients of a block."""
        return self.form != "whole"

    @property
    def fits_flash(self) -> bool:
        """Whether flash kernels take the numbers and the heads."""
        on_gpu = self.capability is not None and self.capability >= (8, 0)
        return on_gpu and self.dtype in SIXTEEN_BIT and self.channels % 8 == 0 and self.channels <= 256


class Kernel(Protocol):
    """Attention of one implementation, with everything chosen but the tensors and the mask."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """query [s, b, a, d], key [t, b, g, d], value [t, b, g, e] -> [s, b, a, e]; differentiable."""
        ...

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """query [b, a, q, d], key [b, g, k, d], value [b, g, k, e] -> out [b, a, q, e], lse [b, a, q] in at least
        fp32."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, ...]:
        """This block's share of the gradients of query, key, value and the bias that is set, if one is; ``out`` and
        ``lse`` are those over *all* blocks, with which the shares are exact."""
        ...


class FlashKernel:
    """Base of flash kernels: bands counted from the lower right corner, documents packed into one call.

    A subclass gives ``_flash`` (differentiable where it serves whole sequences) and ``_flash_backward``. Tensors are of
    16 bits, on a GPU, of any strides whose last dim is contiguous. Nothing is copied on the way: queries, keys and
    values are read where the projection and the rotary embedding wrote them, and the output is dense in the order of
    the queries' dims. No dropout, whose masks would depend on the kernel.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Tensor]:
        """query [b, q, a, d], key, value [b, k, g, .] -> out, lse [b, a, q]; or packed, [n, a, d] -> out, lse [a, n].

        ``shape`` are the boundaries (int32 [documents + 1], or None) and the longest segment of queries and of keys.
        """
        raise NotImplementedError

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: Window) -> tuple:
        """``tensors`` grad, query, key, value, out as above -> the gradients of query, key and value."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """As :meth:`Kernel.attend`."""
        assert mask.dropout is None and mask.bias is None
        if mask.hidden is not None:
            raise UserError(
                "attention_mask: flash-attn takes no dense masks; describe documents by packed_seq_params, windows by "
                "window_size, or choose --attention-backend auto"
            )
        if mask.documents is not None:
            return self._documents(query, key, value, mask)
        tile = whole_tile(len(query), len(key), mask.visibility)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self.forward(query, key, value, tile)[0].permute(2, 0, 1, 3)

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Each document by itself, in one call: time and memory grow with the documents' lengths, not with s^2."""
        documents = mask.documents
        assert documents is not None and documents.cu_seqlens_q is not None
        length, batch = query.shape[:2]
        longest = documents.max_seqlen_q or length, documents.max_seqlen_kv or len(key)
        before, after = mask.visibility.limits
        window = -1 if before is None else before, -1 if after is None else after
        bounds = documents.cu_seqlens_q, documents.cu_seqlens_k
        # [s, b, ...] -> [b * s, ...]: documents are runs of a row; views where b is 1
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out, _ = self._flash(query, key, value, (*bounds, *longest), window)
        return out.unflatten(0, (batch, length)).transpose(0, 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """As :meth:`Kernel.forward`; out in the inputs' dtype, lse fp32."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = self._flash(query, key, value, (None, None, tile.num_queries, tile.num_keys), kernel_window(tile))
        return out.transpose(1, 2), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Kernel.backward`; gradients in the inputs' dtype."""
        tensors = [x.transpose(1, 2) for x in (grad, query, key, value, out)]
        shape = None, None, tile.num_queries, tile.num_keys
        # the kernels do not look at lse's strides
        grads = self._flash_backward(tensors, lse.contiguous(), shape, kernel_window(tile))
        return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)

    def forward_packed(self, query: Tensor, key: Tensor, value: Tensor, at: Segments) -> tuple[Tensor, Tensor]:
        """query [n, a, d], key and value [m, g, .], one segment after the other -> out [n, a, e], lse [n, a]."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        out, lse = self._flash(query, key, value, shape, at.window)
        return out, lse.t()

    def backward_packed(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, at: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, in their shapes."""
        shape = at.query_bounds, at.key_bounds, at.longest_query, at.longest_key
        return self._flash_backward([grad, query, key, value, out], lse.t().contiguous(), shape, at.window)
