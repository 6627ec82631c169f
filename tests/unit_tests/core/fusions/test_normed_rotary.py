"""Heads split from their projection, normalized and rotated in one kernel equal the formula, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.normed_rotary import HeadNorms, split_normed_rotary_triton
from megatron.core.fusions.residual_norm import NormTraits, normalize_plain
from megatron.core.fusions.rope import rotary_reference
from megatron.core.fusions.split_rotary import split_heads
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled


def exact(packed, weights, tables, interleaved, offset):
    """Split, normalize with ``eps`` 1e-2 and rotate in torch operations."""
    query, key, value = split_heads(packed)
    traits = NormTraits(1e-2, False, offset)
    heads = [normalize_plain(x, None, weight, None, traits)[1] for x, weight in zip((query, key), weights)]
    return *(rotary_reference(x, *tables, interleaved) for x in heads), value


@pytest.mark.parametrize("interleaved, offset", [(False, 0.0), (True, 1.0)])
@pytest.mark.parametrize(
    "shape, pairs, dtype",
    [
        ((3, 2, 2, 3, 12), 4, torch.float32), ((2, 1, 1, 1, 6), 3, torch.float32),
        ((2, 2, 3, 4, 64), 32, torch.bfloat16), ((2, 1, 2, 3, 512), 256, torch.float32),
        pytest.param((4096, 2, 4, 8, 128), 64, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((333, 3, 32, 1, 80), 20, torch.float32, marks=pytest.mark.gpu),
        pytest.param((129, 2, 1, 71, 64), 32, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_the_kernel_equals_the_formula(shape, pairs, dtype, interleaved, offset):
    """``shape``: s, b, g, p, d. Gradients come in another order of dims, as attention kernels return them."""
    length, batch, groups, per_group, channels = shape
    packed = filled(length, batch, groups, per_group + 2, channels, dtype=dtype)
    weights = [filled(channels, dtype=dtype, seed=seed) for seed in (5, 6)]
    angles = filled(length, 1, 1, pairs, dtype=torch.float64, seed=1).to(DEVICE)
    tables = (angles.cos(), angles.sin())
    upstream = [
        filled(batch, heads * groups, length, channels, dtype=dtype, seed=2 + heads).permute(2, 0, 1, 3)
        for heads in (per_group, 1, 1)
    ]
    assert_equal_to_formula(
        lambda x, *weights: split_normed_rotary_triton(
            x, HeadNorms(*weights, 1e-2, offset), *(table.float() for table in tables), interleaved
        ),
        lambda x, *weights: exact(x, weights, tables, interleaved, offset),
        [packed, *weights], upstream,
    )  # fmt: skip


def test_no_tokens():
    packed, weight = torch.zeros(0, 1, 2, 3, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE)
    table = torch.zeros(0, 1, 1, 4, device=DEVICE)
    query, key, value = split_normed_rotary_triton(packed, HeadNorms(weight, weight, 1e-5, 0.0), table, table, False)
    (query.sum() + key.sum() + value.sum()).backward()
    assert query.shape == (0, 1, 2, 8) and packed.grad.shape == packed.shape
