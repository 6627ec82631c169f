"""Linear layers in fp8: their three products equal the reference, and weights are cast once per step."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.fp8.gemms import BlockwiseGemms, PerTensorGemms
from megatron.core.fp8.scales import ScaleHistory
from megatron.core.fp8.storage import Epoch, GatheredCopy
from megatron.core.fusions.fp8_cast import E4M3, E5M2
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.gemms import accumulate_product
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from tests.reference import fp8 as reference
from tests.test_utils.kernels import filled

RECIPES = ["tensorwise", "delayed", "blockwise"]


def build_gemms(recipe, weights, *, gradients=E5M2, weight_gradients=True):
    arguments = weights, Epoch(), gradients, accumulate_product
    if recipe == "blockwise":
        return BlockwiseGemms(*arguments, weight_gradients=weight_gradients)
    history = ScaleHistory(2, uses_maximum=True, margin=1) if recipe == "delayed" else None
    return PerTensorGemms(
        *arguments, weight_gradients=weight_gradients, groups=(), weight_groups=(), history=history, name="layer"
    )


def products(gemms, x, weight, grad, bias=None):
    """Y, dX, dW and db by the autograd function of linear layers."""
    x, weight = (item.clone().requires_grad_() for item in (x, weight))
    bias = None if bias is None else bias.clone().requires_grad_()
    gemms.weights = [weight]
    y = parallel_linear(x, weight, bias, LinearTraits(Group("tp"), gemms=gemms))
    y.backward(grad)
    return y.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def settings(recipe, **changes):
    values = {"fp8_format": "hybrid", "fp8_recipe": recipe, "no_fp8_wgrad": False, "fp8_amax_history_len": 2,
              "fp8_amax_compute_algo": "max", "fp8_margin": 1}  # fmt: skip
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize("weight_gradients", [True, False], ids=["wgrad", "no-wgrad"])
@pytest.mark.parametrize("gradients", [E5M2, E4M3], ids=["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens, rows, columns", [(48, 32, 16), (256, 144, 130)])
def test_the_three_products_equal_the_reference(recipe, gradients, weight_gradients, tokens, rows, columns):
    """In fp64, over three steps: delayed scales follow from earlier steps."""
    weight = filled(rows, columns, dtype=torch.float64) * 0.1
    gemms = build_gemms(recipe, [weight], gradients=gradients, weight_gradients=weight_gradients)
    c = settings(recipe, fp8_format="hybrid" if gradients == E5M2 else "e4m3", no_fp8_wgrad=not weight_gradients)
    histories = {}
    for step in range(3):
        x, grad = (
            filled(tokens, size, dtype=torch.float64, seed=7 + step + size) * 3.0**step for size in (columns, rows)
        )
        actual = products(gemms, x, weight, grad)
        leaves = [item.clone().requires_grad_() for item in (x.view(1, tokens, columns), weight)]
        y = reference.linear(c, *leaves, "layer", histories, 1, True)
        y.backward(grad.view(1, tokens, rows))
        expected = y.detach()[0], leaves[0].grad[0], leaves[1].grad
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13 * other.abs().max().item())
        for history in histories.values():
            history.end_step(c)
        if recipe == "delayed":
            gemms.history.update(())


BANDS = {
    ("tensorwise", E4M3): (0.0377, 0.0377, 0.0377), ("tensorwise", E5M2): (0.0377, 0.06, 0.06),
    ("blockwise", E4M3): (0.0377, 0.0377, 0.0377), ("blockwise", E5M2): (0.0377, 0.06, 0.06),
}  # fmt: skip
"""Error of Y, dX, dW relative to their norm: formats with 3 and 2 mantissa bits."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recipe, gradients", BANDS)
def test_errors_of_products_of_normal_numbers(recipe, gradients, dtype):
    x, weight, grad = (
        filled(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(256, 384), (128, 384), (256, 128)])
    )
    result = products(build_gemms(recipe, [weight], gradients=gradients), x, weight, grad)
    exact = x.double() @ weight.double().t(), grad.double() @ weight.double(), grad.double().t() @ x.double()
    for one, other, band in zip(result, exact, BANDS[recipe, gradients]):
        error = ((one.double() - other).norm() / other.norm()).item()
        assert band * 0.9 < error < band * 1.1, f"{error:.4f}, not {band}"


