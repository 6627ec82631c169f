"""Multi-latent attention (MLA): low-rank queries, keys and values (DeepSeek-V2, section 2.1).

  [nope, rope] of each query head  = norm(x Dq) Uq             (x Wq without a query rank)
  latent, rope key                 = x Dkv
  [nope key, value] of each head   = norm(latent) Ukv

Rotary positions apply only to the rope channels, in adjacent pairs; all heads share one rope key. The norms exist only
with ``qk_layernorm``. Tensor-parallel ranks replicate the down projections and split the up projections by heads. Under
sequence parallelism each rank computes the latents of its positions and all-gathers them instead of the wider stream.

Legend: s sequence, b batch, h hidden, a heads (local), d channels of a query or key head, e of a value head, r rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.attention.cached_layout import CACHED, CachedLayout
from megatron.core.attention.latent_description import describe_latent_attention
from megatron.core.attention.qk_norm import qk_norm
from megatron.core.attention.rotary import RotaryTables, latent_softmax_scale
from megatron.core.attention.sequence_states import CacheSpec
from megatron.core.attention.token_layout import ANY_ORDER
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.split_rotary import choose_rotary
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import declare_row_parts
from megatron.core.tensor_parallel import operators
from megatron.core.tensor_parallel.autograd_handle import start_all_gather
from megatron.core.tensor_parallel.gemms import GemmLayer
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.context_parallel_support import build_token_mixer
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.norm import IdentityOp, build_norm
from megatron.core.transformer.overlap import Segmented, Segments, can_overlap, finish, leave
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

Slot = ModuleSpec | Callable[..., object] | None
Heads = tuple[Tensor, Tensor, Tensor]
Tables = RotaryTables | None


@dataclass
class MLASelfAttentionSubmodules:
    """Slots of :class:`MLASelfAttention`. The configuration selects which query projections are used."""

    linear_q_proj: Slot = None
    linear_q_down_proj: Slot = None
    linear_q_up_proj: Slot = None
    linear_kv_down_proj: Slot = None
    linear_kv_up_proj: Slot = None
    core_attention: Slot = None
    linear_proj: Slot = None
    q_layernorm: Slot = None
    """Norm of the queries' latent; None: ``norm`` if the configuration has one. The same for keys and values."""
    kv_layernorm: Slot = None
    linear_qkv_down_proj: Slot = None
    norm: ModuleSpec | Callable[..., object] = build_norm
    """Class of the norms that the configuration has (``attention/qk_norm.py``)."""


def _build(slot: Slot, *sizes: object, **settings: object) -> Any:
    assert slot is not None, "a slot that this configuration needs is empty"
    return build_module(slot, *sizes, **settings)


