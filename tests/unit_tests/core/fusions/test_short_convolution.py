"""The kernel of the short convolution and SiLU equals its formula, with all gradients, at documents and odd sizes."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions import short_convolution
from megatron.core.fusions.short_convolution import convolution_silu
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled
from tests.unit_tests.core.transformer.ssm.recurrences import convolution_by_token

DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def check(shape, taps, documents, has_bias, dtype, formula, parts=None):
    """``parts``: of heads, three channels apart in the projection that the kernel reads; otherwise one head."""
    length, batch, channels = shape
    parts = parts or (channels,)
    heads = channels // sum(parts)
    sizes = [(length, batch, heads, sum(parts) + 3), (batch, taps - 1, channels), (channels, taps), (channels,)]
    inputs = [filled(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]
    follows = filled(length, batch, dtype=torch.float32, seed=4) < 0.7 if documents else None
    follows = None if follows is None else follows.to(DEVICE)

    def kernel(x, tail, weight, bias):
        return convolution_silu(x[..., :-3], follows, tail, weight, bias, parts)

    def reference(x, tail, weight, bias):
        y = formula(x[..., :-3].flatten(2), follows, tail, weight)
        y = torch.nn.functional.silu(y if bias is None else y + bias).view(length, batch, heads, -1)
        return torch.cat([part.flatten(2) for part in y.split(parts, dim=-1)], dim=-1)

    if not has_bias:
        inputs[3] = None
    assert_equal_to_formula(kernel, reference, inputs, [filled(*shape, dtype=dtype, seed=9)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, taps, documents, has_bias, parts", [
    ((11, 1, 20), 4, True, True, (2, 3)), ((2, 1, 5), 4, False, False, None), ((6, 1, 9), 3, False, True, None),
    ((5, 2, 3), 2, True, True, None), ((3, 1, 21), 4, False, False, (1, 2, 4)),
])  # fmt: skip
def test_the_kernel_equals_the_formula(shape, taps, documents, has_bias, parts, dtype, monkeypatch):
    """Several programs along tokens and channels."""
    monkeypatch.setattr(short_convolution, "_TOKENS", 8)
    monkeypatch.setattr(short_convolution, "_CHANNELS", 16)
    check(shape, taps, documents, has_bias, dtype, convolution_by_token, parts)


@pytest.mark.parametrize("length", [1, 2, 3, 10])
@pytest.mark.parametrize("documents", [False, True])
def test_a_layer_stores_the_same_tail_with_the_kernel(length, documents, monkeypatch):
    from megatron.core.transformer.ssm import convolution

    x, tail, weight = (filled(*size, dtype=torch.float64) for size in ((length, 2, 3), (2, 3, 3), (3, 4)))
    follows = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1, 1]).bool()[:length, None].expand(-1, 2) if documents else None
    arguments = x.unsqueeze(2), follows, tail, weight, None, (3,)
    _, expected = convolution._activated(*arguments)
    monkeypatch.setattr(convolution, "kernels_serve", lambda dtype: True)
    monkeypatch.setattr(convolution, "convolution_silu", lambda *arguments: None)
    monkeypatch.setattr(convolution, "is_right", lambda *arguments: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    output, actual = convolution._activated(*arguments)
    assert output is None and torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_the_kernel_equals_plain_torch_at_real_sizes(documents):
    from megatron.core.transformer.ssm.convolution import causal_convolution

    def plain(*arguments):
        return causal_convolution(*arguments)[0]

    check((4100, 2, 8192 + 512), 4, documents, True, torch.bfloat16, plain, (128, 128, 256))
