"""Norms that take the residual stream along equal their formulas, forward and backward."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.residual_norm import NormTraits, choose_normalize, normalize_plain, normalize_triton
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled, results


def exact(x, branch, weight, bias, traits):
    stream = x if branch is None else x + branch
    centred = stream - stream.mean(-1, keepdim=True) if traits.centred else stream
    normed = centred / (centred.square().mean(-1, keepdim=True) + traits.eps).sqrt() * (weight + traits.offset)
    return stream, normed if bias is None else normed + bias


def check(shape, dtype, traits, *, adds, skips):
    width = shape[-1]
    x, branch, grad, skip = (filled(*shape, dtype=dtype, seed=seed) for seed in range(4))
    # what is normalized is the rounded sum, which the formula does not know: eighths add up without rounding
    x, branch = (part.mul(8).round().div(8) for part in (x, branch))
    weight, bias = filled(width, dtype=dtype, seed=4), filled(width, dtype=dtype, seed=5)
    inputs = x, branch if adds else None, weight, bias if traits.centred else None
    upstream = skip if skips else None, grad
    assert_equal_to_formula(
        lambda *leaves: normalize_triton(*leaves, traits), lambda *leaves: exact(*leaves, traits), inputs, upstream
    )


RMS, LAYER, CENTRED_WEIGHT = (NormTraits(1e-5, False, 0.0), NormTraits(1e-5, True, 0.0), NormTraits(1e-5, False, 1.0))
FORMS = {"alone": (False, False), "with stream": (False, True), "with branch": (True, True), "end": (True, False)}


@pytest.mark.parametrize(
    "form, shape, dtype, traits",
    [
        ("with branch", (5, 3, 33), torch.float32, LAYER), ("end", (1, 2, 2), torch.float32, RMS),
        ("with stream", (7, 130), torch.float32, CENTRED_WEIGHT), ("with branch", (3, 1, 1100), torch.bfloat16, RMS),
        ("alone", (2, 64), torch.bfloat16, LAYER), ("with stream", (1030, 3), torch.float32, RMS),
    ],
)  # fmt: skip
def test_kernels_equal_the_formula(form, shape, dtype, traits):
    adds, skips = FORMS[form]
    check(shape, dtype, traits, adds=adds, skips=skips)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form, shape, traits",
    [
        ("with branch", (8192, 1, 4096), RMS), ("with stream", (8192, 1, 4096), RMS), ("alone", (1023, 3, 128), RMS),
        ("with branch", (777, 2, 5120), LAYER), ("end", (5, 16384), LAYER), ("alone", (1, 1, 7), LAYER),
        ("with stream", (100, 1000), CENTRED_WEIGHT),
    ],
)  # fmt: skip
def test_kernels_equal_the_formula_at_real_sizes(form, shape, dtype, traits):
    adds, skips = FORMS[form]
    check(shape, dtype, traits, adds=adds, skips=skips)


@pytest.mark.parametrize("traits", [RMS, LAYER])
def test_plain_torch_equals_the_formula(traits):
    bias = filled(6, dtype=torch.float64) if traits.centred else None
    inputs = *filled(2, 4, 3, 6, dtype=torch.float64), filled(6, dtype=torch.float64, seed=2), bias
    pairs = (
        results(lambda *leaves, f=f: f(*leaves, traits), inputs, filled(2, 4, 3, 6, dtype=torch.float64), torch.float64)
        for f in (normalize_plain, exact)
    )
    for mine, expected in zip(*pairs):
        torch.testing.assert_close(mine, expected)


def test_16_bit_branches_and_weights_join_an_fp32_stream():
    wide, branch, weight = (filled(3, 40, dtype=torch.float32), filled(3, 40, dtype=torch.bfloat16, seed=1),
                            filled(40, dtype=torch.bfloat16, seed=2))  # fmt: skip
    actual = []
    for normalize in (normalize_triton, normalize_plain):
        leaves = [x.to(DEVICE, copy=True).requires_grad_() for x in (wide, branch, weight)]
        stream, normed = normalize(*leaves[:2], leaves[2], None, RMS)
        (stream.sum() + normed.float().square().sum()).backward()
        assert (stream.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        actual.append([stream.detach(), normed.detach(), *(x.grad for x in leaves)])
    for mine, expected in zip(*actual):
        assert mine.dtype == expected.dtype
        torch.testing.assert_close(mine.float(), expected.float(), rtol=3e-2, atol=3e-2)


def test_a_stream_that_nothing_is_added_to_is_not_copied():
    x = filled(2, 8, dtype=torch.float32).to(DEVICE).requires_grad_()
    weight = torch.ones(8, device=DEVICE)
    assert normalize_triton(x, None, weight, None, RMS)[0].data_ptr() == x.data_ptr()


def test_no_rows_have_a_gradient_of_zero():
    x, weight = torch.empty(0, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE, requires_grad=True)
    normalize_triton(x, None, weight, None, RMS)[1].sum().backward()
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros(8, device=DEVICE))


def test_rows_that_no_program_holds_and_unwanted_kernels_are_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_normalize(torch.bfloat16, 4096).kernel is normalize_triton
    assert choose_normalize(torch.bfloat16, 4096, False) is normalize_plain
    assert choose_normalize(torch.bfloat16, 40960) is normalize_plain
    assert choose_normalize(torch.float64, 4096) is normalize_plain
