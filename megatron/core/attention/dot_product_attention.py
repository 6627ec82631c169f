"""Core attention: the module between the QKV projection and the output projection.

    out = softmax(softcap(scale Q K^T) + bias(distance), over the visible keys and the sink) V

Soft cap, bias and sink are optional. The module combines a kernel, selected once at construction (``choose.py``), with
a context-parallel form (``context_parallel/forms.py``), looked up at every call by the ranks of the token layout. One
rank calls the kernel on full sequences.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, d and e head dims of keys and values.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from megatron.core.attention.cached_layout import CACHED
from megatron.core.attention.choose import UNEQUAL_HEADS, build_kernel, build_request
from megatron.core.attention.context import AttentionContext
from megatron.core.attention.context_parallel import forms
from megatron.core.attention.context_parallel.forms import Attention, EqualHeads
from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.masks import Mask
from megatron.core.attention.max_logits import MaxLogits
from megatron.core.attention.sink import add_sink, has_sink
from megatron.core.attention.tiles import Visibility
from megatron.core.attention.token_layout import ANY_ORDER, TokenLayout
from megatron.core.attention.window import layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import ProcessGroups

_NO_CONTEXT = AttentionContext()


class CoreAttention(nn.Module):
    """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] of this rank's tokens and heads to [s, b, a * e].

    Args:
        layer_number: from 1; selects window, communication type and dropout masks.
        attention_type: ``cross``: keys belong to another sequence than queries, without causality or window, and are
            seen as ``ctx.encoder_documents`` says. ``relative``: ``ctx.position_bias`` is added to scores.
        softmax_scale: None: ``config.softmax_scale``, or 1 / sqrt(d).
        k_channels: d; None: ``config.kv_channels``.
        v_channels: e; None: d.

    Raises UserError if the backend requested by flag does not support this layer, or ``groups`` has another
    context-parallel size than ``config``."""

    mixes_tokens, layouts = True, ANY_ORDER | CACHED
    softmax_offset: Tensor | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: Literal["self", "relative", "cross"] = "self",
        *,
        groups: ProcessGroups,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        """Check the context-parallel size and the heads of an all-to-all (UserError), select and build the kernel, and
        register the sink as ``softmax_offset``. Communication forms are built at the first call."""
        super().__init__()
        self.layer_number, self.soft_cap = layer_number, config.attn_logit_softcapping
        self._static, self._sink = TokenLayout.of(groups), has_sink(config)
        if config.context_parallel_size != (ranks := self._static.group.size):
            raise UserError(
                f"context_parallel_size {config.context_parallel_size}: the process groups have {ranks} "
                "ranks; pass the same size to initialize_model_parallel(context_parallel_size=...)"
            )
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        window = layer_window(config.window_size, config.window_attn_skip_freq, layer_number)
        self.is_cross, biased = attention_type == "cross", attention_type == "relative"
        self.visibility = Visibility(False) if self.is_cross else Visibility(causal, window)
        site = "cross attention" if self.is_cross else "attention"
        self.rate, self.site = config.attention_dropout, ("layer", layer_number, site)
        self.kind = forms.layer_comm_type(config.cp_comm_type, layer_number)
        forms.check_form(config, self.kind, self._static, groups.tp.size)
        self._heads = groups.tp.rank, config.num_attention_heads // groups.tp.size
        keys = k_channels or config.kv_channels
        values = v_channels or keys
        self._channels = keys, values
        self.scale = scale = softmax_scale or config.softmax_scale or 1.0 / math.sqrt(keys)
        self._batch_invariant = config.batch_invariant_mode
        needs = forms.kernel_needs(self.kind, self._static, self._sink, config.hybrid_context_parallel)
        if self._batch_invariant:
            needs = "gather"
        request = build_request(config, self.visibility.window, needs, max(keys, values), biased=biased)
        self.choice, self.kernel = build_kernel(request, config, layer_number, scale)
        """Selected kernel and reason."""
        self.max_logits: MaxLogits | None = None
        """Accumulator of maximum logits in training; None: not computed."""
        self._forms: dict[tuple, Attention] = {}
        add_sink(self, config, groups)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, ctx: AttentionContext = _NO_CONTEXT) -> Tensor:
        """Attend and return [s, b, a * e] in the queries' dtype. Collective over the ranks of ``ctx.layout``, also in
        backward. With context parallelism, reads document bounds on the host; the first read waits for the GPU.
        Cross-attention reads ``ctx.encoder_documents`` and ignores mask and bias.

        A dense ``ctx.attention_mask`` applies in addition to causality and window; some kernels and context parallelism
        reject it (UserError). Raises ValueError in training with dropout without ``ctx.dropout``, and without
        ``ctx.layout`` under context parallelism."""
        mask = self.mask(ctx)
        if self.max_logits is not None and self.training:
            self.max_logits.add(query, key, mask, ctx.layout)
        return ctx.layout.attention(self)(query, key, value, mask).flatten(2)

    def mask(self, ctx: AttentionContext) -> Mask:
        """Return the mask of a forward pass, with bias, dropout and sink."""
        documents = ctx.encoder_documents if self.is_cross else ctx.layout.documents
        if documents is not None and documents.cu_seqlens_q is None:
            documents = None
        hidden, bias = (None, None) if self.is_cross else (ctx.attention_mask, ctx.position_bias)
        return Mask(self.visibility, documents, hidden, self._weight_dropout(ctx), bias, self.softmax_offset)

    def form(self, layout: TokenLayout) -> Attention:
        """Return the attention over the ranks of ``layout`` (cached), padding heads where the kernel needs equal dims.
        Raises ValueError for the default layout if the program has several context-parallel ranks."""
        ranks = layout.group, layout.order, layout.levels
        if (form := self._forms.get(ranks)) is None:
            if layout.is_default and self._static.group.size > 1:
                raise ValueError(f"attention over {self._static.group.size} context-parallel ranks needs ctx.layout")
            form = (
                forms.BatchInvariantAttention(layout, self.kernel, self.soft_cap)
                if self._batch_invariant
                else forms.build_form(self.kind, layout, self.kernel, self._sink)
            )
            if self._channels[0] != self._channels[1]:
                is_kernel = form == self.kernel.attend
                if not is_kernel or self.choice.kernel not in UNEQUAL_HEADS:
                    form = EqualHeads(form, for_cudnn=is_kernel and self.choice.kernel == "cudnn")
            self._forms[ranks] = form
        return form

    @property
    def description(self) -> str:
        """Text for the log: context-parallel form of the program's groups if there is one, kernel, reason, and whether
        heads are padded or a sink is added by the log-sum-exp."""
        form, words = self.form(self._static), str(self.choice)
        if isinstance(form, EqualHeads):
            keys, values = self._channels
            words += "" if form.for_cudnn else f", heads of {keys} and {values} channels filled up"
            form = form.inner
        if form == self.kernel.attend:
            return words
        if self._static.group.size == 1:
            return f"{words}, then the sink by the log-sum-exp"
        return f"{type(form).__name__} over context-parallel ranks, {words}"

    def _weight_dropout(self, ctx: AttentionContext) -> WeightDropout | None:
        """Return the dropout of attention weights at the tokens of ``ctx.dropout``; None in eval mode or with rate 0.
        Raises ValueError if it is needed and that is None."""
        if not self.rate or not self.training:
            return None
        if (at := ctx.dropout) is None:
            raise ValueError(
                f"dropout at {self.site} needs the coordinates of its tokens: pass dropout=DropoutCoordinates(...), "
                "set attention_dropout to 0 or call eval()"
            )
        tp_rank, heads = self._heads
        first_head = tp_rank * heads + forms.first_head(self.kind, ctx.layout, heads)
        packed, documents = ctx.layout.documents, None
        if packed is not None and packed.samples is not None and (bounds := packed.document_bounds()) is not None:
            documents = bounds, packed.samples
        return WeightDropout(at.stream, self.rate, self.site, first_head, at.sample_b, documents)
