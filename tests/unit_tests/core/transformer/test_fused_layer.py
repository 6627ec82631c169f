"""A layer on kernels computes what a layer on plain torch does; flags choose; norms of others fit into the slots."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from megatron.core.attention.rotary import RotaryEmbedding
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions import activations, dispatch, residual_norm, split_rotary
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.random import dropout as dropout_module
from megatron.core.random.dropout import DropoutCoordinates
from megatron.core.random.philox import DropoutStream
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from tests.test_utils.kernels import DEVICE

LLAMA = {"normalization": "RMSNorm", "swiglu": True, "num_query_groups": 2, "add_bias_linear": False}
GPT = {"normalization": "LayerNorm", "squared_relu": True, "hidden_dropout": 0.25, "apply_layernorm_1p": True}
PLAIN = {
    "bias_swiglu_fusion": False, "bias_gelu_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
}  # fmt: skip
LENGTH, BATCH, HIDDEN = 3, 2, 24


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Kernels for the tensors of any device, wherever they are wanted."""
    for module in (activations, residual_norm, split_rotary, dropout_module):
        monkeypatch.setattr(module, "kernels_serve", lambda dtype, expected=True: expected)
    monkeypatch.setattr(dispatch.ByDevice, "__call__", lambda self, *args: self.kernel(*args))


def make_layer(spec=None, **overrides):
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 40}
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(**{**sizes, **rates, "params_dtype": torch.float32, "init_method_std": 0.2, **overrides})
    layer = build_module(spec or get_gpt_layer_local_spec(), config, layer_number=1).to(DEVICE)
    for index, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator(DEVICE).manual_seed(index))
    return layer


def run(layer):
    """Output, input gradient, weight gradients."""
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(9)).to(DEVICE).requires_grad_()
    positions = torch.arange(LENGTH, device=DEVICE)
    samples = torch.tensor([7, 1 << 40], device=DEVICE)
    coordinates = DropoutCoordinates(DropoutStream(3), samples, positions)
    output = layer(hidden, ForwardContext(rotary_pos_emb=RotaryEmbedding(6, 1.0)(LENGTH, DEVICE), dropout=coordinates))
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize(
    "network", [LLAMA, GPT, {**LLAMA, "qk_layernorm": True, "apply_residual_connection_post_layernorm": True}],
    ids=["llama", "gpt with dropout", "normed heads and post-norm"],
)  # fmt: skip
def test_a_layer_on_kernels_equals_one_on_plain_torch(kernels_everywhere, network):
    fused, plain = make_layer(**network), make_layer(**network, **PLAIN)
    plain.load_state_dict(fused.state_dict())
    for mine, expected in zip(run(fused), run(plain), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_recomputation_on_kernels_changes_no_bit(kernels_everywhere):
    saved = run(make_layer(**LLAMA))
    for modules in (["layernorm", "mlp_act"], ["mlp", "core_attn"]):
        dropped = run(make_layer(**LLAMA, recompute_granularity="selective", recompute_modules=modules))
        assert all(torch.equal(mine, expected) for mine, expected in zip(dropped, saved, strict=True))


def test_flags_turn_every_kernel_off(kernels_everywhere, monkeypatch):
    monkeypatch.setattr(dispatch.ByDevice, "__call__", lambda *args: pytest.fail("a kernel ran"))
    for network in (LLAMA, GPT):
        run(make_layer(**network, **PLAIN))


class OthersNorm(nn.Module):
    """Knows x, and nothing of residual streams."""

    def __init__(self, config, hidden_size, eps, groups=None):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def test_a_norm_that_knows_only_its_input_fills_the_slots(kernels_everywhere):
    local = get_gpt_layer_local_spec()
    slots = {**vars(local.submodules), "input_layernorm": OthersNorm, "pre_mlp_layernorm": OthersNorm}
    rest = ModuleSpec(local.module, submodules=type(local.submodules)(**slots))
    layer, twin = make_layer(rest, **LLAMA), make_layer(**LLAMA)
    twin.load_state_dict(layer.state_dict())
    for mine, expected in zip(run(layer), run(twin), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
