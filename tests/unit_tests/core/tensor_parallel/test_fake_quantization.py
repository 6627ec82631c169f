"""Fake quantization of linear layers and experts against its definition, and torchao's rounding."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.fusions.e4m3 import rounded, scales
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.sharding.placement import Normal, initialize_parameters
from megatron.core.tensor_parallel.calibration import _RecordedProducts
from megatron.core.tensor_parallel.fake_quantization import (
    RoundedGemms,
    RoundedProducts,
    TokenRounding,
    WeightRounding,
    quantize_layers,
)
from megatron.core.tensor_parallel.gemms import GemmLayer
from megatron.core.tensor_parallel.grouped_linear import LOOP, _GroupedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.linear import LinearTraits
from tests.unit_tests.core.tensor_parallel.test_gemms import model

INPUTS, OUTPUTS, ROWS, BATCH = 24, 40, 7, 3
CONFIG = ModelParallelConfig(params_dtype=torch.float64)


def e4m3(x, dims):
    """Nearest value of e4m3 times s = amax over ``dims`` / 448: 3 bits after the leading one, steps of 2^-9 at least;
    backward as if nothing was rounded."""
    scale = (x.detach().float().abs().amax(dims, keepdim=True) / 448).double()
    units = (x.detach().float() / scale.float()).double()
    step = torch.exp2(units.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return x + ((units / step).round() * step * scale - x).detach()


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        settings = {"config": CONFIG, "init_method": Normal(0.2), "groups": SINGLE_PROCESS}
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.decoder.layers[0].mlp = torch.nn.Module()
        self.decoder.layers[0].mlp.linear_fc1 = ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, **settings)
        self.output_layer = ColumnParallelLinear(INPUTS, OUTPUTS, bias=True, **settings)


def test_linear_layer_and_gradients_equal_the_definition_and_the_output_layer_is_not_quantized():
    layers = Layers()
    initialize_parameters(layers, 3, SINGLE_PROCESS)
    quantize_layers(layers, SINGLE_PROCESS)
    linear = layers.decoder.layers[0].mlp.linear_fc1
    assert type(linear.traits.gemms) is RoundedGemms and type(layers.output_layer.traits.gemms) is not RoundedGemms
    results, generator = [], torch.Generator().manual_seed(2)
    values = torch.randn(ROWS, BATCH, INPUTS, dtype=torch.float64, generator=generator)
    for compute in (
        lambda x: linear(x)[0],
        lambda x: F.linear(e4m3(x, -1), e4m3(linear.weight, (0, 1)), linear.bias),
    ):
        x = values.clone().requires_grad_()
        output = compute(x * 1.0)
        results.append((output.detach(), *torch.autograd.grad(output.square().sum(), [x, *linear.parameters()])))
    assert (results[0][0] - F.linear(values, linear.weight, linear.bias)).abs().max() > 1e-3
    for native, expected in zip(*results):
        torch.testing.assert_close(native, expected, rtol=1e-6, atol=1e-6)


def test_all_linear_layers_of_a_model_are_quantized_but_router_and_output_layer():
    built = model(num_moe_experts=4, moe_layer_freq=[0, 1])
    quantize_layers(built, SINGLE_PROCESS)
    layers = {name: module for name, module in built.named_modules() if isinstance(module, GemmLayer)}
    dense = {name for name, layer in layers.items() if type(layer.traits.gemms) is RoundedGemms}
    experts = {name for name, layer in layers.items() if type(getattr(layer, "products", None)) is RoundedProducts}
    attention = {f"decoder.layers.{n}.self_attention.linear_{part}" for n in range(2) for part in ("qkv", "proj")}
    assert dense == attention | {f"decoder.layers.0.mlp.linear_{part}" for part in ("fc1", "fc2")}
    assert experts == {f"decoder.layers.1.mlp.experts.linear_{part}" for part in ("fc1", "fc2")}


def test_experts_have_a_scale_per_weight():
    generator = torch.Generator().manual_seed(4)
    weight = (
        torch.randn(3, 5, 6, dtype=torch.float64, generator=generator) * torch.tensor([1.0, 30, 0.01])[:, None, None]
    )
    x, grad = (torch.randn(9, width, dtype=torch.float64, generator=generator) for width in (6, 5))
    ends, results = torch.tensor([4, 4, 9], dtype=torch.int32), []
    products = RoundedProducts(TokenRounding(), WeightRounding(None, None), LOOP)

    def native(x, weight):
        traits = LinearTraits(Group("etp"))
        return _GroupedLinear.apply(x, weight.flatten(0, 1), ends, traits, products, None, None, True)

    def defined(x, weight):
        w, x = e4m3(weight, (1, 2)), e4m3(x, -1)
        return torch.cat((x[:4] @ w[0].T, x[4:] @ w[2].T))

    for compute in (native, defined):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        output = compute(*leaves)
        results.append((output.detach(), *torch.autograd.grad(output, leaves, grad)))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_extreme_values_have_finite_scales_and_infinities_become_nan():
    x = torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [3e38, 1.0], [float("inf"), 1.0], [float("nan"), 2.0]])
    result = TokenRounding()(x)
    assert torch.equal(result[0], x[0]) and result[1].abs().max() < 1e-38 and torch.isclose(result[2, 0], x[2, 0])
    assert result[3, 0].isnan() and result[3, 1] == 1 and result[4, 0].isnan() and result[4, 1] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_equals_torchao(dtype):
    qat = pytest.importorskip("torchao.quantization.qat", reason="pip install torchao: the reference")
    from torchao.quantization import PerRow, PerTensor

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)

    def reference(granularity):
        quantizer = qat.Float8FakeQuantizer(qat.Float8FakeQuantizeConfig(torch.float8_e4m3fn, granularity))
        return quantizer(x.float()).to(dtype)  # torchao rounds the scale of bf16 values to bf16

    assert torch.equal(TokenRounding()(x), reference(PerRow()))
    assert torch.equal(rounded(x, scales(x.abs().amax().view(1))), reference(PerTensor()))


def test_only_rows_of_experts_are_recorded():
    recorded, x = [], torch.randn(6, INPUTS)
    _RecordedProducts(recorded.append, None, LOOP).pack_input(x, torch.tensor([2, 2, 5]), for_backward=False)
    assert len(recorded) == 1 and torch.equal(recorded[0], x[:5])
