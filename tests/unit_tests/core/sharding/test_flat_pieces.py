"""Stretches of local memory are rectangles of the global tensor: every element once, in its place, padding left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.groups.process_groups import RankGrid, build_process_groups
from megatron.core.sharding.flat_pieces import flat_pieces, spec_or_replicated
from megatron.core.sharding.placement import Part, Shard, Zeros, local_view, parameter


def groups_of(tp, rank):
    return build_process_groups(RankGrid(tp=tp), rank, lambda name, lists: (None, None))


SHAPES = {
    "matrix": ((8, 3), {}),
    "columns": ((5, 8), {"tp": Shard(1)}),
    "stacked": ((2, 4, 3), {"tp": Shard(1), "ndim": 2}),
    "padded": ((5, 3), {"tp": Shard(0), "stored": (8, 3)}),
    "vector": ((12,), {"tp": Shard(0)}),
    "heads": ((2, 3, 4, 5), {"tp": Shard(0), "ndim": 2}),
    "scalar": ((), {}),
    "part": (Part((6, 4), "weight", (2, 0), (4, 4)), {"tp": Shard(0)}),
}


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
            pieces = flat_pieces(local.spec, groups, start, stop)
            assert len(pieces) <= (3 if len(local.spec.shape) <= 2 else 2 * len(local.spec.shape) - 1)
            for piece in pieces:
                view = piece.view(values.view(-1)[start:stop])
                place = tuple(slice(o, o + n) for o, n in zip(*piece.chunk))
                assert math.prod(view.shape) and not rebuilt[place].any()
                rebuilt[place] = view
        expected = torch.zeros(local.spec.shape)
        whole = local_view(values, local.spec, groups)
        [piece] = flat_pieces(local.spec, groups, 0, size) or [None]
        if piece is not None:
            assert piece.chunk.lengths == tuple(whole.shape)
            expected[tuple(slice(o, o + n) for o, n in zip(*piece.chunk))] = whole
        assert torch.equal(rebuilt, expected)


def test_an_update_through_a_piece_reaches_the_memory():
    local = parameter((4, 3), init=Zeros())
    flat = torch.zeros(7)
    for index, piece in enumerate(flat_pieces(local.spec, groups_of(1, 0), 2, 9)):
        piece.view(flat).fill_(index + 1)
    assert flat.tolist() == [1, 2, 2, 2, 2, 2, 2]
    assert flat_pieces(local.spec, groups_of(1, 0), 5, 5) == []


@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_a_parameter_without_a_spec_is_whole_everywhere(shape):
    spec = spec_or_replicated(torch.zeros(shape))
    assert spec.shape == shape and len(flat_pieces(spec, groups_of(2, 1), 0, math.prod(shape))) == 1
