"""The product of one row equals its definition; linear layers of one token use it on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.fusions.installed_triton import triton
from megatron.core.fusions.row_product import is_row, row_product
from megatron.core.tensor_parallel.gemms import Gemms
from tests.test_utils.kernels import DEVICE, TOLERANCE, filled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 4096, 5000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_of_a_row_equals_its_definition(dtype, width, has_bias):
    x = filled(1, 1, width, dtype=dtype, device=DEVICE)
    weight = filled(9, width + 8, dtype=dtype, seed=1, device=DEVICE)[2:, 8:]  # rows of a larger matrix
    bias = filled(7, dtype=dtype, seed=2, device=DEVICE) if has_bias else None
    found = row_product(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == (1, 1, 7) and found.dtype == dtype
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.gpu
def test_linear_layers_of_one_token_use_it(monkeypatch):
    weight = filled(64, 128, dtype=torch.bfloat16, device="cuda")
    for rows in (1, 2):
        x = filled(rows, 1, 128, dtype=torch.bfloat16, device="cuda")
        assert is_row(x, weight) == (rows == 1)
        torch.testing.assert_close(Gemms().output(x, weight), F.linear(x, weight))
    assert not is_row(filled(1, 128, dtype=torch.float32, device="cuda"), weight)
