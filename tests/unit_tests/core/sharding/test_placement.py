"""Parameters are slices of one global tensor in every layout."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group, ProcessGroups
from megatron.core.sharding.placement import (
    Normal,
    Ones,
    Partial,
    Replicate,
    Shard,
    XavierUniform,
    Zeros,
    adopt_declarations,
    counts_on_this_rank,
    initialize_parameters,
    local_rectangle,
    local_view,
    parameter,
)
from megatron.core.sharding.rectangles import Rectangle
from tests.test_utils.specs import named_specs, unique_parameter_count


def tensor_parallel(rank, size):
    return ProcessGroups(tp=Group("tp", tuple(range(size)), rank))


class Weights(nn.Module):
    """Every kind of declaration."""

    def __init__(self, groups=None, dtype=torch.float32):
        super().__init__()
        built = {"groups": groups, "dtype": dtype}
        self.column = parameter((12, 10), init=Normal(0.02), mesh={"tp": Shard(0)}, **built)
        self.row = parameter((6, 24), init=Normal(0.5), mesh={"tp": Shard(1)}, **built)
        self.odd_row = parameter((5, 6), init=Normal(1.0), mesh={"tp": Shard(1)}, **built)
        self.gate_up = parameter((2, 8, 5), init=Normal(1.0), mesh={"tp": Shard(1)}, ndim=2, **built)
        self.xavier = parameter((4, 7, 3), init=XavierUniform(), mesh={"tp": Shard(0)}, ndim=2, **built)
        self.bias = parameter((2, 8), init=Ones(), mesh={"tp": Shard(1)}, ndim=1, **built)
        self.padded = parameter((9, 4), init=Normal(1.0), mesh={"tp": Shard(0)}, stored=(16, 4), **built)
        self.norm = parameter((7,), init=Ones(), partial=("tp",), **built)


def build(size, rank, dtype=torch.float32):
    groups = tensor_parallel(rank, size)
    model = Weights(groups, dtype)
    initialize_parameters(model, 1234, groups)
    return model, groups


def gathered(size, dtype=torch.float32):
    """The global tensors, put together from every rank's chunks."""
    full = {}
    for rank in range(size):
        model, groups = build(size, rank, dtype)
        for name, param, spec in named_specs(model):
            target = full.setdefault(name, torch.full(spec.shape, torch.nan, dtype=dtype))
            offsets, lengths = local_rectangle(spec, groups)
            rectangle = tuple(slice(o, o + n) for o, n in zip(offsets, lengths))
            target[rectangle] = local_view(param, spec, groups)
    return full


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_bit_identical_for_every_split(size, dtype):
    if size == 4:
        with pytest.raises(ValueError, match="not divisible by the tp size 4"):
            Weights(tensor_parallel(0, 4))
        return
    one, many = gathered(1, dtype), gathered(size, dtype)
    assert dtype != torch.float64 or any(not torch.equal(x, x.float().double()) for x in one.values()), "fp32 draws"
    for name in one:
        assert not many[name].isnan().any(), name
        assert torch.equal(one[name], many[name]), name


def test_stored_shapes_fold_leading_dims_and_padding_is_zero():
    model, groups = build(2, 1)
    assert model.gate_up.shape == (8, 5) and model.bias.shape == (8,) and model.xavier.shape == (14, 3)
    assert model.padded.shape == (8, 4) and torch.count_nonzero(model.padded[1:]) == 0 and model.padded[0].all()
    assert local_rectangle(model.padded.spec, groups) == Rectangle((8, 0), (1, 4))


def test_a_shard_of_nothing_but_padding_is_an_empty_chunk():
    groups = tensor_parallel(1, 2)
    weight = parameter((5, 4), init=Normal(1.0), mesh={"tp": Shard(0)}, stored=(16, 4), groups=groups)
    assert local_rectangle(weight.spec, groups) == Rectangle((5, 0), (0, 4))


def test_distributions_have_their_declared_width():
    model = nn.Module()
    model.normal = parameter((300, 200), init=Normal(0.02))
    model.xavier = parameter((2, 150, 200), init=XavierUniform(), ndim=2)
    initialize_parameters(model, 1, SINGLE_PROCESS)
    assert model.normal.std().item() == pytest.approx(0.02, rel=0.02)
    bound = (6 / (300 + 200)) ** 0.5
    assert model.xavier.abs().max() <= bound and model.xavier.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


