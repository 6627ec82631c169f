"""Routing functions of Megatron-LM's ``moe_utils``, on logits and scores [tokens, experts]; the library's router has
its own kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.config.errors import UserError


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return (scores, experts), both [tokens, topk], of the best experts in the ``group_topk`` best groups. The score
    of a group is the sum of its best ``topk // group_topk`` scores (DeepSeek-V2 and V3)."""
    by_group = scores.reshape(num_tokens, num_groups, num_experts // num_groups)
    group_scores = by_group.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    is_open = torch.zeros_like(group_scores, dtype=torch.bool)
    is_open.scatter_(1, group_scores.topk(group_topk, dim=-1).indices, True)
    closed = by_group.masked_fill(~is_open.unsqueeze(-1), -math.inf)
    values, experts = closed.reshape(num_tokens, num_experts).topk(topk, dim=-1)
    return values, experts


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the routing map (bool) and the fp32 scores, which sum to 1 per token, both [tokens, experts]. Rows of
    tokens in ``padding_mask`` (True: padding) are zero. ``fused`` changes nothing. Raises UserError for another
    function than softmax, sigmoid and sqrtsoftplus."""
    wide = logits.float()
    if score_function == "softmax":
        scores = wide.softmax(dim=-1)
    elif score_function in ("sigmoid", "sqrtsoftplus"):
        positive = wide.sigmoid() if score_function == "sigmoid" else torch.nn.functional.softplus(wide).sqrt()
        scores = positive / (positive.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        raise UserError(f"score_function {score_function!r}: unknown; choose softmax, sigmoid or sqrtsoftplus")
    routing_map = torch.zeros_like(scores, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(topk, dim=1).indices, True)
    if padding_mask is not None:
        is_token = ~padding_mask.unsqueeze(-1)
        routing_map, scores = routing_map & is_token, scores * is_token
    return routing_map, scores


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the map, both [tokens, experts], of at most ``ceil(tokens x topk / experts x
    factor)`` tokens per expert: those with the largest probabilities, or the first ones (``position``).
    ``pad_to_capacity`` adds tokens that did not select the expert. Raises UserError for another policy."""
    num_tokens, num_experts = routing_probs.shape
    capacity = math.ceil(num_tokens * router_topk / num_experts * capacity_factor)
    if drop_policy not in ("probs", "position"):
        raise UserError(f"drop_policy {drop_policy!r}: unknown; choose probs or position")
    within = torch.ones_like(routing_map, dtype=torch.bool)
    if capacity <= num_tokens:
        # stable: among equal keys the first tokens stay
        keys = routing_probs if drop_policy == "probs" else routing_map.int()
        order = keys.sort(dim=0, descending=True, stable=True).indices[:capacity]
        within = torch.zeros_like(within).scatter(0, order, True)
    selected = within if pad_to_capacity else within & routing_map.bool()
    return routing_probs * selected, selected
