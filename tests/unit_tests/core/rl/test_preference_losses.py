"""Losses of preference pairs: published values, TRL's formulas written apart, and weights by pairs."""

import math

import pytest
import torch

from megatron.core.rl.preference_losses import Completions, pair_losses, sum_completions

KINDS = ("sigmoid", "hinge", "ipo")


def one_pair(margin, tokens=1):
    """Policy and reference whose chosen completion has the log-ratio ``margin``, the rejected one 0."""
    log_probs = torch.tensor([[margin - 7.0, -5.0]], requires_grad=True)
    return Completions(log_probs, torch.full((1, 2), float(tokens))), torch.tensor([[-7.0, -5.0]])


@pytest.mark.parametrize(
    "kind, loss, gradient", [("sigmoid", 0.437488, -0.035434), ("hinge", 0.4, -0.1), ("ipo", 1.0, 2.0)]
)
def test_published_values_at_margin_6(kind, loss, gradient):
    """beta 0.1, one token, margin 6 (ms-swift #10167)."""
    policy, reference = one_pair(6.0)
    losses = pair_losses(policy, reference, kind, 0.1).losses
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-6)
    assert policy.log_probs_bn.grad[0].tolist() == pytest.approx([gradient, -gradient], abs=1e-6)


@pytest.mark.parametrize(
    "kind, smoothing, loss",
    [("sigmoid", 0.0, math.log(2)), ("sigmoid", 0.3, math.log(2)), ("hinge", 0.0, 1.0), ("ipo", 0.0, 25.0)],
)
def test_loss_of_equal_models(kind, smoothing, loss):
    policy, reference = one_pair(0.0, tokens=9)
    assert pair_losses(policy, reference, kind, 0.1, smoothing).losses.item() == pytest.approx(loss, rel=1e-6)


def trl_scores(policy, reference, mask):
    """Log-ratios of TRL 1.16's DPOTrainer, sums over tokens for every loss; the first p rows are chosen, the others
    rejected: log-probabilities and mask [2p, s]."""
    logps = (policy.double() * mask).sum(1)
    ref_logps = (reference.double() * mask).sum(1)
    return (logps - ref_logps).chunk(2)


def trl_loss(kind, policy, reference, mask, beta, smoothing):
    """TRL 1.16's DPOTrainer, arguments as of :func:`trl_scores`. Label smoothing as in conservative DPO."""
    chosen_scores, rejected_scores = trl_scores(policy, reference, mask)
    delta = chosen_scores - rejected_scores
    if kind == "sigmoid":
        win, lose = torch.log(torch.sigmoid(beta * delta)), torch.log(1 - torch.sigmoid(beta * delta))
        return -(1 - smoothing) * win - smoothing * lose
    if kind == "hinge":
        return (1 - beta * delta).clamp(min=0)
    chosen_mask, rejected_mask = mask.chunk(2)
    average = chosen_scores / chosen_mask.sum(1) - rejected_scores / rejected_mask.sum(1)
    return (average - 1 / (2 * beta)) ** 2


def packed(values, mask, rows):
    """Pack completions [2p, s] (chosen, then rejected) and their prompts into ``rows`` of equal numbers of pairs,
    the chosen one before the rejected one. Return values and completion numbers [b, tokens]."""
    pairs = len(values) // 2
    order = [half * pairs + pair for pair in range(pairs) for half in (0, 1)]
    per_row = len(order) // rows
    numbers = [torch.where(mask[index] > 0, place % per_row, -1) for place, index in enumerate(order)]
    return values[order].reshape(rows, -1), torch.stack(numbers).reshape(rows, -1)


