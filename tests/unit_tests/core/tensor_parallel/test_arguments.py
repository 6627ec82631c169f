"""Tensor-parallel layers that programs build with Megatron-LM's arguments, compared with one rank."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.config.errors import UserError
from megatron.core.config.model_parallel_config import ModelParallelConfig
from megatron.core.sharding.placement import Ones
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

CONFIG = ModelParallelConfig(params_dtype=torch.float64, gradient_accumulation_fusion=False)
WHOLE = torch.arange(32.0, dtype=torch.float64).view(8, 4) / 7


def slice_of(dim, weight):
    """Fills this rank's part of ``WHOLE``, as an initial value of a program's own."""
    tp = parallel_state.get_process_groups().tp
    full = WHOLE if dim == 0 else WHOLE.t().contiguous()
    weight.copy_(full.chunk(tp.size, dim)[tp.rank])


def _layers(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    common = {"config": CONFIG, "skip_bias_add": False, "is_expert": False, "tp_comm_buffer_name": "fc1"}
    column = ColumnParallelLinear(
        4, 8, init_method=partial(slice_of, 0), bias=True, gather_output=True, stride=1,
        embedding_activation_buffer=None, grad_output_buffer=None, tp_group=tp_group, **common,
    )  # fmt: skip
    row = RowParallelLinear(
        8, 4, init_method=partial(slice_of, 1), bias=False, input_is_parallel=False, keep_master_weight_for_test=False,
        **common,
    )  # fmt: skip
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    y, bias = column(x)
    z, _ = row(y)
    z.square().sum().backward()
    reference = x.detach().clone().requires_grad_()
    expected = F.linear(F.linear(reference, WHOLE), WHOLE.t())
    expected.square().sum().backward()
    torch.testing.assert_close(z, expected)
    torch.testing.assert_close(x.grad, reference.grad)
    shared = ColumnParallelLinear(
        4, 8, config=CONFIG, init_method=Ones(), bias=False, gather_output=True, skip_weight_param_allocation=True
    )
    assert shared.weight is None and not list(shared.parameters())
    weight = WHOLE.chunk(world_size)[rank].clone().requires_grad_()
    x.grad = None
    output, _ = shared(x, weight=weight)
    output.sum().backward()
    torch.testing.assert_close(output, F.linear(x, WHOLE))
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(8 // world_size, 4))
    torch.testing.assert_close(x.grad, WHOLE.sum(0).expand(3, 4))
    embedding = VocabParallelEmbedding(
        8, 4, init_method=partial(slice_of, 0), config=CONFIG, reduce_scatter_embeddings=False, divisible_by=8
    )
    ids = torch.tensor([[0, 7], [3, 4]])
    torch.testing.assert_close(embedding(ids), WHOLE[ids])
    return bias is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_of_a_program_equal_one_rank(gloo_pool, world_size):
    assert gloo_pool.run(_layers, world_size) == [True] * world_size


def _rejected(rank, world_size):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(UserError, match="is_expert True: experts split over ranks are built by MoELayer only"):
        ColumnParallelLinear(4, 8, config=CONFIG, init_method=Ones(), is_expert=True)
    return True


def test_experts_that_are_split_over_ranks_are_rejected(gloo_pool):
    assert all(gloo_pool.run(_rejected, 2))
    assert ColumnParallelLinear(4, 8, config=CONFIG, init_method=Ones(), is_expert=True).weight.sum() == 32


def test_values_with_another_meaning_are_rejected():
    with pytest.raises(UserError, match="stride 2: not available"):
        RowParallelLinear(4, 8, config=CONFIG, init_method=Ones(), stride=2)
    with pytest.raises(TypeError, match="outputs"):
        RowParallelLinear(4, 8, config=CONFIG, init_method=Ones(), outputs=2)
