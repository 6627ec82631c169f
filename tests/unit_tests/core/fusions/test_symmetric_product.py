"""The kernel of symmetric products equals a full GEMM, and its result is symmetric to the bit."""

import pytest
import torch

from megatron.core.fusions import symmetric_product as module
from megatron.core.fusions.symmetric_product import symmetric_product, symmetric_product_reference

# Triton's interpreter multiplies the bits of bf16
RUNS = [
    ("cpu", torch.float16),
    *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in (torch.float16, torch.bfloat16)),
]


def commuting(k, m, n, dtype, device):
    """[k, m, n] of normal numbers, its scaled Gram matrix, and the square of that."""
    torch.manual_seed(m)
    x = torch.randn(k, m, n, device=device)
    gram = x @ x.mT / (m + n)
    return x.to(dtype), gram.to(dtype), (gram @ gram).to(dtype)


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("k, m, n", [(1, 1, 1), (2, 16, 40), (1, 128, 64), (2, 129, 70), (1, 300, 33)])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_equals_a_full_gemm(k, m, n, dtype, device, transposed):
    if module.triton is None or (device == "cpu" and torch.cuda.is_available()):
        pytest.skip("the interpreter runs where there is Triton and no GPU")
    x, gram, square = commuting(k, m, n, dtype, device)
    if transposed:
        x = x.mT.contiguous().mT
    for arguments in ((x, x, None, 0.5, 1.0), (gram, square, None, 1.0, 1.0), (gram, gram, gram, -1.5, 0.75)):
        actual = module.symmetric_product_triton(*arguments)
        expected = symmetric_product_reference(
            *(argument.float() if torch.is_tensor(argument) else argument for argument in arguments)
        )
        assert actual.dtype == dtype and torch.equal(actual, actual.mT)
        error = torch.finfo(dtype).eps
        torch.testing.assert_close(actual.float(), expected, rtol=error, atol=error * float(expected.abs().max()))


def test_cpus_and_other_dtypes_use_a_full_gemm():
    x = torch.randn(2, 5, 9, dtype=torch.float64)
    torch.testing.assert_close(symmetric_product(x, x), x @ x.mT)
    torch.testing.assert_close(symmetric_product(x, x, x @ x.mT, 2.0, 0.5), 2.5 * x @ x.mT)
