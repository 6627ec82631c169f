"""From router logits to experts and weights, as functions of one token (Sinkhorn and capacity: of the micro-batch).

    softmax, after (default)   top-k of z; softmax over the k chosen                            Mixtral, GPT-OSS, Qwen3
    softmax, before            top-k of softmax(z); not renormalised                            Switch, OLMoE
    sigmoid, sqrtsoftplus      top-k of s(z) + bias; s / (sum of the chosen s + 1e-20), k > 1   DeepSeek-V3, V4
    quantile balancing         top-k of z + bias, whatever the scores; weights as above
    Sinkhorn                   top-k of the doubly normalised exp(z); softmax over all experts, or sigmoid for k = 1

Weights are multiplied by the scaling factor (not Sinkhorn's). Mathematics is fp32, or fp64 for fp64 logits
(Megatron-LM: always fp32); weights go back to the logits' dtype. Equal scores are won by the expert with the lower
number, so that the choice is a function of the token alone. Nothing here waits for the device.

Legend: s sequence (local), b batch, t tokens (local s * b), e experts, g expert groups, k choices of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
SINKHORN_ITERATIONS, SINKHORN_TOLERANCE = 32, 1e-4


class Routing(NamedTuple):
    """Where each token goes."""

    experts: Tensor
    """int64 [t, k], different ones for a token; the number of experts where the choice was dropped."""
    weights: Tensor
    """[t, k], differentiable; 0 where the choice was dropped."""
    drops: bool = True
    """Whether a choice may be dropped; if none is, permutations need no masks."""


def maths_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which scores are computed: fp32 or, of fp64 logits, fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def scores_of(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Scores of all experts (last dim), each on its own but for softmax; fp32 or fp64."""
    z = logits.to(maths_dtype(logits))
    if function == "softmax":
        return z.softmax(-1)
    if function == "sigmoid":
        return z.sigmoid()
    # the root of an underflown softplus would have the gradient infinity * 0
    return F.softplus(z).clamp_min(torch.finfo(z.dtype).tiny).sqrt()


