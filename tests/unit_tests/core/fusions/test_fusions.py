"""Each fused operation equals its formula, forward and backward."""


import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.model_settings import ModelSettings
from megatron.core.fusions.activations import gated, quick_gelu, select_activation, squared_relu, swiglu
from megatron.core.fusions.rms_norm import rms_norm, rms_norm_reference
from megatron.core.fusions.rope import apply_rotary, rotary_reference

DOUBLE = torch.float64


def both_gradients(function, reference, *inputs):
    """Outputs and input gradients of two functions agree."""
    results = []
    for f in (function, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = f(*leaves)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
        results.append([output.detach(), *[leaf.grad for leaf in leaves]])
    return zip(*results)


@pytest.mark.parametrize("shape", [(3, 2, 8), (1, 1, 2), (5, 3, 14)])
def test_swiglu_equals_its_formula(shape):
    x = torch.randn(shape, dtype=DOUBLE)
    for local, expected in both_gradients(swiglu, lambda t: F.silu(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1], x):
        torch.testing.assert_close(local, expected)


@pytest.mark.parametrize("dtype, tolerance", [(DOUBLE, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(7, 3, 33), (1, 1, 1), (4, 64)])
def test_rms_norm_equals_torch(shape, dtype, tolerance):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    pairs = both_gradients(lambda a, w: rms_norm(a, w, 1e-5), lambda a, w: rms_norm_reference(a, w, 1e-5), x, weight)
    for local, expected in pairs:
        assert local.dtype == dtype
        torch.testing.assert_close(local, expected, rtol=tolerance, atol=tolerance * 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [2, 6, 8])
def test_rotary_equals_its_reference(interleaved, width):
    angles = torch.randn(5, 1, 1, width // 2, dtype=DOUBLE)
    wide = torch.randn(5, 2, 3, 11, dtype=DOUBLE)
    strided = wide[..., 2:10]  # a view, as a slice of the joint projection is
    pairs = both_gradients(
        lambda x: apply_rotary(x, angles.cos(), angles.sin(), interleaved),
        lambda x: rotary_reference(x, angles.cos(), angles.sin(), interleaved),
        strided,
    )
    for local, expected in pairs:
        torch.testing.assert_close(local, expected)


def choice(params_dtype=DOUBLE, **overrides):
    config = ModelSettings(**overrides)
    config.params_dtype = params_dtype
    return config


def test_gelu_is_approximate_exactly_where_bias_and_gelu_are_fused():
    x = torch.linspace(-3, 3, 20, dtype=DOUBLE)
    assert torch.equal(select_activation(choice())(x), F.gelu(x, approximate="tanh"))
    assert torch.equal(select_activation(choice(bias_gelu_fusion=False))(x), F.gelu(x))
    assert torch.equal(select_activation(choice(add_bias_linear=False))(x), F.gelu(x))
    assert torch.equal(select_activation(choice(exact_gelu=True))(x), F.gelu(x))


def test_the_other_activations():
    x = torch.linspace(-3, 3, 20, dtype=DOUBLE)
    gate, up = x[:10], x[10:]
    assert select_activation(choice(squared_relu=True)) is squared_relu
    assert torch.equal(squared_relu(x), x.clamp(min=0) ** 2)
    assert torch.equal(select_activation(choice(relu=True))(x), x.clamp(min=0))
    assert select_activation(choice(swiglu=True)) is swiglu
    torch.testing.assert_close(select_activation(choice(quick_geglu=True))(x), gate * torch.sigmoid(1.702 * gate) * up)
    torch.testing.assert_close(select_activation(choice(geglu=True))(x), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(select_activation(choice(geglu=True, exact_gelu=True))(x), F.gelu(gate) * up)
    clamped = select_activation(choice(swiglu=True, activation_func_clamp_value=1.0, glu_linear_offset=1.0))(x)
    torch.testing.assert_close(clamped, F.silu(gate.clamp(max=1.0)) * (up.clamp(-1.0, 1.0) + 1.0))
    torch.testing.assert_close(gated(x, activation=quick_gelu), quick_gelu(gate) * up)