def test_blocks_keep_small_values_next_to_outliers():
    """One value of 10^6 makes 1 vanish with one scale per tensor, and only in its block with block scales."""
    x, weight = torch.ones(128, 256, dtype=torch.float64), torch.ones(128, 256, dtype=torch.float64)
    x[5, 7] = 1e6
    grad = torch.ones(128, 128, dtype=torch.float64)
    lost, saved = (
        products(build_gemms(recipe, [weight]), x, weight, grad)[0] for recipe in ("tensorwise", "blockwise")
    )
    assert lost[6].abs().max() == 0 and torch.equal(saved[6], torch.full((128,), 256.0, dtype=torch.float64))


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_fp8_weight_gradients_dw_is_exact(recipe):
    x, weight, grad = (filled(128, 128, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    _, dx, dw, db = products(build_gemms(recipe, [weight], weight_gradients=False), x, weight, grad, grad[0])
    assert torch.equal(dw, grad.t().matmul(x)) and torch.equal(db, grad.sum(0, dtype=torch.float32).bfloat16())
    assert not torch.equal(dx, grad.matmul(weight))


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_keeps_one_byte_per_element_of_the_input(recipe):
    x, weight = (filled(128, 256, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (0, 1))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda entry: saved.append(entry) or entry, lambda entry: entry):
        parallel_linear(x, weight, None, LinearTraits(Group("tp"), gemms=build_gemms(recipe, [weight])))
    rest = [item for item in saved if item.data_ptr() != weight.data_ptr()]
    assert sum(other.numel() * other.element_size() for other in rest) <= x.numel() * 1.05
    assert rest[0].dtype == E4M3 and rest[0].shape == (256, 128)


def test_a_frozen_weight_or_input_costs_no_copy():
    x, weight = (filled(16, 32, dtype=torch.float32, seed=seed) for seed in (0, 1))
    gemms = build_gemms("tensorwise", [weight])
    evaluated = gemms.pack_input(x, for_backward=False)
    assert evaluated.second is evaluated.first
    operands = gemms.pack_gradient(x[:, :16], for_input=False, for_weight=True)
    assert isinstance(operands.first, torch.Tensor) and operands.second.data.shape == (16, 16)
    plain = gemms.pack_gradient(x[:, :16], for_input=False, for_weight=False)
    assert plain.first is plain.second


# ---- copies of weights


class Counting(PerTensorGemms):
    """Counts casts of weights."""

    casts = 0

    def cast_weights(self, weights, *, rows, columns):
        self.casts += 1
        return super().cast_weights(weights, rows=rows, columns=columns)


def counting(*weights):
    epoch = Epoch()
    return Counting(weights, epoch, E5M2, accumulate_product, groups=(), weight_groups=())


def value(gemms, weight, *, columns=False):
    copy = gemms.weight_copies(weight, columns=columns)
    wide = copy.data.double() * copy.scale.double()
    return wide.t() if columns else wide


def test_weights_are_cast_once_per_step_for_all_micro_batches():
    weight, other = (filled(16, 32, dtype=torch.float32, seed=seed) for seed in (0, 1))
    gemms = counting(weight, other)
    for _ in range(3):
        for x in (weight, other):
            assert torch.equal(value(gemms, x), value(gemms, x, columns=True))
    assert gemms.casts == 1
    gemms.epoch.advance()
    assert value(gemms, weight, columns=True) is not None and gemms.casts == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed_copies_made_at_each_use_give_the_same_bits(recipe):
    x, weight, grad = (
        filled(*shape, dtype=torch.bfloat16, seed=seed) for seed, shape in enumerate([(48, 130), (32, 130), (48, 32)])
    )
    results = []
    for keeps_transposed in (True, False):
        gemms = build_gemms(recipe, [weight])
        gemms.keeps_transposed = keeps_transposed
        results.append(products(gemms, x, weight, grad)[:3])
        assert [copies.columns is not None for copies in gemms._copies.values()] == [keeps_transposed]
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("square", [True, False], ids=["blocks", "tensor"])
def test_gathered_weights_are_transposed_at_each_use(square):
    weight = filled(144, 130, dtype=torch.bfloat16)
    weight.fp8_copy = copy = GatheredCopy((144, 130), square=square, groups=())
    copy.set_scales(copy.amax(weight.view(-1), 0))
    copy.payload = copy.cast(weight.view(-1), 0).view(144, 130)
    kept, made = (build_gemms("blockwise" if square else "tensorwise", [weight]) for _ in range(2))
    made.keeps_transposed = False
    for gemms in (kept, made):
        gemms.found = gemms.weight_copies(weight, columns=True)
    assert torch.equal(kept.found.data.float(), made.found.data.float())
    assert torch.equal(made.found.data.float(), copy.quantized.data.float().t())
    assert torch.equal(kept.found.scale, made.found.scale)
    assert made.weight_copies(weight, columns=True).data is not made.found.data


def test_weights_of_one_layer_share_a_scale():
    weight, other = torch.ones(16, 32), torch.full((16, 32), 7.0)
    gemms = counting(weight, other)
    assert gemms.weight_copies(weight, columns=False).scale.item() == pytest.approx(7 / 448)


@pytest.mark.parametrize("change", ["in_place", "load", "other_memory", "optimizer"])
def test_changed_weights_are_cast_again_within_a_step(change):
    module = torch.nn.Linear(32, 16, bias=False)
    gemms = counting(module.weight)
    before = value(gemms, module.weight)
    with torch.no_grad():
        if change == "in_place":
            module.weight.mul_(2)
        elif change == "load":
            module.load_state_dict({"weight": 2 * module.weight})
        elif change == "other_memory":
            module.weight.data = 2 * module.weight
        else:
            module.weight.grad = -module.weight.clone()
            torch.optim.SGD([module.weight], lr=1.0).step()
    assert torch.equal(value(gemms, module.weight), 2 * before) and gemms.casts == 2


def test_an_update_that_leaves_no_trace_is_seen_after_the_step():
    """Kernels of the optimizer write to memory that torch does not watch."""
    weight = filled(16, 32, dtype=torch.float32)
    gemms = counting(weight)
    before = value(gemms, weight)
    weight.data.mul_(2)
    gemms.epoch.advance()
    assert torch.equal(value(gemms, weight), 2 * before)


def test_under_fsdp_no_copy_lives():
    """Memory of gathered weights is used again: the address, or a copy, would be of another layer."""
    weight = filled(16, 32, dtype=torch.float32)
    gemms = counting(weight)
    gemms.keeps_weights, gemms.weights = False, ()
    first = value(gemms, weight)
    weight.data.mul_(2)
    assert torch.equal(value(gemms, weight), 2 * first) and gemms.casts == 2 and not gemms._copies
    only = []
    gemms.cast_weights = lambda weights, *, rows, columns: (
        only.append((rows, columns)) or Counting.cast_weights(gemms, weights, rows=rows, columns=columns)
    )
    value(gemms, weight), value(gemms, weight, columns=True)
    assert only == [(True, False), (False, True)]


# ---- values that are not finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bad_values_reach_the_output_and_do_not_stay(recipe, bad):
    """The loss or gradient becomes NaN, which the run's checks find; the step after has clean scales."""
    x, weight, grad = (filled(128, 128, dtype=torch.float32, seed=seed) for seed in range(3))
    clean, dirty = (build_gemms(recipe, [weight]) for _ in range(2))
    for gemms, value in ((clean, 1.0), (dirty, bad)):
        for step in range(3):
            one = x.clone()
            one[3, 4] = value if step == 1 else 1.0
            result = products(gemms, one, weight, grad)
            if step == 1:
                assert result[0][3].isfinite().all() == (value == 1.0)
            if recipe == "delayed":
                gemms.history.update(())
        gemms.found = result
    for one, other in zip(clean.found[:3], dirty.found[:3]):
        assert one.isfinite().all() and torch.equal(one, other)


# ---- programs


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shards", [True, False], ids=["zero", "replicated"])
def test_a_program_without_finalize_model_grads_reads_updated_weights(bf16, shards):
    """Updates of flat buffers are invisible to torch; the optimizer marks the weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.fp8.recipe import fp8_gemms
    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from tests.unit_tests.core.fp8.test_fp8_recipe import build

    model = build(
        num_layers=1, fp8_recipe="tensorwise", bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32
    )
    settings = DistributedDataParallelConfig(use_distributed_optimizer=shards)
    ddp = DistributedDataParallel(None, settings, model, groups=SINGLE_PROCESS)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=bf16), [ddp], groups=SINGLE_PROCESS)
    ids = torch.arange(16)[None]
    for _ in range(2):
        optimizer.zero_grad()
        ddp(ids, ids, labels=ids).float().sum().backward()
        ddp.finish_grad_sync()
        assert optimizer.step()[0]
        for gemms in fp8_gemms(model):
            weight = gemms.weights[0]
            fresh = gemms.cast_weights([weight.detach()], rows=True, columns=False)[0].rows
            assert torch.equal(gemms.weight_copies(weight, columns=False).data.float(), fresh.data.float())
