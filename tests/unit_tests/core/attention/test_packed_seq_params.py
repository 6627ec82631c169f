"""Documents of a batch: padded rows, moves to a device, rows with one document, rejected bounds."""

import pytest
import torch

from megatron.core.attention import packed_seq_params
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.config.errors import UserError

LENGTHS = torch.tensor([3, 128])


def of(queries, keys=None):
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (queries, keys or queries)]
    return PackedSeqParams(cu_seqlens_q=tensors[0], cu_seqlens_kv=tensors[1] if keys else tensors[0])


def test_padding_is_a_document_and_where_keys_have_none_one_without_queries():
    local, other = PackedSeqParams.of_lengths(LENGTHS, 128), PackedSeqParams.of_keys(LENGTHS, 64, 128)
    assert local.cu_seqlens_q.tolist() == other.cu_seqlens_kv.tolist() == [0, 3, 128, 256, 256]
    assert other.cu_seqlens_q.tolist() == [0, 64, 64, 128, 128] and local.cu_seqlens_kv is local.cu_seqlens_q
    max_length = [(x.max_seqlen_q, x.max_seqlen_kv) for x in (local, other)]
    assert max_length == [(128, 128), (64, 128)] and local.cu_seqlens_q.dtype == torch.int32


def test_rows_without_padding_have_no_documents_where_the_host_can_know(monkeypatch):
    full = torch.tensor([128, 128])
    assert PackedSeqParams.of_padding(full, 128) is None
    assert PackedSeqParams.of_padding(LENGTHS, 128).cu_seqlens_q.tolist() == [0, 3, 128, 256, 256]
    monkeypatch.setattr(packed_seq_params, "is_on_host", lambda x: False)
    assert PackedSeqParams.of_padding(full, 128).cu_seqlens_q.tolist() == [0, 128, 128, 256, 256]


def test_boundaries_that_move_to_a_device_stay_known_to_the_host():
    meta = torch.device("meta")
    local, other = PackedSeqParams.of_lengths(LENGTHS, 128), PackedSeqParams.of_keys(LENGTHS, 64, 128)
    for documents in (local, other, PackedSeqParams()):
        assert documents.on(torch.device("cpu")) is documents
    destination, keys_there = local.on(meta), other.on(meta)
    assert destination.cu_seqlens_kv is destination.cu_seqlens_q and destination.all_bounds() == local.all_bounds()
    assert keys_there.cu_seqlens_q.device == keys_there.cu_seqlens_kv.device == meta
    assert keys_there.all_bounds() == ((0, 64, 64, 128, 128), (0, 3, 128, 256, 256))


def test_boundaries_are_known_where_the_host_may_read_or_has_read_them(monkeypatch):
    documents = of([0, 3, 8])
    assert documents.known
    monkeypatch.setattr(packed_seq_params, "is_on_host", lambda x: False)
    assert PackedSeqParams().known and not documents.known
    documents.all_bounds()
    assert documents.known


def test_the_rest_begins_after_empty_documents():
    documents = PackedSeqParams.of_lengths(torch.tensor([128, 128, 3]), 128)
    assert documents.all_bounds() == ((0, 128, 128, 256, 256, 259, 384),) * 2
    assert documents.split_full_rows(3)[1].all_bounds() == ((0, 3, 128),) * 2


def test_rows_without_a_common_boundary_are_not_split():
    documents = of([0, 4, 8, 10, 12], [0, 0, 4, 6, 12])
    documents.all_bounds()
    assert documents.split_full_rows(3) == (0, documents)


def test_ranges_are_of_each_token_in_its_row():
    documents = PackedSeqParams.of_lengths(torch.tensor([3, 5, 1]), 5)
    ranges = documents.ranges(3, 5)
    assert ranges.dtype == torch.int32 and ranges is documents.ranges(3, 5)
    assert ranges[0].tolist() == [[0, 0, 0, 3, 3], [0] * 5, [0, 1, 1, 1, 1]]
    assert ranges[1].tolist() == [[3, 3, 3, 5, 5], [5] * 5, [1, 5, 5, 5, 5]]


@pytest.mark.parametrize("bounds", [[1, 8, 16], [0, 8, 15], [0, 8, 24], [0, 9, 16], [0, 12, 8, 16], [0, 8], [0, 4]])
def test_documents_of_other_rows_are_rejected(bounds):
    of([0, 3, 8, 8, 16]).check(2, 8)
    PackedSeqParams().check(2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q must ascend from 0 to 16"):
        of(bounds).check(2, 8)


def padded(actual, places, **more):
    tensors = [torch.tensor(x, dtype=torch.int32) for x in (actual, places)]
    return PackedSeqParams("thd", tensors[0], tensors[0], tensors[1], tensors[1], 9, 9, **more)


def test_padding_after_documents_is_made_documents():
    """Documents of 3, 4 and 0 tokens at 0, 4 and 8, in a row whose last place ends at 10, and two tokens more."""
    result = padded([0, 3, 7, 7], [0, 4, 8, 10]).documents(12)
    assert result.cu_seqlens_q.tolist() == [0, 3, 4, 8, 8, 8, 10, 12] and result.cu_seqlens_q.dtype == torch.int32
    assert result.cu_seqlens_kv is result.cu_seqlens_q and result.max_seqlen_q is None
    result.check(1, 12)
    same = padded([0, 4, 8], [0, 4, 8]).documents(8)
    assert same.cu_seqlens_q.tolist() == [0, 4, 4, 8, 8, 8]
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    plain = PackedSeqParams("thd", bounds, bounds, bounds, bounds, 4, 4, total_tokens=8, cp_group=None)
    assert plain.documents(8) is plain and plain.max_seqlen_kv == 4
    copied = PackedSeqParams("thd", bounds, bounds.clone()).documents(8)
    assert copied.cu_seqlens_kv is copied.cu_seqlens_q


def test_documents_that_cannot_be_are_rejected():
    with pytest.raises(ValueError, match="longer than its place"):
        padded([0, 5, 7], [0, 4, 8]).documents(8)
    with pytest.raises(ValueError, match="cu_seqlens_kv: must equal"):
        of([0, 4, 8], [0, 5, 8]).documents(8)


def test_documents_that_a_program_splits_over_context_parallel_ranks_are_rejected():
    """Megatron-LM's programs cut each document for the ranks; this library's ring takes rows cut as a whole."""
    for documents in (padded([0, 4, 8], [0, 4, 8]), PackedSeqParams("thd", torch.tensor([0, 4, 8]))):
        with pytest.raises(UserError, match="2 context-parallel ranks split rows, not documents"):
            documents.documents(8, 2)
    assert of([0, 4, 8]).documents(8, 2).cu_seqlens_q.tolist() == [0, 4, 8]
