"""Trading computation and bandwidth for activation memory. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Layers, PositiveInt, Range

IN_FLIGHT, LOADED_AHEAD = 4, 2
"""Calls of these modules whose tensors are still on the device until their copies are done, about one layer's; and
calls whose tensors return before backward needs them."""


@dataclass(kw_only=True)
class RecomputeConfig(FlagGroup):
    """Activation recomputation and offloading"""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute full layers in backward, or only the modules of --recompute-modules; default: save all activations."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Full recomputation. uniform: save the input of every group of --recompute-num-layers layers; block: recompute
    only the first --recompute-num-layers layers of each stage. To recompute every layer: uniform with 1."""

    recompute_num_layers: Layers | None = None
    """Layers per group (uniform) or recomputed layers per stage (block)."""

    recompute_modules: list[str] | None = None
    """Modules that selective recomputation recomputes: core_attn (attention without its projections), mlp, layernorm (a
    layer's two norms), mlp_act (the feed-forward activation), moe (router, experts and dispatch of a layer with
    experts), moe_act, shared_experts, mla_up_proj (up-projections of multi-latent attention); default: core_attn."""

    distribute_saved_activations: bool = False
    """Split the saved inputs of recomputed layers over the tensor-parallel ranks."""

    fine_grained_activation_offloading: bool = False
    """Move tensors that the modules of --offload-modules save for backward to pinned host memory."""

    offload_modules: list[str] | None = None
    """Modules whose saved tensors are offloaded: attn_norm, qkv_linear (inputs), core_attn (queries, keys, values,
    output), attn_proj (input), mlp_norm, expert_fc1, moe_act (inputs)."""

    min_offloaded_tensor_size: PositiveInt = 1_048_576
    """Elements from which a tensor is offloaded."""

    activation_offload_fraction: Annotated[float, Range(0, 1)] = 1.0
    """Fraction of the calls of --offload-modules in a forward pass that offload, the first ones."""
