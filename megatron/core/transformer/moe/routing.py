"""Experts and weights from router logits, as functions of one token (Sinkhorn and capacity: of the micro-batch).

  softmax, after (default)   top-k of z; softmax over the top-k                               Mixtral, GPT-OSS, Qwen3
  softmax, before            top-k of softmax(z), not renormalized                            Switch, OLMoE
  sigmoid, sqrtsoftplus      top-k of s(z) + bias; s / (sum of the top-k s + 1e-20), k > 1    DeepSeek-V3, V4
  quantile balancing         top-k of z + bias for every score function; weights as above
  Sinkhorn                   top-k of the doubly normalized exp(z); softmax over all experts, or sigmoid for k = 1

Weights are multiplied by the scaling factor (except Sinkhorn). Computation is in fp32, or fp64 for fp64 logits
(Megatron-LM: always fp32); weights are cast to the logits' dtype. Ties go to the lower expert index, so that the choice
depends on the token only. Nothing here waits for the device.

Legend: s sequence (local), b batch, t tokens (local s * b), e experts, g expert groups, k choices of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.fusions.batch_invariant_product import in_full_vectors
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SINKHORN_ITERATIONS, SINKHORN_TOLERANCE = 32, 1e-4


class Routing(NamedTuple):
    """Top-k experts and weights of each token."""

    experts: Tensor
    """int64 [t, k], distinct per token; dropped choices have the index ``num_experts``."""
    weights: Tensor
    """[t, k] in the dtype of the logits (``moe_router_dtype``), differentiable; 0 for dropped choices."""
    drops: bool = True
    """Whether choices may be dropped; if not, permutations need no masks."""


def expert_scores(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Return the scores of all experts (last dim), fp32 or fp64. Only softmax normalizes over experts."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if function == "softmax":
        return z.softmax(-1)
    if function == "sigmoid":
        return in_full_vectors(torch.sigmoid, z)
    # clamp: the square root of an underflowed softplus would have the gradient infinity * 0
    return in_full_vectors(F.softplus, z).clamp_min(torch.finfo(z.dtype).tiny).sqrt()


def balanced_scores(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Return the scores of the balancing losses, normalized to sum to 1 over all experts."""
    scores = expert_scores(logits, function)
    return scores if function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return int64 indices of the k highest scores along the last dim, highest first; ties go to the lower index."""
    # torch.topk breaks ties, frequent in bf16, by device and shape; contiguous: a view would keep all indices in memory
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


@dataclass(frozen=True)
class RoutingRule:
    """Rule that selects and weights experts. Raises UserError for inconsistent sizes."""

    num_experts: int
    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    """Number of groups of adjacent experts; a token uses experts of ``group_topk`` groups only. None: no limit."""
    group_topk: int | None = None
    scaling_factor: float | None = None
    """Factor of the weights; None and 0 mean 1."""
    sinkhorn: bool = False
    quantiles: bool = False
    """Whether to compare logits plus the bias of :func:`quantile_levels` instead of scores."""
    group_score_topk: int | None = None
    """Number of best experts whose scores sum to a group's score; None: topk / group_topk."""

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_experts:
            raise UserError(f"moe_router_topk {self.topk}: choose 1 to {self.num_experts}, the number of experts")
        if self.quantiles and self.topk == self.num_experts:
            raise UserError(f"quantile_balancing needs moe_router_topk below {self.num_experts}, the number of experts")
        if self.num_groups is None:
            return
        groups, chosen, scored = self.num_groups, self.group_topk or 0, self.group_score_topk
        if self.num_experts % groups or not 1 <= chosen <= groups or (scored is None and self.topk % chosen):
            raise UserError(
                f"moe_router_num_groups {groups} must divide {self.num_experts} experts, and moe_router_group_topk "
                f"{self.group_topk} must be at most {groups} and divide moe_router_topk {self.topk}"
            )
        size = self.num_experts // groups
        if self.topk > chosen * size:
            raise UserError(f"moe_router_topk {self.topk}: {chosen} groups of {size} experts hold fewer")
        if scored is not None and not 1 <= scored <= size:
            raise UserError(f"moe_router_group_score_topk {scored}: choose 1 to {size}, the experts of a group")

    @property
    def kind(self) -> str:
        """Name of the score function in the kernels."""
        return "softmax before" if self.score_function == "softmax" and self.pre_softmax else self.score_function

    @property
    def choice_kind(self) -> str:
        """Name of the scores that top-k compares, in the kernels; "softmax" compares logits."""
        return "softmax" if self.sinkhorn or self.quantiles else self.kind

    @torch.no_grad()
    def choose(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the top-k experts int64 [..., k] of ``logits`` [..., e], best first; ties go to the lower index.
        Compares scores, but logits for softmax after top-k, Sinkhorn and quantile balancing, plus ``bias`` [e], which
        does not affect weights; limited to each token's best groups if there are groups. Does not compute Sinkhorn."""
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = z if self.choice_kind == "softmax" else expert_scores(z, self.score_function)
        if bias is not None:
            scores = scores + bias
        return top_k(scores if self.num_groups is None else self._within_groups(scores), self.topk)

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Set scores outside of each token's best groups to -inf. A group's score is the sum of its
        ``group_score_topk`` best scores (DeepSeek-V3: always 2; Megatron-LM: k / group_topk)."""
        assert self.num_groups is not None and self.group_topk is not None
        scores_g = scores.unflatten(-1, (self.num_groups, -1))
        counted = self.group_score_topk or self.topk // self.group_topk
        best = scores_g.sort(-1, descending=True).values[..., :counted].sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top_k(best, self.group_topk), True)
        return scores_g.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return weights [..., k] of ``experts`` [..., k] in the dtype of ``logits`` [..., e] (module docstring)."""
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.sinkhorn:
            scores = z.sigmoid() if self.topk == 1 else z.softmax(-1)
            return scores.gather(-1, experts).to(logits.dtype)
        if self.score_function == "softmax":
            weights = z.softmax(-1).gather(-1, experts) if self.pre_softmax else z.gather(-1, experts).softmax(-1)
        else:
            weights = expert_scores(z.gather(-1, experts), self.score_function)
            if self.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self.scaling_factor if self.scaling_factor else weights).to(logits.dtype)


