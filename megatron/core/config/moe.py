"""Mixture of experts: which layers have experts, how tokens are routed to them and travel there. Only fields, no
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config.attention import parse_layer_pattern
from megatron.core.config.cli import flag
from megatron.core.config.ranges import Dim, NonNegativeFloat, NumRanks, PositiveFloat, Probability

TokenDispatcher = Literal["allgather", "alltoall", "flex"]
Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"]


@dataclass(kw_only=True)
class MoEConfig:
    """Mixture of experts"""

    num_moe_experts: Dim | None = flag("--num-experts")
    """Experts per layer; given, feed-forward networks are mixtures of experts."""

    moe_layer_freq: int | list[int] = flag("--moe-layer-freq", default=1, parse=parse_layer_pattern, metavar="N|LIST")
    """Layers with experts: the first and every N-th after it, or those with a 1 in a list of 0 and 1 such as
    [0]*3+[1]*58."""

    moe_ffn_hidden_size: Dim | None = None
    """Width inside an expert; default: that of the dense feed-forward network."""

    moe_shared_expert_intermediate_size: Dim | None = None
    """Width of a feed-forward network beside the experts that takes every token; of several shared experts, the sum."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of its input (Qwen2-MoE)."""

    moe_shared_expert_overlap: bool = False
    """Compute the shared expert while tokens travel to the experts, and its gradient while those travel back. Needs
    --moe-shared-expert-intermediate-size."""

    expert_model_parallel_size: NumRanks = 1
    """Expert-parallel size (EP): ranks over which the experts are shared out; it takes ranks of tensor, context and
    data parallelism and needs none of its own."""

    expert_tensor_parallel_size: NumRanks | None = None
    """Ranks over which the matrices of each expert are split (ETP); default: --tensor-model-parallel-size."""

    moe_router_topk: Dim = 2
    """Experts per token."""

    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """What makes scores of the router's logits."""

    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice, without normalizing the chosen ones again; by default softmax over
    the chosen ones."""

    moe_router_num_groups: Dim | None = None
    """Groups that the experts form for --moe-router-group-topk."""

    moe_router_group_topk: Dim | None = None
    """Groups of experts that a token may choose from: those with the largest sums of their best scores."""

    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor of the chosen experts' weights."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router's logits and weights; default: that of the activations."""

    moe_router_enable_expert_bias: bool = False
    """A bias per expert that counts for the choice only and moves after each iteration towards equal load
    (DeepSeek-V3). Needs sigmoid or sqrtsoftplus scores."""

    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """How far that bias moves in an iteration."""

    moe_router_load_balancing_type: list[Balance] = flag(default_factory=lambda: ["aux_loss"])
    """What keeps the load of the experts equal: an auxiliary loss per micro-batch, per sequence or over the global
    batch (several add up), a Sinkhorn assignment, or a bias of the choice that would have given every expert as many
    tokens of the last global batch (quantile_balancing)."""

    moe_router_quantile_balancing_ema: Probability = 0.0
    """How much of that bias stays in every iteration; the rest is the new one."""

    moe_aux_loss_coeff: list[NonNegativeFloat] = flag(default_factory=lambda: [0.0])
    """Coefficient of each auxiliary loss."""

    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Coefficient of the mean squared logsumexp of the router's logits."""

    moe_input_jitter_eps: Probability | None = None
    """The router sees its input times a random number from 1 - EPS to 1 + EPS during training."""

    moe_router_force_load_balancing: bool = False
    """Send tokens to experts in turn, whatever the router says: for benchmarks."""

    moe_expert_capacity_factor: PositiveFloat | None = None
    """Tokens that an expert takes, as a multiple of its equal share of a micro-batch's; the rest is dropped. Left out,
    none is."""

    moe_pad_expert_input_to_capacity: bool = False
    """Fill up every expert's tokens to its capacity: sizes are then the same in every step."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped: those with the smallest weights, or the last ones."""

    moe_token_dispatcher_type: TokenDispatcher = "allgather"
    """How tokens travel to the ranks of their experts: all to everyone, or each to where it goes; flex is the same as
    alltoall."""

    moe_static_rows: bool = False
    """Give a rank's experts room for the most rows that can come, so that the host reads no number of rows in a step.
    For --moe-token-dispatcher-type allgather; room for up to as many times the rows as there are expert-parallel
    ranks."""

    overlap_moe_expert_parallel_comm: bool = False
    """Two-batch overlap: tokens of one half of a micro-batch travel between experts' ranks while the other half
    computes. Needs an even --micro-batch-size, and losses that do not look at the whole micro-batch."""

    moe_fusion: bool = flag("--no-moe-fusion", default=True)
    """Plain torch operations for permutation and experts, one expert at a time, instead of kernels and grouped
    GEMMs."""


def expert_tensor_ranks(config: Any) -> int:
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
    whole = ("sinkhorn", "quantile_balancing")
    balances = any(kind in whole or (kind == "aux_loss" and coefficient) for kind, coefficient in kinds)
    return balances or config.moe_expert_capacity_factor is not None


def has_side_losses(config: MoEConfig) -> bool:
    """Whether routers have losses of their own."""
    return config.num_moe_experts is not None and bool(any(config.moe_aux_loss_coeff) or config.moe_z_loss_coeff)
