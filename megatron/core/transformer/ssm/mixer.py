"""Construction that recurrent mixers share: an input projection stacked in blocks of heads, a short convolution of its
first rows, an output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.attention.cached_layout import CACHED
from megatron.core.attention.context_parallel.forms import layer_comm_type
from megatron.core.attention.sequence_states import CacheSpec
from megatron.core.attention.token_layout import ANY_ORDER
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.sharding.placement import Drawn, Init, Shard, declare_row_parts, parameter
from megatron.core.tensor_parallel.layers import StackedSize
from megatron.core.transformer.initial_values import output_weight_init, weight_init
from megatron.core.transformer.sites import Sited
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.ssm.convolution import ShortConvolution
from megatron.core.transformer.ssm.description import MixerSizes

LAYOUTS = ANY_ORDER | CACHED
"""Layouts of all recurrent mixers, which scan by ``ctx.layout``."""
Slot = ModuleSpec | Callable[..., object]


@dataclass
class MixerSubmodules:
    """Slots of :class:`RecurrentMixer`."""

    in_proj: Slot
    out_proj: Slot


class RecurrentMixer(Sited, nn.Module):
    """Base of mixers [s, b, hidden] -> [s, b, hidden] (s / tp positions under sequence parallelism). Subclasses declare
    ``mixes_tokens`` and ``layouts``, which hold for their ``forward``."""

    cache_spec = CacheSpec(per_sequence=("conv", "state"))

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        layer_number: int,
        groups: ProcessGroups,
        sizes: MixerSizes,
    ) -> None:
        """Build ``in_proj``, ``conv1d`` and ``out_proj``. Raises UserError if the tensor-parallel size does not divide
        the blocks."""
        super().__init__()
        self.open_sites()
        self.layer_number, self.by_heads = layer_number, layer_comm_type(config.cp_comm_type, layer_number) == "a2a"
        self._vectors = {"mesh": {"tp": Shard(0)}, "groups": groups, "dtype": config.params_dtype}
        options, parts = {"config": config, "bias": False, "groups": groups}, sizes.parts
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            StackedSize((sizes.blocks, sum(parts)), 0),
            init_method=weight_init(config),
            **options,
        )
        declare_row_parts(self.in_proj, parts, parts, sizes.adapters)
        convolved = parts[sizes.convolved]
        self.conv1d = ShortConvolution(sizes.blocks, convolved, sizes.taps, config, groups, bias=sizes.has_bias)
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.outputs,
            config.hidden_size,
            init_method=output_weight_init(config),
            **options,
        )

    def vector(self, *shape: int, init: Init) -> nn.Parameter:
        """Return a parameter of ``shape``, folded to one dim, whose first dim tensor-parallel ranks split."""
        return parameter(shape, init=init, ndim=1, **self._vectors)


DECAY_RATE = Drawn(1.0, 16.0, torch.log)
"""Initial ``A_log``."""


def initial_time_bias(uniform: Tensor) -> Tensor:
    """Return the inverse softplus of times that are log-uniform in [0.001, 0.1]."""
    low, high = torch.tensor([0.001, 0.1], dtype=torch.float64).log().tolist()
    step = (low + (high - low) * uniform).exp()
    return step + torch.log(-torch.expm1(-step))


TIME_BIAS = Drawn(0.0, 1.0, initial_time_bias)
"""Initial ``dt_bias``."""