class MLASelfAttention(Segmented):
    """Multi-latent self-attention with its projections, [s, b, h] -> [s, b, h]."""

    mixes_tokens, layouts = True, ANY_ORDER | CACHED  # core attention exchanges keys
    cache_spec = CacheSpec(per_token=("rope_key", "latent"))
    calls, spans, results = ("core_attn",), ("qkv_linear", "attn_proj"), ("mla_up_proj",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        *,
        groups: ProcessGroups,
    ) -> None:
        """Build the modules from the slots. AssertionError if a slot that the configuration needs is None."""
        super().__init__()
        # head dims: unrotated and rotated channels of queries and keys, and values
        self._nope, self._rope, self._value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        self._ranks = config.q_lora_rank, config.kv_lora_rank
        self._build_projections(config, submodules, groups)
        assert submodules.core_attention is not None
        self.core_attention = build_token_mixer(
            submodules.core_attention,
            config,
            layer_number,
            attn_mask_type,
            groups=groups,
            softmax_scale=latent_softmax_scale(config),
            k_channels=self._nope + self._rope,
            v_channels=self._value,
        )
        self.linear_proj = _build(
            submodules.linear_proj,
            config.num_attention_heads * self._value,
            config.hidden_size,
            config=config,
            init_method=output_weight_init(config),
            bias=config.add_bias_linear,
            groups=groups,
        )
        self._rotated = choose_rotary(config.params_dtype, config.apply_rope_fusion)
        self._group = groups.tp
        # each rank's heads read the one rope key: its gradient is all-reduced (reduce-scattered under sequence
        # parallelism)
        self._for_all_heads: Callable[..., Tensor] = operators.copy_to_region
        self._of_gathered: dict[str, bool] = {}  # Transformer Engine's linears do not take the argument
        if groups.stream(config.sequence_parallel).size > 1:
            self._for_all_heads, self._of_gathered = operators.gather_from_sequence, {"is_gathered": True}

    def _build_projections(
        self, config: TransformerConfig, slots: MLASelfAttentionSubmodules, groups: ProcessGroups
    ) -> None:
        """Create the linear layers and latent norms from the slots: with a query rank query down (or one fused down
        projection), norm and up. Sets ``self._down``, the function that computes the latents."""
        query_rank, rank = self._ranks
        hidden, heads = config.hidden_size, config.num_attention_heads
        query_width, width = heads * (self._nope + self._rope), heads * (self._nope + self._value)

        def linear(slot: Slot, into: int, out: int) -> nn.Module:
            options = {"config": config, "init_method": weight_init(config), "bias": False, "groups": groups}
            return _build(slot, into, out, **options)

        def latent_norm(slot: Slot, size: int) -> nn.Module:
            if qk_norm(config, is_filled=slot is not None) is None:
                return IdentityOp()
            epsilon = config.latent_norm_epsilon
            epsilon = config.norm_epsilon if epsilon is None else epsilon
            return build_module(slot or slots.norm, config, size, epsilon, groups=groups)

        self._down = self._stream_queries
        if config.mla_down_proj_fusion:
            self._down = self._latents_one_weight
            self.linear_qkv_down_proj = linear(
                slots.linear_qkv_down_proj or slots.linear_kv_down_proj, hidden, (query_rank or 0) + rank + self._rope
            )
        elif query_rank is not None:
            self._down = self._latents_two_weights
            self.linear_q_down_proj = linear(slots.linear_q_down_proj, hidden, query_rank)
        if query_rank is None:
            self.linear_q_proj = linear(slots.linear_q_proj, hidden, query_width)
        else:
            self.q_layernorm = latent_norm(slots.q_layernorm, query_rank)
            self.linear_q_up_proj = linear(slots.linear_q_up_proj, query_rank, query_width)
        if not config.mla_down_proj_fusion:
            self.linear_kv_down_proj = linear(slots.linear_kv_down_proj, hidden, rank + self._rope)
        self.kv_layernorm = latent_norm(slots.kv_layernorm, rank)
        self.linear_kv_up_proj = linear(slots.linear_kv_up_proj, rank, width)
        query_rows = (self._nope + self._rope,)
        declare_row_parts(self.linear_query, query_rows, query_rows)
        declare_row_parts(self.linear_kv_up_proj, (self._nope + self._value,), (self._nope, self._value))

    describe = staticmethod(describe_latent_attention)

    @property
    def linear_query(self) -> nn.Module:
        """Linear layer that outputs the queries."""
        return self.linear_q_proj if self._ranks[0] is None else self.linear_q_up_proj

    @property
    def overlaps(self) -> bool:
        """Whether its collectives can stay in flight."""
        return all(can_overlap(first, self.linear_proj) for first in (self.linear_query, self.linear_kv_up_proj))

    def segments(self, hidden_states: Tensor, ctx: ForwardContext) -> Segments[Tensor]:
        """Run ``forward`` as a generator of four segments: down projections and norms (start the all-gather) | up
        projections and core attention | output projection (start the reduction) | (wait, add the bias). Returns [s, b,
        h]. With ``ctx.overlap`` the latents are all-gathered in one message and saved gathered; else backward repeats
        their all-gathers if it recomputes the heads."""
        source, rest = self.at.qkv_linear(self._down, hidden_states)
        # contiguous: a saved view would keep the memory of the full tensor
        latent, rope_key = (part.contiguous() for part in rest.split((self._ranks[1], self._rope), dim=-1))
        parts, heads = (source, self.kv_layernorm(latent), rope_key), self._heads
        if ctx.overlap and self.linear_proj.scatters:  # one message: copy engines serve few at a time
            gathering, heads = start_all_gather(torch.cat(parts, dim=-1), self._group), self._gathered_heads
            yield
            parts = gathering.wait().split([part.shape[-1] for part in parts], dim=-1)
        else:
            yield
        mixed = ctx.layout.mix_latents(self, heads, parts, ctx)
        yield
        summing = self.at.attn_proj(leave, self.linear_proj, mixed, ctx)
        yield
        return finish(self.linear_proj, summing, ctx)

    def _stream_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear_kv_down_proj(x)[0]

    def _latents_two_weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_layernorm(self.linear_q_down_proj(x)[0]), self.linear_kv_down_proj(x)[0]

    def _latents_one_weight(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query_rank, rank = self._ranks
        query, rest = self.linear_qkv_down_proj(x)[0].split((query_rank, rank + self._rope), dim=-1)
        return self.q_layernorm(query.contiguous()), rest

    def _heads(self, source: Tensor, latent: Tensor, rope_key: Tensor, ctx: ForwardContext) -> Heads:
        """Compute query [s, b, a, d], key [t, b, a, d] and value [t, b, a, e]; may all-gather the latents."""
        rope_key = self._rotated_key(self._for_all_heads(rope_key, self._group), ctx.rotary_pos_emb)
        query = self._query(self.linear_query(source)[0], ctx.rotary_pos_emb)
        return query, *self._keys_values(self.linear_kv_up_proj(latent)[0], rope_key)

    def _gathered_heads(self, source: Tensor, latent: Tensor, rope_key: Tensor, ctx: ForwardContext) -> Heads:
        query = self._query(self.linear_query(source, is_gathered=True)[0], ctx.rotary_pos_emb)
        return query, *self.expand(latent, self._rotated_key(rope_key, ctx.rotary_pos_emb))

    def attend_heads(self, heads: Callable[..., Heads], parts: Sequence[Tensor], ctx: ForwardContext) -> Tensor:
        """Attend to the heads that ``heads(*parts, ctx)`` computes from latents; return [s, b, a * e]."""
        qkv = heads(*parts, ctx)
        with self.kept.mla_up_proj(qkv, heads, *parts, ctx):
            return self.at.core_attn(self.core_attention, *qkv, ctx)

    def attend_cached(
        self, source: Tensor, latent: Tensor, rope_key: Tensor, layout: CachedLayout, ctx: ForwardContext
    ) -> Tensor:
        """Attend to the paged cache of normed latents and rotated rope keys; return [n, 1, a * e]."""
        query = self._query(self.linear_query(source)[0], ctx.rotary_pos_emb)
        latent, rope_key = (self._for_all_heads(x, self._group) for x in (latent, rope_key))
        rope_key, core = self._rotated_key(rope_key, ctx.rotary_pos_emb), self.core_attention
        return layout.attend_latents(core, self, query, latent.unsqueeze(2), rope_key, core.mask(ctx)).flatten(2)

    # ---- cached_layout.LatentHeads

    @property
    def absorbs(self) -> bool:
        """Whether the products of the up projection can change places with the products of attention."""
        up = self.linear_kv_up_proj
        return not isinstance(up, GemmLayer) or (up.traits.gemms.reads_weight and not up.is_wrapped)

    def expand(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [t, b, a, d] and values [t, b, a, e] of gathered latents and rotated rope keys."""
        return self._keys_values(self.linear_kv_up_proj(latent, **self._of_gathered)[0], rope_key)

    def absorb(self, query: Tensor) -> Tensor:
        """Return [n, b, a, r + rope] of queries [n, b, a, d]: ``q . Uk latent = Uk^T q . latent``."""
        nope, rope = query.split((self._nope, self._rope), dim=-1)
        return torch.cat((torch.einsum("nbad,adr->nbar", nope, self._up_weights[0]), rope), dim=-1)

    def values(self, latent: Tensor) -> Tensor:
        """Apply the up projection of values to each head's mean of latents [n, b, a, r]; return [n, b, a, e]."""
        return torch.einsum("nbar,aer->nbae", latent, self._up_weights[1])

    @property
    def _up_weights(self) -> tuple[Tensor, ...]:
        weight = cast("Tensor", self.linear_kv_up_proj.weight).unflatten(0, (-1, self._nope + self._value))
        return weight.split((self._nope, self._value), dim=1)

    def _rotated_key(self, rope_key: Tensor, tables: Tables) -> Tensor:
        """Return the rope key [s, b, 1, rope] of [s, b, rope], rotated by ``tables`` (None: no rotation)."""
        rope_key = rope_key.unsqueeze(2)
        return rope_key if tables is None else self._rotated(rope_key, *tables, True)

    def _query(self, query: Tensor, tables: Tables) -> Tensor:
        """Return queries [s, b, a, nope + rope] of the projection's output, rotated by ``tables``."""
        query = query.unflatten(-1, (-1, self._nope + self._rope))
        if tables is None:
            return query
        nope, rope = query.split((self._nope, self._rope), dim=-1)
        return torch.cat((nope, self._rotated(rope, *tables, True)), dim=-1)

    def _keys_values(self, key_value: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Return key [t, b, a, nope + rope] and value [t, b, a, v] of the up projection's output and the rotated
        ``rope_key`` [t, b, 1, rope], which is copied to all heads."""
        key, value = key_value.unflatten(-1, (-1, self._nope + self._value)).split((self._nope, self._value), dim=-1)
        return torch.cat((key, rope_key.expand(-1, -1, key.shape[2], -1)), dim=-1), value


serve_other_names(__name__)
