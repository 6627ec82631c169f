"""Trading computation and bandwidth for activation memory. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.groups import FlagGroup
from megatron.core.config.ranges import Layers

RECOMPUTED_MODULES = ("core_attn", "mlp", "layernorm", "mlp_act", "moe", "moe_act", "shared_experts", "mla_up_proj")
"""Modules that selective recomputation can recompute."""


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
