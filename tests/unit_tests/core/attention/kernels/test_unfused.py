"""The plain kernel against the definition, pair by pair: what the interface allows beyond training a decoder."""

import itertools

import pytest
import torch

from megatron.core.attention.kernels.torch_sdpa import TorchAttention
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Visibility, full_tile

BATCH, HEADS, GROUPS, CHANNELS, SCALE = 2, 4, 2, 6, 0.4
DOUBLE = torch.float64


def tensors(queries, keys, value_channels):
    generator = torch.Generator().manual_seed(0)
    shapes = [(queries, HEADS, CHANNELS), (keys, GROUPS, CHANNELS), (keys, GROUPS, value_channels)]
    return [torch.randn(s, BATCH, a, d, generator=generator, dtype=DOUBLE, requires_grad=True) for s, a, d in shapes]


def by_definition(query, key, value, sees):
    """``sees(row, query, key)``: whether the pair is visible."""
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=DOUBLE)
    for row in range(BATCH):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            for i in range(len(query)):
                visible = [j for j in range(len(key)) if sees(row, i, j)]
                scores = key[visible, row, group] @ query[i, row, head] * SCALE
                out[i, row, head] = scores.softmax(0) @ value[visible, row, group]
    return out


def assert_equal(kernel, inputs, mask, sees):
    expected, actual = by_definition(*inputs, sees), kernel.attend(*inputs, mask)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(torch.autograd.grad(actual, inputs, weights), torch.autograd.grad(expected, inputs, weights)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kernel", [UnfusedAttention(SCALE), TorchAttention("torch", SCALE)], ids=["plain", "torch"])
@pytest.mark.parametrize("value_channels", [CHANNELS, 10])
@pytest.mark.parametrize(
    "queries, keys, visibility",
    [
        (7, 3, Visibility(False)),
        *itertools.product([7, 3, 1], [7], [Visibility(True), Visibility(False), Visibility(True, (2, 0))]),
    ],
)
def test_values_may_be_wider_and_queries_fewer(kernel, queries, keys, value_channels, visibility):
    """With a cache, the queries are the last positions of more keys; cross-attention has any number of keys."""
    before, after = visibility.limits

    def sees(row, i, j):
        distance = j - (i + keys - queries)
        return (after is None or distance <= after) and (before is None or distance >= -before)

    assert_equal(kernel, tensors(queries, keys, value_channels), Mask(visibility), sees)


@pytest.mark.parametrize("kernel", [UnfusedAttention(SCALE), TorchAttention("torch", SCALE)], ids=["plain", "torch"])
@pytest.mark.parametrize("causal", [True, False])
def test_padded_rows_attend_to_valid_keys_only(kernel, causal):
    lengths = torch.tensor([3, 7])
    documents = PackedSeqParams.of_lengths(lengths, 7)
    documents.check(BATCH, 7)
    assert documents.document_bounds() == (0, 3, 7, 14, 14)

    def sees(row, i, j):
        return (i < lengths[row]) == (j < lengths[row]) and (j <= i or not causal)

    assert_equal(kernel, tensors(7, 7, CHANNELS), Mask(Visibility(causal), documents), sees)


@pytest.mark.parametrize("kernel", [UnfusedAttention(SCALE), TorchAttention("torch", SCALE)], ids=["plain", "torch"])
def test_a_dense_mask_adds_to_the_rest(kernel):
    hidden = torch.zeros(BATCH, 1, 7, 7, dtype=torch.bool)
    hidden[1, :, 3:, 1] = True
    inputs = tensors(7, 7, CHANNELS)
    assert_equal(kernel, inputs, Mask(hidden=hidden), lambda row, i, j: j <= i and not hidden[row, 0, i, j])


@pytest.mark.parametrize("visibility", [Visibility(True), Visibility(False), Visibility(True, (2, 0))])
def test_a_single_block_is_the_full_tensor(visibility):
    """Its hand-written backward equals autograd; values may have more channels than keys."""
    inputs, kernel = tensors(5, 7, 10), UnfusedAttention(SCALE)
    tile = full_tile(5, 7, visibility)
    full = kernel.attend(*inputs, Mask(visibility)).permute(1, 2, 0, 3)
    weights = torch.randn_like(full)
    heads_first = [x.detach().permute(1, 2, 0, 3) for x in inputs]
    out, lse = kernel.forward(*heads_first, tile)
    torch.testing.assert_close(out, full)
    expected = torch.autograd.grad(full, inputs, weights)
    for one, other in zip(kernel.backward(weights, *heads_first, out, lse, tile), expected, strict=True):
        torch.testing.assert_close(one.permute(2, 0, 1, 3), other)


def test_capped_blocks_equal_capped_full_sequences():
    """Blocks have a hand-written backward pass; full sequences use torch's."""
    kernel, inputs = UnfusedAttention(SCALE, soft_cap=0.7), tensors(7, 7, CHANNELS)
    result = kernel.attend(*inputs, Mask(Visibility(True, (3, 0))))
    plain = UnfusedAttention(SCALE).attend(*inputs, Mask(Visibility(True, (3, 0))))
    assert not torch.allclose(result, plain, atol=1e-3), "the cap does nothing"
    grad, tile = torch.randn_like(result), full_tile(7, 7, Visibility(True, (3, 0)))
    query, key, value = (x.detach().permute(1, 2, 0, 3) for x in inputs)
    out, lse = kernel.forward(query, key, value, tile)
    torch.testing.assert_close(out.permute(2, 0, 1, 3), result)
    grads = kernel.backward(grad.permute(1, 2, 0, 3), query, key, value, out, lse, tile)
    for one, other in zip(grads, torch.autograd.grad(result, inputs, grad)):
        torch.testing.assert_close(one.permute(2, 0, 1, 3), other)


def test_a_cap_is_of_scores_that_layer_scaling_has_not_divided():
    inputs = tensors(5, 5, CHANNELS)
    scaled = UnfusedAttention(SCALE, soft_cap=0.7, layer_scale=3.0, softmax_in_fp32=True)
    plain = UnfusedAttention(SCALE, soft_cap=0.7)
    mask = Mask(Visibility(True))
    torch.testing.assert_close(scaled.attend(*inputs, mask), plain.attend(*inputs, mask))


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_is_added_to_scores_that_layer_scaling_has_not_divided(soft_cap, causal):
    """Layer scaling affects only rounding: outputs and all gradients equal those without it, also in blocks."""
    inputs, length = tensors(5, 5, CHANNELS), 5
    bias = torch.randn(HEADS, 2 * length - 1, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    bias.requires_grad_()
    mask = Mask(Visibility(causal), bias=bias)
    plain = UnfusedAttention(SCALE, soft_cap=soft_cap).attend(*inputs, mask)
    upstream = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    expected = torch.autograd.grad(plain, [*inputs, bias], upstream)
    without = UnfusedAttention(SCALE, soft_cap=soft_cap).attend(*inputs, Mask(Visibility(causal)))
    assert not torch.allclose(plain, without, atol=1e-2), "the bias does nothing"
    scaled = UnfusedAttention(SCALE, layer_scale=3.0, softmax_in_fp32=True, soft_cap=soft_cap)
    actual = scaled.attend(*inputs, mask)
    torch.testing.assert_close(actual, plain)
    torch.testing.assert_close(torch.autograd.grad(actual, [*inputs, bias], upstream), expected)
    query, key, value = (x.detach().permute(1, 2, 0, 3) for x in inputs)
    blocks, tile = scaled.with_mask(mask), full_tile(length, length, mask.visibility)
    out, lse = blocks.forward(query, key, value, tile)
    torch.testing.assert_close(out.permute(2, 0, 1, 3), plain)
    *grads, of_bias = blocks.backward(upstream.permute(1, 2, 0, 3), query, key, value, out, lse, tile)
    torch.testing.assert_close((*(x.permute(2, 0, 1, 3) for x in grads), of_bias), expected)