def test_experts_have_the_xavier_values_of_one_matrix_each():
    model = nn.Module()
    model.experts = parameter((8, 2, 30, 40), init=XavierUniform(stacked=1), ndim=2)
    initialize_parameters(model, 1, SINGLE_PROCESS)
    bound = (6 / (60 + 40)) ** 0.5
    assert 0.99 * bound < model.experts.abs().max() <= bound


def test_seeds_and_names_give_different_values():
    def values(seed, name):
        model = nn.Module()
        model.register_parameter(name, parameter((8,), init=Normal(1.0)))
        initialize_parameters(model, seed, SINGLE_PROCESS)
        return next(model.parameters()).detach()

    drawn = [values(seed, name) for seed, name in itertools.product((1, 2), ("a", "b"))]
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(drawn, 2))


def test_a_tied_copy_starts_equal_and_is_not_counted():
    owner, copy = nn.Module(), nn.Module()
    owner.word = parameter((6, 4), init=Normal(1.0))
    copy.output = parameter((6, 4), init=Normal(1.0))
    copy.output.spec = replace(copy.output.spec, tied_to="word")
    initialize_parameters(owner, 1, SINGLE_PROCESS)
    initialize_parameters(copy, 1, SINGLE_PROCESS)
    assert torch.equal(owner.word, copy.output)
    assert unique_parameter_count(owner) == 24 and unique_parameter_count(copy) == 0


def test_parameters_without_a_declaration_count_once():
    assert [counts_on_this_rank(None, tensor_parallel(rank, 2)) for rank in (0, 1)] == [True, False]


def test_counts_are_of_the_true_global_shapes():
    assert unique_parameter_count(build(2, 0)[0]) == 120 + 144 + 30 + 80 + 84 + 16 + 36 + 7


def test_parameter_rejects_mixed_grids_and_missing_groups():
    groups = tensor_parallel(0, 2)
    with pytest.raises(ValueError, match="a mesh names axes of"):
        parameter((4, 4), init=Zeros(), groups=groups, mesh={"tp": Shard(0), "ep": Shard(1)})
    with pytest.raises(ValueError, match="created with their groups"):
        parameter((4, 4), init=Zeros(), mesh={"tp": Shard(0)})


def test_weights_without_allreduce_need_a_declared_placement():
    experts = nn.Linear(2, 2)
    experts.weight.allreduce = False
    with pytest.raises(UserError, match="weight: allreduce is False"):
        adopt_declarations(experts, tensor_parallel(0, 2))


def test_partial_sums_are_over_axes_of_the_parameters_grid():
    """The ranks of another axis hold other experts: a sum over them would be of different elements."""
    for mesh, partial in (({"ep": Shard(0)}, ("tp",)), (None, ("ep",)), ({"tp": Shard(0)}, ("tq",))):
        with pytest.raises(ValueError, match="partial sums over axes of"):
            parameter((4, 4), init=Zeros(), mesh=mesh, partial=partial, groups=SINGLE_PROCESS)


def test_attributes_of_megatron_lm_declare_partial_sums_and_shards():
    module, groups = nn.Linear(4, 2), tensor_parallel(0, 2)
    module.weight.tensor_model_parallel, module.weight.partition_dim = True, 1
    module.bias.sequence_parallel = False
    adopt_declarations(module, groups)
    assert module.weight.spec.shape == (2, 8) and module.weight.spec.mesh == {"tp": Shard(1)}
    assert module.bias.spec.grad == {} and module.bias.spec.mesh == {}
    norm = nn.LayerNorm(4)
    norm.weight.sequence_parallel = True
    adopt_declarations(norm, groups)
    assert norm.weight.spec.grad == {"tp": Partial()} and not hasattr(norm.bias, "spec")


@pytest.mark.parametrize("mesh", [{"ep": Shard(0)}, {"etp": Shard(0)}, {"ep": Replicate(), "etp": Replicate()}])
def test_any_expert_axis_makes_an_expert_parameter(mesh):
    assert parameter((4, 4), init=Zeros(), mesh=mesh, groups=SINGLE_PROCESS).spec.is_expert
    assert not parameter((4, 4), init=Zeros(), mesh={"tp": Shard(0)}, groups=SINGLE_PROCESS).spec.is_expert


@pytest.mark.parametrize("dim", [-1, 0])
def test_a_stride_is_rejected_with_words_that_can_be_copied(dim):
    module = nn.Linear(2, 2)
    module.weight.tensor_model_parallel, module.weight.partition_stride = True, 2
    module.weight.partition_dim = dim
    with pytest.raises(UserError, match=r'mesh=\{"tp": Shard\(dim\)\}\)'):
        adopt_declarations(module, SINGLE_PROCESS)
