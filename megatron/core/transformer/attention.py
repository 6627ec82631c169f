"""Self-attention with grouped queries.

One projection computes queries, keys and values, interleaved per query group: its rows are, group by group, the group's
p query heads, its key head and its value head. Splitting by groups therefore keeps a group's heads on one rank. With
fewer groups than tensor-parallel ranks, the ranks of a group split its query heads and replicate its key and value
head. With ``attention_output_gate`` each query head is followed by its gate.

Legend: s sequence, b batch, h hidden, g groups (local), p query heads per group, d head dim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.attention.cached_layout import CACHED
from megatron.core.attention.description import describe_attention
from megatron.core.attention.qk_norm import qk_norm
from megatron.core.attention.sequence_states import CacheSpec
from megatron.core.attention.token_layout import ANY_ORDER
from megatron.core.attention.window import has_rotation, layer_window
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare_row_parts
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.context_parallel_support import build_token_mixer
from megatron.core.transformer.head_split import HeadSplit
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.norm import IdentityOp, L2Norm, NormAcrossHeads, RMSNorm, build_norm
from megatron.core.transformer.overlap import Segmented, Segments, can_overlap, enter, finish, leave
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

Slot = ModuleSpec | Callable[..., object]


@dataclass
class SelfAttentionSubmodules:
    """Slots of :class:`SelfAttention`."""

    linear_qkv: Slot
    core_attention: Slot
    linear_proj: Slot
    q_layernorm: Slot | None = None
    """Norm of the query heads; None: ``norm`` if the configuration has one. The same for the keys."""
    k_layernorm: Slot | None = None
    norm: Slot = build_norm
    """Class of the norms that the configuration has (``attention/qk_norm.py``)."""


class SelfAttention(Segmented):
    """Self-attention with its projections, [s, b, h] -> [s, b, h] (s / tp positions under sequence parallelism)."""

    mixes_tokens, layouts = True, ANY_ORDER | CACHED  # core attention exchanges keys
    cache_spec = CacheSpec(per_token=("key", "value"))
    calls, spans = ("core_attn",), ("qkv_linear", "attn_proj")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build the modules from the slots. ``layer_number`` (from 1) decides about rotary embedding and sliding
        window. With fewer query groups than tensor-parallel ranks, this rank has some query heads of one group."""
        super().__init__()
        heads, kv_groups, channels = config.num_attention_heads, config.num_query_groups, config.kv_channels
        heads_per_group = heads // kv_groups
        per_head = 1 + config.attention_output_gate
        query = per_head * heads_per_group
        qkv = StackedSize((kv_groups, (query + 2) * channels), 0, shared=2 * channels)
        shared = qkv.is_shared_over(groups.tp.size)  # then this rank has some query heads of one group
        self.heads_per_group = heads // groups.tp.size if shared else heads_per_group
        self.channels, self._per_head = channels, per_head
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            qkv,
            config=config,
            init_method=weight_init(config),
            bias=config.add_bias_linear or config.add_qkv_bias,
            groups=groups,
        )
        declare_row_parts(self.linear_qkv, (query * channels, channels, channels), (channels,) * (query + 2))
        self._has_rotation = has_rotation(config.no_rope_freq, layer_number)
        self._is_local = layer_window(config.window_size, config.window_attn_skip_freq, layer_number) is not None
        self.q_layernorm = _head_norm(submodules.q_layernorm, submodules.norm, config, groups, heads)
        self.k_layernorm = _head_norm(submodules.k_layernorm, submodules.norm, config, groups, kv_groups)
        self.core_attention = build_token_mixer(
            submodules.core_attention, config, layer_number, attn_mask_type, groups=groups
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads * channels,
            config.hidden_size,
            config=config,
            init_method=output_weight_init(config),
            bias=config.add_bias_linear,
            groups=groups,
        )
        self.split = HeadSplit(self, config)

    @property
    def borrowed(self) -> tuple[nn.Parameter, ...]:
        """Weights of the head norms, which a kernel may read without calling the norms' modules."""
        return tuple(x.weight for x in (self.q_layernorm, self.k_layernorm) if isinstance(x, RMSNorm))

    describe = staticmethod(describe_attention)

    @property
    def first_linear(self) -> nn.Module:
        """First linear layer of the mixer, the only reader of its input."""
        return self.linear_qkv

    @property
    def overlaps(self) -> bool:
        """Whether its collectives can stay in flight."""
        return can_overlap(self.linear_qkv, self.linear_proj)

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Run four segments: (start the all-gather) | projection and core attention | output projection (start the
        reduction) | (wait, add the bias). Collectives are in flight between segments only with ``ctx.overlap``. Layers
        with a sliding window take the local rotary tables if given, layers without rotation none."""
        gathering = enter(self.linear_qkv, hidden_states, ctx)
        yield
        projected, _ = self.at.qkv_linear(self.linear_qkv, gathering)  # waits for the all-gather
        grouped = projected.unflatten(-1, (-1, self._per_head * self.heads_per_group + 2, self.channels))
        gate, grouped = self._gate(grouped)
        tables = (ctx.rotary_pos_emb_local if self._is_local else None) or ctx.rotary_pos_emb
        query, key, value = self.split(grouped, tables if self._has_rotation else None)
        mixed = self.at.core_attn(self.core_attention, query, key, value, ctx)
        if gate is not None:
            mixed = mixed * gate.flatten(2).sigmoid()
        del projected, grouped, query, key, value, gate  # a suspended generator would keep their memory
        yield
        summing = self.at.attn_proj(leave, self.linear_proj, mixed, ctx)
        yield
        return finish(self.linear_proj, summing, ctx)

    def _gate(self, grouped: Tensor) -> tuple[Tensor | None, Tensor]:
        """Split [s, b, g, 2 p + 2, d] into gates [s, b, g * p, d] and the rest [s, b, g, p + 2, d]."""
        if self._per_head == 1:
            return None, grouped
        query, rest = grouped.split((2 * self.heads_per_group, 2), dim=3)
        query, gate = query.unflatten(3, (-1, 2)).unbind(4)
        return gate.flatten(2, 3), torch.cat((query, rest), dim=3)


def _head_norm(
    slot: Slot | None, norm: Slot, config: TransformerConfig, groups: ProcessGroups, num_heads: int
) -> nn.Module:
    """Return the norm of query or key heads that :func:`qk_norm` chooses. The standard one is ``slot``, or else
    ``norm``, per head: each rank sees only its heads of ``num_heads``, so that gradients are partial over TP."""
    kind = qk_norm(config, is_filled=slot is not None)
    if kind is None:
        return IdentityOp()
    if kind == "across_heads":
        return NormAcrossHeads(config, num_heads, groups=groups)
    partial = ("tp",) if groups.tp.size > 1 else ()
    chosen = L2Norm if kind == "l2" else slot or norm
    return build_module(chosen, config, config.kv_channels, config.norm_epsilon, groups=groups, partial=partial)


serve_other_names(__name__)
