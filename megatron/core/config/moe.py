"""Mixture of experts. Fields only, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.core.config.attention import parse_layer_pattern
from megatron.core.config.cli import flag
from megatron.core.config.ranges import Dim, NonNegativeFloat, PositiveFloat, Range


@dataclass(kw_only=True)
class MoeConfig:
    """Mixture of experts"""

    num_experts: Annotated[int, Range(1, 2**20)] | None = None
    """Experts per mixture layer; left out, the model is dense."""

    moe_layer_freq: int | list[int] = flag("--moe-layer-freq", default=1, parse=parse_layer_pattern, metavar="N|LIST")
    """Which layers have experts: every N-th, or those with a 1 in a list such as [0]*3+[1]*58."""

    moe_ffn_hidden_size: Dim | None = None
    """Width inside one expert; default: --ffn-hidden-size."""

    moe_shared_expert_intermediate_size: Dim | None = None
    """Total width of the experts that see every token."""

    moe_shared_expert_gate: bool = False
    """A learned gate on the shared experts' output."""

    moe_shared_expert_overlap: bool = False
    """Run the shared experts while tokens travel to the routed ones."""

    moe_router_topk: Annotated[int, Range(1, 2**20)] = 2
    """Experts per token."""

    moe_router_load_balancing_type: list[
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"]
    ] = flag("--moe-router-load-balancing-type", default_factory=lambda: ["aux_loss"])
    """How the load of the experts is balanced; several may be combined."""

    moe_aux_loss_coeff: list[NonNegativeFloat] = flag("--moe-aux-loss-coeff", default_factory=lambda: [0.0])
    """Weight of each balancing loss, in the order of --moe-router-load-balancing-type."""

    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Weight of the router's z-loss, which keeps its logits small."""

    moe_input_jitter_eps: NonNegativeFloat | None = None
    """Multiply the router's input by uniform noise in 1 plus or minus this value."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """From router logits to scores."""

    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the top-k choice, instead of over the chosen ones."""

    moe_router_num_groups: Annotated[int, Range(1, 2**20)] | None = None
    """Groups of experts for group-limited routing."""

    moe_router_group_topk: Annotated[int, Range(1, 2**20)] | None = None
    """Groups that a token may use."""

    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Multiply the chosen scores by this."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Number format of the router; default: that of the model."""

    moe_router_enable_expert_bias: bool = False
    """Balance by a per-expert bias on the choice, updated from the load, without a loss (DeepSeek-V3)."""

    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Step of that bias per iteration."""

    moe_router_force_load_balancing: bool = False
    """Send tokens to random experts: for benchmarks only."""

    moe_router_padding_for_quantization: bool = False
    """Pad every expert's tokens to what quantized kernels need."""

    moe_grouped_gemm: bool = False
    """One grouped matrix product for all local experts."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    """How tokens travel between expert-parallel ranks."""

    moe_expert_capacity_factor: PositiveFloat | None = None
    """Tokens that an expert takes at most, as a multiple of an even share; left out, none are dropped."""

    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped beyond the capacity: those with low scores, or late ones."""

    moe_per_layer_logging: bool = False
    """Log the balancing losses of each layer."""

    moe_permute_fusion: bool = False
    """Fused token permutation."""

    moe_router_fusion: bool = False
    """Fused router."""