@pytest.mark.parametrize("kind, smoothing", [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)])
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_rows_have_trl_losses_gradients_and_rewards(kind, smoothing, rows):
    generator = torch.Generator().manual_seed(3)
    policy = torch.rand(12, 40, generator=generator) * -4
    reference = policy + torch.randn(12, 40, generator=generator)
    lengths = torch.randint(1, 30, (12, 1), generator=generator)
    mask = ((torch.arange(40) >= 5) & (torch.arange(40) < 5 + lengths)).float()
    expected_input, actual_input = policy.clone().requires_grad_(), policy.clone().requires_grad_()

    expected = trl_loss(kind, expected_input, reference, mask, 0.1, smoothing)
    expected.mean().backward()
    values, numbers = packed(actual_input, mask, rows)
    sums = sum_completions(values, numbers, 12 // rows)
    frozen = sum_completions(packed(reference, mask, rows)[0], numbers, 12 // rows).log_probs_bn
    result = pair_losses(sums, frozen, kind, 0.1, smoothing)
    (result.losses.sum() / 6).backward()

    torch.testing.assert_close(result.losses.flatten().double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual_input.grad, expected_input.grad, rtol=1e-4, atol=1e-8)
    for rewards, scores in zip(result[1:3], trl_scores(policy, reference, mask)):
        torch.testing.assert_close(rewards.flatten().double(), 0.1 * scores, rtol=1e-5, atol=1e-6)
    assert result.present.sum() == 6


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_unequal_numbers_of_pairs_weigh_each_pair_equally(kind):
    """Micro-batches of 1 and 3 pairs: the mean of their means would weigh the pairs 1/2, 1/6, 1/6, 1/6."""
    tokens = torch.tensor([[-1.0, -2.0], [-3.0, -1.5], [-0.5, -4.0], [-2.0, -2.5]])
    losses = []
    for rows in ([[0, 1, 2, 3]], [[0], [1, 2, 3]]):
        total = pairs = 0.0
        for members in rows:
            values = torch.zeros(1, 10)
            values[0, : 2 * len(members)] = tokens[members].flatten()
            numbers = torch.full((1, 10), -1)
            numbers[0, : 2 * len(members)] = torch.arange(2 * len(members))
            sums = sum_completions(values, numbers, 8)
            result = pair_losses(sums, torch.zeros(1, 8), kind, 0.5)
            total, pairs = total + result.losses.sum(), pairs + result.present.sum()
        assert pairs == 4
        losses.append(total / pairs)
    torch.testing.assert_close(losses[0], losses[1])


def test_bf16_log_probabilities_are_summed_in_fp32():
    """4,096 tokens of -0.01: a bf16 sum would stop at -4."""
    values = torch.full((1, 4096), -0.01, dtype=torch.bfloat16)
    sums = sum_completions(values, torch.zeros(1, 4096, dtype=torch.long), 1)
    assert sums.log_probs_bn.dtype == torch.float32
    assert sums.log_probs_bn.item() == pytest.approx(4096 * values[0, 0].item(), rel=1e-5)


def test_infinite_prompt_tokens_and_absent_pairs_are_not_counted():
    values = torch.tensor([[-torch.inf, -1.0, -torch.inf, -2.0]], requires_grad=True)
    sums = sum_completions(values, torch.tensor([[-1, 0, -1, 1]]), 4)
    assert sums.log_probs_bn.tolist() == [[-1.0, -2.0, 0.0, 0.0]] and sums.lengths_bn.tolist() == [[1, 1, 0, 0]]
    result = pair_losses(sums, torch.zeros(1, 4), "sigmoid", 1.0)
    result.losses.sum().backward()
    assert result.losses[0].tolist() == pytest.approx([math.log(1 + math.exp(-1)), 0.0])
    assert result.present.tolist() == [[1.0, 0.0]] and torch.isfinite(values.grad).all()
    assert result.chosen_rewards[0, 0] == -1 and result.rejected_rewards[0, 0] == -2


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_without_its_second_half_is_absent(kind):
    values = -torch.ones(1, 3, requires_grad=True)
    values.retain_grad()
    result = pair_losses(sum_completions(values, torch.tensor([[0, 1, 2]]), 4), torch.zeros(1, 4), kind, 0.25)
    result.losses.sum().backward()
    assert result.present.tolist() == [[1.0, 0.0]] and result.losses[0, 1] == 0
    assert values.grad[0, 0] == -values.grad[0, 1] != 0 and values.grad[0, 2] == 0


@pytest.mark.parametrize("kind, beta, smoothing, name", [
    ("sigmoid", 0.0, 0.0, "beta"), ("ipo", 0.1, 0.1, "label_smoothing"), ("sigmoid", 0.1, 0.5, "label_smoothing"),
    ("dpo", 0.1, 0.0, "kind"),
])  # fmt: skip
def test_settings_out_of_range_are_named(kind, beta, smoothing, name):
    with pytest.raises(ValueError, match=name):
        pair_losses(*one_pair(1.0), kind, beta, smoothing)
