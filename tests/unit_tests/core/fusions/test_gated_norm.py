"""The kernels of gated norms equal their formulas, with all gradients, for views of projections."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from megatron.core.fusions.gated_norm import GatedNormTraits, gated_norm
from tests.test_utils.kernels import DEVICE, assert_equal_to_formula, filled

DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def formula(x, gate, weight, traits):
    heads, size = x.shape[2:]
    active = 1.0 if gate is None else (torch.sigmoid(gate) if traits.sigmoid else F.silu(gate)).reshape(x.shape)
    values = x * active if traits.gate_first else x
    normed = traits.scale * values / torch.sqrt(values.square().mean(-1, keepdim=True) + traits.eps)
    if weight is not None:
        normed = normed * weight.view(-1, size).expand(heads, size)
    return normed if traits.gate_first else normed * active


def check(shape, per, weights, traits, dtype):
    """``per``: heads per block of the gate, 0 without a gate. Tensors are columns of one projection."""
    tokens, batch, heads, size = shape
    joined = filled(tokens, batch, heads // max(per, 1), 3 * max(per, 1) * size, dtype=dtype)
    weight = filled(weights * size, dtype=dtype, seed=1) if weights else None
    upstream = filled(*shape, dtype=dtype, seed=2)

    def by(function):
        def run(joined, weight):
            first, gate, _ = joined.chunk(3, -1)
            x = first.reshape(shape) if per > 1 else first
            return function(x, gate if per else None, weight, traits)

        return run

    assert_equal_to_formula(by(gated_norm), by(formula), [joined, weight], [upstream])


CASES = {
    "norm, then SiLU": (2, 1, GatedNormTraits(1e-6)), "norm, then sigmoid": (1, 1, GatedNormTraits(1e-5, sigmoid=True)),
    "SiLU, then norm of groups": (1, 4, GatedNormTraits(1e-5, gate_first=True)),
    "unit length": (0, 0, GatedNormTraits(1e-3, scale=0.25)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(5, 2, 4, 16), (1, 1, 4, 24)])
def test_the_kernel_equals_the_formula(shape, case, dtype):
    check(shape, *CASES[case], dtype)


def test_modules_compute_the_same_with_kernels(monkeypatch):
    """The gate is a view of columns of a projection."""
    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.core.transformer.ssm import gated_norm as norms
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    x, gate = filled(3, 2, 4, 8, dtype=torch.float32), filled(3, 2, 2, 128, dtype=torch.float32)[..., :16]
    heads = norms.GatedNorm(8, config, SINGLE_PROCESS)
    sigmoid = norms.GatedNorm(8, config, SINGLE_PROCESS, activation=torch.sigmoid)
    groups = norms.GroupNorm(32, 16, config, SINGLE_PROCESS)

    def results():
        return [heads(x, gate), sigmoid(x, gate), groups(x.flatten(2), gate), norms.unit_length(x[..., :5], 0.5)]

    with torch.no_grad():
        for module in (heads, sigmoid, groups):
            module.weight.uniform_(0.5, 1.5)
        expected = results()
        monkeypatch.setattr(norms, "_has_kernel", lambda *arguments: True)
        for actual, right in zip(results(), expected, strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case, shape", [
    ("norm, then SiLU", (4099, 1, 32, 128)), ("norm, then sigmoid", (2050, 2, 32, 128)),
    ("SiLU, then norm of groups", (2050, 2, 4, 1024)), ("unit length", (4099, 2, 16, 128)),
])  # fmt: skip
def test_the_kernel_equals_the_formula_at_real_sizes(case, shape):
    check(shape, *CASES[case], torch.bfloat16)
