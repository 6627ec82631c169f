"""Weight gradients of experts: the kernel equals the formula, adds, and leaves rows of no group and groups of no row
alone."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.grouped_weight_gradient import (
    grouped_weight_gradient_reference,
    grouped_weight_gradient_triton,
)
from tests.test_utils.kernels import DEVICE, filled

CASES = [  # Triton's interpreter multiplies no bf16
    ((5, 5, 70, 71), 80, 48, 136, torch.float32, torch.float16),
    ((0, 3), 3, 130, 16, torch.bfloat16, torch.float32),
    ((4, 9), 9, 1300, 300, torch.float32, torch.float32),
]
BIG = [
    (tuple(512 * index - index % 7 for index in range(1, 129)), 65536, 1536, 2048, torch.float32, torch.bfloat16),
    ((20, 8000, 8000, 16384), 16384, 4096, 14336, torch.float32, torch.bfloat16),
    ((5, 700), 900, 333, 77, torch.float32, torch.float16),
]


@pytest.mark.parametrize(
    "ends, rows, out, width, total_dtype, dtype",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.gpu) for case in BIG)],
)
def test_the_kernel_equals_the_formula(ends, rows, out, width, total_dtype, dtype):
    grad, x = (filled(rows, item, dtype=dtype, seed=item) for item in (out, width))
    grad[ends[-1] :], x[ends[-1] :] = float("nan"), float("nan")
    grad, x, ends_g = grad.to(DEVICE), x.to(DEVICE), torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    before = filled(len(ends), out, width, dtype=total_dtype).to(DEVICE)
    result, repeated, exact = before.clone(), before.clone(), before.double()
    grouped_weight_gradient_triton(grad, x, ends_g, result)
    grouped_weight_gradient_triton(grad, x, ends_g, repeated)
    grouped_weight_gradient_reference(grad, x, ends_g, exact)
    assert torch.equal(result, repeated), "differs from run to run"
    # tensor cores cut off what is below their fp32 sums instead of rounding it, thousands of times
    tolerance = (1e-5 if rows < 1000 else 1e-4) if total_dtype == torch.float32 else 1e-2
    assert (result.double() - exact).abs().max() <= tolerance * exact.abs().max()
    for group, (start, end) in enumerate(zip((0, *ends), ends)):
        if start == end:
            assert torch.equal(result[group], before[group])
