"""Flat ranges of local memory are rectangles of the global tensor: every element once, in place, without padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.groups.process_groups import RankGrid, build_process_groups
from megatron.core.sharding.flat_pieces import flat_pieces
from megatron.core.sharding.placement import Shard, SubTensor, Zeros, local_view, parameter, spec_or_replicated
from megatron.core.sharding.rectangles import Rectangle


def groups_of(tp, rank):
    return build_process_groups(RankGrid(tp=tp), rank, lambda name, lists: (None, None))


SHAPES = {
    "matrix": ((8, 3), {}),
    "columns": ((5, 8), {"mesh": {"tp": Shard(1)}}),
    "stacked": ((2, 4, 3), {"mesh": {"tp": Shard(1)}, "ndim": 2}),
    "padded": ((5, 3), {"mesh": {"tp": Shard(0)}, "stored": (8, 3)}),
    "vector": ((12,), {"mesh": {"tp": Shard(0)}}),
    "heads": ((2, 3, 4, 5), {"mesh": {"tp": Shard(0)}, "ndim": 2}),
    "scalar": ((), {}),
    "part": (SubTensor((6, 4), "weight", Rectangle((2, 0), (4, 4))), {"mesh": {"tp": Shard(0)}}),
}


@settings(deadline=None)
@given(kind=st.sampled_from(sorted(SHAPES)), tp=st.sampled_from([1, 2]), data=st.data())
def test_cut_anywhere_the_pieces_make_up_the_local_shard(kind, tp, data):
    shape, options = SHAPES[kind]
    for rank in range(tp):
        groups = groups_of(tp, rank)
        local = parameter(shape, init=Zeros(), groups=groups, **options)
        size = local.numel()
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
        values = torch.arange(1.0, size + 1).view(local.shape)
        rebuilt = torch.zeros(local.spec.shape)
        for start, stop in zip([0, *cuts], [*cuts, size]):
            pieces = list(flat_pieces(local.spec, groups, (start, stop), values.view(-1)[start:stop]))
            assert len(pieces) <= (3 if len(local.spec.shape) <= 2 else 2 * len(local.spec.shape) - 1)
            for rectangle, view in pieces:
                place = rectangle.of(rebuilt)
                assert math.prod(view.shape) and view.shape == rectangle.lengths and not place.any()
                place.copy_(view)
        expected = torch.zeros(local.spec.shape)
        full = local_view(values, local.spec, groups)
        for rectangle, view in flat_pieces(local.spec, groups, (0, size), values):
            assert torch.equal(view, full)
            rectangle.of(expected).copy_(full)
        assert torch.equal(rebuilt, expected)


def test_an_update_through_a_piece_reaches_the_memory():
    local = parameter((4, 3), init=Zeros())
    flat = torch.zeros(7)
    for index, (_, view) in enumerate(flat_pieces(local.spec, groups_of(1, 0), (2, 9), flat)):
        view.fill_(index + 1)
    assert flat.tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert not list(flat_pieces(local.spec, groups_of(1, 0), (5, 5), flat[:0]))


@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_a_parameter_without_a_spec_is_full_on_every_rank(shape):
    spec = spec_or_replicated(torch.zeros(shape))
    pieces = list(flat_pieces(spec, groups_of(2, 1), (0, math.prod(shape)), torch.zeros(shape)))
    assert spec.shape == shape and len(pieces) == 1
