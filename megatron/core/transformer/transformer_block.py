"""Stack of the transformer layers of one pipeline stage, and the final norm on the last stage. The first and the last
layer may have only some of their branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron import serve_other_names
from megatron.core.config.errors import UserError
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.pipeline_parallel.stages import layer_branch_costs, layer_parts
from megatron.core.transformer.context import NO_CONTEXT, ForwardContext
from megatron.core.transformer.context_parallel_support import build_token_mixer
from megatron.core.transformer.norm import build_norm
from megatron.core.transformer.overlap import run_two_batch_overlap
from megatron.core.transformer.policies import install_policies
from megatron.core.transformer.sites import Run, Sited, call
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import layer_branches


class LayerList(nn.Module):
    """Layers registered under their *global* index, so that state-dict names are global names; indexed like a list."""

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
        return self.get_submodule(str(self.indices[position]))


@dataclass
class TransformerBlockSubmodules:
    """One spec per layer of the full model, and the final norm."""

    layer_specs: Sequence[ModuleSpec]
    layer_norm: ModuleSpec | Callable[..., object] = build_norm


def layer_specs(spec: ModuleSpec | TransformerBlockSubmodules, num_layers: int) -> Sequence[ModuleSpec]:
    """Return one spec per layer of the full model, in order. A single layer spec is repeated; a block spec must have
    exactly ``num_layers`` entries.

    Raises: UserError: ``spec`` has another number of layers."""
    if isinstance(spec, ModuleSpec):
        return [spec] * num_layers
    if len(spec.layer_specs) != num_layers:
        raise UserError(
            f"the block spec has {len(spec.layer_specs)} layer specs for {num_layers} layers; give one for each layer "
            "of the whole model"
        )
    return spec.layer_specs


class TransformerBlock(Sited, nn.Module):
    """The layers of this stage, [s, b, h] -> [s, b, h], cast to ``stream_dtype`` first. ``branches`` is the stage's
    range of branches, counted from 0 over all layers (None: all); indices outside this stack belong to another stack.

    ``spec`` is one spec for every layer, or ``TransformerBlockSubmodules``. The stack has ``num_layers`` layers (None:
    ``config.num_layers``), numbered from ``first_number``: a second stack continues the numbers of the first."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | TransformerBlockSubmodules,
        *,
        branches: range | None = None,
        post_layer_norm: bool = True,
        num_layers: int | None = None,
        first_number: int = 1,
        groups: ProcessGroups,
    ) -> None:
        """Build this stage's layers (partial at its ends) under their index in this stack, and with ``post_layer_norm``
        the final norm. Raises UserError as :func:`layer_specs` and :func:`build_token_mixer`."""
        super().__init__()
        self.open_sites()
        specs = layer_specs(spec, num_layers or config.num_layers)
        names = branch_names(specs, config.use_parallel_residual)
        branches = layer_branch_costs(range(len(specs)), names) if branches is None else branches
        self.layers = LayerList()
        for part in layer_parts(branches, names):
            options = {} if part.is_whole else {"branches": part.branches}
            number = part.layer + first_number
            layer = build_token_mixer(specs[part.layer], config, layer_number=number, groups=groups, **options)
            self.layers.append(layer, part.layer)
        self.layer_runs: list[tuple[Run, range]] = [(call, range(len(self.layers)))]
        """Policy of each group of layers, and their positions."""
        self.final_layernorm = None
        if post_layer_norm:
            norm = build_norm if isinstance(spec, ModuleSpec) else spec.layer_norm
            self.final_layernorm = build_module(norm, config, config.hidden_size, config.norm_epsilon, groups=groups)
        self.fp8 = install_policies(self, config, len(specs), groups)
        """Scales and recipe of fp8 layers; None without fp8."""
        self._overlaps = overlaps(config, groups) and all(getattr(layer, "overlaps", False) for layer in self.layers)
        self.stream_dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype

    def forward(self, hidden_states: Tensor, ctx: ForwardContext = NO_CONTEXT) -> Tensor:
        """Cast to ``stream_dtype``, run the layers by their recomputation policies, and apply the final norm."""
        hidden_states = hidden_states.to(self.stream_dtype)
        for run, positions in self.layer_runs:
            if run is not call or self._overlaps:
                hidden_states = run(partial(self._through, positions, ctx), hidden_states)
                continue
            for position in positions:  # as ``_through``, one frame less in every trace
                hidden_states = self.layers[position](hidden_states, ctx)
        return hidden_states if self.final_layernorm is None else self.final_layernorm(hidden_states)

    def _through(self, positions: range, ctx: ForwardContext, hidden_states: Tensor) -> Tensor:
        """Run the layers at ``positions`` of this stage, with two-batch overlap if it is configured, every layer
        supports it, there are no documents and the batch size is even; else one layer after another."""
        layers = [self.layers[position] for position in positions]
        if self._overlaps and ctx.can_be_halved and hidden_states.shape[1] % 2 == 0:
            return run_two_batch_overlap(layers, hidden_states, ctx)
        for layer in layers:
            hidden_states = layer(hidden_states, ctx)
        return hidden_states


def overlaps(config: TransformerConfig, groups: ProcessGroups) -> bool:
    """Return whether the configuration enables two-batch overlap and there are ranks to communicate with."""
    tensor = config.tp_comm_overlap and groups.stream(config.sequence_parallel).size > 1
    return tensor or (config.overlap_moe_expert_parallel_comm and groups.etp_ep.size > 1)


def branch_names(specs: Sequence[ModuleSpec], parallel: bool = False) -> list[list[str]]:
    """Branch names of each layer; an indivisible one is ``layer``. ``parallel``: branches read the same stream."""
    parts = [layer_branches(spec, parallel) for spec in specs]
    return [["layer"] if branches is None else [branch.name for branch in branches] for branches in parts]


serve_other_names(__name__)
