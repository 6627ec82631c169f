"""Mixture of experts: y = sum of w_e(x) expert_e(x) over the few experts e that a router chooses for a token.

Shazeer et al. 2017; balancing: Fedus et al. 2022 (section 2.2), DeepSeek-V2 (2024, section 2.2: per sequence), Qiu et
al. 2025 (global batch), Clark et al. 2022 (Sinkhorn); z-loss: Zoph et al. 2022; sigmoid scores, groups, a bias instead
of losses: DeepSeek-V3 (2024), section 2.1.2; capacity: Lepikhin et al. 2021. Where they differ, Megatron-LM's way.

Legend: b batch, s sequence, h hidden, e experts, k chosen per token; m sequences of a micro-batch, with its t tokens
in the order [s, m]. ``net`` is the model: its ``linear`` and ``mlp``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.reference import fp8
from tests.reference.settings import Settings

PREFIX = {"aux_loss": "", "seq_aux_loss": "seq_", "global_aux_loss": "global_"}


class Router:
    """What a router remembers from one global batch to the next, [e] each: a ``bias`` added to the scores for the
    choice; the ``shares`` of all choices by score in the last one. Of this one: tokens that experts compute (``used``),
    and choices by score without bias, groups and capacity (``wanted``); with quantile balancing the ``levels`` of
    its micro-batches."""

    def __init__(self, c: Settings) -> None:
        self.bias = self.used = self.wanted = torch.zeros(c.num_experts, dtype=torch.float64)
        self.shares = torch.full_like(self.bias, 1 / c.num_experts)
        self.levels: list[Tensor] = []
        self.has_bias = c.moe_router_enable_expert_bias or "quantile_balancing" in c.moe_router_load_balancing_type

    def end_batch(self, c: Settings) -> None:
        """Moves the bias of experts with less than the mean up, of those with more down."""
        if c.moe_router_enable_expert_bias:
            self.bias = self.bias + c.moe_router_bias_update_rate * (self.used.mean() - self.used).sign()
        if self.levels:
            level, keep = torch.stack(self.levels).mean(dim=0), c.moe_router_quantile_balancing_ema
            self.bias = (keep * self.bias - (1 - keep) * (level - level.mean())).float().double()
            self.levels = []
        self.shares = self.wanted / self.wanted.sum().clamp(min=1)
        self.used = self.wanted = torch.zeros_like(self.used)


def mixture(net, x: Tensor, at: str) -> Tensor:
    """[b, s, h] -> [b, s, h]. Losses go to ``net.aux_losses``, counts to the router."""
    c, router = net.c, net.routers.setdefault(at, Router(net.c))
    logits = net.linear(x, f"{at}.router")
    parts = [within_capacity(c, *choose(c, part, router, net.training)) for part in logits.split(net.micro_batch_size)]
    weights, used = (torch.cat(item) for item in zip(*parts))
    if net.training:
        expected = best(scores_of(c, logits), c.moe_router_topk)
        router.used, router.wanted = router.used + used.sum((0, 1)), router.wanted + expected.sum((0, 1))
        # a layer that is applied several times balances as much as one
        times = c.mtp_num_layers if c.mtp_use_repeated_layer and at.startswith("mtp.") else 1
        for name, term in aux_losses(net, logits, router, times):
            net.aux_losses.setdefault(name, []).append(term)
    if fp8.covers(c, f"{at}.experts.linear_fc1"):
        y = in_fp8(net, x, at, weights, used)
    else:
        y = sum(weights[..., e, None] * net.mlp(x, f"{at}.experts", e) for e in range(c.num_experts))
    if c.moe_shared_expert_intermediate_size:
        shared = net.mlp(x, f"{at}.shared_experts")
        if c.moe_shared_expert_gate:
            shared = shared * torch.sigmoid(x @ net.weights[f"{at}.shared_experts.gate_weight"].T)
        y = y + shared
    return y


def in_fp8(net, x: Tensor, at: str, weights: Tensor, used: Tensor) -> Tensor:
    """Return the weighted sum [b, s, h]. Casts see the tokens that experts compute, and the weighted input of fc2."""
    weights_ebs, used_ebs = (item.permute(2, 0, 1)[..., None] for item in (weights, used))

    def linear(rows: Tensor, name: str) -> Tensor:
        settings = net.histories, net.micro_batch_size, net.training
        return fp8.expert_linear(net.c, rows, net.weights[f"{name}.weight"], name, *settings)

    def bias(name: str) -> Tensor | float:
        result = net.weights.get(f"{name}.bias")
        return 0.0 if result is None else result[:, None, None]

    fc1, fc2 = f"{at}.experts.linear_fc1", f"{at}.experts.linear_fc2"
    y = net.activation(linear(used_ebs * x, fc1) + bias(fc1)) * weights_ebs
    return (used_ebs * (linear(y, fc2) + weights_ebs * bias(fc2))).sum(dim=0)


def best(scores: Tensor, k: int) -> Tensor:
    """1 for the ``k`` largest of the last dim, else 0."""
    return torch.zeros_like(scores).scatter(-1, scores.topk(k, dim=-1).indices, 1.0)


def choose(c: Settings, logits: Tensor, router: Router, training: bool) -> tuple[Tensor, Tensor]:
    """Weights [m, s, e], zero where an expert is not chosen, and choices, 0 or 1."""
    k, kind = c.moe_router_topk, c.moe_router_score_function
    if c.moe_router_load_balancing_type == "sinkhorn":
        scores = torch.sigmoid(logits) if k == 1 else logits.softmax(dim=-1)
        chosen = best(sinkhorn(logits.detach()) if training else logits, k)
        return scores * chosen, chosen
    by_quantile = None
    if c.moe_router_load_balancing_type == "quantile_balancing":
        by_quantile = best(logits + router.bias, k)
        if training:
            router.levels.append(level_of(logits.detach(), router.bias, k))
    if kind == "softmax":
        scores = logits.softmax(dim=-1)
        chosen = by_quantile
        if chosen is None:
            chosen = best(limited(c, scores if c.moe_router_pre_softmax else logits), k)
        if not c.moe_router_pre_softmax:
            scores = logits.masked_fill(chosen == 0, -torch.inf).softmax(dim=-1)
        weights = scores * chosen
    else:
        scores = torch.sigmoid(logits) if kind == "sigmoid" else F.softplus(logits).sqrt()
        chosen = best(limited(c, scores + router.bias), k) if by_quantile is None else by_quantile
        weights = scores * chosen
        if k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * (c.moe_router_topk_scaling_factor or 1.0), chosen


def level_of(logits: Tensor, bias: Tensor, k: int) -> Tensor:
    """Return [e] offsets that, subtracted from [m, s, e], give every expert an equal number of tokens, compared with
    each token's best rejected expert."""
    z = logits.flatten(0, 1)
    left_out = (z + bias).sort(dim=1, descending=True).values[:, k]
    return (z - left_out[:, None]).sort(dim=0, descending=True).values[len(z) * k // z.shape[1]]


def limited(c: Settings, scores: Tensor) -> Tensor:
    """Scores, minus infinity outside of the best groups; a group is as good as the sum of its best scores."""
    if c.moe_router_group_topk is None:
        return scores
    groups = scores.unflatten(-1, (c.moe_router_num_groups, -1))
    summed = c.moe_router_group_score_topk or c.moe_router_topk // c.moe_router_group_topk
    worth = groups.topk(summed, dim=-1).values.sum(dim=-1)
    return groups.masked_fill(best(worth, c.moe_router_group_topk)[..., None] == 0, -torch.inf).flatten(-2)


def sinkhorn(logits: Tensor) -> Tensor:
    """Return exp(logits) [m, s, e], rows and columns scaled alternately until every expert has the same sum."""
    matrix = logits.exp().flatten(0, 1)
    column = torch.ones_like(matrix[0])
    change = math.inf
    while change > 1e-4:
        row = 1 / (len(matrix) * ((matrix * column).sum(dim=1) + 1e-8))
        before, column = column, 1 / (len(column) * ((matrix * row[:, None]).sum(dim=0) + 1e-8))
        change = (before - column).abs().mean().item()
    return (matrix * column * row[:, None]).view(logits.shape)


def within_capacity(c: Settings, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and choices after dropping tokens beyond each expert's capacity in a micro-batch: the largest
    weights are kept, or the first tokens."""
    if c.moe_expert_capacity_factor is None:
        return weights, chosen
    m, s, e = chosen.shape
    capacity = math.ceil(m * s * c.moe_router_topk / e * c.moe_expert_capacity_factor)
    selected = chosen.transpose(0, 1).flatten(0, 1)  # [t, e]
    worth = weights.transpose(0, 1).flatten(0, 1) if c.moe_token_drop_policy == "probs" else torch.ones_like(selected)
    order = torch.where(selected == 1, worth, -1.0).argsort(dim=0, descending=True, stable=True)
    place = order.argsort(dim=0)
    retained = (selected * (place < capacity)).view(s, m, e).transpose(0, 1)
    return weights * retained, retained


def scores_of(c: Settings, logits: Tensor) -> Tensor:
    """Return the expert probabilities that the losses use: scores that sum to 1 per token."""
    if c.moe_router_score_function == "softmax":
        return logits.softmax(dim=-1)
    scores = torch.sigmoid(logits) if c.moe_router_score_function == "sigmoid" else F.softplus(logits).sqrt()
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def aux_losses(net, logits: Tensor, router: Router, times: int):
    """Yield (name, (coefficient, mean)) for each loss of a layer: per micro-batch, or per sequence weighted by its
    number of tokens in the main loss."""
    c, tokens = net.c, torch.from_numpy(net.batch.loss_mask).sum(dim=1)

    def mean(size: int, of) -> Tensor:
        parts = zip((tokens / tokens.sum()).split(size), logits.split(size))
        return sum(share.sum() * of(part) for share, part in parts)

    both = c.moe_router_load_balancing_type, c.moe_aux_loss_coeff
    for kind, coefficient in zip(*(item if isinstance(item, list) else [item] for item in both)):
        if kind in PREFIX and coefficient:
            shares = router.shares if kind == "global_aux_loss" else None
            size = net.micro_batch_size if kind == "aux_loss" else 1
            term = mean(size, lambda part, shares=shares: imbalance(c, part, shares))
            yield f"{PREFIX[kind]}load_balancing_loss", (coefficient / times, term)
    if c.moe_z_loss_coeff:
        yield "z_loss", (c.moe_z_loss_coeff, mean(1, lambda part: part.logsumexp(dim=-1).square().mean()))


def imbalance(c: Settings, logits: Tensor, shares: Tensor | None) -> Tensor:
    """e sum over experts of (their share of the choices) (their mean score), 1 where all are equal; only scores have a
    gradient. Choices follow the scores of ``logits`` [m, s, e] unless ``shares`` is given: the global loss uses the
    choices of the last global batch, because every micro-batch can know them."""
    scores = scores_of(c, logits)
    if shares is None:
        shares = best(scores, c.moe_router_topk).mean((0, 1)) / c.moe_router_topk
    return c.num_experts * (shares * scores.mean((0, 1))).sum()
