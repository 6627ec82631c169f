"""Kernels of the router equal the definitions of ``transformer/moe``, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.routing import choose_triton, weigh_triton
from megatron.core.transformer.moe.balance import summarize
from megatron.core.transformer.moe.routing import RoutingRule, expert_scores
from tests.test_utils.kernels import DEVICE

RULES = {
    "softmax": ("softmax", False), "softmax before": ("softmax", True), "sigmoid": ("sigmoid", False),
    "sqrtsoftplus": ("sqrtsoftplus", False),
}  # fmt: skip
SMALL = [((5, 3, 6), 2), ((37, 2, 20), 3), ((9, 1, 16), 1), ((130, 2, 60), 8), ((3, 2, 2), 2)]
REAL = [((4096, 2, 128), 8), ((8192, 1, 8), 2), ((1000, 3, 256), 8), ((513, 2, 60), 4), ((4096, 1, 512), 10)]


def check(kind, sizes, k, dtype, biased):
    function, before = RULES[kind]
    num_experts = sizes[-1]
    generator = torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(sizes, generator=generator)).to(dtype).to(DEVICE)
    logits[0, 0] = 1.0  # ties
    bias = torch.randn(num_experts, generator=generator).to(DEVICE) if biased else None
    rule = RoutingRule(num_experts, k, function, before, scaling_factor=2.5)
    experts = choose_triton(logits, bias, kind, k)
    assert torch.equal(experts, choose_triton(logits, bias, kind, k))
    exact = logits.double()
    expected = rule.choose(logits, bias)
    differs = (experts != expected).any(-1)
    if differs.any():  # scores that are equal but for rounding
        scores = exact if kind == "softmax" else expert_scores(exact, function) + (0 if bias is None else bias.double())
        mine, foreign = (scores.gather(-1, x)[differs] for x in (experts, expected))
        torch.testing.assert_close(mine, foreign, rtol=1e-5, atol=1e-6)
        assert differs.float().mean() < 0.01

    mine, foreign = logits.clone().requires_grad_(), exact.clone().requires_grad_()
    weights, sums = weigh_triton(mine, experts, kind, 2.5, True)
    assert sums is not None and weights.dtype == dtype
    exact_weights, exact_sums = rule.weigh(foreign, experts), summarize(foreign, experts, function)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 1e-5}
    torch.testing.assert_close(weights.double(), exact_weights, **tolerance)
    assert torch.equal(sums.choices_be.double(), exact_sums.choices_be) and not sums.nonfinite_b.any()
    torch.testing.assert_close(sums.scores_be.double(), exact_sums.scores_be, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.z_b.double(), exact_sums.z_b, rtol=1e-5, atol=1e-5)
    outputs = weights, sums.scores_be, sums.z_b
    exact_outputs = exact_weights, exact_sums.scores_be, exact_sums.z_b
    upstream = [torch.randn(output.shape, generator=generator).to(DEVICE) for output in outputs]
    for results in (outputs, exact_outputs):
        torch.autograd.backward(results, [grad.to(result.dtype) for grad, result in zip(upstream, results)])
    loose = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(mine.grad.double(), foreign.grad, **loose)

    other = logits.clone().requires_grad_()
    single, nothing = weigh_triton(other, experts, kind, 2.5, False)
    assert nothing is None and torch.equal(single, weights)
    exact_alone = exact.clone().requires_grad_()
    single.backward(upstream[0].to(dtype))
    rule.weigh(exact_alone, experts).backward(upstream[0].to(dtype).double())
    torch.testing.assert_close(other.grad.double(), exact_alone.grad, **loose)


@pytest.mark.parametrize("sizes, k", SMALL)
@pytest.mark.parametrize("kind", RULES)
def test_kernels_equal_the_definitions(kind, sizes, k):
    check(kind, sizes, k, torch.float32, biased=kind in ("sigmoid", "sqrtsoftplus"))


@pytest.mark.parametrize("kind", RULES)
def test_kernels_equal_the_definitions_in_bf16(kind):
    check(kind, (20, 3, 20), 4, torch.bfloat16, biased=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes, k", REAL)
@pytest.mark.parametrize("kind", RULES)
def test_kernels_equal_the_definitions_at_real_sizes(kind, sizes, k, dtype):
    check(kind, sizes, k, dtype, biased=kind == "sigmoid")


def test_logits_that_are_not_finite_are_counted_and_choose_experts_that_exist():
    logits = torch.randn(6, 2, 10, device=DEVICE)
    logits[1, 0, :4] = torch.nan
    logits[2, 1, 3], logits[3, 1] = torch.inf, -torch.inf
    experts = choose_triton(logits, None, "softmax", 3)
    assert experts.min() >= 0 and experts.max() < 10
    assert all(len(set(value)) == 3 for value in experts.flatten(0, 1).tolist())
    _, sums = weigh_triton(logits, experts, "softmax", 1.0, True)
    assert sums is not None and sums.nonfinite_b.tolist() == [4.0, 11.0]
    assert sums.choices_be.sum(1).tolist() == [18.0, 18.0]


@pytest.mark.parametrize("kind, chosen", [("softmax", [0, 2, 3]), ("softmax before", [0, 1, 2])])
def test_scores_that_underflow_are_equal(kind, chosen):
    logits = torch.tensor([[[200.0, 0.0, 50.0, 3.0]]], device=DEVICE)
    function, before = RULES[kind]
    assert RoutingRule(4, 3, function, before).choose(logits).flatten().tolist() == chosen
    assert choose_triton(logits, None, kind, 3).flatten().tolist() == chosen
