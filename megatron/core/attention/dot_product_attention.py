"""Core attention: the module between the QKV projection and the output projection.

    out = softmax(softcap(scale Q K^T) + bias(distance), over the visible keys and the sink) V

Soft cap, bias and sink are optional. The module combines a kernel, selected once at construction (``choose.py``), with
a context-parallel strategy (``context_parallel/forms.py``). Without context parallelism it calls the kernel on full
sequences.

Legend: s, t query and key sequence, b batch, a query heads, g key/value groups, d head dim, e head dim of
values.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from megatron.core.attention.choose import UNEQUAL_HEADS, build_kernel, build_request
from megatron.core.attention.context_parallel.forms import EqualHeads, FullSequence, layer_layout
from megatron.core.attention.dropout import WeightDropout
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.sink import add_sink
from megatron.core.attention.tiles import Visibility
from megatron.core.attention.window import layer_window
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.random.dropout import DropoutCoordinates


class CoreAttention(nn.Module):
    """Map query [s, b, a, d], key [t, b, g, d] and value [t, b, g, e] of this rank's tokens and heads to [s, b, a * e].

    Args:
        layer_number: from 1; selects window, communication type and dropout masks.
        attention_type: ``cross``: keys belong to another sequence than queries, without causality or window.
            ``relative``: ``forward`` adds its ``position_bias`` to scores.
        softmax_scale: None: ``config.softmax_scale``, or 1 / sqrt(d).
        k_channels: d; None: ``config.kv_channels``.
        v_channels: e; None: d.

    Raises UserError if the backend requested by flag does not support this layer, or ``groups`` has another
    context-parallel size than ``config``."""

    supports_context_parallel = True

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
        super().__init__()
        if config.context_parallel_size != groups.cp.size:
            raise UserError(
                f"context_parallel_size {config.context_parallel_size}: the process groups have {groups.cp.size} "
                "ranks; pass the same size to initialize_model_parallel(context_parallel_size=...)"
            )
        self.shared = groups.cp.size > 1
        causal = attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        window = layer_window(config.window_size, config.window_attn_skip_freq, layer_number)
        is_cross, biased = attention_type == "cross", attention_type == "relative"
        self.visibility = Visibility(False) if is_cross else Visibility(causal, window)
        site = "cross attention" if is_cross else "attention"
        self.rate, self.site = config.attention_dropout, ("layer", layer_number, site)
        layout = layer_layout(config, layer_number, groups)
        keys = k_channels or config.kv_channels
        values = v_channels or keys
        scale = softmax_scale or config.softmax_scale or 1.0 / math.sqrt(keys)
        request = build_request(config, self.visibility.window, layout.needs, max(keys, values), biased=biased)
        self.choice, kernel = build_kernel(request, config, layer_number, scale)
        """Selected kernel and reason."""
        self.form, self.first_head = layout.form(kernel), layout.first_head
        self._filled = ""
        if keys != values and (self.choice.kernel not in UNEQUAL_HEADS or not isinstance(self.form, FullSequence)):
            both = self.choice.kernel == "cudnn" and isinstance(self.form, FullSequence)
            self.form = EqualHeads(self.form, both)
            self._filled = "" if both else f", heads of {keys} and {values} channels filled up"
        add_sink(self, config, groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """Attend and return [s, b, a * e] in the queries' dtype. Collective over the context-parallel group, also in
        backward. With context parallelism, reads document bounds on the host; the first read waits for the GPU.

        Args:
            attention_mask: bool, True where hidden, broadcastable to [b, a, s, t]; applied in addition to causality and
                window. Some kernels and context parallelism reject it (UserError).
            packed_seq_params: document bounds in full sequences, also with context parallelism.
            dropout: coordinates of the tokens; required in training with dropout (else ValueError).
            position_bias: [a, n], added to scores by head and distance (``position_bias.py``)."""
        documents = packed_seq_params
        if documents is not None and documents.cu_seqlens_q is None:
            documents = None
        mask = Mask(self.visibility, documents, attention_mask, self._weight_dropout(dropout), position_bias)
        return self.form(query, key, value, mask, self.softmax_offset).flatten(2)

    @property
    def description(self) -> str:
        """Text for the log: context-parallel strategy if there is one, kernel, reason, and whether heads are padded or
        a sink is added by the log-sum-exp."""
        form = self.form.inner if isinstance(self.form, EqualHeads) else self.form
        words = f"{self.choice}{self._filled}"
        if isinstance(form, FullSequence):
            return words
        if not self.shared:
            return f"{words}, then the sink by the log-sum-exp"
        return f"{type(form).__name__} over context-parallel ranks, {words}"

    def _weight_dropout(self, at: DropoutCoordinates | None) -> WeightDropout | None:
        """Return the dropout of attention weights at the tokens ``at``; None in eval mode or with rate 0. Raises
        ValueError if it is needed and ``at`` is None."""
        if not self.rate or not self.training:
            return None
        if at is None:
            raise ValueError(
                f"dropout at {self.site} needs the coordinates of its tokens: pass dropout=DropoutCoordinates(...), "
                "set attention_dropout to 0 or call eval()"
            )
        return WeightDropout(at.stream, self.rate, self.site, self.first_head, at.sample_b)
