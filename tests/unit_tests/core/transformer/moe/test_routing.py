"""Choice and weights against definitions written out token by token, in fp64."""

import math

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.transformer.moe.routing import (
    RoutingRule,
    expert_capacity,
    round_robin,
    sinkhorn_scores,
    top_k,
    within_capacity,
)
from tests.test_utils.unstable_sort import make_sorts_unstable

DOUBLE = torch.float64


def scores_by_definition(z, function):
    if function == "softmax":
        total = sum(math.exp(item) for item in z)
        return [math.exp(item) / total for item in z]
    if function == "sigmoid":
        return [1 / (1 + math.exp(-item)) for item in z]
    return [math.sqrt(math.log1p(math.exp(item))) for item in z]


def chosen_by_definition(rule, z, bias):
    """Experts of one token, best first."""
    after = rule.score_function == "softmax" and not rule.pre_softmax
    scores = list(z) if after else scores_by_definition(z, rule.score_function)
    scores = [score + add for score, add in zip(scores, bias)]
    allowed = set(range(len(z)))
    if rule.num_groups is not None:
        size, best = len(z) // rule.num_groups, rule.group_score_topk or rule.topk // rule.group_topk
        groups = [range(first, first + size) for first in range(0, len(z), size)]
        groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:best]))
        allowed = {e for group in groups[: rule.group_topk] for e in group}
    return sorted(allowed, key=lambda e: (-scores[e], e))[: rule.topk]


def weights_by_definition(rule, z, experts):
    scores = scores_by_definition(z, rule.score_function)
    weights = [scores[e] for e in experts]
    if not (rule.score_function == "softmax" and rule.pre_softmax) and (
        rule.score_function == "softmax" or rule.topk > 1
    ):
        weights = [weight / sum(weights) for weight in weights]
    return [weight * (rule.scaling_factor or 1.0) for weight in weights]


RULES = [
    RoutingRule(12, k, function, pre, *groups, scaling_factor=scale)
    for function, pre in [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
    for k in (1, 2, 4, 12)
    for groups in [(None, None), (4, 2), (3, 1)]
    for scale in (None, 2.5)
    if groups[0] is None or (k % groups[1] == 0 and k <= 12 // groups[0] * groups[1])
]
RULES += [  # sums of other than k / group_topk scores; k that group_topk does not divide
    RoutingRule(12, k, "sigmoid", False, *groups, group_score_topk=scored)
    for k, groups, scored in [(2, (4, 2), 2), (2, (4, 2), 3), (4, (4, 2), 1), (5, (4, 2), 2), (3, (3, 1), 4)]
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choice_and_weights_follow_the_definition(rule, biased):
    torch.manual_seed(1)
    logits = 2 * torch.randn(5, 3, 12, dtype=DOUBLE)
    bias = torch.randn(12, dtype=DOUBLE) if biased else None
    experts = rule.choose(logits, bias)
    weights = rule.weigh(logits, experts)
    for s in range(5):
        for b in range(3):
            z = logits[s, b].tolist()
            expected = chosen_by_definition(rule, z, [0.0] * 12 if bias is None else bias.tolist())
            assert experts[s, b].tolist() == expected
            assert weights[s, b].tolist() == pytest.approx(weights_by_definition(rule, z, expected), rel=1e-12)


@pytest.mark.parametrize("rule", RULES[::3], ids=str)
def test_gradients_of_weights_are_those_of_differences(rule):
    torch.manual_seed(2)
    logits = torch.randn(3, 12, dtype=DOUBLE, requires_grad=True)
    experts = rule.choose(logits)
    torch.autograd.gradcheck(lambda z: rule.weigh(z, experts), logits)


def test_equal_scores_are_won_by_lower_numbers(monkeypatch):
    make_sorts_unstable(monkeypatch)
    assert top_k(torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]]), 4).tolist() == [[1, 3, 4, 2]]
    assert RoutingRule(8, 3).choose(torch.zeros(2, 8, dtype=torch.bfloat16)).tolist() == [[0, 1, 2]] * 2
    assert RoutingRule(8, 2, "sigmoid", False, 4, 2).choose(torch.zeros(1, 8)).tolist() == [[0, 1]]


def test_negative_scores_lose_against_nothing_outside_of_their_groups():
    rule = RoutingRule(4, 2, "sigmoid", False, 2, 1)
    bias = torch.tensor([-3.0, -3.0, -2.0, -9.0])
    assert rule.choose(torch.zeros(1, 4), bias).tolist() == [[0, 1]]  # a mask of 0 instead of -inf would choose 2, 3


