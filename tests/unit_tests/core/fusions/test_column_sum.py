"""Column sums equal the formula, also when added to a total, with equal bits in every run."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions import column_sum
from megatron.core.fusions.column_sum import choose_column_sum, column_sum_plain, column_sum_triton
from tests.test_utils.kernels import DEVICE, TOLERANCE, filled


def check(function, shape, dtype, total_dtype):
    x = filled(*shape, dtype=dtype).to(DEVICE)
    before = None if total_dtype is None else filled(shape[1], dtype=total_dtype, seed=1).to(DEVICE)
    local, repeated = (function(x, None if before is None else before.clone()) for _ in range(2))
    exact = x.double().sum(0) + (0 if before is None else before.double())
    assert torch.equal(local, repeated) and local.dtype == (total_dtype or dtype) and local.shape == exact.shape
    assert (local.double() - exact).abs().max() <= TOLERANCE[local.dtype] * max(1.0, exact.abs().max())


@pytest.mark.parametrize("function", [column_sum_triton, column_sum_plain])
@pytest.mark.parametrize(
    "shape, dtype, total_dtype",
    [
        ((5, 3), torch.float32, None), ((37, 131), torch.bfloat16, torch.float32),
        ((145, 130), torch.bfloat16, None), ((131, 7), torch.float32, torch.float32),
        ((0, 3), torch.float32, torch.float32), ((0, 3), torch.bfloat16, None),
    ],
)  # fmt: skip
def test_columns_are_summed(monkeypatch, function, shape, dtype, total_dtype):
    monkeypatch.setattr(column_sum, "FEW_TILES", 2)  # so that small sums have two stages too
    monkeypatch.setattr(column_sum, "PROGRAMS_PER_SM", 2)
    check(function, shape, dtype, total_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("total_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8192, 1024), (8192, 4096), (8191, 3000), (100, 7), (513, 50000), (264, 2048)])
def test_columns_are_summed_at_real_sizes(shape, dtype, total_dtype):
    check(column_sum_triton, shape, dtype, total_dtype)


def test_the_flag_chooses_plain_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_column_sum(torch.bfloat16).kernel is column_sum_triton
    assert choose_column_sum(torch.bfloat16, False) is column_sum_plain
