"""NVIDIA apex itself in our slots, against the built-in kernels: within bf16's precision. Skipped where it, or the
extension that a part needs, is not installed."""

import inspect

import pytest
import torch

from megatron.core.extensions.apex import EXTENSIONS, ApexAdam, ApexNormalize, ApexWeightGradient, what_is_missing
from megatron.core.fusions.adam import AdamStep, adam_reference_
from megatron.core.fusions.residual_norm import NormTraits, normalize_plain
from megatron.core.fusions.storage import Copy, OptimizerEntry, Remainder, Storage
from megatron.core.tensor_parallel.gemms import accumulate_product
from tests.test_utils import fake_apex

pytestmark = pytest.mark.gpu


@pytest.fixture
def needs():
    def skip_without(part):
        if reason := what_is_missing(part):
            pytest.skip(reason)

    return skip_without


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                    (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])  # fmt: skip
def test_weight_gradients_equal_the_local_ones(dtypes, needs):
    needs("wgrad")
    dtype, total_dtype = dtypes
    grad, x = random(200, 96, dtype=dtype), random(200, 72, dtype=dtype, seed=1)
    local, foreign = (random(96, 72, dtype=total_dtype, seed=2) for _ in range(2))
    accumulate_product(local, grad.t(), x)
    ApexWeightGradient()(foreign, grad.t(), x)
    narrow = total_dtype != torch.float32
    torch.testing.assert_close(foreign, local, rtol=2e-2 if narrow else 1e-3, atol=0.2 if narrow else 2e-2)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16),
                                    (torch.float32, torch.float32)])  # fmt: skip
@pytest.mark.parametrize("centred", [False, True])
def test_norms_equal_the_local_norms(centred, dtypes, needs):
    needs("norm")
    stream, weights = dtypes
    results = []
    for normalize in (normalize_plain, ApexNormalize()):
        x, branch = (random(6, 5, 192, dtype=stream, seed=seed).requires_grad_() for seed in (0, 1))
        weight, bias = (random(192, dtype=weights, seed=seed).requires_grad_() for seed in (2, 3))
        inputs = (x, branch, weight, bias) if centred else (x, branch, weight)
        outputs = normalize(x, branch, weight, bias if centred else None, NormTraits(1e-5, centred, 1.0))
        gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])
        results.append((*outputs, *gradients))
    tolerance = 5e-2 if torch.bfloat16 in dtypes else 1e-4
    for foreign, local in zip(results[1], results[0]):
        torch.testing.assert_close(foreign, local, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [Storage, Copy, Remainder])
@pytest.mark.parametrize("changes", [{}, {"decoupled": False, "factor": None}, {"skip": 1.0}])
def test_adam_equals_the_local_update(kind, changes, needs):
    needs("adam")
    numbers = {"decoupled": True, "skip": 0.0, "factor": 0.3, **changes}
    step, skip = (torch.tensor(value, device="cuda") for value in (3.0, numbers["skip"]))
    factor = None if numbers["factor"] is None else torch.tensor(numbers["factor"], device="cuda")
    results = []
    for update in (adam_reference_, ApexAdam()):
        tensors = []
        for size in (5, 4097, 200_000):
            master = kind(random(size, dtype=torch.float32 if kind is Storage else torch.bfloat16))
            if kind.kept_dtype is not None:
                master.kept = torch.zeros(size, dtype=kind.kept_dtype, device="cuda")
                master.refresh()
            moments = (random(size, seed=1), random(size, seed=2).square())
            tensors.append(OptimizerEntry(master, random(size, seed=3), moments, 0.01, 0.1))
        update(tensors, AdamStep(0.9, 0.999, 1e-8, numbers["decoupled"], step, skip, factor))
        results.append([value for tensor in tensors for value in (tensor.storage.read(), *tensor.moments)])
    for foreign, local in zip(results[1], results[0]):
        torch.testing.assert_close(foreign, local, rtol=1e-5, atol=1e-6)


def test_the_stand_in_that_other_tests_use_takes_the_same_arguments(needs):
    needs("norm")
    real, fake = pytest.importorskip("apex.normalization.fused_layer_norm"), fake_apex.norms([])
    for name in ("fused_layer_norm_affine", "fused_rms_norm_affine"):
        foreign, local = (list(inspect.signature(getattr(home, name)).parameters) for home in (real, fake))
        assert foreign[: len(local)] == local, name
    for part, name in (("wgrad", "wgrad_gemm_accum_fp16"), ("adam", "multi_tensor_adam_capturable")):
        needs(part)
        assert hasattr(pytest.importorskip(EXTENSIONS[part]), name)
