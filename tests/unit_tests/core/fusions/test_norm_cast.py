"""Norms that write fp8 copies: the bytes and magnitudes of the norm and a separate cast."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fp8.gemms import PerTensorGemms, target_of_reader
from megatron.core.fp8.recipe import fp8_stacks
from megatron.core.fusions import fp8_cast
from megatron.core.fusions.dispatch import ByDevice
from megatron.core.fusions.fp8_cast import E4M3, CastTarget, Scale, carried, cast_tensor
from megatron.core.fusions.residual_norm import NormTraits, normalize_plain, normalize_triton
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import policies
from megatron.core.transformer.norm import StreamNorm
from megatron.core.transformer.overlap import input_reader
from tests.test_utils.kernels import DEVICE, filled

RMS, LAYER, OFFSET = NormTraits(1e-5, False, 0.0), NormTraits(1e-5, True, 0.0), NormTraits(1e-5, False, 1.0)


@pytest.fixture(autouse=True)
def same_casts(monkeypatch):
    """Expected bytes come from the kernel too: the interpreter converts some values wrongly."""
    monkeypatch.setattr(fp8_cast, "_casts_on_gpu", lambda x: x.element_size() == 2)


def run(shape, traits, stream_dtype, *, adds, target):
    """(stream, normalized values, gradients)."""
    x, branch, grad, skip = (filled(*shape, dtype=torch.bfloat16, seed=seed, device=DEVICE) for seed in range(4))
    weight, bias = (filled(shape[-1], dtype=torch.bfloat16, seed=seed, device=DEVICE) for seed in (4, 5))
    leaves = [x.to(stream_dtype, copy=True), branch.clone(), weight, bias]
    for leaf in leaves:
        leaf.requires_grad_()
    inputs = leaves[0], leaves[1] if adds else None, leaves[2], leaves[3] if traits.centred else None
    stream, normed = normalize_triton(*inputs, traits, target)
    torch.autograd.backward((stream, normed), (skip.to(stream_dtype), grad))
    return stream.detach(), normed, [leaf.grad for leaf in leaves if leaf.grad is not None]


def check(shape, traits, stream_dtype, *, adds):
    """On a GPU the two variants of the kernel may add a row's squares in another order: the last bit of its inverse
    deviation, and so a few rounded values, differ. In the interpreter none does."""
    factor = torch.tensor([48.0], device=DEVICE)
    target = CastTarget(E4M3, Scale(factor, 1 / factor), fp8_cast.new_amax(factor.device))
    stream, values, gradients = run(shape, traits, stream_dtype, adds=adds, target=None)
    cast_stream, carrier, cast_gradients = run(shape, traits, stream_dtype, adds=adds, target=target)
    copies = carried(carrier)
    assert carrier.shape == values.shape and carrier.dtype == values.dtype and carrier.isnan().all()
    assert copies.columns is None and copies.rows.scale is target.scale.inverse
    expected = cast_tensor(values, E4M3, target.scale, columns=False).rows
    assert copies.rows.data.shape == expected.data.shape and copies.rows.data.is_contiguous()
    different = (copies.rows.data.view(torch.uint8) != expected.data.view(torch.uint8)).float().mean().item()
    assert different <= (0.001 if DEVICE == "cuda" else 0)
    largest = target.noted.view(torch.float32).max().item()
    assert largest == pytest.approx(values.abs().max().item(), rel=0.01 if DEVICE == "cuda" else 0)
    assert torch.equal(cast_stream, stream)
    for one, other in zip(cast_gradients, gradients, strict=True):
        if DEVICE == "cpu":
            assert torch.equal(one, other)
            continue
        rounding = torch.finfo(one.dtype).eps
        assert (one - other).abs().max() <= 4 * rounding * other.abs().max()
        assert one.element_size() == 4 or (one != other).float().mean() <= 0.001


@pytest.mark.parametrize("shape, traits, stream_dtype, adds", [
    ((5, 3, 48), LAYER, torch.bfloat16, True), ((1, 16), RMS, torch.bfloat16, False),
    ((7, 1, 144), OFFSET, torch.bfloat16, False), ((3, 1, 1104), RMS, torch.float32, True),
])  # fmt: skip
def test_copies_have_the_bytes_of_separate_casts(shape, traits, stream_dtype, adds):
    check(shape, traits, stream_dtype, adds=adds)


@pytest.mark.gpu
@pytest.mark.parametrize("shape, traits, stream_dtype, adds", [
    ((8192, 1, 4096), RMS, torch.bfloat16, True), ((8192, 1, 4096), RMS, torch.bfloat16, False),
    ((4096, 2, 4096), RMS, torch.float32, True), ((777, 2, 5120), LAYER, torch.bfloat16, True),
    ((1023, 3, 128), OFFSET, torch.bfloat16, False), ((33, 16384), LAYER, torch.bfloat16, True),
    ((140_000, 16384), RMS, torch.bfloat16, False),
])  # fmt: skip
def test_copies_have_the_bytes_of_separate_casts_at_real_sizes(shape, traits, stream_dtype, adds):
    """The last has more than 2^31 elements."""
    check(shape, traits, stream_dtype, adds=adds)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_bad_values_are_observed(value):
    x = filled(8, 64, dtype=torch.bfloat16)
    x[3, 5] = value
    factor = torch.ones(1, device=DEVICE)
    target = CastTarget(E4M3, Scale(factor, factor), fp8_cast.new_amax(factor.device))
    normalize_triton(x.to(DEVICE), None, torch.ones(64, dtype=torch.bfloat16, device=DEVICE), None, RMS, target)
    assert not target.noted.max().view(torch.float32).isfinite()


# ---- in a model


def build(**settings):
    values = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "ffn_hidden_size": 256, "bf16": True,
              "fp8": "hybrid", "fp8_recipe": "delayed", "add_bias_linear": False, "normalization": "RMSNorm",
              "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
    config = TransformerConfig(**values | settings)
    return GPTModel(config, get_gpt_decoder_block_spec(config, False), 32, 16)


def on_kernels(model):
    """Let every norm have its kernel, without a GPU too, and every matrix a delayed scale."""
    for module in model.modules():
        if isinstance(module, StreamNorm):
            module.normalize = ByDevice(normalize_triton, normalize_plain)
    for state in fp8_stacks(model).values():
        if state.history is not None:
            state.history.known = [True] * len(state.history.known)
    return model


def targets(model):
    """Whether each branch's norm casts its output, in order."""
    hidden = SimpleNamespace(is_cuda=True, device=next(model.parameters()).device)
    return [
        not branch.at.is_plain(branch.norm_site)
        and policies._target_of_mixer(branch, branch.norm, hidden) is not None
        for layer in model.decoder.layers
        for branch in layer.branches
    ]


MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64, "moe_layer_freq": [0, 1]}


@pytest.mark.parametrize("settings, expected", [
    ({}, [1, 1, 1, 1]), ({"add_bias_linear": True, "normalization": "LayerNorm"}, [1, 1, 1, 1]),
    ({"fp8_recipe": "tensorwise"}, [0, 0, 0, 0]), ({"fp8": None}, [0, 0, 0, 0]), ({"bf16": False}, [0, 0, 0, 0]),
    ({"fp8_wgrad": False}, [0, 0, 0, 0]), (MOE, [1, 1, 1, 0]), ({"multi_latent_attention": True}, [0, 1, 0, 1]),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, [1, 0, 1, 0]),
    ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, [1, 1, 1, 1]),
    ({"apply_residual_connection_post_layernorm": True}, [0, 0, 0, 0]),
])  # fmt: skip
def test_norms_cast_for_one_reader_with_a_known_scale(settings, expected):
    model = build(**settings)
    assert not any(targets(model)), "no scale is known, or there is no kernel"
    assert targets(on_kernels(model)) == expected


def test_a_layer_that_reads_its_input_otherwise_gets_values():
    model = on_kernels(build())
    mlp, attention = model.decoder.layers[0].mlp, model.decoder.layers[0].self_attention
    assert input_reader(mlp) is mlp.linear_fc1 and input_reader(attention) is attention.linear_qkv

    class Twice(type(mlp)):
        def segments(self, hidden_states, ctx):
            return hidden_states + (yield from super().segments(hidden_states, ctx))

    class Unchanged(type(mlp)):
        pass

    for kind, reader in ((Twice, None), (Unchanged, mlp.linear_fc1)):
        mlp.__class__ = kind
        assert input_reader(mlp) is reader
    device = next(model.parameters()).device
    assert target_of_reader(mlp.linear_fc2, device) is None and target_of_reader(mlp.linear_fc1, device) is not None
    mlp.linear_fc1.shared_weight = mlp.linear_fc1.weight
    assert target_of_reader(mlp.linear_fc1, device) is None


def test_magnitudes_are_recorded_for_a_backward_pass_only():
    linear = on_kernels(build()).decoder.layers[0].mlp.linear_fc1
    device = linear.weight.device
    assert target_of_reader(linear, device).noted is not None
    with torch.no_grad():
        assert target_of_reader(linear, device).noted is None
    linear.weight.requires_grad_(False)
    assert target_of_reader(linear, device).noted is None


def train(model, *, casts):
    """Two steps of the decoder with constant weights: outputs, gradients and magnitudes of the last step."""
    history = model.decoder.fp8.history
    for layer in model.decoder.layers:
        for branch in layer.branches:
            if not casts:
                branch.at.clear(branch.norm_site)
    for _ in range(2):
        model.zero_grad()
        x = filled(16, 2, 128, dtype=torch.bfloat16).to(DEVICE).requires_grad_()
        y = model.decoder(x)
        y.backward(filled(16, 2, 128, dtype=torch.bfloat16, seed=1).to(DEVICE))
        magnitudes = history.magnitudes()
        history.update(())
    gradients = [parameter.grad for parameter in model.decoder.parameters()]
    return [y.detach(), x.grad, *gradients, magnitudes]


@pytest.mark.parametrize("settings", [{}, {"add_bias_linear": True, "normalization": "LayerNorm"}])
def test_layers_train_as_with_separate_casts(settings, monkeypatch):
    """Equal outputs, gradients and recorded magnitudes; the first step has no scale yet."""
    counted, original, target = [], PerTensorGemms._cast, policies._target_of_mixer
    monkeypatch.setattr(
        PerTensorGemms, "_cast", lambda self, x, row, *rest, **options:
        counted.append(row) or original(self, x, row, *rest, **options),
    )  # fmt: skip
    if DEVICE == "cpu":  # kernels in the interpreter
        monkeypatch.setattr(ByDevice, "__call__", lambda self, x, *inputs: self.kernel(x, *inputs))
        monkeypatch.setattr(
            policies, "_target_of_mixer",
            lambda branch, norm, x: target(branch, norm, SimpleNamespace(is_cuda=True, device=x.device)),
        )  # fmt: skip
    results, casts_made = [], []
    for casts in (False, True):
        model = build(**settings).to(DEVICE)
        for module in model.modules():
            if isinstance(module, StreamNorm):
                module.normalize = ByDevice(normalize_triton, normalize_plain)
        counted.clear()
        results.append(train(model, casts=casts))
        casts_made.append(len(counted))
    expected, actual = results
    assert casts_made[0] - casts_made[1] == 4, "inputs of four layers in the second step"
    for one, other in zip(actual, expected, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * largest if DEVICE == "cuda" else 0)
