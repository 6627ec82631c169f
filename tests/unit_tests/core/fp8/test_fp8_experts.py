"""Experts in fp8: their grouped products equal the reference, for any number of rows per expert."""

import pytest
import torch

from megatron.core.fp8.experts import ExpertGemms, ExpertProducts
from megatron.core.fp8.scales import ScaleHistory
from megatron.core.fp8.storage import Epoch
from megatron.core.fusions import fp8_cast
from megatron.core.fusions.fp8_cast import E4M3, E5M2, Scale, amax_parts, cast_groups, columns_of_groups, new_amax
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.gemms import accumulate_product
from megatron.core.tensor_parallel.grouped_linear import LOOP, _GroupedLinear, row_ranges
from megatron.core.tensor_parallel.linear import LinearTraits
from tests.reference import fp8 as reference
from tests.test_utils.kernels import DEVICE, filled
from tests.unit_tests.core.fp8.test_fp8_gemms import settings

COUNTS = {"uneven": [5, 0, 130, 17], "even": [16, 16], "none": [0, 0], "one-expert": [256], "some-of-the-rows": [3, 40]}
AFTER_THE_END = 7
"""Rows of no expert."""


def build(recipe, weight, *, gradients=E5M2, weight_gradients=True):
    """Products of experts with the stacked weight [g, o, i]."""
    history = ScaleHistory(2, uses_maximum=True, margin=1) if recipe == "delayed" else None
    casts = ExpertGemms(
        [weight.flatten(0, 1)], Epoch(), gradients, accumulate_product, weight_gradients=weight_gradients, groups=(),
        weight_groups=(), history=history, name="layer", num_experts=len(weight),
    )  # fmt: skip
    return ExpertProducts(LOOP, casts)


def run(products, x, weight, grad, ends):
    """Y, dX and dW [g, o, i] of the rows ``x``, by the autograd function of expert layers."""
    x, matrix = x.clone().requires_grad_(), weight.flatten(0, 1).clone().requires_grad_()
    products.casts.weights = [matrix]
    y = _GroupedLinear.apply(x, matrix, ends, LinearTraits(Group("etp")), products, None, None, True)
    y.backward(grad)
    return y.detach(), x.grad, matrix.grad.view_as(weight)


