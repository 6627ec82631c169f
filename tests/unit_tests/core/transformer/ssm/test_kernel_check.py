"""Kernels that give wrong results are found before they compute a model."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.gated_norm import GatedNormTraits
from megatron.core.fusions.short_convolution import convolution_silu
from megatron.core.transformer.ssm import convolution, delta_rule, gated_norm, kernel_check, state_space
from tests.test_utils.kernels import DEVICE

SIZES = {"key": torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16), "value": torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The kernels are chosen for bf16, and computed by the interpreter in fp32, as it has no bf16."""
    monkeypatch.setattr(kernel_check, "kernels_fit", lambda key, value: key.dtype == torch.bfloat16)
    monkeypatch.setattr(kernel_check, "KERNEL_DTYPE", torch.float32)
    monkeypatch.setattr(kernel_check, "_check_rule", kernel_check._check_rule.__wrapped__)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def changed(rule, place, factor):
    """Plain torch in the place of kernels, with a wrong gradient of one input."""
    return lambda *inputs: rule(*(
        Wrong.apply(x, factor) if index == place else x for index, x in enumerate(inputs) if x is not None
    ))  # fmt: skip


RULES = {
    "delta": (delta_rule.delta_rule, False), "channels": (delta_rule.delta_rule, True),
    "states": (state_space.state_space, False),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_right_kernels_serve_and_wrong_gradients_do_not(on_a_gpu, case, monkeypatch, caplog):
    saved, (rule, per_channel) = [], RULES[case]
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        assert kernel_check.kernels_serve(rule, **SIZES, per_channel=per_channel)
    assert not saved, "recomputation counts a layer's saved tensors, and only its first run has the small problem"
    floats = {name: x.float() for name, x in SIZES.items()}
    assert not kernel_check.kernels_serve(rule, **floats, per_channel=per_channel)
    for place, name in ((1, "keys"), (3, "decays")):
        with monkeypatch.context() as patch:
            patch.setattr(kernel_check, "linear_attention", changed(rule, place, 1.1))
            caplog.clear()
            assert not kernel_check.kernels_serve(rule, **SIZES, per_channel=per_channel)
            assert f"wrong results on cpu ({name}: relative error 0.1" in caplog.text


def test_results_that_are_not_finite_are_wrong(on_a_gpu, monkeypatch):
    monkeypatch.setattr(kernel_check, "linear_attention", changed(state_space.state_space, 2, float("nan")))
    assert not kernel_check.kernels_serve(state_space.state_space, **SIZES)


def test_kernels_that_raise_do_not_serve(on_a_gpu, monkeypatch, caplog):
    def launch(*inputs):
        raise KeyError("Keyword argument BV")

    monkeypatch.setattr(kernel_check, "linear_attention", launch)
    assert not kernel_check.kernels_serve(delta_rule.delta_rule, **SIZES)
    assert "do not run on cpu (KeyError: 'Keyword argument BV'): plain torch" in caplog.text


NORMS = {"SiLU": GatedNormTraits(1e-6), "groups": GatedNormTraits(1e-5, gate_first=True)}


def changed_input(factor, kernel, x, *arguments):
    """The kernel with a wrong gradient of its input; for the convolution plain torch, which takes less time."""
    if kernel is convolution_silu:
        return convolution._plain(Wrong.apply(x, factor), *arguments)[0]
    return kernel(Wrong.apply(x, factor), *arguments)


KERNELS = [
    (convolution, "convolution_silu", (4, True)), (convolution, "convolution_silu", (2, False)),
    *((gated_norm, "gated_norm", (24, traits, False)) for traits in NORMS.values()),
    (gated_norm, "gated_norm", (24, GatedNormTraits(1e-3, scale=0.25), True)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "name", "arguments"), KERNELS)
def test_kernels_of_convolutions_and_norms_serve_in_bf16(module, name, arguments):
    assert module._check_kernel.__wrapped__(*arguments, DEVICE)


@pytest.mark.parametrize(("module", "name", "arguments"), KERNELS)
def test_wrong_kernels_of_convolutions_and_norms_are_found(module, name, arguments, monkeypatch, caplog):
    monkeypatch.setattr(kernel_check, "KERNEL_DTYPE", torch.float32)  # the interpreter has no bf16
    check, kernel = module._check_kernel.__wrapped__, getattr(module, name)
    assert check(*arguments, DEVICE)
    for factor in (1.1,) if module is convolution else (1.1, float("nan")):
        monkeypatch.setattr(module, name, partial(changed_input, factor, kernel))
        caplog.clear()
        assert not check(*arguments, DEVICE)
        assert f"give wrong results on {DEVICE} (inputs: relative error" in caplog.text
