"""All-gathers of fp8 matrices along the sequence equal the cast of the gathered matrix, bit for bit."""

from unittest import mock

import pytest
import torch

from megatron.core.fp8.gather import begin_gather
from megatron.core.fusions.fp8_cast import amax_parts, cast_in_blocks, cast_tensor
from megatron.core.tensor_parallel import collectives
from tests.test_utils.kernels import filled


def gathered(rank, world_size, blocks, length, batch):
    """A task of the pool: compare the gathered copies with the copies of the full matrix."""
    from megatron.core import parallel_state

    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    x = filled(length, batch, 144, dtype=torch.bfloat16) * torch.logspace(-2, 2, length).view(-1, 1, 1)
    local = x.chunk(world_size)[rank]
    if blocks:
        full, part = (cast_in_blocks(item, torch.float8_e4m3fn, columns=True) for item in (x, local))
    else:
        full, part = (cast_tensor(item, torch.float8_e5m2, amax_parts(x), columns=True) for item in (x, local))
    rows = part.rows._replace(data=part.rows.data.view(local.shape))
    actual = (
        begin_gather(rows, group, transposed=False).wait(),
        begin_gather(part.columns, group, transposed=True).wait(),
    )
    for one, expected in zip(actual, full, strict=True):
        assert one.data.dtype == expected.data.dtype and one.data.is_contiguous()
        assert torch.equal(one.data.view(torch.uint8).flatten(), expected.data.view(torch.uint8).flatten())
        assert torch.equal(one.scale, expected.scale) and one.scale.stride() == expected.scale.stride()
    return tuple(actual[0].data.shape), tuple(actual[1].data.shape)


@pytest.mark.parametrize("blocks, length, batch", [(False, 12, 3), (False, 4, 1), (True, 512, 1), (True, 256, 2)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_copies_equal_those_of_the_full_matrix(gloo_pool, world_size, blocks, length, batch):
    shapes = gloo_pool.run(gathered, world_size, blocks, length, batch)
    assert shapes == [((length, batch, 144), (144, length * batch))] * world_size


def gathered_gradient(rank, world_size, recipe, weight_gradients):
    """A task of the pool: bytes that this rank sends in backward, and the operands of its gradient."""
    from megatron.core import parallel_state
    from tests.unit_tests.core.fp8.test_fp8_gemms import build_gemms

    group = parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size).tp
    weight = filled(144, 32, dtype=torch.bfloat16)
    gemms = build_gemms(recipe, [weight], weight_gradients=weight_gradients)
    gemms.groups = (group,)
    grad = filled(32, 2, 144, dtype=torch.bfloat16) * torch.logspace(-2, 2, 32).view(-1, 1, 1)
    expected = gemms.pack_gradient(grad.bfloat16(), for_input=True, for_weight=True)
    sent, gather = [], collectives.all_gather

    def counted(out, x, *arguments, **options):
        sent.append(x.numel() * x.element_size())
        return gather(out, x, *arguments, **options)

    with mock.patch.object(collectives, "all_gather", counted):
        carrier = gemms.gather_gradient(grad.bfloat16().chunk(world_size)[rank], group)
    actual = gemms.pack_gradient(carrier, for_input=True, for_weight=True)
    for one, other in zip(actual, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one.data.shape == other.data.shape and torch.equal(one.scale, other.scale)
            assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
    return carrier.shape, bool(carrier.isnan().all()), sum(sent)


@pytest.mark.parametrize("recipe, weight_gradients, size", [
    ("tensorwise", True, 1), ("delayed", True, 1), ("tensorwise", False, 2), ("blockwise", True, 2),
])  # fmt: skip
def test_gradients_of_row_parallel_layers_are_gathered_in_fp8(gloo_pool, recipe, weight_gradients, size):
    """One byte per element, and the values of the carrier are not used. With block scales the two copies differ, and
    weight gradients in higher precision read the values: there the tensor is gathered."""
    result = gloo_pool.run(gathered_gradient, 2, recipe, weight_gradients)
    assert result == [((32, 2, 144), size == 1, 16 * 2 * 144 * size)] * 2