@torch.no_grad()
def sinkhorn_scores(logits: Tensor, sharers: Group) -> Tensor:
    """Return exp(z) scaled so that experts get equal shares, fp32 (fp64) [..., e]: Sinkhorn-Knopp over the micro-batch.

    ``sharers`` hold the other tokens of its sequences; each of the 32 iterations all-reduces over them. Scales are
    frozen once the mean change is at most 1e-4, decided on the device. Megatron-LM stops at that point, but it waits
    for the device in every iteration and sees only local tokens."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    cost_te = (z - z.amax(-1, keepdim=True)).exp()  # a token's scale is free: subtract its maximum against overflow
    num_tokens, num_experts = cost_te.shape[0] * sharers.size, cost_te.shape[1]
    scale_e, moving = cost_te.new_ones(num_experts), torch.ones((), dtype=torch.bool, device=z.device)
    for _ in range(SINKHORN_ITERATIONS):
        scale_t = 1 / (num_tokens * (cost_te @ scale_e + 1e-8))
        sum_e = scale_t @ cost_te
        if sharers.size > 1:
            dist.all_reduce(sum_e, group=sharers.handle)
        following_e = torch.where(moving, 1 / (num_experts * (sum_e + 1e-8)), scale_e)
        moving = moving & ((following_e - scale_e).abs().mean() > SINKHORN_TOLERANCE)
        scale_e = following_e
    return (cost_te * scale_e).view(logits.shape)


@torch.no_grad()
def quantile_levels(logits: Tensor, bias: Tensor, k: int, sharers: Group) -> Tensor:
    """Return thresholds [e] to subtract from logits [..., e] so that each expert is in the top-k of the same number of
    the m tokens of a micro-batch: the (m k / e + 1)-th largest difference of a logit and its token's (k + 1)-th best
    logit plus ``bias``. All-gathers over ``sharers``, which hold the other tokens of its sequences. Raises UserError: m
    k is not divisible by e."""
    z = logits.flatten(0, -2)  # adding the fp32 bias promotes to at least fp32
    num_experts = z.shape[1]
    above_te = z - (z + bias).kthvalue(num_experts - k, dim=1, keepdim=True).values
    if sharers.size > 1:
        above_te = begin_all_gather(above_te, sharers).wait()
    num_chosen, rest = divmod(len(above_te) * k, num_experts)
    if rest:
        raise UserError(f"quantile_balancing: {num_experts} experts do not divide {len(above_te)} tokens x {k} choices")
    return above_te.kthvalue(len(above_te) - num_chosen, dim=0).values


def round_robin(position_s: Tensor, batch: int, num_experts: int, k: int) -> Tensor:
    """Return experts int64 [s, b, k] round-robin by position: token 0 gets 0 to k - 1, and the next token continues."""
    choice_k = torch.arange(k, device=position_s.device)
    experts_sk = (position_s[:, None] * k + choice_k) % num_experts
    return experts_sk[:, None].expand(-1, batch, -1).contiguous()


def expert_capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Return the maximum tokens per expert out of ``num_tokens`` local ones: ceil(t k / e * factor), at most t."""
    return min(num_tokens, math.ceil(num_tokens * k / num_experts * factor))


@torch.no_grad()
def within_capacity(experts: Tensor, weights: Tensor | None, num_experts: int, capacity: int) -> Tensor:
    """Return bool [t, k], True for choices within their expert's capacity. Choices with the highest ``weights`` [t, k]
    are kept; ties, and all choices if None, are kept in token order."""
    experts_r = experts.flatten()
    order = None
    if weights is not None:
        order = weights.flatten().sort(descending=True, stable=True).indices
        experts_r = experts_r[order]
    by_expert, places = experts_r.sort(stable=True)
    first_e = torch.searchsorted(by_expert, torch.arange(num_experts, device=experts.device))
    rank = torch.arange(len(by_expert), device=experts.device) - first_e[by_expert]
    rows = places if order is None else order[places]
    return torch.empty_like(rank, dtype=torch.bool).scatter_(0, rows, rank < capacity).view(experts.shape)
