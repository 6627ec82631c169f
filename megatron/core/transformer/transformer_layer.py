"""One transformer layer: attention and feed-forward network, each with its norm, dropout and residual.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

Under ``apply_residual_connection_post_layernorm`` what is added to is norm(x) instead of x.

Legend: s sequence, b batch, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import RotaryTables
from megatron.core.transformer.dropout import DropoutCoordinates, NoDropout, dropout_is_fused, make_dropout
from megatron.core.transformer.interleave import Walk
from megatron.core.transformer.norm import StreamNorm
from megatron.core.transformer.recompute import forget_norms, run_of
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """Slots of :class:`TransformerLayer`."""

    input_layernorm: ModuleSpec | Callable[..., Any]
    self_attention: ModuleSpec | Callable[..., Any]
    pre_mlp_layernorm: ModuleSpec | Callable[..., Any]
    mlp: ModuleSpec | Callable[..., Any]


class _Stream(NamedTuple):
    """The residual stream at a norm."""

    hidden: Tensor
    """What is normalized."""
    residual: Tensor
    """What the next branch is added to."""
    normed: Tensor


def _norm(norm: nn.Module, hidden: Tensor) -> _Stream:
    """Any norm."""
    return _Stream(hidden, hidden, norm(hidden))


def _norm_with_stream(norm: nn.Module, hidden: Tensor) -> _Stream:
    """A norm whose backward pass also adds up the stream's gradient."""
    residual, normed = norm(hidden, None)
    return _Stream(hidden, residual, normed)


def _norm_as_residual(norm: nn.Module, hidden: Tensor) -> _Stream:
    normed = norm(hidden)
    return _Stream(hidden, normed, normed)


def _enter_of(config: TransformerConfig, norm: nn.Module) -> Callable[[nn.Module, Tensor], _Stream]:
    if config.apply_residual_connection_post_layernorm:
        return _norm_as_residual
    return _norm_with_stream if isinstance(norm, StreamNorm) else _norm


class TransformerLayer(nn.Module):
    """[s, b, h] -> [s, b, h]. ``layer_number`` counts from 1 over the whole model."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__()
        groups = groups or SINGLE_PROCESS
        self.config, self.layer_number = config, layer_number
        norm_arguments = (config, config.hidden_size, config.norm_epsilon)
        self.input_layernorm = build_module(submodules.input_layernorm, *norm_arguments, groups=groups)
        self.self_attention = build_module(
            submodules.self_attention, config, layer_number=layer_number, groups=groups
        )
        fused = dropout_is_fused(config)
        self.attention_dropout = make_dropout(
            config.hidden_dropout, "layer", layer_number, "attention output", fused=fused
        )
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, *norm_arguments, groups=groups)
        self.mlp = build_module(submodules.mlp, config, groups=groups)
        self.mlp_dropout = make_dropout(config.hidden_dropout, "layer", layer_number, "mlp output", fused=fused)
        self._run_mlp, self._saving = run_of(config, "mlp"), forget_norms(config)
        self._enter = _enter_of(config, self.input_layernorm)
        self._enter_mlp = _enter_of(config, self.pre_mlp_layernorm)
        self._join = self._drop_add_and_norm
        if isinstance(self.attention_dropout, NoDropout) and self._enter_mlp is _norm_with_stream:
            self._join = self._add_and_norm

    def _drop_add_and_norm(self, residual: Tensor, branch: Tensor, dropout: DropoutCoordinates | None) -> _Stream:
        return self._enter_mlp(self.pre_mlp_layernorm, self.attention_dropout(branch, dropout, residual))

    def _add_and_norm(self, residual: Tensor, branch: Tensor, dropout: DropoutCoordinates | None) -> _Stream:
        """In one pass."""
        hidden, normed = self.pre_mlp_layernorm(residual, branch)
        return _Stream(hidden, hidden, normed)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTables | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        stream = self._enter(self.input_layernorm, hidden_states)
        with self._saving(stream.normed, self.input_layernorm, stream.hidden):
            branch = self.self_attention(stream.normed, attention_mask, rotary_pos_emb, packed_seq_params, dropout)
        stream = self._join(stream.residual, branch, dropout)
        with self._saving(stream.normed, self.pre_mlp_layernorm, stream.hidden):
            branch = self._run_mlp(self.mlp, stream.normed)
        return self.mlp_dropout(branch, dropout, stream.residual)

    def pieces(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_pos_emb: RotaryTables | None,
        packed_seq_params: PackedSeqParams | None,
        dropout: DropoutCoordinates | None,
    ) -> Walk:
        """:meth:`forward` under sequence parallelism, stopping between its pieces (``interleave.py``)."""
        attention, mlp = self.self_attention, self.mlp
        stream = self._enter(self.input_layernorm, hidden_states)
        gathering = attention.linear_qkv.gather(stream.normed)
        yield
        mixed = attention.mix(gathering, attention_mask, rotary_pos_emb, packed_seq_params, dropout)
        yield
        summing, _ = attention.linear_proj(mixed, in_flight=True)
        yield
        branch, _ = attention.linear_proj.finish(summing)
        stream = self._join(stream.residual, branch, dropout)
        gathering = mlp.linear_fc1.gather(stream.normed)
        yield
        intermediate, _ = mlp.linear_fc1(gathering)
        yield
        summing, _ = mlp.project(intermediate, in_flight=True)
        yield
        branch, _ = mlp.linear_fc2.finish(summing)
        return self.mlp_dropout(branch, dropout, stream.residual)

    def has_pieces(self) -> bool:
        """Whether its linear layers can leave their collectives under way."""
        attention, mlp = self.self_attention, self.mlp
        columns = getattr(attention, "linear_qkv", None), getattr(mlp, "linear_fc1", None)
        rows = getattr(attention, "linear_proj", None), getattr(mlp, "linear_fc2", None)
        return all(isinstance(linear, ColumnParallelLinear) for linear in columns) and all(
            isinstance(linear, RowParallelLinear) for linear in rows
        )
