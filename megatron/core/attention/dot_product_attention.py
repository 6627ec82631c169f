"""Attention cores: queries, keys and values in, mixed values out.

    softmax(Q K^T / sqrt(d), over the visible keys) V

``UnfusedAttention`` is the plain-torch reference and the only one with attention dropout, whose masks must not depend
on a kernel; ``SDPAttention`` calls one of torch's fused kernels (cuDNN or flash on GPUs, flash on CPUs) and, for packed
documents, torch's variable-length attention on GPUs and one call per document elsewhere; ``FlashAttention`` calls the
flash-attn package. ``attention_kernels.choose_kernel`` chooses, ``make_core_attention`` builds, once.

No layout is copied on the way: kernels read queries, keys and values where the projection and the rotary embedding
wrote them ([s, b, a, d], or strided views of the projection), give their output in the order of the queries' dims, so
that ``[s, b, a * d]`` is a view of it, and get a gradient with the output's strides.

Legend: s sequence, b batch, a query heads, g key/value groups, p query heads per group, d head dim.
"""

from __future__ import annotations

import functools
import logging
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.attention.choose import (
    SDPA_BACKENDS,
    SIXTEEN_BIT,
    Choice,
    choose_kernel,
    refusal,
    request_of,
)
from megatron.core.attention.context_parallel.attention import make_context_parallel_attention
from megatron.core.attention.context_parallel.tiles import Visibility
from megatron.core.attention.masks import document_mask, hidden_mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.window import Window, layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.notices import notice
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.extensions.cudnn import CUDNN_LENGTHS, cudnn_takes_lengths
from megatron.core.extensions.flash_attn import load_flash_attention
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.random.dropout import AttentionDropout, DropoutCoordinates, NoDropout

logger = logging.getLogger(__name__)

_WITH_A_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels for dense masks, which only callers of the library pass, in order of preference. Not cuDNN, whose backward
pass is reported to make NaN of rows with small logits under a mask (pytorch/pytorch#196678: lengths of 64 modulo 128).
"""


class CoreAttention(nn.Module):
    """What all cores share: scale, window, causality. Query [s, b, a, d], key and value [s, b, g, d] -> [s, b, a *
    d]."""

    choice = Choice("unfused", "the reference")
    """The kernel that was chosen, and why."""

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


class FusedAttention(CoreAttention):
    """What fused kernels share. Their softmax is in fp32 whatever the inputs are."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type)
        self.choice = choose_kernel(request_of(config, layer_number))
        self._prepare(config)

    def _prepare(self, config: TransformerConfig) -> None:
        """What follows from the choice."""

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
        return self._rows(query, key, value, attention_mask)

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Whole rows of the batch."""
        raise NotImplementedError

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, longest: int) -> Tensor:
        """Query [t, a, d], key and value [t, g, d], documents one after the other -> [t, a, d]."""
        raise NotImplementedError

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """Each document by itself; time and memory grow with the documents' lengths, not with s^2."""
        length, batch = query.shape[:2]
        # [s, b, ...] -> [b * s, ...]: documents are runs of a row; views where b is 1
        flat_query, flat_key, flat_value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        mixed = self._documents(flat_query, flat_key, flat_value, packed, packed.max_seqlen_q or length)
        return mixed.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)


