"""The kernels' two passes over logits equal plain torch code, which equals torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions import cross_entropy
from megatron.core.fusions.cross_entropy import PLAIN, Softmax, cross_entropy_passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fused(monkeypatch):
    """The kernels, with blocks so small that rows take several; in Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(cross_entropy, "_BLOCK", 16)
    monkeypatch.setattr(cross_entropy, "_NUM_WARPS", 1)
    return cross_entropy.FUSED


def inputs(tokens, width, num_true, dtype, device=DEVICE, scale=4.0):
    generator = torch.Generator().manual_seed(tokens + width)
    logits = (torch.randn(tokens, width, generator=generator) * scale).to(dtype)
    label = torch.randint(-2, width + 2, (tokens,), generator=generator)  # some of other slices
    grad = torch.randn(tokens, generator=generator)
    grad[::3] = 0  # masked tokens
    return logits.to(device), label.to(device), grad.to(device), num_true


def check(passes, tokens, width, num_true, dtype, device=DEVICE):
    logits, label, grad, num_true = inputs(tokens, width, num_true, dtype, device)
    actual, expected = (x.statistics(logits, label, num_true) for x in (passes, PLAIN))
    if num_true:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        assert actual[1:].eq(0).all() and actual[0].lt(-1e38).all()
    softmax = Softmax(expected[0].clamp(min=0), expected[1] + 1, num_true)  # of several slices
    exact = torch.empty_like(logits, dtype=torch.float32)
    PLAIN.gradient(logits.float(), label, softmax, grad, exact)
    passes.gradient(logits, label, softmax, grad, logits)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]  # the interpreter truncates
    torch.testing.assert_close(logits.float(), exact, rtol=tolerance, atol=1e-6)
    assert logits[:, num_true:].eq(0).all() and logits[::3].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, width, num_true", [(5, 37, 37), (3, 48, 33), (1, 7, 1), (2, 16, 0)])
def test_kernels_equal_plain_torch(fused, tokens, width, num_true, dtype):
    check(fused, tokens, width, num_true, dtype)


def test_rows_may_lie_apart_and_the_result_elsewhere(fused):
    logits, label, grad, _ = inputs(4, 40, 37, torch.float32)
    saved, out = logits.clone(), torch.full((4, 40), torch.nan, device=DEVICE)
    view, statistics = logits[:, :37], PLAIN.statistics(saved[:, :37].contiguous(), label, 37)
    torch.testing.assert_close(fused.statistics(view, label, 37), statistics)
    fused.gradient(view, label, Softmax(statistics[0], statistics[1], 37), grad, out[:, :37])
    assert torch.equal(logits, saved) and out[:, 37:].isnan().all() and not out[:, :37].isnan().any()


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_infinities_and_huge_logits(kind, request):
    passes = PLAIN if kind == "plain" else request.getfixturevalue("fused")
    logits = torch.full((3, 40), -torch.inf, device=DEVICE)
    logits[0, 39], logits[1, 3], logits[1, 30], logits[2, 5] = 2.0, 1e30, 1e30, torch.nan
    maximum, total, label = passes.statistics(logits, torch.tensor([39, 3, 0], device=DEVICE), 40).cpu()
    assert maximum[:2].tolist() == [2.0, 1e30 * torch.ones(())] and total[:2].tolist() == [1.0, 2.0]
    assert label[:2].tolist() == maximum[:2].tolist() and total[2].isnan()


def test_plain_passes_are_torchs_cross_entropy():
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    label, grad = torch.randint(0, 9, (5,)), torch.randn(5, dtype=torch.float64)
    expected = F.cross_entropy(logits, label, reduction="none")
    maximum, total, label_logit = PLAIN.statistics(logits.detach(), label, 9)
    torch.testing.assert_close(total.log() + maximum - label_logit, expected.detach())
    out = torch.empty(5, 9, dtype=torch.float64)
    PLAIN.gradient(logits.detach(), label, Softmax(maximum, total, 9), grad, out)
    torch.testing.assert_close(out, torch.autograd.grad(expected, logits, grad)[0])


def test_kernels_serve_gpus_and_16_and_32_bits_only():
    assert cross_entropy_passes(torch.bfloat16, torch.device("cpu")) is PLAIN
    assert cross_entropy_passes(torch.float64, torch.device("cuda")) is PLAIN
    pytest.importorskip("triton")
    assert cross_entropy_passes(torch.bfloat16, torch.device("cuda")) is cross_entropy.FUSED


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "tokens, width, num_true", [(1, 128256, 128256), (257, 50304, 50257), (129, 50257, 50257), (64, 256000, 255990)]
)
def test_kernels_equal_plain_torch_at_real_sizes(tokens, width, num_true, dtype):
    check(cross_entropy.FUSED, tokens, width, num_true, dtype, "cuda")


@pytest.mark.gpu
def test_kernels_give_the_same_bits_every_time():
    logits, label, grad, num_true = inputs(300, 32000, 31999, torch.bfloat16, "cuda")
    results = []
    for _ in range(3):
        statistics, out = cross_entropy.FUSED.statistics(logits, label, num_true), torch.empty_like(logits)
        cross_entropy.FUSED.gradient(logits, label, Softmax(statistics[0], statistics[1], num_true), grad, out)
        results.append((statistics, out))
    for statistics, out in results[1:]:
        assert torch.equal(statistics, results[0][0]) and torch.equal(out, results[0][1])


@pytest.mark.gpu
def test_logits_may_have_more_than_2_to_the_31_elements():
    tokens, width = 16500, 131072
    logits = torch.zeros(tokens, width, dtype=torch.bfloat16, device="cuda")
    logits[-1] = torch.randn(width, device="cuda")
    label = torch.full((tokens,), width - 1, device="cuda")
    expected = F.cross_entropy(logits[-1:].float(), label[-1:])
    maximum, total, label_logit = cross_entropy.FUSED.statistics(logits, label, width)
    torch.testing.assert_close((total.log() + maximum - label_logit)[-1], expected)
    ones = torch.ones(tokens, device="cuda")
    exact = logits[-1].float().softmax(-1)
    cross_entropy.FUSED.gradient(logits, label, Softmax(maximum, total, width), ones, logits)
    exact[-1] -= 1
    torch.testing.assert_close(logits[-1].float(), exact, rtol=4e-3, atol=1e-6)