def test_bias_is_not_in_the_weights():
    rule, logits = RoutingRule(4, 2, "sigmoid"), torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    experts = rule.choose(logits, torch.tensor([9.0, 9.0, 0.0, 0.0]))
    assert set(experts[0].tolist()) == {0, 1}
    saved = logits.sigmoid()[0, experts[0]]
    torch.testing.assert_close(rule.weigh(logits, experts)[0], saved / saved.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mathematics_is_fp32_and_weights_have_the_dtype_of_logits(dtype):
    logits = torch.randn(64, 16).to(dtype)
    for rule in (RoutingRule(16, 3), RoutingRule(16, 3, pre_softmax=True), RoutingRule(16, 3, "sigmoid")):
        experts = rule.choose(logits)
        assert torch.equal(experts, rule.choose(logits.float()))
        weights = rule.weigh(logits, experts)
        assert weights.dtype == dtype
        assert torch.equal(weights, rule.weigh(logits.float(), experts).to(dtype))


def test_underflown_softplus_has_no_gradient():
    logits = torch.tensor([[-200.0, 1.0]], requires_grad=True)
    rule = RoutingRule(2, 2, "sqrtsoftplus")
    rule.weigh(logits, rule.choose(logits))[0, 0].backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize(
    "sizes, message",
    [((4, 5), "moe_router_topk 5"), ((8, 2, "sigmoid", False, 3, 1), "num_groups 3"),
     ((8, 2, "sigmoid", False, 4, 2, None, False, False, 3), "moe_router_group_score_topk 3: choose 1 to 2"),
     ((8, 3, "sigmoid", False, 4, 2), "group_topk 2"), ((8, 2, "sigmoid", False, 4, 5), "group_topk 5"),
     ((8, 2, "sigmoid", False, 4, None), "group_topk None"), ((8, 4, "sigmoid", False, 4, 1), "1 groups of 2")],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_rejected(sizes, message):
    with pytest.raises(UserError, match=message):
        RoutingRule(*sizes)


def sinkhorn_by_definition(z):
    """Megatron-LM's loop."""
    cost, d1, error = z.exp(), torch.ones(z.shape[1], dtype=z.dtype), 1e9
    while error > 1e-4:
        d0 = 1 / (len(z) * ((d1 * cost).sum(1) + 1e-8))
        new = 1 / (z.shape[1] * ((d0[:, None] * cost).sum(0) + 1e-8))
        error, d1 = (new - d1).abs().mean().item(), new
    return d1 * cost * d0[:, None]


@pytest.mark.parametrize("scale", [0.1, 1.0, 2.0])
def test_sinkhorn_chooses_as_the_loop_that_stops(scale):
    torch.manual_seed(3)
    z = scale * torch.randn(64, 8, dtype=DOUBLE)
    expected = sinkhorn_by_definition(z)
    scores = sinkhorn_scores(z, SINGLE_PROCESS.tp_cp)
    torch.testing.assert_close(scores / scores.sum(1, keepdim=True), expected / expected.sum(1, keepdim=True))
    loads = top_k(scores, 2).flatten().bincount(minlength=8)
    assert loads.max() <= top_k(z, 2).flatten().bincount(minlength=8).max()


def test_sinkhorn_that_does_not_converge_ends_after_32_iterations():
    z = torch.tensor([[8.0, 0.0, 0.0], [8.0, 0.0, 1.0], [9.0, 0.0, 0.0]], dtype=DOUBLE)
    cost, scale = (z - z.amax(1, keepdim=True)).exp(), torch.ones(3, dtype=DOUBLE)
    for _ in range(32):
        before, scale = scale, 1 / (3 * ((1 / (3 * (cost @ scale + 1e-8))) @ cost + 1e-8))
    assert (scale - before).abs().mean() > 1e-4
    torch.testing.assert_close(sinkhorn_scores(z, SINGLE_PROCESS.tp_cp), cost * scale, rtol=1e-9, atol=0)


def test_sinkhorn_of_16_bit_logits_is_fp32():
    z = torch.randn(32, 8).bfloat16()
    assert torch.equal(sinkhorn_scores(z, SINGLE_PROCESS.tp_cp), sinkhorn_scores(z.float(), SINGLE_PROCESS.tp_cp))


def test_sinkhorn_of_large_logits_is_finite():
    assert sinkhorn_scores(torch.tensor([[200.0, -200.0], [300.0, 0.0]]), SINGLE_PROCESS.tp_cp).isfinite().all()


def test_round_robin_is_exact():
    experts = round_robin(torch.arange(6), 2, 4, 2)
    assert experts[:, 0].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]
    assert torch.equal(experts[:, 0], experts[:, 1])
    assert torch.equal(round_robin(torch.tensor([4, 5]), 2, 4, 2), experts[4:])


@pytest.mark.parametrize("sizes, expected", [((10, 4, 2, 1.0), 5), ((10, 4, 2, 1.1), 6), ((4, 2, 2, 9.0), 4)])
def test_capacity(sizes, expected):
    assert expert_capacity(*sizes) == expected


@pytest.mark.parametrize("by_weight", [True, False])
@pytest.mark.parametrize("capacity", [1, 2, 5, 40])
def test_tokens_within_capacity_equal_the_definition(capacity, by_weight):
    torch.manual_seed(4)
    experts = top_k(torch.randn(40, 9) + torch.linspace(0, 2, 9), 3)  # the first ones may well be empty
    weights = (4 * torch.rand(40, 3)).round() / 4  # many are equal
    saved = within_capacity(experts, weights if by_weight else None, 9, capacity)
    for e in range(9):
        places = [(t, j) for t in range(40) for j in range(3) if experts[t, j] == e]
        if by_weight:
            places.sort(key=lambda place: -weights[place].item())
        for number, place in enumerate(places):
            assert saved[place].item() == (number < capacity)
