"""Torch's built-in kernels: cuDNN, FlashAttention 2, memory-efficient, math; on CPUs torch's default.

On Hopper cuDNN is 1.6 times as fast as FlashAttention 2 and about as fast as FlashAttention 3. Only the selected kernel
may run; if it does not support a call, the call raises an error with torch's reasons. Exceptions for cuDNN, decided per
call: dense masks, and lengths that are not multiples of 128, go to other kernels, because cuDNN is reported to compute
wrong gradients for them.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, d head dim."""

from __future__ import annotations

import functools
import logging
import warnings
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.attention.kernels.base import SIXTEEN_BIT, FlashKernel, Request
from megatron.core.attention.kernels.padded_rows import attend_padded_rows
from megatron.core.attention.masks import Mask, document_mask, hidden_pairs
from megatron.core.attention.tiles import Tile, full_tile
from megatron.core.attention.window import Window
from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.extensions.cudnn import CUDNN_LENGTHS, cudnn_supports_lengths

aten = torch.ops.aten
logger = logging.getLogger(__name__)

TITLES = {
    "torch": "torch SDPA",
    "cudnn": "cuDNN through torch SDPA",
    "flash": "torch's flash kernel (FlashAttention 2)",
    "efficient": "torch's memory-efficient kernel",
    "math": "torch SDPA, math",
}
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_WITH_A_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels for dense masks, best first. Dense masks come from library callers, and from documents whose bounds are known
on the GPU only. cuDNN is excluded: its backward is reported to return NaN for rows with small logits under a mask
(pytorch/pytorch#196678: lengths of 64 modulo 128)."""


def cudnn_supports(request: Request) -> str | None:
    """Return why cuDNN does not support training with ``request``; None if it does. Rejects soft cap, bias,
    deterministic mode, GPUs below sm_80, and head dims that are not multiples of 8 up to 128 (192 on sm_90 from cuDNN
    9.13). Does not check dtype and window; lengths are checked per call."""
    if request.unusual_scores is not None:
        return request.unusual_scores
    if request.deterministic:
        return "cuDNN's backward pass does not repeat its bits"
    if request.capability is None or request.capability < (8, 0):
        return "cuDNN's attention needs sm_80"
    # head dims above 128 (multi-latent attention): the Hopper backward is wrong in cuDNN 9.11 and 9.12
    wide = request.capability == (9, 0) and (request.cudnn_version or 0) >= 91300
    most = 192 if wide else 128
    if request.channels % 8 or request.channels > most:
        return f"cuDNN's backward pass takes head dims that are multiples of 8 up to {most}"
    return None


def flash_supports(request: Request) -> str | None:
    """Return why torch's flash kernel does not support ``request``; None if it does. It needs a GPU from sm_80 on, bf16
    or fp16, head dims that are multiples of 8 up to 256, no soft cap and no bias."""
    if request.unusual_scores is not None:
        return request.unusual_scores
    if not request.fits_flash:
        return "no flash kernel takes such heads (multiples of 8 up to 256, bfloat16 or float16, from sm_80 on)"
    return None


def efficient_supports(request: Request) -> str | None:
    """Return why the memory-efficient kernel does not support ``request``; None if it does. Rejects soft cap, bias,
    fp64, and head dims whose size is not a multiple of 16 bytes. Does not check GPU, window and key blocks."""
    if request.unusual_scores is not None:
        return request.unusual_scores
    if request.dtype == torch.float64 or request.channels * request.dtype.itemsize % 16:
        return "the memory-efficient kernel reads rows of heads in pieces of 16 bytes, of at most float32"
    return None


class TorchAttention(FlashKernel):
    """``torch.nn.functional.scaled_dot_product_attention``, on a GPU restricted to kernel ``name``. For lengths that
    cuDNN does not support, ``cudnn`` uses the flash kernel; with ``by_name`` (``--attention-backend fused``) it raises
    UserError if gradients are enabled. Windows, packed documents and key blocks call torch's flash operator directly,
    or cuDNN's for blocks that it supports."""

    def __init__(self, name: str, scale: float, *, by_name: bool = False) -> None:
        super().__init__(scale)
        self.name, self._only, self._by_name = name, _BACKENDS.get(name), by_name
        self.packs_documents = name in ("cudnn", "flash")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Documents: variable-length flash calls for 16-bit dtypes on GPUs, else one call per document, or a dense mask
        if only the GPU knows their bounds. A window is a dense mask too, except for the flash kernel."""
        assert mask.dropout is None and mask.bias is None
        if mask.documents is not None and mask.hidden is not None:
            raise ValueError("give either an attention mask or packed documents, not both")
        flash = self.packs_documents and query.is_cuda and query.dtype in SIXTEEN_BIT
        if mask.documents is not None and (flash or mask.documents.known):
            return (self._documents if flash else self._document_by_document)(query, key, value, mask)
        if mask.documents is not None:
            hidden = document_mask(mask.documents, query.shape[1], len(query), len(key))
            mask = replace(mask, documents=None, hidden=hidden)
        # SDPA accepts a window only as a dense mask: call the flash operator instead
        if flash and self.name == "flash" and mask.visibility.window is not None and mask.hidden is None:
            return super().attend(query, key, value, mask)
        return self._rows(query, key, value, mask)

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend within documents: in packed flash calls if cuDNN does not support the shapes, or the host does not
        know the bounds; if each row is one document in unpacked cuDNN calls; if at least the first half of the rows is,
        these in unpacked and the others in packed calls; else in packed flash calls."""
        assert mask.documents is not None
        batch, tile = query.shape[1], full_tile(len(query), len(key), mask.visibility)
        if not self.takes_cudnn(tile):
            return super()._documents(query, key, value, mask)
        num_full, rest = mask.documents.split_full_rows(batch)
        if rest is None:
            return self._rows(query, key, value, replace(mask, documents=None))
        if 2 * num_full < batch:
            return super()._documents(query, key, value, mask)
        return attend_padded_rows(self, query, key, value, mask, num_full, rest)

    def _document_by_document(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend with one SDPA call per document with at least one query, with the mask's causality and window but no
        other masks. Reads the document bounds on the host, which the caller ensures needs no wait."""
        bounds = mask.bounds
        assert bounds is not None
        length, batch = query.shape[:2]
        of_queries, of_keys = ([end - start for start, end in zip(ends, ends[1:])] for ends in bounds)
        no_documents = Mask(mask.visibility)
        lengths = of_queries, of_keys, of_keys
        flat = (x.transpose(0, 1).flatten(0, 1).split(sizes) for x, sizes in zip((query, key, value), lengths))
        parts = [
            self._rows(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), no_documents).squeeze(1)
            for q, k, v in zip(*flat)
            if len(q)
        ]
        return torch.cat(parts).unflatten(0, (batch, length)).transpose(0, 1)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
        """Attend unpacked rows: query [s, b, a, d], key and value [t, b, g, .]; return [s, b, a, .]; differentiable.
        Ignores documents. Builds a dense mask [s, t] unless the tile is full or a causal square. Raises UserError, with
        torch's reasons, if torch has no kernel for the shapes; other errors pass."""
        query_basd, key_bgtd, value_bgtd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        tile, visible = full_tile(len(query), len(key), mask.visibility), None
        if mask.hidden is not None or not (tile.is_full or tile.is_causal_square):
            outside = hidden_pairs(tile, query.device)
            hidden = outside if mask.hidden is None else mask.hidden if outside is None else mask.hidden | outside
            visible = None if hidden is None else ~hidden
        kernels = self._kernels(len(query), len(key), visible) if query.is_cuda else []
        if SDPBackend.EFFICIENT_ATTENTION in kernels:  # does not support grouped queries
            key_bgtd, value_bgtd = (_repeated(x, query.shape[2]) for x in (key_bgtd, value_bgtd))
        causal = visible is None and not tile.is_full
        try:
            with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
                mixed = F.scaled_dot_product_attention(
                    query_basd,
                    key_bgtd,
                    value_bgtd,
                    attn_mask=visible,
                    is_causal=causal,
                    scale=self.scale,
                    enable_gqa=query_basd.shape[1] != key_bgtd.shape[1],
                )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise _refusal(self.name, query_basd, key_bgtd, value_bgtd, causal) from error
        return mixed.permute(2, 0, 1, 3)

    def _kernels(self, num_queries: int, num_keys: int, mask: Tensor | None) -> list[SDPBackend]:
        """Return the kernels that may run on a GPU, best first; empty (torch's default) if none is named. For lengths
        that cuDNN does not support: the flash kernel, with a notice once; if cuDNN was requested by flag, UserError
        with gradients, else cuDNN."""
        if self._only is None:
            return []
        if mask is not None:
            return [self._only] if self._only in _WITH_A_MASK else _WITH_A_MASK
        if self._only != SDPBackend.CUDNN_ATTENTION or cudnn_supports_lengths(num_queries, num_keys):
            return [self._only]
        if self._by_name:
            if not torch.is_grad_enabled():
                return [self._only]
            raise UserError(
                f"--attention-backend fused: {num_queries} queries and {num_keys} keys are not both multiples of "
                f"{CUDNN_LENGTHS}, and of other lengths cuDNN's gradients may be NaN; choose --attention-backend auto"
            )
        _log_once()
        return [SDPBackend.FLASH_ATTENTION]

    def takes_cudnn(self, tile: Tile) -> bool:
        """Return whether cuDNN computes ``tile`` (full or a causal square, supported lengths); else flash does."""
        fits = cudnn_supports_lengths(tile.num_queries, tile.num_keys)
        return self.name == "cudnn" and fits and (tile.is_full or tile.is_causal_square)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
        """Attend by cuDNN if :meth:`takes_cudnn`, else by torch's flash operator."""
        if not self.takes_cudnn(tile):
            return super().forward(query, key, value, tile)
        # after value: no bias, return the log-sum-exp, no dropout, causal unless full, no debug mask
        out, lse = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, not tile.is_full, False, scale=self.scale
        )[:2]
        return out, lse.reshape(lse.shape[:3])

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.takes_cudnn(tile):
            return super().backward(grad, query, key, value, out, lse, tile)
        # the unused random state must be a tensor on the device, although there is no dropout
        unused = torch.zeros((), dtype=torch.int64, device=query.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, lse.contiguous().unsqueeze(-1), unused, unused, None, None, None,
            tile.num_queries, tile.num_keys, 0.0, not tile.is_full, scale=self.scale,
        )  # fmt: skip

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, shape: tuple, window: Window) -> tuple[Tensor, Tensor]:
        # is_causal stays False: a right window of 0 is the causal mask, relative to the lower right corner
        return aten._flash_attention_forward(
            query,
            key,
            value,
            *shape,
            0.0,
            False,
            False,
            scale=self.scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )[:2]

    def _flash_backward(self, tensors: list[Tensor], lse: Tensor, shape: tuple, window: Window) -> tuple:
        """Copies grad and out if they are not contiguous."""
        grad, query, key, value, out = tensors
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused: no dropout
        return aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key,
            value,
            out.contiguous(),
            lse,
            *shape,
            0.0,
            False,
            random_state,
            lse.new_empty(0),
            scale=self.scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )


@functools.cache
def _log_once() -> None:
    notice(logger, "attention: torch's flash kernel for lengths other than multiples of %d", CUDNN_LENGTHS)


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the heads of keys or values [., g, ...] to [., a, ...], one per query head."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _refusal(name: str, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> UserError:
    """Return, not raise, a UserError: kernel ``name`` does not support these tensors [b, heads, s, d]. Its message has
    torch's reasons, collected from the warnings of a debug call, and the shapes."""
    ask = {
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
        "flash": torch.backends.cuda.can_use_flash_attention,
        "efficient": torch.backends.cuda.can_use_efficient_attention,
    }.get(name)
    reasons: list[str] = []
    if ask is not None:
        grouped = query.shape[1] != key.shape[1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ask(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped), debug=True)
        reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
    shapes = f"query {list(query.shape)}, key and value {list(key.shape)}, {query.dtype}"
    return UserError(
        f"attention: {TITLES[name]} was chosen but does not take {shapes}: "
        f"{' '.join(reasons) or 'torch gives no reason'}; choose another --attention-backend"
    )
