"""Products of fp8 matrices equal the fp64 products of their values."""

import pytest
import torch

from megatron.core.extensions import cublaslt
from megatron.core.fp8.products import add_product, dequantize, multiply
from megatron.core.fusions.fp8_cast import amax_parts, cast_in_blocks, cast_tensor
from tests.test_utils.kernels import filled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def matrix(rows, columns, kind, dtype, *, seed, device="cpu"):
    """A quantized matrix, and its values in fp64 by plain indexing."""
    x = filled(rows, columns, dtype=torch.float32, seed=seed, device=device)
    x *= torch.logspace(-1, 1, rows, device=device)[:, None]
    if kind == "tensor":
        built = cast_tensor(x, dtype, amax_parts(x), columns=False).rows
        return built, built.data.double() * built.scale.double()
    built = cast_in_blocks(x, dtype, columns=False, square=kind == "squares").rows
    side = 128 if kind == "squares" else 1
    row, column = torch.arange(rows, device=device) // side, torch.arange(columns, device=device) // 128
    return built, built.data.double() * built.scale.double()[row[:, None], column[None, :]]


def error(result, exact):
    return ((result.double() - exact).abs().max() / exact.abs().max()).item()


KINDS = [("tensor", "tensor"), ("rows", "squares"), ("squares", "rows"), ("rows", "rows")]
SIZES = [(16, 32, 16), (130, 7, 300), (1, 1, 1), (256, 128, 384)]


@pytest.mark.parametrize("m, n, k", SIZES)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
def test_products_equal_those_of_the_values(m, n, k, kinds, dtype, formats):
    check(m, n, k, kinds, dtype, formats)


def check(m, n, k, kinds, dtype, formats, device="cpu", fast=(False,), scale=1.0):
    (left, wide_left), (right, wide_right) = (
        matrix(size, k, kind, of, seed=seed, device=device)
        for seed, (size, kind, of) in enumerate(zip((m, n), kinds, formats))
    )
    assert torch.equal(dequantize(left, torch.float64), wide_left)
    exact = wide_left @ wide_right.t()
    bias = filled(n, dtype=dtype, seed=2, device=device)
    for is_fast in fast:
        # Hopper's tensor cores cut sums to 14 bits after every 32 terms; without fast sums, fp32 registers take them
        # every 128 terms
        cut = 0 if device == "cpu" else max(k, 128) / 32 * 2**-14 if is_fast else 5e-4
        tolerance = scale * TOLERANCE[dtype] + cut
        product = multiply(left, right, dtype, fast=is_fast)
        assert product.dtype == dtype and error(product, exact) < tolerance
        assert error(multiply(left, right, dtype, fast=is_fast, bias=bias), exact + bias.double()) < tolerance
    return left, right, exact


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("rows", "rows")], ids="-".join)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_products_are_added_to_a_gradient(kinds, dtype):
    left, right, exact = check(128, 256, 128, kinds, torch.float64, (E5M2, E4M3))
    total = filled(128, 256, dtype=dtype, seed=5)
    expected = total.double() + exact
    add_product(total, left, right)
    assert total.dtype == dtype and error(total, expected) < 2 * TOLERANCE[dtype]


def test_a_cpu_leaves_the_sum_to_torch():
    left, right, _ = check(16, 16, 16, ("tensor", "tensor"), torch.float32, (E4M3, E4M3))
    total = torch.ones(16, 16)
    arguments = (left.data, right.data, left.scale, right.scale)
    assert not cublaslt.fp8_product(total, *arguments, adds=True, fast=False)
    assert torch.equal(total, torch.ones(16, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 8192), (8192, 14336, 4096), (128, 256, 1280), (1024, 6144, 384)])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
def test_gpu_products_equal_those_of_the_values(m, n, k, kinds, formats):
    """Block scales have K blocks padded to 4: 384 and 1280 are 3 and 10 blocks."""
    fast = (False, True) if kinds[0] == "tensor" else (False,)
    for dtype in (torch.bfloat16, torch.float32):
        check(m, n, k, kinds, dtype, formats, "cuda", fast, scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 8192), (14336, 4096, 8192), (128, 256, 1280), (6144, 1024, 384)])
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("rows", "rows")], ids="-".join)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cublaslt_adds_products_to_gradients(m, n, k, kinds, formats, dtype):
    """Without a temporary, three times, and to a part of a buffer."""
    left, right, exact = check(m, n, k, kinds, torch.float32, formats, "cuda", scale=4)
    buffer = filled(2 * m * n, dtype=dtype, seed=5, device="cuda")
    before, total = buffer.clone(), buffer[m * n :].view(m, n)
    arguments = (left.data, right.data, left.scale, right.scale)
    for _ in range(2):
        assert cublaslt.fp8_product(total, *arguments, scales=kinds, adds=True, fast=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    stored = torch.cuda.memory_allocated()
    add_product(total, left, right)
    assert torch.cuda.max_memory_allocated() - stored < total.numel() * total.element_size()
    assert torch.equal(buffer[: m * n], before[: m * n])
    expected = before[m * n :].view(m, n).double() + 3 * exact
    assert error(total, expected) < 6 * TOLERANCE[dtype] + 5e-4
