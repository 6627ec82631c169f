"""Routing functions against loops over tokens and experts."""

import math

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.transformer.moe import moe_utils

TOKENS, EXPERTS = 9, 8


def scores(seed):
    return torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("num_groups, group_topk, topk", [(4, 2, 4), (2, 1, 3), (4, 3, 3), (8, 4, 4)])
def test_group_limited_topk_selects_in_the_best_groups(num_groups, group_topk, topk):
    values = scores(num_groups)
    actual, experts = moe_utils.group_limited_topk(values, topk, TOKENS, EXPERTS, num_groups, group_topk)
    size = EXPERTS // num_groups
    for token, row in enumerate(values.tolist()):
        groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
        best = [sorted((row[expert] for expert in group), reverse=True)[: topk // group_topk] for group in groups]
        groups = [group for _, group in sorted(zip(best, groups), key=lambda pair: -sum(pair[0]))]
        open_experts = [expert for group in groups[:group_topk] for expert in group]
        expected = sorted(open_experts, key=lambda expert: -row[expert])[:topk]
        assert experts[token].tolist() == expected and actual[token].tolist() == [row[expert] for expert in expected]


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_of_auxiliary_losses_follow_the_formula(name):
    logits = scores(3) * 6 - 3
    padding = torch.zeros(TOKENS, dtype=torch.bool)
    padding[[2, 5]] = True
    for mask in (None, padding):
        chosen, actual = moe_utils.compute_routing_scores_for_aux_loss(logits.float(), 3, name, padding_mask=mask)
        for token, row in enumerate(logits.tolist()):
            function = {"softmax": math.exp, "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
                        "sqrtsoftplus": lambda x: math.sqrt(math.log1p(math.exp(x)))}[name]  # fmt: skip
            positive = [function(x) for x in row]
            weight = 0 if mask is not None and padding[token] else 1 / sum(positive)
            assert actual[token].tolist() == pytest.approx([x * weight for x in positive], abs=1e-6)
            best = sorted(range(EXPERTS), key=lambda expert: -row[expert])[:3] if weight else []
            assert chosen[token].nonzero().flatten().tolist() == sorted(best)
    with pytest.raises(UserError, match="score_function 'tanh': unknown"):
        moe_utils.compute_routing_scores_for_aux_loss(logits, 3, "tanh")


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 9.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_tokens_beyond_the_capacity_of_an_expert_are_dropped(policy, factor):
    topk = 2
    chosen, _ = moe_utils.compute_routing_scores_for_aux_loss(scores(5), topk, "softmax")
    probs = scores(6) * chosen
    actual, retained = moe_utils.apply_router_token_dropping(probs, chosen, topk, factor, policy)
    padded = moe_utils.apply_router_token_dropping(probs, chosen, topk, factor, policy, pad_to_capacity=True)[1]
    capacity = math.ceil(TOKENS * topk / EXPERTS * factor)
    for expert in range(EXPERTS):
        tokens = [token for token in range(TOKENS) if chosen[token, expert]]
        if policy == "probs":
            tokens.sort(key=lambda token: -probs[token, expert].item())
        assert retained[:, expert].nonzero().flatten().tolist() == sorted(tokens[:capacity])
        assert padded[:, expert].sum() == min(capacity, TOKENS)
    assert torch.equal(actual, probs * retained)
    with pytest.raises(UserError, match="drop_policy 'random': unknown"):
        moe_utils.apply_router_token_dropping(probs, chosen, topk, factor, "random")
