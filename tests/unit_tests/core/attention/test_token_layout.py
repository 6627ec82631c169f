"""Token layouts: every token of a full sequence is on one rank; exchanges and their gradients equal one rank."""

from dataclasses import replace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import ONE_RANK, TokenLayout
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group

CPU = torch.device("cpu")
POSITIONS = {
    "zigzag": [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]],
    "contiguous": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
}


def build(order, cp_rank, tp_rank, sequence_parallel=True):
    """Layout of a rank of two context- and two tensor-parallel ranks, without process groups."""
    cp, tp = Group("cp", (0, 2), cp_rank), Group("tp", (0, 1), tp_rank)
    groups = replace(SINGLE_PROCESS, cp=cp, tp=tp, tp_cp=Group("tp_cp", (0, 1, 2, 3), 2 * cp_rank + tp_rank))
    return TokenLayout.of(groups, sequence_parallel, order)


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("cp_rank", [0, 1])
@pytest.mark.parametrize("order", POSITIONS)
def test_positions_are_those_of_this_rank(order, cp_rank, tp_rank):
    layout, expected = build(order, cp_rank, tp_rank), torch.tensor(POSITIONS[order][cp_rank])
    assert torch.equal(layout.positions(8, CPU), expected) and layout.full_length(8) == 16
    assert torch.equal(layout.local(torch.arange(16), 0), expected)
    assert torch.equal(layout.stream_positions(4, CPU), expected.chunk(2)[tp_rank])
    ranges = [[i for span in layout.spans(16, rank) for i in range(*span)] for rank in (0, 1, None)]
    assert ranges == [*POSITIONS[order], expected.tolist()]
    assert layout.has_first_token == (cp_rank == 0) and layout.num_chunks == {"zigzag": 2, "contiguous": 1}[order]


def test_stream_is_split_by_sequence_parallelism_only():
    split, full = (build("zigzag", 1, 1, sequence_parallel) for sequence_parallel in (True, False))
    assert (split.stream.size, split.sharers.ranks) == (2, (0, 1, 2, 3))
    assert (full.stream.size, full.sharers.ranks) == (1, (0, 2))
    assert full.stream_positions(8, CPU).tolist() == POSITIONS["zigzag"][1]


def test_documents_belong_to_one_micro_batch():
    documents = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 3, 16]))
    packed = build("zigzag", 0, 0).with_documents(documents)
    assert packed.documents is documents and packed.with_documents(None).documents is None


def test_default_layout_is_one_rank_and_caches_nothing():
    """Callers all over a program share it: a cache would grow with every length."""
    assert ONE_RANK.is_default and ONE_RANK.num_chunks == 1 and ONE_RANK.spans(5) == ((0, 5),)
    assert ONE_RANK.positions(5, CPU) is not ONE_RANK.positions(5, CPU)
    layout = TokenLayout.of(replace(SINGLE_PROCESS, cp=Group("cp")))
    assert not layout.is_default and layout.positions(5, CPU) is layout.positions(5, CPU)


def exchanged(rank, size, order):
    """Check all exchanges of a rank against one rank that holds the full sequences."""
    groups = parallel_state.initialize_model_parallel(context_parallel_size=size)
    layout = TokenLayout.of(groups, order=order)
    generator = torch.Generator().manual_seed(1)
    whole_sbh = torch.randn(8 * size, 3, 4, generator=generator, dtype=torch.float64)
    weights = torch.randn(size, *whole_sbh.shape, generator=generator, dtype=torch.float64)
    local_part = layout.local(whole_sbh, 0)
    for x, dim in ((local_part, 0), (local_part.transpose(0, 1), 1), (local_part.movedim(0, 2), -1)):
        leaf = x.detach().requires_grad_()  # also as a view whose memory has another order
        full = layout.full(leaf, dim)
        assert torch.equal(full.movedim(dim, 0), whole_sbh)
        (full.movedim(dim, 0) * weights[rank]).sum().backward()
        torch.testing.assert_close(leaf.grad.movedim(dim, 0), layout.local(weights.sum(0), 0))
    summed = layout.sum(weights[rank].clone())
    torch.testing.assert_close(summed, weights.sum(0))
    tokens = layout.local(whole_sbh.view(8 * size, 1, size, -1), 0)
    (heads,) = layout.heads(tokens)
    assert torch.equal(heads, whole_sbh.view(8 * size, 1, size, -1)[:, :, rank : rank + 1])
    assert torch.equal(layout.tokens(heads), tokens)


@pytest.mark.parametrize("order", POSITIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_equal_one_rank(gloo_pool, size, order):
    gloo_pool.run(exchanged, size, order)
