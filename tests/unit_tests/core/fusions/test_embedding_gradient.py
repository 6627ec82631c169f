"""Gradients of a lookup, added to the rows that occur, equal the sum over tokens, in the same bits every time."""

import pytest
import torch

pytest.importorskip("triton")

from megatron.core.fusions.dispatch import ByDevice
from megatron.core.fusions.embedding_gradient import add_rows_plain, add_rows_triton, choose_add_rows
from tests.test_utils.kernels import DEVICE, TOLERANCE, filled

KINDS = ["random", "one of them often", "one alone", "half absent", "all absent"]


def some_ids(kind, tokens, rows):
    ids = torch.randint(rows, (tokens,), generator=torch.Generator().manual_seed(3))
    if kind == "one of them often":
        ids[::3] = rows - 1
    elif kind == "one alone":
        ids[:] = 0
    elif kind == "half absent":
        ids[1::2] = -1
    elif kind == "all absent":
        ids[:] = -1
    return ids


def check(add_rows, kind, shape, dtype, total_dtype):
    tokens, width, rows = shape
    ids, grad = some_ids(kind, tokens, rows).to(DEVICE), filled(tokens, width, dtype=dtype, device=DEVICE)
    before = filled(rows, width, dtype=total_dtype, seed=1, device=DEVICE)
    local, repeated = before.clone(), before.clone()
    for total in (local, repeated):
        add_rows(grad, ids, total)
    assert torch.equal(local, repeated)
    present = ids >= 0
    exact = before.double().index_add_(0, ids[present], grad.double()[present])
    error = (local.double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCE[total_dtype]
    unused = torch.ones(rows, dtype=torch.bool, device=DEVICE).index_fill_(0, ids[present], False)
    assert torch.equal(local[unused], before[unused])


@pytest.mark.parametrize("add_rows", [add_rows_triton, add_rows_plain])
@pytest.mark.parametrize(
    "kind, shape, dtype, total_dtype",
    [
        ("random", (13, 5, 9), torch.float32, torch.float32),
        ("one of them often", (31, 515, 7), torch.bfloat16, torch.float32),
        ("one alone", (19, 3, 2), torch.float32, torch.float32),
        ("half absent", (17, 6, 11), torch.bfloat16, torch.bfloat16),
        ("all absent", (4, 4, 4), torch.float32, torch.float32), ("random", (0, 4, 4), torch.float32, torch.float32),
    ],
)  # fmt: skip
def test_rows_that_occur_get_the_sum(add_rows, kind, shape, dtype, total_dtype):
    check(add_rows, kind, shape, dtype, total_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8192, 4096, 128256), (8192, 1024, 1000), (1023, 777, 50257)])
def test_rows_that_occur_get_the_sum_at_real_sizes(kind, shape, total_dtype):
    check(add_rows_triton, kind, shape, torch.bfloat16, total_dtype)


@pytest.mark.gpu
def test_a_graph_records_the_kernel():
    ids, grad = some_ids("random", 8192, 1000).cuda(), filled(8192, 64, dtype=torch.bfloat16).cuda()
    expected, total = torch.zeros(1000, 64, device="cuda"), torch.zeros(1000, 64, device="cuda")
    add_rows_triton(grad, ids, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_rows_triton(grad, ids, total)
    total.zero_()
    graph.replay()
    assert torch.equal(total, expected)


def test_plain_torch_is_chosen_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_add_rows(torch.bfloat16) is add_rows_plain
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_add_rows(torch.bfloat16) == ByDevice(add_rows_triton, add_rows_plain)
