"""Gated activations that write fp8 copies: the bytes and amaxes of the activation and a separate cast."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fp8.gemms import PerTensorGemms, targets_between
from megatron.core.fp8.scales import ScaleHistory
from megatron.core.fp8.storage import Epoch
from megatron.core.fusions import activations, fp8_cast
from megatron.core.fusions.activation_kernels import GateTraits, gated_triton
from megatron.core.fusions.fp8_cast import E4M3, E5M2, CastTarget, Scale, carried, cast_tensor
from megatron.core.fusions.gated_cast import gated_cast_triton
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.gemms import accumulate_product
from megatron.core.tensor_parallel.linear import LinearTraits, parallel_linear
from tests.test_utils.kernels import DEVICE, filled

pytestmark = pytest.mark.skipif(fp8_cast.triton is None, reason="needs Triton")
GATES = {
    "swiglu": GateTraits(1.0), "clamped": GateTraits(1.702, clamp=0.75, offset=1.0),
}  # fmt: skip


def target(dtype, factor):
    factor = torch.tensor([factor], device=DEVICE)
    return CastTarget(dtype, Scale(factor, 1 / factor), fp8_cast.new_amax(factor.device))


def seen(*targets):
    return [item.noted.view(torch.float32).max().item() for item in targets]


def different_bytes(actual, expected):
    assert actual.data.dtype == expected.data.dtype and actual.data.is_contiguous()
    assert actual.data.shape == expected.data.shape and torch.equal(actual.scale, expected.scale)
    return (actual.data.view(torch.uint8) != expected.data.view(torch.uint8)).float().mean().item()


@pytest.mark.parametrize("traits", GATES.values(), ids=GATES)
@pytest.mark.parametrize("rows, width", [(1, 1), (66, 48), (37, 70), (64, 64)])
def test_copies_have_the_bytes_of_separate_casts(rows, width, traits, monkeypatch):
    """Compilers may contract products differently in the two kernels: a few rounded ties differ on a GPU, none in the
    interpreter."""
    monkeypatch.setattr(fp8_cast, "_casts_on_gpu", lambda x: True)
    x = filled(rows, 1, 2 * width, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
    grad = filled(rows, 1, width, dtype=torch.bfloat16, seed=1).to(DEVICE)
    plain = x.detach().clone().requires_grad_()
    y = gated_triton(plain, traits)
    y.backward(grad)
    output, gradient = target(E4M3, 16.0), target(E5M2, 64.0)
    carrier = gated_cast_triton(x, output, gradient, traits=traits)
    arrived = []
    x.register_hook(lambda item: arrived.append(carried(item)))
    carrier.backward(grad)
    assert carrier.shape == y.shape and carrier.isnan().all()
    assert seen(output, gradient) == pytest.approx([y.abs().max().item(), plain.grad.abs().max().item()], rel=1e-2)
    pairs = [(carried(carrier), y, output), (arrived[0], plain.grad, gradient)]
    for copies, values, cast in pairs:
        expected = cast_tensor(values, cast.dtype, cast.scale, columns=True)
        for actual, other in zip(copies, expected, strict=True):
            assert different_bytes(actual, other) <= (0.002 if DEVICE == "cuda" else 0)


def test_without_gradients_there_is_one_copy_and_no_record():
    targets = target(E4M3, 1.0), target(E5M2, 1.0)
    with torch.no_grad():
        carrier = gated_cast_triton(filled(5, 64, dtype=torch.bfloat16).to(DEVICE), *targets, traits=GATES["swiglu"])
    assert carried(carrier).columns is None and seen(*targets) == [0, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("half", [0, 1])
def test_bad_values_are_observed(half, value):
    x = filled(8, 64, dtype=torch.bfloat16)
    x[3, 5 + 32 * half] = value
    x = x.to(DEVICE).requires_grad_()
    targets = target(E4M3, 1.0), target(E5M2, 1.0)
    gated_cast_triton(x, *targets, traits=GATES["swiglu"]).backward(
        torch.ones(8, 32, dtype=torch.bfloat16, device=DEVICE)
    )
    bits = torch.stack([item.noted.max() for item in targets])  # a maximum of numbers would drop NaN
    assert not any(bits.view(torch.float32).isfinite())


def test_targets_exist_once_delayed_scales_are_known():
    weight = filled(32, 16, dtype=torch.bfloat16)
    device = weight.device

    def build(**options):
        arguments = [weight], Epoch(), E5M2, accumulate_product
        return PerTensorGemms(*arguments, groups=(), weight_groups=(), name="layer", **options)

    history = ScaleHistory(1, uses_maximum=True, margin=0)
    gemms = build(history=history)
    assert gemms.input_target(device) is None and build().input_target(device) is None
    gemms.pack_input(filled(16, 16, dtype=torch.bfloat16), for_backward=True)
    history.update(())
    result = gemms.input_target(device)
    assert result.dtype == E4M3 and gemms.gradient_target(device) is None
    result.noted[3] = torch.tensor(7.0).view(torch.int32)
    assert history.magnitudes().tolist() == [7.0, 0.0]
    gemms.weight_gradients = False
    assert gemms.input_target(device) is None


@pytest.mark.parametrize("settings, expected", [
    ({}, True), ({"fp8_recipe": "tensorwise"}, False), ({"fp8": None}, False), ({"add_bias_linear": True}, False),
    ({"gated_linear_unit": False}, False), ({"bias_swiglu_fusion": False}, False), ({"bf16": False}, False),
])  # fmt: skip
def test_selection(settings, expected, monkeypatch):
    from megatron.core.config.transformer_config import TransformerConfig

    monkeypatch.setattr(activations, "kernels_serve", lambda dtype, requested: requested)
    values = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "fp8": "hybrid", "bf16": True,
              "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}  # fmt: skip
    values |= settings
    if not values["gated_linear_unit"]:
        values["activation_func"] = F.gelu
    assert (activations.select_gated_cast(TransformerConfig(**values)) is not None) == expected


def feed_forward(x, grad, weights, *, fused, observed):
    """Three steps of fc2(swiglu(fc1(x))) in fp8 with delayed scales, which the first step finds: results of the last
    step, and whether its activation carried copies."""
    history = ScaleHistory(2, uses_maximum=True, margin=0)
    layers = []
    for name, weight in zip(("fc1", "fc2"), weights):
        layer, leaf = torch.nn.Module(), weight.clone().requires_grad_()
        gemms = PerTensorGemms(
            [leaf], Epoch(), E5M2, accumulate_product, groups=(), weight_groups=(), history=history, name=name
        )
        layer.traits, layer.leaf = LinearTraits(Group("tp"), gemms=gemms), leaf
        layers.append(layer)
    fc1, fc2 = layers
    for _ in range(3):
        x = x.detach().requires_grad_()
        fc1.leaf.grad = fc2.leaf.grad = None
        intermediate = parallel_linear(x, fc1.leaf, None, fc1.traits)
        targets = targets_between(fc1, fc2, x.device) if fused else None
        traits = GATES["swiglu"]
        activated = gated_triton(intermediate, traits)
        if targets is not None:
            activated = gated_cast_triton(intermediate, *targets, traits=traits)
        y = parallel_linear(activated, fc2.leaf, None, fc2.traits)
        y.backward(grad)
        observed.append(history.magnitudes())
        history.update(())
    return (y.detach(), x.grad, fc1.leaf.grad, fc2.leaf.grad), carried(activated) is not None


def test_layers_around_the_activation_read_its_copies(monkeypatch):
    """Separate casts give the same outputs, gradients and recorded magnitudes. The first step, without scales, has no
    copies."""
    monkeypatch.setattr(fp8_cast, "_casts_on_gpu", lambda x: True)
    x, grad = (filled(32, 2, 48, dtype=torch.bfloat16, seed=seed).to(DEVICE) for seed in (0, 1))
    weights = [filled(*shape, dtype=torch.bfloat16).to(DEVICE) * 0.1 for shape in ((160, 48), (48, 80))]
    records = [], []
    expected, none = feed_forward(x, grad, weights, fused=False, observed=records[0])
    actual, some = feed_forward(x, grad, weights, fused=True, observed=records[1])
    assert some and not none
    for one, other in zip(actual, expected, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * largest if DEVICE == "cuda" else 0)
    for one, other in zip(*records, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01 if DEVICE == "cuda" else 0, atol=0)