class SDPAttention(FusedAttention):
    """``torch.nn.functional.scaled_dot_product_attention``, on a GPU with the chosen kernel and no other; but where
    nobody asked for cuDNN by name, with torch's flash kernel for lengths that cuDNN does not take."""

    def _prepare(self, config: TransformerConfig) -> None:
        self._only = SDPA_BACKENDS.get(self.choice.kernel)
        self._by_name = config.attention_backend == "fused"

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        windowed = self.window is not None and self.choice.kernel == "flash" and attention_mask is None
        if windowed and query.is_cuda and query.dtype in SIXTEEN_BIT:
            return self._windowed(query, key, value)
        query_basd, key_bgsd, value_bgsd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mixed = self._attend(query_basd, key_bgsd, value_bgsd, attention_mask)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _windowed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Torch's flash kernel skips what lies outside of the window, which SDPA has no way to ask for."""
        assert self.window is not None
        left, right = self.window
        query_bsad, key_bsgd, value_bsgd = (x.transpose(0, 1) for x in (query, key, value))
        mixed = torch.ops.aten._flash_attention_forward(
            query_bsad, key_bsgd, value_bsgd, None, None, query.shape[0], key.shape[0], 0.0, False, False,
            scale=self.softmax_scale, window_size_left=left, window_size_right=0 if self.causal else right,
        )[0]  # fmt: skip
        return mixed.transpose(0, 1).flatten(2)

    def _attend(self, query_basd: Tensor, key_bgsd: Tensor, value_bgsd: Tensor, hidden: Tensor | None) -> Tensor:
        num_queries, num_keys = query_basd.shape[2], key_bgsd.shape[2]
        window_matters = self.window is not None and not _covers(self.window, num_keys, self.causal)
        if window_matters or (hidden is not None) or (self.causal and num_queries != num_keys):
            own = self._hidden_mask(num_queries, num_keys, query_basd.device)
            hidden = own if hidden is None else hidden if own is None else hidden | own
        visible = None if hidden is None else ~hidden
        kernels = self._kernels(num_queries, num_keys, visible) if query_basd.is_cuda else []
        if SDPBackend.EFFICIENT_ATTENTION in kernels:  # knows no grouped queries
            key_bgsd, value_bgsd = (_repeated(x, query_basd.shape[1]) for x in (key_bgsd, value_bgsd))
        try:
            with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
                return F.scaled_dot_product_attention(
                    query_basd, key_bgsd, value_bgsd, attn_mask=visible, is_causal=self.causal and visible is None,
                    scale=self.softmax_scale, enable_gqa=query_basd.shape[1] != key_bgsd.shape[1],
                )  # fmt: skip
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise refusal(self.choice.kernel, query_basd, key_bgsd, value_bgsd, self.causal) from error

    def _kernels(self, num_queries: int, num_keys: int, mask: Tensor | None) -> list[SDPBackend]:
        """Those that may run on a GPU, in order of preference; none: whichever torch takes."""
        if self._only is None:
            return []
        if mask is not None:
            return [self._only] if self._only in _WITH_A_MASK else _WITH_A_MASK
        if self._only != SDPBackend.CUDNN_ATTENTION or cudnn_takes_lengths(num_queries, num_keys):
            return [self._only]
        if self._by_name:
            if not torch.is_grad_enabled():
                return [self._only]
            raise UserError(
                f"--attention-backend fused: {num_queries} queries and {num_keys} keys are not both multiples of "
                f"{CUDNN_LENGTHS}, and of other lengths cuDNN's gradients may be NaN; choose --attention-backend auto"
            )
        _tell_once()
        return [SDPBackend.FLASH_ATTENTION]

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, longest: int) -> Tensor:
        assert packed.cu_seqlens_q is not None
        if query.is_cuda and query.dtype in SIXTEEN_BIT:
            return self._varlen(query, key, value, packed.cu_seqlens_q, longest)
        return self._document_by_document(query, key, value, packed.cu_seqlens_q.tolist())

    def _document_by_document(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        """[t, a, d]; one call per document."""
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        parts = []
        for triple in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
            if len(triple[0]):
                query_basd, key_bgsd, value_bgsd = (x.transpose(0, 1).unsqueeze(0) for x in triple)
                parts.append(self._attend(query_basd, key_bgsd, value_bgsd, None).squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> Tensor:
        """[t, a, d]; one kernel for all documents."""
        from torch.nn.attention.varlen import varlen_attn  # needs a CUDA build

        key, value = (_repeated(x, query.shape[1]) for x in (key, value))  # torch 2.11 has no grouped queries here
        left, right = self.window or (-1, -1)
        mixed = varlen_attn(
            query, key, value, bounds, bounds, longest, longest, scale=self.softmax_scale,
            window_size=(left, 0 if self.causal else right),
        )  # fmt: skip
        assert isinstance(mixed, Tensor)  # a pair only where statistics are asked for
        return mixed


@functools.cache
def _tell_once() -> None:
    notice(logger, "attention: torch's flash kernel for lengths other than multiples of %d", CUDNN_LENGTHS)


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [., g, ...] for every query head [., a, ...]."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


class FlashAttention(FusedAttention):
    """The flash-attn package, also for windows and packed documents. No dense masks."""

    def _prepare(self, config: TransformerConfig) -> None:
        self._kernels = load_flash_attention(
            int(self.choice.kernel[-1]), scale=self.softmax_scale, causal=self.causal, window=self.window,
            deterministic=config.deterministic_mode,
        )  # fmt: skip

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is not None:
            raise UserError(
                "attention_mask: flash-attn takes no dense masks; describe documents by packed_seq_params, windows by "
                "window_size, or choose --attention-backend auto"
            )
        return self._kernels.dense(*(x.transpose(0, 1) for x in (query, key, value))).transpose(0, 1).flatten(2)

    def _documents(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, longest: int) -> Tensor:
        assert packed.cu_seqlens_q is not None
        return self._kernels.packed(query, key, value, packed.cu_seqlens_q, longest)


def _covers(window: Window, num_keys: int, causal: bool) -> bool:
    """Whether a window is so wide that it hides nothing that causality does not hide."""
    left, right = (side < 0 or side >= num_keys - 1 for side in window)
    return left and (right or causal)


def _class_of(choice: Choice) -> type[UnfusedAttention | FusedAttention]:
    if choice.kernel == "unfused":
        return UnfusedAttention
    return FlashAttention if choice.kernel.startswith("flash-attn") else SDPAttention


def make_core_attention(
    config: TransformerConfig,
    layer_number: int,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    groups: ProcessGroups | None = None,
) -> nn.Module:
    """The core that the configuration asks for; where ranks share sequences, a form of context parallelism.

    Raises:
        ValueError: the kernel that was asked for by name cannot serve here.
    """
    groups = groups or SINGLE_PROCESS
    if config.context_parallel_size != groups.cp.size:
        raise UserError(
            f"context_parallel_size {config.context_parallel_size}: the process groups are of {groups.cp.size} ranks; "
            "pass the same size to initialize_model_parallel(context_parallel_size=...)"
        )
    choice = choose_kernel(request_of(config, layer_number))
    core = _class_of(choice)(config, layer_number, attn_mask_type, groups)
    core.choice = choice
    if groups.cp.size == 1:
        return core
    visibility = Visibility(core.causal, core.window)
    # windows: SDPA would need a mask of the whole sequence, the blocks of a ring of one rank need none
    whole_sequence_core = core if isinstance(core, FusedAttention) and core.window is None else None
    return make_context_parallel_attention(
        config, layer_number, visibility, core.softmax_scale, groups, whole_sequence_core
    )
