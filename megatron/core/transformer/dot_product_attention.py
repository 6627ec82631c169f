"""Attention cores: queries, keys and values in, mixed values out.

    softmax(Q K^T / sqrt(d), over the visible keys) V

``UnfusedAttention`` is the plain-torch reference and the only one with attention dropout, whose masks must not depend
on a kernel; ``SDPAttention`` calls torch's fused kernels (cuDNN or flash on GPUs, flash on CPUs) and, for packed
documents, torch's variable-length attention on GPUs and one call per document elsewhere. ``make_core_attention``
chooses once.

Legend: s sequence, b batch, a query heads, g key/value groups, p query heads per group, d head dim.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.context_parallel.tiles import Visibility
from megatron.core.enums import AttnMaskType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.transformer.attention_masks import document_mask, hidden_mask
from megatron.core.transformer.attention_window import Window, layer_window
from megatron.core.transformer.context_parallel_attention import make_context_parallel_attention
from megatron.core.transformer.dropout import AttentionDropout, DropoutCoordinates, NoDropout
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


class CoreAttention(nn.Module):
    """What all cores share: scale, window, causality. Query [s, b, a, d], key and value [s, b, g, d] -> [s, b, a *
    d]."""

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType) -> None:
        super().__init__()
        self.causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        self.window: Window | None = layer_window(config.window_size, config.window_attn_skip_freq, layer_number)
        assert config.kv_channels is not None
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels)
        self._mask: tuple[tuple[int, int], Tensor | None] | None = None

    def _hidden_mask(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """[q, k] mask of causality and window, built once per shape."""
        if self._mask is None or self._mask[0] != (num_queries, num_keys):
            mask = hidden_mask(num_queries, num_keys, causal=self.causal, window=self.window, device=device)
            self._mask = (num_queries, num_keys), mask
        return self._mask[1]


class UnfusedAttention(CoreAttention):
    """Scores, mask, softmax and dropout as separate torch operations."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type)
        assert config.num_attention_heads is not None
        tp = (groups or SINGLE_PROCESS).tp
        first_head = tp.rank * (config.num_attention_heads // tp.size)
        self.layer_scale = float(layer_number) if config.apply_query_key_layer_scaling else 1.0
        """Scores are divided by it before they are rounded and multiplied again in the fp32 softmax."""
        in_fp32 = config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling
        self._softmax = self._softmax_in_fp32 if in_fp32 else self._softmax_in_own_dtype
        self.dropout: nn.Module = NoDropout()
        if config.attention_dropout:
            self.dropout = AttentionDropout(
                config.attention_dropout, "layer", layer_number, "attention", first_head=first_head
            )

    def _softmax_in_fp32(self, scores: Tensor) -> Tensor:
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        return torch.softmax(scores.to(dtype) * self.layer_scale, dim=-1).to(scores.dtype)

    def _softmax_in_own_dtype(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        """``attention_mask`` bool, True where hidden, broadcasts to [b, a, q, k] and adds to causality and window."""
        num_queries, batch, heads, channels = query.shape
        num_keys, kv_groups = key.shape[0], key.shape[2]
        # the heads of one group share a matrix product, so that keys and values are never repeated
        grouped = query.unflatten(2, (kv_groups, -1)).permute(1, 2, 3, 0, 4).flatten(2, 3)
        scaled_keys = key.permute(1, 2, 3, 0) * (self.softmax_scale / self.layer_scale)
        scores = torch.matmul(grouped, scaled_keys).view(batch, heads, num_queries, num_keys)
        masks = [self._hidden_mask(num_queries, num_keys, query.device), attention_mask]
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            masks.append(document_mask(packed_seq_params.cu_seqlens_q, batch, num_queries))
        for mask in masks:
            if mask is not None:
                scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        weights = self.dropout(self._softmax(scores), dropout).view(batch, kv_groups, -1, num_keys)
        mixed = torch.matmul(weights, value.permute(1, 2, 0, 3)).view(batch, heads, num_queries, channels)
        return mixed.permute(2, 0, 1, 3).reshape(num_queries, batch, heads * channels)


class SDPAttention(CoreAttention):
    """``torch.nn.functional.scaled_dot_product_attention``; its softmax is in fp32 whatever the inputs are."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type)
        self._kernels = _kernel_order(config.attention_backend) if torch.cuda.is_available() else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        """As :meth:`UnfusedAttention.forward`; ``dropout`` is not used."""
        if packed_seq_params is not None and packed_seq_params.cu_seqlens_q is not None:
            if attention_mask is not None:
                raise ValueError("give either an attention mask or packed documents, not both")
            return self._packed(query, key, value, packed_seq_params)
        query_basd, key_bgsd, value_bgsd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = self._attend(query_basd, key_bgsd, value_bgsd, attention_mask)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, hidden: Tensor | None) -> Tensor:
        num_queries, num_keys = query_basd.shape[2], key_bgsd.shape[2]
        window_matters = self.window is not None and not _covers(self.window, num_keys, self.causal)
        if window_matters or (hidden is not None) or (self.causal and num_queries != num_keys):
            own = self._hidden_mask(num_queries, num_keys, query_basd.device)
            hidden = own if hidden is None else hidden if own is None else hidden | own
        visible = None if hidden is None else ~hidden
        with self._kernel_choice():
            return F.scaled_dot_product_attention(
                query_basd, key_bgsd, value_bgsd, attn_mask=visible, is_causal=self.causal and visible is None,
                scale=self.softmax_scale, enable_gqa=query_basd.shape[1] != key_bgsd.shape[1],
            )  # fmt: skip

    def _kernel_choice(self) -> AbstractContextManager:
        return nullcontext() if self._kernels is None else sdpa_kernel(self._kernels, set_priority=True)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """Each document by itself; time and memory grow with the documents' lengths, not with s^2."""
        length, batch = query.shape[:2]
        # [s, b, ...] -> [b * s, ...]: documents are runs of a row
        flat_query, flat_key, flat_value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        assert packed.cu_seqlens_q is not None
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            mixed = self._varlen(flat_query, flat_key, flat_value, packed, length)
        else:
            mixed = self._document_by_document(flat_query, flat_key, flat_value, packed.cu_seqlens_q.tolist())
        return mixed.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)

    def _document_by_document(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        """[t, a, d]; one call per document."""
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        parts = []
        for triple in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
            if len(triple[0]):
                query_basd, key_bgsd, value_bgsd = (x.transpose(0, 1).unsqueeze(0) for x in triple)
                parts.append(self._attend(query_basd, key_bgsd, value_bgsd, None).squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, length: int) -> Tensor:
        """[t, a, d]; one kernel for all documents. No document is longer than a row, so ``length`` bounds them."""
        from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

        if query.shape[1] != key.shape[1]:  # torch 2.11 has no grouped queries here
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        left, right = self.window or (-1, -1)
        bounds = packed.cu_seqlens_q
        assert bounds is not None
        longest = packed.max_seqlen_q or length
        mixed = varlen_attn(
            query, key, value, bounds, bounds, longest, longest, scale=self.softmax_scale,
            window_size=(left, 0 if self.causal else right),
        )  # fmt: skip
        assert isinstance(mixed, Tensor)  # a pair only where statistics are asked for
        return mixed


def _covers(window: Window, num_keys: int, causal: bool) -> bool:
    """Whether a window is so wide that it hides nothing that causality does not hide."""
    left, right = (side < 0 or side >= num_keys - 1 for side in window)
    return left and (right or causal)


def _kernel_order(backend: str) -> list[SDPBackend]:
    """Torch's kernels in order of preference. On Hopper cuDNN's are 1.6 times as fast as torch's flash kernels."""
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    first = {"fused": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}.get(str(backend))
    return kernels if first is None else [first, *(kernel for kernel in kernels if kernel != first)]


def make_core_attention(
    config: TransformerConfig,
    layer_number: int,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    groups: ProcessGroups | None = None,
) -> nn.Module:
    """The core that the configuration asks for: unfused for ``unfused``/``local`` or with attention dropout, else
    SDPA; where ranks share sequences, a form of context parallelism."""
    groups = groups or SINGLE_PROCESS
    if config.context_parallel_size != groups.cp.size:
        raise ValueError(
            f"context_parallel_size {config.context_parallel_size}: the process groups are of {groups.cp.size} ranks; "
            "pass the same size to initialize_model_parallel(context_parallel_size=...)"
        )
    unfused = config.attention_backend in ("unfused", "local") or config.attention_dropout > 0
    core = (UnfusedAttention if unfused else SDPAttention)(config, layer_number, attn_mask_type, groups)
    if layer_number == 1:
        _report_choice(config, core)
    if groups.cp.size == 1:
        return core
    visibility = Visibility(core.causal, core.window)
    # windows: SDPA would need a mask of the whole sequence, the blocks of a ring of one rank need none
    whole_sequence_core = None if unfused or core.window is not None else core
    return make_context_parallel_attention(
        config, layer_number, visibility, core.softmax_scale, groups, whole_sequence_core
    )


def _report_choice(config: TransformerConfig, core: CoreAttention) -> None:
    """Says once what runs, and warns where a kernel was asked for that cannot."""
    asked = str(config.attention_backend)
    if asked in ("flash", "fused") and isinstance(core, UnfusedAttention):
        logger.warning(
            "--attention-backend %s: fused kernels draw their own dropout masks, so --attention-dropout %g is computed"
            " by unfused attention (the same mathematics, slower); give --attention-dropout 0 for the kernel",
            asked, config.attention_dropout,
        )  # fmt: skip
    else:
        kernels = "unfused torch operations" if isinstance(core, UnfusedAttention) else "torch SDPA kernels"
        logger.info("attention: %s (--attention-backend %s)", kernels, asked)