def spread(x, ranges):
    """Rows as the reference takes them, [g, 1, t, i], with zeros for other experts' rows."""
    full = x.new_zeros(len(ranges), 1, len(x), x.shape[1])
    for group, rows in enumerate(ranges):
        full[group, 0, rows] = x[rows]
    return full


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("weight_gradients", [True, False], ids=["wgrad", "no-wgrad"])
@pytest.mark.parametrize("gradients", [E5M2, E4M3], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_the_three_products_equal_the_reference(recipe, gradients, weight_gradients, counts):
    """In fp64, over three steps. Rows of no expert hold larger values, which must not change the scales."""
    weight = torch.stack([filled(32, 48, dtype=torch.float64, seed=seed) * 10.0**-seed for seed in range(len(counts))])
    products = build(recipe, weight, gradients=gradients, weight_gradients=weight_gradients)
    c = settings(recipe, fp8_format="hybrid" if gradients == E5M2 else "e4m3", no_fp8_wgrad=not weight_gradients)
    ends, histories = torch.tensor(counts).cumsum(0).int(), {}
    used = int(ends[-1])
    for step in range(3):
        x, grad = (
            filled(used + AFTER_THE_END, size, dtype=torch.float64, seed=7 + step + size) * 3.0**step
            for size in (48, 32)
        )
        x[used:] *= 1e3
        grad[used:] *= 1e3
        y, dx, dw = run(products, x, weight, grad, ends)
        ranges = row_ranges(ends)
        leaves = [item.requires_grad_() for item in (spread(x, ranges), weight.clone())]
        expected = reference.expert_linear(c, *leaves, "layer", histories, 1, True)
        expected.backward(spread(grad, ranges))
        actual = spread(y, ranges), spread(dx, ranges), dw
        for one, other in zip(actual, (expected.detach(), leaves[0].grad, leaves[1].grad)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13 * float(other.abs().max()) + 1e-300)
        for history in histories.values():
            history.end_step(c)
        if recipe == "delayed":
            products.casts.history.update(())


def test_backward_keeps_one_byte_per_element_of_the_rows():
    ends = torch.tensor([128, 256], dtype=torch.int32)
    x, weight = filled(256, 64, dtype=torch.bfloat16), filled(2, 32, 64, dtype=torch.bfloat16)
    packed = build("tensorwise", weight).pack_input(x, ends, for_backward=True)
    assert packed.second.data.dtype == E4M3 and packed.second.data.shape == (256, 64)
    evaluated = build("tensorwise", weight).pack_input(x, ends, for_backward=False)
    assert evaluated.second is evaluated.first


def test_delayed_scales_are_used_once_input_and_gradient_have_one():
    ends = torch.tensor([16, 32], dtype=torch.int32)
    x, weight, grad = (filled(*shape, dtype=torch.float64) for shape in ((32, 48), (2, 16, 48), (32, 16)))
    products = build("delayed", weight)
    first = run(products, x, weight, grad, ends)
    plain = LOOP.output(x, weight, ends)
    assert torch.equal(first[0], plain)
    products.casts.history.update(())
    assert not torch.equal(run(products, x, weight, grad, ends)[0], plain)


def test_transposed_copies_made_at_each_use_give_the_same_bits():
    ends = torch.tensor([16, 32], dtype=torch.int32)
    x, weight, grad = (filled(*shape, dtype=torch.bfloat16) for shape in ((32, 48), (2, 16, 48), (32, 16)))
    kept, made = (build("tensorwise", weight) for _ in range(2))
    made.casts.keeps_transposed = False
    assert all(map(torch.equal, run(kept, x, weight, grad, ends), run(made, x, weight, grad, ends)))
    assert all(copies.columns is None for copies in made.casts._copies.values())


def test_weights_are_cast_once_per_step_with_a_scale_each():
    weight = torch.stack([filled(32, 48, dtype=torch.bfloat16) * scale for scale in (1.0, 2.0**-7)])
    products = build("tensorwise", weight)
    stacked = products.casts.weights[0].view(2, 32, 48)
    first, second = (products.casts.weight_copies(item, columns=False) for item in stacked)
    assert torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
    assert second.scale == first.scale * 2.0**-7
    assert products.casts.weight_copies(stacked[1], columns=False).data is second.data
    products.casts.epoch.advance()
    assert products.casts.weight_copies(stacked[1], columns=False).data is not second.data


# ---- casts


def check_casts(x, counts, dtype):
    numbers = torch.tensor(counts).cumsum(0).int()
    ranges, used = row_ranges(numbers), int(numbers[-1])
    to = reference.E4M3 if dtype == E4M3 else reference.E5M2
    passed = Scale(*torch.tensor([[2.0], [0.5]], device=x.device))
    for scale in (amax_parts(x[:used]), passed):
        factor = scale.factor.double() if isinstance(scale, Scale) else None
        noted = new_amax(x.device) if scale is passed else None
        copies = cast_groups(x, dtype, scale, ranges, rows=True, columns=True, noted=noted)
        assert noted is None or noted.max() == amax_parts(x[:used]).view(torch.int32).max()
        expected = reference.per_tensor(x[:used].double(), to, factor)
        codes = reference.codes(expected.grid, to).to(x.device)
        assert torch.equal(copies.rows.data[:used].view(torch.uint8), codes)
        if used:
            assert torch.equal(copies.columns.scale.double(), expected.scale)
        for rows, columns in zip(ranges, columns_of_groups(copies.columns.data, ranges)):
            size, columns = rows.stop - rows.start, columns.view(torch.uint8)
            assert columns.is_contiguous() and columns.shape == (x.shape[1], -(-size // 128) * 128)
            assert torch.equal(columns[:, :size], codes[rows].T) and not columns[:, size:].any()
        single = cast_groups(x, dtype, scale, ranges, rows=False, columns=True)
        bits = (item.columns.data.view(torch.uint8) for item in (single, copies))
        assert single.rows is None and torch.equal(*bits)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_groups_are_cast_with_one_scale_and_transposed_separately(counts, dtype):
    check_casts(filled(sum(counts) + AFTER_THE_END, 48, dtype=torch.float32), counts, dtype)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_interpreted_kernels_cast_groups(counts, monkeypatch):
    """Powers of two, which the interpreter rounds correctly."""
    monkeypatch.setattr(fp8_cast, "_casts_on_gpu", lambda x: True)
    exponents = torch.randint(-5, 3, (sum(counts) + AFTER_THE_END, 80), generator=torch.Generator().manual_seed(0))
    x = torch.exp2(exponents.float())
    check_casts(x.to(DEVICE, torch.bfloat16), counts, E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_compiled_kernels_cast_groups(counts, dtype):
    check_casts(filled(sum(counts) + AFTER_THE_END, 144, dtype=torch.bfloat16).cuda(), counts, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("total", [None, torch.float32, torch.bfloat16], ids=["new", "fp32", "bf16"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("gradients", [E5M2, E4M3], ids=["hybrid", "e4m3"])
def test_products_on_a_gpu_equal_those_of_a_cpu(gradients, counts, total):
    """Bytes are equal; sums differ by their order, and Y by 14-bit sums."""
    ends = torch.tensor(counts).cumsum(0).int()
    used = int(ends[-1])
    x, grad = (filled(used + AFTER_THE_END, size, dtype=torch.bfloat16) for size in (256, 144))
    weight = filled(len(counts), 144, 256, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        x, grad, weight, ends = (item.to(device) for item in (x, grad, weight, ends))
        products = build("tensorwise", weight, gradients=gradients)
        products.casts.weights = [weight.view(-1, 256)]
        inputs = products.pack_input(x, ends, for_backward=True)
        gradient = products.pack_gradient(grad, ends, for_input=True, for_weight=True)
        sums = None if total is None else torch.ones(weight.shape, dtype=total, device=device)
        y, dx = products.output(inputs.first, weight, ends), products.input_gradient(gradient.first, weight, ends)
        results.append((y[:used], dx[:used], products.weight_gradient(gradient.second, inputs.second, ends, sums)))
    for one, other in zip(*results):
        largest = float(one.abs().max()) if one.numel() else 0.0
        torch.testing.assert_close(other.cpu().float(), one.float(), rtol=1e-2, atol=1e-2 * largest)
