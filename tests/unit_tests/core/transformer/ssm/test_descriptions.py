"""Descriptions of linear attention agree with the built mixers: parameters, and bytes that are saved for backward."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.description.model import LayerPlace
from megatron.core.enums import AttnMaskType
from megatron.core.fusions import gated_norm as gated_norm_kernels
from megatron.core.fusions import linear_attention, short_convolution
from megatron.core.groups.process_groups import SINGLE_PROCESS
from megatron.core.models.backends import get_backend
from megatron.core.models.common.layer_specs import MIXERS
from megatron.core.sharding.placement import initialize_parameters
from megatron.core.transformer.context import ForwardContext
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.ssm import convolution, delta_rule, description, gated_norm, state_space

LENGTH = 256
SIZES = [(32, 128, 8, 2), (64, 64, 8, 4), (128, 32, 4, 2), (128, 128, 8, 2)]
"""Channels of keys and values, heads of values, heads of keys."""


def built(kind, key, value, heads, groups):
    delta = {
        "linear_key_head_dim": key, "linear_value_head_dim": value, "linear_num_value_heads": heads,
        "linear_num_key_heads": groups, "hybrid_layer_pattern": "G",
    }  # fmt: skip
    mamba = {
        "mamba_state_dim": key, "mamba_head_dim": value, "mamba_num_heads": heads, "mamba_num_groups": groups,
        "hybrid_layer_pattern": "M",
    }  # fmt: skip
    kimi = {**delta, "hybrid_layer_pattern": "K", "linear_num_key_heads": heads}
    sizes = {"gated_delta_net": delta, "kimi_delta_attention": kimi, "mamba": mamba}[kind]
    config = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=8, bf16=True, **sizes)
    spec = MIXERS[kind](get_backend("local"), None, AttnMaskType.causal)
    return build_module(spec, config, layer_number=1, groups=SINGLE_PROCESS), config


class NoKernel:
    """A kernel whose launches do nothing."""

    def __init__(self, kernel):
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


def enable_kernels(patch):
    """Let layers allocate and save what they do with kernels on a GPU."""
    pytest.importorskip("triton")
    for module in (linear_attention, short_convolution, gated_norm_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            patch.setattr(module, name, NoKernel(getattr(module, name)))
    for rule in (delta_rule, state_space):
        patch.setattr(rule, "kernels_serve", lambda *arguments: True)
    patch.setattr(gated_norm, "_has_kernel", lambda *arguments: True)
    patch.setattr(
        convolution, "_activated", lambda x, follows, tail, *weights: (
            short_convolution.convolution_silu(x, follows, tail, *weights), tail
        ),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention", "mamba"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kernels", [False, True])
def test_described_bytes_are_saved(kind, sizes, kernels, monkeypatch):
    if kernels:
        enable_kernels(monkeypatch)
    monkeypatch.setattr(description, "_has_kernels", lambda *sizes: kernels)
    mixer, config = built(kind, *sizes)
    length = 1024 if kernels else LENGTH  # kernels save one state per sequence
    parameters, saved, alive = {param.data_ptr() for param in mixer.parameters()}, {}, []

    def pack(x):
        alive.append(x)  # else another tensor may take its place
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.randn(length, 1, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        mixer(x, ForwardContext(TokenLayout()))
    described = mixer.describe(config, LayerPlace(1, length))
    bytes_per_token = sum(kept.bytes for op in described.ops for kept in op.saved)
    without_input = (sum(saved.values()) - x.untyped_storage().nbytes()) / length  # the norm's, in a layer
    assert bytes_per_token == pytest.approx(without_input, rel=0.1)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention", "mamba"])
@pytest.mark.parametrize("batch", [1, 2])
def test_kernels_read_parts_of_projections_in_place(kind, batch, monkeypatch):
    """Only gradients are joined: for the convolution's outputs, and for the projection."""
    enable_kernels(monkeypatch)
    (mixer, config), names = built(kind, 64, 64, 8, 4), []
    x = torch.randn(128, batch, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            name = str(op.overloadpacket)
            if name in {"aten.clone", "aten.copy_", "aten.cat"} and result.numel() >= x.numel() // 4:
                names.append(name)
            return result

    with Copies():
        y = mixer(x, ForwardContext(TokenLayout()))
        y.backward(torch.ones_like(y))
    assert names == ["aten.cat"] * 2


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention", "mamba"])
def test_described_parameters_are_those_of_the_mixer(kind):
    mixer, config = built(kind, 32, 128, 8, 2)
    piece = mixer.describe(config, LayerPlace(1, LENGTH))
    described = {param.name: (param.shape, param.ndim, dict(param.mesh)) for param in piece.params}
    assert described == {
        name: (param.spec.shape, param.ndim, {axis: place.dim for axis, place in param.spec.mesh.items()})
        for name, param in mixer.named_parameters()
    }


@pytest.mark.parametrize(("kind", "products"), [
    ("gated_delta_net", 3), ("kimi_delta_attention", 3),  # S^T k, k v^T, S^T q
    ("mamba", 2),  # B (dt x)^T, S^T C
])  # fmt: skip
def test_described_work_is_that_of_the_recurrence(kind, products):
    """Each product of a state [key, value] has key x value multiplications and key x value sums."""
    key, value, heads = 32, 128, 8
    mixer, config = built(kind, key, value, heads, 2)
    ops = {op.kind: op for op in mixer.describe(config, LayerPlace(1, LENGTH)).ops}
    assert ops["recurrence"].flops == 2 * products * heads * key * value * LENGTH
    # bf16: at least two inputs and the output in the forward pass, three inputs and two outputs in the backward pass
    assert 8 <= ops["norm"].traffic / (2 * heads * value) <= 16


@pytest.mark.parametrize("kind", ["gated_delta_net", "mamba"])
def test_convolution_begins_as_that_of_torch(kind):
    mixer, _ = built(kind, 32, 128, 8, 2)
    weight = mixer.conv1d.weight
    initialize_parameters(mixer, 1, SINGLE_PROCESS)
    like = torch.nn.Conv1d(weight.shape[0], weight.shape[0], weight.shape[-1], groups=weight.shape[0]).weight
    assert weight.abs().max().item() == pytest.approx(like.abs().max().item(), rel=0.02)
    assert weight.float().std().item() == pytest.approx(like.std().item(), rel=0.05)
