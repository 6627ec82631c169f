"""All-gathers of fp8 matrices along the sequence equal the cast of the gathered matrix, bit for bit."""

import pytest
import torch

from megatron.core.fp8.gather import begin_gather
from megatron.core.fusions.fp8_cast import amax_parts, cast_in_blocks, cast_tensor
from tests.test_utils.kernels import filled


def gathered(rank, world_size, blocks, length, batch):
    """A task of the pool: compare the gathered copies with the copies of the full matrix."""
    from megatron.core import parallel_state

    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    x = filled(length, batch, 144, dtype=torch.bfloat16) * torch.logspace(-2, 2, length).view(-1, 1, 1)
    local = x.chunk(world_size)[rank]
    if blocks:
        full, part = (cast_in_blocks(each, torch.float8_e4m3fn, columns=True) for each in (x, local))
    else:
        full, part = (cast_tensor(each, torch.float8_e5m2, amax_parts(x), columns=True) for each in (x, local))
    rows = part.rows._replace(data=part.rows.data.view(local.shape))
    found = (
        begin_gather(rows, group, transposed=False).wait(),
        begin_gather(part.columns, group, transposed=True).wait(),
    )
    for one, expected in zip(found, full, strict=True):
        assert one.data.dtype == expected.data.dtype and one.data.is_contiguous()
        assert torch.equal(one.data.view(torch.uint8).flatten(), expected.data.view(torch.uint8).flatten())
        assert torch.equal(one.scale, expected.scale) and one.scale.stride() == expected.scale.stride()
    return tuple(found[0].data.shape), tuple(found[1].data.shape)


@pytest.mark.parametrize("blocks, length, batch", [(False, 12, 3), (False, 4, 1), (True, 512, 1), (True, 256, 2)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_copies_equal_those_of_the_full_matrix(gloo_pool, world_size, blocks, length, batch):
    shapes = gloo_pool.run(gathered, world_size, blocks, length, batch)
    assert shapes == [((length, batch, 144), (144, length * batch))] * world_size
