"""The matrix over NCCL: layouts on GPUs give the answer of one GPU, to 1e-10 in float64 and 1e-5 in float32."""

import dataclasses

import pytest

from tests.test_utils.layout_table import TABLE, THROUGH_COPY_ENGINES, row
from tests.test_utils.layouts import Matrix

STEPS = 4
LAYOUTS = [
    pytest.param(name, marks=pytest.mark.gpus(row(name).world_size), id=f"{row(name).world_size}-gpus-{name}")
    for name in TABLE
    if 1 < row(name).world_size <= 4
]


@pytest.fixture(scope="module")
def gpu_matrix(nccl_pool):
    """Layouts against one rank, rank r on GPU r."""
    matrix = Matrix(nccl_pool)
    yield matrix
    matrix.close()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_gpu(gpu_matrix, name):
    check(gpu_matrix, name)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [layout for layout in LAYOUTS if layout.values[0] in THROUGH_COPY_ENGINES])
def test_layout_equals_one_gpu_however_small_its_messages(gpu_matrix, name):
    """Without the patch, copy engines leave small messages to NCCL."""
    check(gpu_matrix, name, "small_messages_through_copy_engines")


def check(gpu_matrix, name, fault=None):
    verdict = gpu_matrix.verdict(dataclasses.replace(row(name), steps=STEPS), fault)
    assert verdict.equal, "\n".join(map(str, verdict.differences[:5]))
