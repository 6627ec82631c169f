"""From a packed projection to heads: split into queries, keys and values, head norms and rotary embedding.

Legend: s sequence, b batch, g groups (local), p query heads per group, d head dim."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from megatron.core.attention.rotary import RotaryTables
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions import normed_rotary, split_rotary
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.transformer.norm import IdentityOp, RMSNorm

Heads = tuple[Tensor, Tensor, Tensor]
"""Query [s, b, g * p, d], key and value [s, b, g, d]."""


class HeadNorms(Protocol):
    """Attention whose norms are read at each call, so that programs can replace them."""

    q_layernorm: nn.Module
    k_layernorm: nn.Module
    heads_per_group: int


class HeadSplit:
    """Function (packed [s, b, g, p + 2, d], rotary tables or None) -> :data:`Heads`. Kernels are chosen once by the
    kinds of ``owner``'s norms: one kernel for everything where there are no norms or RMS norms."""

    def __init__(self, owner: HeadNorms, config: TransformerConfig) -> None:
        self.owner, self.interleaved = owner, config.rotary_interleaved
        self._rotate = split_rotary.choose_rotary(config.params_dtype, config.apply_rope_fusion)
        self._split: split_rotary.SplitHeads = self._normed
        self._split_rotated: split_rotary.SplitRotary = self._normed_and_rotated
        norms = owner.q_layernorm, owner.k_layernorm
        if all(isinstance(norm, IdentityOp) for norm in norms):
            self._split = split_rotary.choose_split_heads(config.params_dtype)
            self._split_rotated = split_rotary.choose_split_rotary(config.params_dtype, config.apply_rope_fusion)
        fits_kernel = isinstance(self._rotate, ByDevice) and config.kv_channels <= normed_rotary.WIDEST
        if fits_kernel and all(type(norm) is RMSNorm and norm.has_kernel for norm in norms):
            self._split_rotated = ByDevice(self._normed_and_rotated_in_kernel, self._normed_and_rotated)

    def __call__(self, packed: Tensor, tables: RotaryTables | None) -> Heads:
        if tables is None:
            return self._split(packed)
        return self._split_rotated(packed, *tables, self.interleaved)

    def _normed(self, packed: Tensor) -> Heads:
        query, key, value = packed.split((self.owner.heads_per_group, 1, 1), dim=3)
        query, key = self.owner.q_layernorm(query), self.owner.k_layernorm(key)
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    def _normed_and_rotated(self, packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Heads:
        query, key, value = self._normed(packed)
        return self._rotate(query, cos, sin, interleaved), self._rotate(key, cos, sin, interleaved), value

    def _normed_and_rotated_in_kernel(self, packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Heads:
        query, key = self.owner.q_layernorm, self.owner.k_layernorm
        assert isinstance(query, RMSNorm) and isinstance(key, RMSNorm)
        norms = normed_rotary.HeadNorms(query.weight, key.weight, query.eps, query.offset)
        return normed_rotary.split_normed_rotary_triton(packed, norms, cos, sin, interleaved)
