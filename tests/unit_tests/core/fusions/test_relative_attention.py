"""Attention with a bias by head and distance: the kernels equal the formula, forward and backward, the bias' gradient
included."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions import relative_attention as module
from megatron.core.fusions.relative_attention import TILINGS, Pairs, relative_attention, relative_attention_backward
from tests.test_utils.kernels import DEVICE, TOLERANCE, filled

SMALL = dict.fromkeys(TILINGS, (32, 16, 4, 1))
SCALE = 0.3


def formula(query, key, value, bias, pairs):
    """Output and log-sum-exp, in the tensors' dtype."""
    per_group, (num_queries, num_keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (x.repeat_interleave(per_group, 1) for x in (key, value))
    i, j = (torch.arange(n, device=query.device) for n in (num_queries, num_keys))
    distance = j - i[:, None]
    scores = SCALE * query @ key.mT + bias
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance < -num_queries if pairs.left is None else distance < -pairs.left
    hidden |= distance > num_keys if pairs.right is None else distance > pairs.right
    if pairs.ranges_2bs is not None:
        first, last = pairs.ranges_2bs[:, :, None, :, None]
        hidden = hidden | (j < first) | (j >= last)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ value, scores.logsumexp(-1)


def ranges(lengths, length):
    """Return the key ranges of rows with ``lengths`` valid tokens each; padding attends to padding."""
    lengths = torch.tensor(lengths)[:, None]
    real = torch.arange(length) < lengths
    both = torch.where(real, 0, lengths), torch.where(real, lengths, length)
    return torch.stack(both).to(torch.int32).to(DEVICE)


def check(shape, pairs, dtype, tilings=TILINGS):
    """``shape``: b, a, g, s, t, d, and biases per head."""
    batch, heads, groups, num_queries, num_keys, channels, distances = shape
    sizes = [(num_queries, heads), (num_keys, groups), (num_keys, groups), (num_queries, heads)]
    # views of [s, b, a, d], as projections write them, before numbers that do not belong to them
    tensors = [
        filled(n + 32, batch, a, channels, dtype=dtype, seed=seed, device=DEVICE)[:n].permute(1, 2, 0, 3)
        for seed, (n, a) in enumerate(sizes)
    ]  # fmt: skip
    query, key, value, grad = tensors
    bias = filled(heads, distances, dtype=torch.float32, seed=7, device=DEVICE)
    distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
    dense = bias[:, pairs.middle + distance.to(DEVICE)]
    exact = [x.double().requires_grad_() for x in (query, key, value, dense)]
    expected, expected_lse = formula(*exact, pairs)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    out, lse = relative_attention(query, key, value, bias, SCALE, pairs, tilings)
    grads = relative_attention_backward(grad, (query, key, value, out, lse, bias), SCALE, pairs, tilings)
    assert out.stride() == query.stride() and lse.dtype == grads[3].dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-2)
    for actual, one in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (actual.double() - one).norm() < TOLERANCE[dtype] * one.norm() + 1e-6


@pytest.mark.parametrize(
    "shape, pairs",
    [
        ((2, 4, 2, 64, 64, 16, 127), Pairs(63)),
        ((2, 2, 2, 64, 64, 16, 127), Pairs(63, None, 0)),
        ((2, 2, 1, 33, 33, 16, 65), Pairs(32, None, 0, ranges([33, 20], 33))),  # a last tile of one key
        ((3, 2, 2, 50, 50, 16, 99), Pairs(49, None, None, ranges([50, 1, 33], 50))),
        ((1, 2, 1, 40, 40, 16, 79), Pairs(39, 9, 5)),
        ((1, 1, 1, 16, 64, 16, 200), Pairs(90, None, 3)),  # keys beyond the tiles of queries
        ((1, 1, 1, 33, 16, 16, 48), Pairs(32)),
        ((1, 1, 1, 80, 20, 16, 200), Pairs(90, 12, -4)),  # queries after every key that they could see
    ],
)
def test_the_kernels_equal_the_formula(shape, pairs, monkeypatch):
    (batch, heads, groups, num_queries, num_keys, *_), grids = shape, []
    monkeypatch.setattr(module, "_LARGEST", 2 * heads * num_queries * num_keys)  # of three rows two at a time
    launch = module._launch
    monkeypatch.setattr(module, "_launch", lambda *args: grids.append(args[2]) or launch(*args))
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        check(shape, pairs, torch.float32, SMALL)
    finally:
        torch.use_deterministic_algorithms(False)
    of_queries, of_keys = -(-num_queries // 32), -(-num_keys // 16)
    some = [(of_queries, min(2, batch - first) * heads) for first in range(0, batch, 2)]
    assert grids == [(of_queries, batch * heads), *some, (of_keys, batch * groups)]


def test_a_gradient_may_have_any_strides_a_row_any_size_and_a_bias_16_bits(monkeypatch):
    monkeypatch.setattr(module, "_LARGEST", 1)
    *tensors, grad = (filled(2, 1, 16, 16, dtype=torch.float16, seed=seed, device=DEVICE) for seed in range(4))
    same = grad[..., :1].expand_as(grad)
    pairs, half = Pairs(15), filled(1, 31, dtype=torch.float16, seed=7, device=DEVICE)

    def results(bias, grad):
        out, lse = relative_attention(*tensors, bias, SCALE, pairs, SMALL)
        return out, lse, *relative_attention_backward(grad, (*tensors, out, lse, bias), SCALE, pairs, SMALL)

    for plain, strided in (grad, torch.stack((grad, -grad), -1)[..., 0]), (same.contiguous(), same):
        expected, result = results(half.float(), plain), results(half, strided)
        assert (
            all(torch.equal(*item) for item in zip(result, expected, strict=True)) and result[-1].dtype == torch.float32
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape, pairs",
    [
        ((4, 8, 8, 512, 512, 128, 1023), Pairs(511)),
        ((4, 8, 8, 512, 512, 64, 1023), Pairs(511, None, None, ranges([512, 100, 511, 1], 512))),
        ((4, 8, 2, 128, 128, 128, 255), Pairs(127, None, 0)),
        ((2, 4, 4, 333, 333, 32, 665), Pairs(332, None, 0, ranges([333, 70], 333))),
        ((2, 4, 4, 256, 512, 64, 2047), Pairs(1023 - 512)),
        ((2, 4, 4, 512, 512, 64, 1023), Pairs(511, 100, 30)),
    ],
)
def test_the_kernels_equal_the_formula_on_a_gpu(shape, pairs, dtype):
    check(shape, pairs, dtype)
