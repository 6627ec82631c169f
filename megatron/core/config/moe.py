"""Mixture of experts: which layers have experts, how tokens are routed and sent to them. Only fields, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron.core.config.attention import check_layer_pattern, parse_layer_pattern
from megatron.core.config.cli import flag
from megatron.core.config.optional import OptionalGroup
from megatron.core.config.ranges import Dim, NonNegativeFloat, NumRanks, PositiveFloat, Probability

if TYPE_CHECKING:
    from megatron.core.config.model_settings import ModelSettings

TokenDispatcher = Literal["allgather", "alltoall", "flex"]
Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"]


@dataclass(kw_only=True)
class MoEConfig(OptionalGroup):
    """Mixture of experts"""

    num_moe_experts: Dim | None = flag("--num-experts")
    """Number of experts per layer; set, feed-forward networks are mixtures of experts."""

    moe_layer_freq: int | list[int] = flag(
        "--moe-layer-freq", default=1, parse=parse_layer_pattern, check=check_layer_pattern, metavar="N|LIST"
    )
    """Layers with experts: the first and every N-th after it, or those with a 1 in a list of 0 and 1 such as
    [0]*3+[1]*58."""

    moe_ffn_hidden_size: Dim | None = None
    """Expert width; default: the width of the dense feed-forward network."""

    moe_shared_expert_intermediate_size: Dim | None = None
    """Width of the shared expert, a feed-forward network that every token passes through; with several shared experts,
    their sum."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of its input (Qwen2-MoE)."""

    moe_shared_expert_overlap: bool = False
    """Overlap the shared expert with the token dispatch, and its gradient with the dispatch in backward. Requires
    --moe-shared-expert-intermediate-size."""

    expert_model_parallel_size: NumRanks = 1
    """Expert-parallel size (EP). Reuses the tensor-, context- and data-parallel ranks."""

    expert_tensor_parallel_size: NumRanks | None = None
    """Expert tensor-parallel size (ETP): ranks that split each expert's matrices; default:
    --tensor-model-parallel-size."""

    moe_router_topk: Dim = 2
    """Experts per token."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Router score function."""

    moe_router_pre_softmax: bool = False
    """Apply softmax before top-k, without renormalizing (default: softmax over the top-k logits)."""

    moe_router_num_groups: Dim | None = None
    """Number of expert groups for --moe-router-group-topk."""

    moe_router_group_topk: Dim | None = None
    """Groups of experts that a token may select from: those with the highest group scores."""

    moe_router_group_score_topk: Dim | None = None
    """Experts of a group whose scores are summed to the group score (DeepSeek-V3: 2); default: --moe-router-topk /
    --moe-router-group-topk."""

    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the top-k experts' combine weights."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's logits and combine weights; default: the activations' dtype."""

    moe_router_enable_expert_bias: bool = False
    """Auxiliary-loss-free balancing (DeepSeek-V3): a bias per expert, used for top-k selection only and updated after
    each iteration towards balanced load. Requires sigmoid or sqrtsoftplus scores."""

    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """Update rate of the expert bias, per iteration."""

    moe_router_load_balancing_type: list[Balance] = flag(default_factory=lambda: ["aux_loss"])
    """Load balancing: an auxiliary loss per micro-batch, per sequence or per global batch (several are summed),
    Sinkhorn assignment, or quantile_balancing, a selection bias under which every expert would have received the same
    number of tokens of the last global batch."""

    moe_router_quantile_balancing_ema: Probability = 0.0
    """EMA decay of the quantile-balancing bias (0: last global batch only)."""

    moe_aux_loss_coeff: list[NonNegativeFloat] = flag(default_factory=lambda: [0.0])
    """Coefficient of each auxiliary loss."""

    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Coefficient of the router z-loss: the mean squared logsumexp of its logits."""

    moe_input_jitter_eps: Probability | None = None
    """Multiply the router's input by random numbers from 1 - EPS to 1 + EPS in training."""

    moe_router_force_load_balancing: bool = False
    """Assign tokens to experts round-robin, ignoring the router (benchmarks only)."""

    moe_expert_capacity_factor: PositiveFloat | None = None
    """Expert capacity factor: capacity = ceil(tokens x top-k / experts x factor) per rank; excess tokens are dropped.
    Default: dropless."""

    moe_pad_expert_input_to_capacity: bool = False
    """Pad each expert's input to its capacity (static shapes)."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens to drop above capacity: those with the smallest weights (probs), or the last ones (position)."""

    moe_token_dispatcher_type: TokenDispatcher = "allgather"
    """Token dispatcher: allgather (all tokens to all ranks) or alltoall (tokens to their experts only); flex is an
    alias of alltoall."""

    moe_static_rows: bool = False
    """Allocate for the maximum token count to avoid host syncs (allgather only; up to EP times the activation
    memory)."""

    overlap_moe_expert_parallel_comm: bool = False
    """Two-batch overlap: dispatch one half of a micro-batch while the other half computes. Requires an even
    --micro-batch-size and no loss over the full micro-batch."""

    moe_fusion: bool = flag("--no-moe-fusion", default=True)
    """Fused permutation kernels and grouped GEMMs for experts, instead of plain torch operations, one expert at a
    time."""


def expert_tensor_ranks(config: ModelSettings) -> int:
    """Ranks over which each expert's matrices are split; ``config`` has the fields of tensor parallelism too."""
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size


def has_experts(config: MoEConfig, layer_number: int) -> bool:
    """Whether the feed-forward network of a layer (from 1) is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    pattern, index = config.moe_layer_freq, layer_number - 1
    return index % pattern == 0 if isinstance(pattern, int) else bool(pattern[index])


def depends_on_micro_batch(config: MoEConfig) -> bool:
    """Whether what a token goes through, or a loss, depends on the other sequences of its micro-batch."""
    kinds = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    global_types = ("sinkhorn", "quantile_balancing")
    balances = any(kind in global_types or (kind == "aux_loss" and coefficient) for kind, coefficient in kinds)
    return balances or config.moe_expert_capacity_factor is not None


def has_side_losses(config: MoEConfig) -> bool:
    """Whether routers have auxiliary losses."""
    kinds = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    balances = any(coefficient and kind != "none" for kind, coefficient in kinds)
    return config.num_moe_experts is not None and bool(balances or config.moe_z_loss_coeff)
