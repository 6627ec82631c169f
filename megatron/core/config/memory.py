"""Trading computation and bandwidth for activation memory. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.ranges import Layers

RECOMPUTED_MODULES = ("core_attn", "mlp", "layernorm", "mlp_act", "moe", "moe_act", "shared_experts", "mla_up_proj")
"""What selective recomputation knows to drop."""


@dataclass(kw_only=True)
class RecomputeConfig:
    """Activation recomputation and offloading"""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers in the backward pass, or only the modules of --recompute-modules; left out, keep every
    activation."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Full recomputation: "uniform" keeps the input of every group of --recompute-num-layers layers; "block" recomputes
    only the first --recompute-num-layers layers of each stage. Every layer is: uniform, 1."""

    recompute_num_layers: Layers | None = None
    """Layers per group (uniform) or recomputed layers per stage (block)."""

    recompute_modules: list[str] | None = None
    """What selective recomputation drops: core_attn (attention between its projections), mlp, layernorm (the outputs of
    a layer's two norms), mlp_act (the output of the feed-forward network's activation), of layers with experts moe
    (router, experts, and the way between them), moe_act and shared_experts, mla_up_proj (the heads that multi-latent
    attention makes of latents); default: core_attn."""

    distribute_saved_activations: bool = False
    """Split the saved inputs of recomputed layers over the tensor-parallel ranks."""