def balanced_scores(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Scores that add up to 1 over all experts: those of the balancing losses."""
    scores = scores_of(logits, function)
    return scores if function == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores along the last dim, highest first, of equal ones the lower index first."""
    # torch.topk leaves ties, frequent in bf16, to the device and the shape; a view would keep all indices in memory
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


@dataclass(frozen=True)
class RoutingRule:
    """How experts are chosen and weighted. UserError for sizes that do not fit."""

    num_experts: int
    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    """Groups of neighbouring experts, of which each token may choose ``group_topk``; None: no limit."""
    group_topk: int | None = None
    scaling_factor: float | None = None
    """None and 0 are 1."""
    sinkhorn: bool = False
    quantiles: bool = False
    """Whether logits, not scores, are compared, with a bias that :func:`quantile_levels` gives."""

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_experts:
            raise UserError(f"moe_router_topk {self.topk}: choose 1 to {self.num_experts}, the number of experts")
        if self.quantiles and self.topk == self.num_experts:
            raise UserError(f"quantile_balancing needs moe_router_topk below {self.num_experts}, the number of experts")
        if self.num_groups is None:
            return
        groups, chosen = self.num_groups, self.group_topk or 0
        if self.num_experts % groups or not 1 <= chosen <= groups or self.topk % chosen:
            raise UserError(
                f"moe_router_num_groups {groups} must divide {self.num_experts} experts, and moe_router_group_topk "
                f"{self.group_topk} must be at most {groups} and divide moe_router_topk {self.topk}"
            )
        if self.topk // chosen > self.num_experts // groups:
            size = self.num_experts // groups
            raise UserError(f"moe_router_topk {self.topk}: {chosen} groups of {size} experts hold fewer")

    @property
    def kind(self) -> str:
        """What the kernels call the scores."""
        return "softmax before" if self.score_function == "softmax" and self.pre_softmax else self.score_function

    @property
    def choice_kind(self) -> str:
        """The same of the choice: "softmax" compares logits."""
        return "softmax" if self.sinkhorn or self.quantiles else self.kind

    @torch.no_grad()
    def choose(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """Experts int64 [..., k] of ``logits`` [..., e], best first; ``bias`` [e] is added to the scores here alone."""
        z = logits.to(maths_dtype(logits))
        scores = z if self.choice_kind == "softmax" else scores_of(z, self.score_function)
        if bias is not None:
            scores = scores + bias
        return top_k(scores if self.num_groups is None else self._within_groups(scores), self.topk)

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Scores, -inf outside of each token's best groups; a group's score is the sum of its k / group_topk best."""
        assert self.num_groups is not None and self.group_topk is not None
        scores_g = scores.unflatten(-1, (self.num_groups, -1))
        best = scores_g.sort(-1, descending=True).values[..., : self.topk // self.group_topk].sum(-1)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, top_k(best, self.group_topk), True)
        return scores_g.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights [..., k] of the chosen ``experts`` [..., k] in the dtype of ``logits`` [..., e], differentiable."""
        z = logits.to(maths_dtype(logits))
        if self.sinkhorn:
            scores = z.sigmoid() if self.topk == 1 else z.softmax(-1)
            return scores.gather(-1, experts).to(logits.dtype)
        if self.score_function == "softmax":
            weights = z.softmax(-1).gather(-1, experts) if self.pre_softmax else z.gather(-1, experts).softmax(-1)
        else:
            weights = scores_of(z.gather(-1, experts), self.score_function)
            if self.topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * self.scaling_factor if self.scaling_factor else weights).to(logits.dtype)


@torch.no_grad()
def sinkhorn_scores(logits: Tensor, sharers: Group) -> Tensor:
    """exp(z) scaled until experts get equal shares, fp32 (fp64) [..., e]: Sinkhorn and Knopp over the micro-batch.

    ``sharers`` hold the other tokens of its sequences. Of 32 iterations those count up to the one in which the scale of
    experts changes by at most 1e-4 in the mean, as the device alone knows; there Megatron-LM, which waits for the
    device in every iteration and sees local tokens alone, stops.
    """
    z = logits.to(maths_dtype(logits)).flatten(0, -2)
    cost_te = (z - z.amax(-1, keepdim=True)).exp()  # a token's scale is free: its maximum cannot overflow
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
    """[e] what to subtract of logits [..., e] so that each expert is among the k best of equally many of the m tokens
    of a micro-batch: the (m k / e + 1)-th largest of what a logit has above its token's (k + 1)-th best, ``bias``
    counted. ``sharers`` hold the other tokens of its sequences. UserError where e does not divide m k.
    """
    z = logits.flatten(0, -2)  # at least float32 once the bias is added
    num_experts = z.shape[1]
    above_te = z - (z + bias).kthvalue(num_experts - k, dim=1, keepdim=True).values
    if sharers.size > 1:
        above_te = begin_all_gather(above_te, sharers).wait()
    taken, rest = divmod(len(above_te) * k, num_experts)
    if rest:
        raise UserError(f"quantile_balancing: {num_experts} experts do not divide {len(above_te)} tokens x {k} choices")
    return above_te.kthvalue(len(above_te) - taken, dim=0).values


def round_robin(position_s: Tensor, batch: int, num_experts: int, k: int) -> Tensor:
    """Experts int64 [s, b, k] in turn: token 0 of a sequence takes 0 to k - 1, the next one goes on from there."""
    choice_k = torch.arange(k, device=position_s.device)
    experts_sk = (position_s[:, None] * k + choice_k) % num_experts
    return experts_sk[:, None].expand(-1, batch, -1).contiguous()


def expert_capacity(num_tokens: int, num_experts: int, k: int, factor: float) -> int:
    """Tokens that an expert takes of ``num_tokens`` local ones: ceil(t k / e * factor), at most all of them."""
    return min(num_tokens, math.ceil(num_tokens * k / num_experts * factor))


@torch.no_grad()
def within_capacity(experts: Tensor, weights: Tensor | None, num_experts: int, capacity: int) -> Tensor:
    """Bool [t, k]: the choices that their expert takes, those with the highest ``weights`` [t, k] or, of equal ones and
    with None, those of the first tokens."""
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
