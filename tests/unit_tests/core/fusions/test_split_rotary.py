"""Heads split from their projection and rotated in one kernel equal the formula, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.rope import apply_rotary, rotary_reference
from megatron.core.fusions.split_rotary import (
    choose_rotary,
    choose_split_heads,
    choose_split_rotary,
    rotary_triton,
    split_heads,
    split_heads_triton,
    split_rotary_plain,
    split_rotary_triton,
)
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled


def exact(packed, cos, sin, interleaved):
    query, key, value = split_heads(packed)
    return rotary_reference(query, cos, sin, interleaved), rotary_reference(key, cos, sin, interleaved), value


def check(shape, pairs, dtype, interleaved, function=split_rotary_triton):
    """``shape``: s, b, g, p, d. Gradients come in another order of dims, as attention kernels return them."""
    length, batch, groups, per_group, channels = shape
    packed = filled(length, batch, groups, per_group + 2, channels, dtype=dtype)
    angles = filled(length, 1, 1, pairs, dtype=torch.float64, seed=1).to(DEVICE)
    tables = (angles.cos(), angles.sin())
    upstream = [
        filled(batch, heads * groups, length, channels, dtype=dtype, seed=2 + heads).permute(2, 0, 1, 3)
        for heads in (per_group, 1, 1)
    ]
    assert_equal_to_formula(
        lambda x: function(x, *(table.to(torch.float32) for table in tables), interleaved),
        lambda x: exact(x, *tables, interleaved), [packed], upstream,
    )  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape, pairs, dtype",
    [
        ((3, 2, 2, 3, 12), 4, torch.float32), ((2, 1, 1, 1, 6), 3, torch.float32),
        ((2, 2, 3, 4, 64), 32, torch.bfloat16), ((2, 1, 2, 3, 512), 256, torch.float32),
    ],
)  # fmt: skip
def test_the_kernel_equals_the_formula(shape, pairs, dtype, interleaved):
    check(shape, pairs, dtype, interleaved)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, pairs",
    [((8192, 1, 8, 4, 128), 64), ((333, 3, 32, 1, 80), 20), ((129, 2, 1, 71, 64), 32), ((65, 1, 5, 2, 96), 48)],
)
def test_the_kernel_equals_the_formula_at_real_sizes(shape, pairs, dtype, interleaved):
    check(shape, pairs, dtype, interleaved)


@pytest.mark.parametrize(
    "shape, pairs, dtype",
    [
        ((3, 2, 3, 10), 4, torch.float32),
        pytest.param((8192, 1, 32, 128), 64, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((257, 3, 5, 72), 30, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_heads_that_were_split_before_are_rotated_equally(shape, pairs, dtype):
    angles = filled(shape[0], 1, 1, pairs, dtype=torch.float64, seed=1).to(DEVICE)
    cos, sin = angles.cos(), angles.sin()
    assert_equal_to_formula(
        lambda x: rotary_triton(x, cos.float(), sin.float(), False), lambda x: rotary_reference(x, cos, sin),
        [filled(*shape, dtype=dtype)], [filled(*shape, dtype=dtype, seed=2)],
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((3, 2, 2, 3, 12), torch.float32), ((5, 2, 3, 1, 16), torch.bfloat16),
        pytest.param((2048, 4, 16, 1, 64), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((129, 2, 3, 4, 80), torch.bfloat16, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_gradients_of_heads_without_rotary_are_packed(shape, dtype):
    length, batch, groups, per_group, channels = shape
    packed = filled(length, batch, groups, per_group + 2, channels, dtype=dtype)
    upstream = [
        filled(batch, heads * groups, length, channels, dtype=dtype, seed=2 + heads).permute(2, 0, 1, 3)
        for heads in (per_group, 1, 1)
    ]
    assert_equal_to_formula(split_heads_triton, split_heads, [packed], upstream)
    assert_equal_to_formula(split_heads_triton, split_heads, [packed], [upstream[0], None, upstream[2]])


def test_heads_without_rotary_are_views():
    packed = filled(3, 1, 2, 3, 4, dtype=torch.float32).to(DEVICE).requires_grad_()
    memory = packed.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() == memory for x in split_heads_triton(packed))


def test_plain_torch_equals_the_formula():
    check((5, 2, 2, 3, 12), 4, torch.float32, False, function=split_rotary_plain)


def test_the_flag_chooses_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_split_rotary(torch.bfloat16).kernel is split_rotary_triton
    assert choose_split_rotary(torch.bfloat16, False) is split_rotary_plain
    assert choose_split_heads(torch.bfloat16).kernel is split_heads_triton
    assert choose_rotary(torch.bfloat16).kernel is rotary_triton
    assert choose_rotary(torch.bfloat16, False) is apply_rotary
