"""A stack of transformer layers: those of one pipeline stage, the first and the last of which may be halves, and the
final norm on the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.rotary import RotaryTables
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import SINGLE_PROCESS, ProcessGroups
from megatron.core.pipeline_parallel.stages import half_layers_of, layers_of
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.transformer.interleave import Surroundings, can_be_halved, run_interleaved
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.recompute import layer_runs
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer


class LayerList(nn.Module):
    """Layers registered under their *global* index, so that state-dict names are global names; used like a list."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []

    def append(self, layer: nn.Module, index: int) -> None:
        self.add_module(str(index), layer)
        self.indices.append(index)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, position: int) -> nn.Module:
        """By position in this stage, not by global index."""
        return self.get_submodule(str(self.indices[position]))


@dataclass
class TransformerBlockSubmodules:
    """One spec per layer of the whole model, and the final norm."""

    layer_specs: Sequence[ModuleSpec]
    layer_norm: ModuleSpec | Callable[..., Any] = make_norm


class TransformerBlock(nn.Module):
    """The ``half_layers`` of the model, as of ``pipeline_layout.layers_of``; [s, b, h] -> [s, b, h].

    ``spec`` is one layer's spec, repeated for every layer, or ``TransformerBlockSubmodules``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | TransformerBlockSubmodules,
        *,
        half_layers: range | None = None,
        post_layer_norm: bool = True,
        groups: ProcessGroups | None = None,
    ) -> None:
        super().__init__()
        assert config.num_layers is not None
        groups = groups or SINGLE_PROCESS
        half_layers = half_layers_of(range(config.num_layers)) if half_layers is None else half_layers
        if isinstance(spec, ModuleSpec):
            spec = TransformerBlockSubmodules([spec] * config.num_layers)
        if len(spec.layer_specs) != config.num_layers:
            raise UserError(
                f"the block spec has {len(spec.layer_specs)} layer specs for {config.num_layers} layers; give one "
                f"for each "
                "layer of the whole model"
            )
        self.layers = LayerList()
        for index, half in layers_of(half_layers):
            part = {} if half is None else {"half": half}
            layer = build_module(spec.layer_specs[index], config, layer_number=index + 1, groups=groups, **part)
            self.layers.append(layer, index)
        self._runs = layer_runs(config, len(self.layers), groups)
        """Which layers run together, and what they keep for backward."""
        self.final_layernorm = None
        if post_layer_norm:
            self.final_layernorm = build_module(
                spec.layer_norm, config, config.hidden_size, config.norm_epsilon, groups=groups
            )
        self._interleaves = interleaves(config, groups) and all(_has_pieces(layer) for layer in self.layers)
        self.stream_dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_pos_emb: RotaryTables | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        dropout: DropoutCoordinates | None = None,
    ) -> Tensor:
        hidden_states = hidden_states.to(self.stream_dtype)
        around = Surroundings(attention_mask, rotary_pos_emb, packed_seq_params, dropout)
        for run, positions in self._runs:
            hidden_states = run(partial(self._through, positions, around), hidden_states)
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def _through(self, positions: range, around: Surroundings, hidden_states: Tensor) -> Tensor:
        """Layers ``positions`` of this stage."""
        layers = [self.layers[position] for position in positions]
        if self._interleaves and can_be_halved(hidden_states, around):
            return run_interleaved(layers, hidden_states, around)
        for layer in layers:
            hidden_states = layer(hidden_states, *around)
        return hidden_states


def interleaves(config: TransformerConfig, groups: ProcessGroups) -> bool:
    """Whether halves of micro-batches take turns where they can."""
    return config.tp_comm_overlap and config.sequence_parallel and groups.tp.size > 1


def _has_pieces(layer: nn.Module) -> bool:
    return isinstance(layer, TransformerLayer) and layer.has_pieces()
