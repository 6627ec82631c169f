"""The activations' kernels equal their formulas, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from megatron.core.fusions.activation_kernels import (
    GateTraits,
    gated_triton,
    squared_relu_triton,
    weighted_gated_triton,
)
from megatron.core.fusions.activations import (
    gated,
    quick_gelu,
    select_activation,
    select_weighted_activation,
    squared_relu,
    swiglu,
)
from tests.test_utils.kernels import assert_equal_to_formula, filled
from tests.unit_tests.core.fusions.test_fusions import choice

KINDS = {
    "swiglu": (GateTraits(1.0), F.silu),
    "swiglu, clamped": (GateTraits(1.0, 0.7, 1.0), F.silu),
    "quick_geglu": (GateTraits(1.702, None, 1.0), quick_gelu),
    "quick_geglu, clamped": (GateTraits(1.702, 7.0), quick_gelu),
}


def check(kind, shape, dtype):
    traits, activation = KINDS[kind]
    packed = filled(*shape[:-1], 2 * shape[-1], dtype=dtype)
    if traits.clamp is not None:
        packed.view(-1)[::3] = traits.clamp
    assert_equal_to_formula(
        lambda x: gated_triton(x, traits),
        lambda x: gated(x, activation=activation, clamp=traits.clamp, offset=traits.offset),
        [packed],
        [filled(*shape, dtype=dtype, seed=1)],
    )


def check_weighted(kind, shape, dtype):
    traits, activation = KINDS[kind]
    assert_equal_to_formula(
        lambda x, weights: weighted_gated_triton(x, weights, traits),
        lambda x, weights: weights.unsqueeze(-1)
        * gated(x, activation=activation, clamp=traits.clamp, offset=traits.offset),
        [filled(*shape[:-1], 2 * shape[-1], dtype=dtype), filled(*shape[:-1], dtype=dtype, seed=2)],
        [filled(*shape, dtype=dtype, seed=1)],
    )


@pytest.mark.parametrize(
    "kind, shape, dtype",
    [
        ("swiglu", (2, 2050), torch.bfloat16), ("quick_geglu, clamped", (5, 7), torch.float32),
        pytest.param("swiglu", (65536, 768), torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("quick_geglu, clamped", (4097, 2880), torch.float32, marks=pytest.mark.gpu),
    ],
)  # fmt: skip
def test_weighted_gated_kernels_equal_the_formula(kind, shape, dtype):
    check_weighted(kind, shape, dtype)


@pytest.mark.parametrize(
    "kind, shape, dtype",
    [
        ("swiglu", (2, 2050), torch.bfloat16), ("swiglu, clamped", (3, 2, 7), torch.float32),
        ("quick_geglu", (3, 5), torch.float32), ("quick_geglu, clamped", (1, 2, 16), torch.bfloat16),
    ],
)  # fmt: skip
def test_gated_kernels_equal_the_formula(kind, shape, dtype):
    check(kind, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, shape",
    [
        ("swiglu", (8192, 1, 14336)), ("swiglu", (70001, 1, 64)), ("swiglu, clamped", (513, 3, 2731)),
        ("quick_geglu", (1, 1, 1)), ("quick_geglu, clamped", (4096, 2, 2880)),
    ],
)  # fmt: skip
def test_gated_kernels_equal_the_formula_at_real_sizes(kind, shape, dtype):
    check(kind, shape, dtype)


@pytest.mark.parametrize(
    "shape, dtype",
    [((3, 1001), torch.float32), ((5, 9), torch.bfloat16), pytest.param((4096, 2, 16384), torch.bfloat16,
                                                                          marks=pytest.mark.gpu)],
)  # fmt: skip
def test_squared_relu_equals_the_formula(shape, dtype):
    inputs, upstream = [filled(*shape, dtype=dtype)], [filled(*shape, dtype=dtype, seed=1)]
    assert_equal_to_formula(squared_relu_triton, squared_relu, inputs, upstream)


def test_flags_choose_between_kernels_and_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    bf16 = {"params_dtype": torch.bfloat16}
    assert select_activation(choice(swiglu=True, **bf16)).plain is swiglu
    assert select_activation(choice(swiglu=True, bias_swiglu_fusion=False, **bf16)) is swiglu
    assert select_activation(choice(squared_relu=True, **bf16)).kernel is squared_relu_triton
    assert select_activation(choice(squared_relu=True, bias_gelu_fusion=False, **bf16)) is squared_relu
    assert select_activation(choice(swiglu=True)) is swiglu  # float64
    assert select_weighted_activation(choice(swiglu=True, **bf16)).kernel.func is weighted_gated_triton
    weighted = select_weighted_activation(choice(squared_relu=True, bias_gelu_fusion=False, **bf16))
    assert weighted(torch.tensor([[3.0]]), torch.tensor([2.0])).item() == 18
