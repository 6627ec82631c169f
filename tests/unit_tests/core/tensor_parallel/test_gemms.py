"""The GEMM slot: a recipe gets every linear layer with its global name and number, and its GEMMs compute forward and
backward."""

import pytest
import torch

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.gemms import Gemms, install_gemms
from megatron.core.tensor_parallel.grouped_linear import LOOP, GroupedLinear, GroupedProducts

VOCAB, LENGTH = 32, 8


class Doubled(Gemms):
    """Twice the product, so that every use shows; counts the calls of each operator."""

    def __init__(self):
        super().__init__(self.add)
        self.calls = []

    def output(self, x, weight, bias=None, *, out=None):
        self.calls.append("output")
        return super().output(x, weight, bias, out=out).mul_(2)

    def input_gradient(self, grad, weight, *, out=None):
        self.calls.append("input")
        return super().input_gradient(grad, weight, out=out).mul_(2)

    def weight_gradient(self, grad, x):
        self.calls.append("weight")
        return super().weight_gradient(grad, x).mul_(2)

    def add(self, total, left, right):
        self.calls.append("weight")
        total.addmm_(left, right, alpha=2)


def model(**settings):
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, bf16=False, hidden_dropout=0.0,
                               attention_dropout=0.0, add_bias_linear=False, **settings)  # fmt: skip
    torch.manual_seed(0)
    built = GPTModel(config, get_gpt_decoder_block_spec(config, False), VOCAB, LENGTH,
                     share_embeddings_and_output_weights=False)  # fmt: skip
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return built


def run(built):
    ids = torch.arange(LENGTH)[None]
    losses = built(ids, ids, labels=(ids * 5 + 1) % VOCAB)
    losses.sum().backward()
    return losses.detach(), {name: parameter.grad for name, parameter in built.named_parameters()}


def test_a_recipe_gets_each_layer_with_its_name_and_number():
    places = {}
    install_gemms(model(num_moe_experts=4, moe_layer_freq=[0, 1]),
                  lambda place: places.update({place.name: (place.layer, type(place.module).__name__)}))  # fmt: skip
    assert places.pop("output_layer") == (None, "VocabParallelOutput")
    assert places["decoder.layers.0.self_attention.linear_qkv"] == (0, "ColumnParallelLinear")
    assert places["decoder.layers.1.self_attention.linear_proj"] == (1, "RowParallelLinear")
    assert {kind for layer, kind in places.values() if layer == 0} == {"ColumnParallelLinear", "RowParallelLinear"}
    assert "GroupedLinear" in {kind for layer, kind in places.values() if layer == 1}
    several, places = torch.nn.ModuleDict({"models": torch.nn.ModuleList([model()])}), {}
    install_gemms(several, lambda place: places.update({place.name: place.layer}))
    assert places["models.0.decoder.layers.1.mlp.linear_fc1"] == 1 and places["models.0.output_layer"] is None


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_gemms_of_the_output_layer_compute_all_three_products(chunk_tokens):
    """Doubled GEMMs equal a doubled weight, whose own gradient is doubled too."""
    slot, plain = (model(cross_entropy_chunk_tokens=chunk_tokens) for _ in range(2))
    gemms = Doubled()
    install_gemms(slot, lambda place: gemms if place.layer is None else None)
    with torch.no_grad():
        plain.output_layer.weight.mul_(2)
    (losses, actual), (expected_losses, expected) = run(slot), run(plain)
    torch.testing.assert_close(losses, expected_losses)
    expected["output_layer.weight"] *= 2
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert set(gemms.calls) == {"output", "input", "weight"}


@pytest.mark.parametrize("layer", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_every_linear_layer_uses_its_gemms(layer):
    built, gemms = model(), Doubled()
    install_gemms(built, lambda place: gemms if place.layer == 1 and place.name.endswith(layer) else None)
    run(built)
    assert sorted(gemms.calls) == ["input", "output", "weight"]


def test_experts_take_grouped_gemms():
    calls = []

    def multiply(x, weight, ends):
        calls.append(weight.shape)
        return LOOP.multiply(x, weight, ends)

    built = model(num_moe_experts=4)
    products = GroupedProducts(multiply, LOOP.weight_gradient)
    install_gemms(built, lambda place: products if isinstance(place.module, GroupedLinear) else None)
    run(built)
    assert len(calls) == 2 * 2 * 2, "layers x linear layers x (forward, input gradient)"
