"""One transformer layer: attention and feed-forward network, each with its norm, dropout and residual.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

Under ``apply_residual_connection_post_layernorm`` what is added to is norm(x) instead of x. Either line is a half of
the layer, and x all that goes from one to the other: a pipeline stage may end between them.

Legend: s sequence, b batch, h hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.pipeline_parallel.stages import Half
from megatron.core.random.dropout import DropoutCoordinates, NoDropout, dropout_is_fused, make_dropout
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.interleave import Surroundings, Walk
from megatron.core.transformer.norm import StreamNorm
from megatron.core.transformer.recompute import forget_norms, run_of
from megatron.core.transformer.spec_utils import ModuleSpec, build_module


@dataclass
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


def _build_norm(spec: ModuleSpec | Callable[..., Any], config: TransformerConfig, groups: ProcessGroups) -> nn.Module:
    return build_module(spec, config, config.hidden_size, config.norm_epsilon, groups=groups)


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


class _Branch(NamedTuple):
    """What attention puts out, not yet added."""

    residual: Tensor
    branch: Tensor


class TransformerLayer(nn.Module):
    """[s, b, h] -> [s, b, h]. ``layer_number`` counts from 1 over the whole model.

    ``half``: build and compute only this half; of the other one there are no modules.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        groups: ProcessGroups | None = None,
        half: Half | None = None,
    ) -> None:
        super().__init__()
        groups = groups or SINGLE_PROCESS
        self.config, self.layer_number = config, layer_number
        self.has_attention, self.has_mlp = half != "mlp", half != "attention"
        self._saving = forget_norms(config)
        if self.has_attention:
            self._build_attention(submodules, groups)
        if self.has_mlp:
            self._build_mlp(submodules, groups)
        self._forward, self.pieces = {
            None: (self._whole, self._whole_pieces),
            "attention": (self._attention_half, self._attention_half_pieces),
            "mlp": (self._mlp_half, self._mlp_half_pieces),
        }[half]
        self._join = self._drop_add_and_norm
        if half is None and isinstance(self.attention_dropout, NoDropout) and self._enter_mlp is _norm_with_stream:
            self._join = self._add_and_norm

    def _build_attention(self, submodules: TransformerLayerSubmodules, groups: ProcessGroups) -> None:
        config, number = self.config, self.layer_number
        self.input_layernorm = _build_norm(submodules.input_layernorm, config, groups)
        self.self_attention = build_module(submodules.self_attention, config, layer_number=number, groups=groups)
        self.attention_dropout = make_dropout(
            config.hidden_dropout, "layer", number, "attention output", fused=dropout_is_fused(config)
        )
        self._enter = _enter_of(config, self.input_layernorm)

    def _build_mlp(self, submodules: TransformerLayerSubmodules, groups: ProcessGroups) -> None:
        config, number = self.config, self.layer_number
        self.pre_mlp_layernorm = _build_norm(submodules.pre_mlp_layernorm, config, groups)
        self.mlp = build_module(submodules.mlp, config, groups=groups)
        self.mlp_dropout = make_dropout(
            config.hidden_dropout, "layer", number, "mlp output", fused=dropout_is_fused(config)
        )
        self._run_mlp = run_of(config, "mlp")
        self._enter_mlp = _enter_of(config, self.pre_mlp_layernorm)

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
        return self._forward(
            hidden_states, Surroundings(attention_mask, rotary_pos_emb, packed_seq_params, dropout)
        )

    def _whole(self, hidden_states: Tensor, around: Surroundings) -> Tensor:
        residual, branch = self._attend(hidden_states, around)
        return self._feed_forward(self._join(residual, branch, around.dropout), around.dropout)

    def _attention_half(self, hidden_states: Tensor, around: Surroundings) -> Tensor:
        residual, branch = self._attend(hidden_states, around)
        return self.attention_dropout(branch, around.dropout, residual)

    def _mlp_half(self, hidden_states: Tensor, around: Surroundings) -> Tensor:
        return self._feed_forward(self._enter_mlp(self.pre_mlp_layernorm, hidden_states), around.dropout)

    def _attend(self, hidden_states: Tensor, around: Surroundings) -> _Branch:
        stream = self._enter(self.input_layernorm, hidden_states)
        with self._saving(stream.normed, self.input_layernorm, stream.hidden):
            return _Branch(stream.residual, self.self_attention(stream.normed, *around))

    def _feed_forward(self, stream: _Stream, dropout: DropoutCoordinates | None) -> Tensor:
        with self._saving(stream.normed, self.pre_mlp_layernorm, stream.hidden):
            branch = self._run_mlp(self.mlp, stream.normed)
        return self.mlp_dropout(branch, dropout, stream.residual)

    # ---- the same under sequence parallelism, stopping between their pieces (``interleave.py``)

    def _whole_pieces(self, hidden_states: Tensor, around: Surroundings) -> Walk:
        residual, branch = yield from self._attend_pieces(hidden_states, around)
        return (yield from self._feed_forward_pieces(self._join(residual, branch, around.dropout), around.dropout))

    def _attention_half_pieces(self, hidden_states: Tensor, around: Surroundings) -> Walk:
        residual, branch = yield from self._attend_pieces(hidden_states, around)
        return self.attention_dropout(branch, around.dropout, residual)

    def _mlp_half_pieces(self, hidden_states: Tensor, around: Surroundings) -> Walk:
        stream = self._enter_mlp(self.pre_mlp_layernorm, hidden_states)
        return (yield from self._feed_forward_pieces(stream, around.dropout))

    def _attend_pieces(self, hidden_states: Tensor, around: Surroundings) -> Generator[None, None, _Branch]:
        attention = self.self_attention
        stream = self._enter(self.input_layernorm, hidden_states)
        gathering = attention.linear_qkv.gather(stream.normed)
        yield
        mixed = attention.mix(gathering, *around)
        yield
        summing, _ = attention.linear_proj(mixed, in_flight=True)
        yield
        branch, _ = attention.linear_proj.finish(summing)
        return _Branch(stream.residual, branch)

    def _feed_forward_pieces(self, stream: _Stream, dropout: DropoutCoordinates | None) -> Walk:
        mlp = self.mlp
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
        columns, rows = [], []
        if self.has_attention:
            columns.append(getattr(self.self_attention, "linear_qkv", None))
            rows.append(getattr(self.self_attention, "linear_proj", None))
        if self.has_mlp:
            columns.append(getattr(self.mlp, "linear_fc1", None))
            rows.append(getattr(self.mlp, "linear_fc2", None))
        return all(isinstance(linear, ColumnParallelLinear) for linear in columns) and all(
            isinstance(linear, RowParallelLinear) for linear in rows
        )


def can_be_cut(layer: ModuleSpec | Callable[..., Any]) -> bool:
    """Whether a layer's class or function says that it builds halves: by a parameter ``half`` of its own.

    A subclass that inherits its constructor need not know of halves in its own ``forward``.
    """
    make = layer.module if isinstance(layer, ModuleSpec) else layer
    own = vars(make).get("__init__") if isinstance(make, type) else make
    return own is not None and "half" in inspect.signature(own).parameters
