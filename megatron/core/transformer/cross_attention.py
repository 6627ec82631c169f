"""Cross-attention: queries of the decoder attend to keys and values of the encoder output.

The query projection's rows are ordered head by head. The key-value projection's rows are, group by group, a key head
and a value head, so that a split by groups keeps both on one rank.

Legend: s sequence (local; e: of the encoder), b batch, h hidden, a query heads (local), g groups (local), d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.attention.description import describe_cross_attention
from megatron.core.attention.token_layout import ANY_ORDER
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare_row_parts
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.context_parallel_support import build_token_mixer
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.sites import Sited
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
class CrossAttentionSubmodules:
    """Slots of :class:`CrossAttention`."""

    linear_q: ModuleSpec | Callable[..., object]
    linear_kv: ModuleSpec | Callable[..., object]
    core_attention: ModuleSpec | Callable[..., object]
    linear_proj: ModuleSpec | Callable[..., object]


class CrossAttention(Sited, nn.Module):
    """Cross-attention with its projections, [s, b, h] -> [s, b, h]; reads ``ctx.encoder_output`` [e, b, h] and the
    valid keys in ``ctx.encoder_documents``. Raises UserError unless TP divides the query groups."""

    mixes_tokens, layouts = True, ANY_ORDER  # core attention exchanges keys
    calls = ("core_attn",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build ``linear_q``, ``linear_kv``, ``core_attention`` (without causality) and ``linear_proj`` from the slots.
        Raises UserError unless the query groups are a multiple of the tensor-parallel size."""
        super().__init__()
        self.open_sites()
        heads, kv_groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
        if kv_groups % groups.tp.size:
            raise UserError(
                f"num_query_groups {kv_groups}: cross-attention needs a multiple of tensor_model_parallel_size "
                f"{groups.tp.size}"
            )
        self.channels, self.dtype = channels, config.params_dtype
        shared = {"config": config, "bias": config.add_bias_linear, "groups": groups}
        self.linear_q = build_module(
            submodules.linear_q, config.hidden_size, heads * channels, init_method=weight_init(config), **shared
        )
        self.linear_kv = build_module(
            submodules.linear_kv,
            config.hidden_size,
            StackedSize((kv_groups, 2 * channels), 0),
            init_method=weight_init(config),
            **shared,
        )
        declare_row_parts(self.linear_q, (heads * channels,), (channels,) * heads)
        declare_row_parts(self.linear_kv, (channels, channels), (channels, channels))
        self.core_attention = build_token_mixer(
            submodules.core_attention, config, layer_number, AttnMaskType.padding, attention_type="cross", groups=groups
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * channels,
            config.hidden_size,
            init_method=output_weight_init(config),
            **shared,
        )

    describe = staticmethod(describe_cross_attention)

    @property
    def first_linear(self) -> nn.Module:
        """First linear layer of the mixer, the only reader of its input."""
        return self.linear_q

    def forward(self, hidden_states: Tensor, ctx: ForwardContext = NO_CONTEXT) -> Tensor:
        """Let the queries of ``hidden_states`` attend to ``ctx.encoder_output`` [e, b, h], cast to the parameters'
        dtype, within ``ctx.encoder_documents``. Both projections all-gather their input under sequence parallelism."""
        assert ctx.encoder_output is not None, "a decoder's context brings encoder_output"
        query = self.linear_q(hidden_states)[0].unflatten(-1, (-1, self.channels))
        pairs = self.linear_kv(ctx.encoder_output.to(self.dtype))[0].unflatten(-1, (-1, 2, self.channels))
        key, value = pairs.unbind(3)
        mixed = self.at.core_attn(self.core_attention, query, key, value, ctx)
        return self.linear_proj(mixed)[0]
