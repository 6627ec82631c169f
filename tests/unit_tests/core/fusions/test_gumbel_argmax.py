"""The kernel draws the tokens of the formula in fp64, at odd sizes and for strided rows."""

import pytest
import torch

from megatron.core.fusions.gumbel_argmax import gumbel_argmax_triton
from megatron.core.random.philox import GUMBEL_KEY, gumbel
from tests.test_utils.kernels import DEVICE


def case(rows, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size + 3, generator=generator).mul(3).to(dtype).to(DEVICE)[:, :size]
    seeds = torch.randint(2**62, (rows, 1), generator=generator).to(DEVICE)
    return logits, seeds, torch.arange(rows, device=DEVICE)[:, None] * 7 + 2**20


@pytest.mark.parametrize("size", [1, 7, 2048, 5003])
def test_draws_equal_the_formula(size):
    logits, seeds, positions = case(9, size)
    result = gumbel_argmax_triton(logits, seeds, positions, GUMBEL_KEY)
    assert torch.equal(result, (logits + gumbel(seeds, positions, size)).argmax(-1))
    repeated = gumbel_argmax_triton(logits[4:5], seeds[4:5], positions[4:5], GUMBEL_KEY)
    assert repeated[0] == result[4]


def test_hidden_tokens_are_not_drawn_and_nan_gives_a_valid_index():
    logits, seeds, positions = case(9, 300)
    logits = logits.masked_fill(torch.arange(300, device=DEVICE) != 77, float("-inf"))
    assert (gumbel_argmax_triton(logits, seeds, positions, GUMBEL_KEY) == 77).all()
    result = gumbel_argmax_triton(torch.full_like(logits, float("nan")), seeds, positions, GUMBEL_KEY)
    assert ((result >= 0) & (result < 300)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_on_a_gpu_follow_the_distribution(dtype):
    logits, _, _ = case(1, 50, dtype)
    count = 40_000
    seeds = torch.arange(count, device=DEVICE)[:, None]
    rows = logits.expand(count, -1)
    actual = gumbel_argmax_triton(rows, seeds, torch.full_like(seeds, 9), GUMBEL_KEY)
    expected = (rows + gumbel(seeds, torch.full_like(seeds, 9), 50)).argmax(-1)
    assert (actual == expected).double().mean() > 0.9999
    shares, requested = actual.bincount(minlength=50) / count, logits[0].double().softmax(-1)
    assert (shares - requested).abs().max() < 0.01
