"""Rows of one document each at the front of a batch go to the kernel of whole sequences, others to the packed one."""

import pytest
import torch

from megatron.core.attention.kernels import torch_sdpa
from megatron.core.attention.kernels.base import FlashKernel
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Visibility

LENGTH = 128


def padded(*lengths, num_queries=None):
    lengths = torch.tensor(lengths)
    if num_queries is None:
        return PackedSeqParams.of_lengths(lengths, LENGTH)
    return PackedSeqParams.of_keys(lengths, num_queries, LENGTH)


def told(documents):
    """As batches bring them: boundaries on the host too."""
    documents.all_bounds()
    return documents


@pytest.mark.parametrize("lengths, whole", [((128, 128, 3), 2), ((128, 5, 128), 1), ((7, 128), 0), ((128, 128), 2)])
def test_rows_are_whole_up_to_the_first_with_padding(lengths, whole):
    for documents in (padded(*lengths), padded(*lengths, num_queries=64)):
        found, others = told(documents).whole_rows(len(lengths))
        assert found == whole and (others is None) == (whole == len(lengths))
        if others is not None and whole:
            bounds = others.all_bounds()
            assert [each[0] for each in bounds] == [0, 0] and len(bounds[0]) == len(bounds[1])
            assert bounds[1][-1] == LENGTH * (len(lengths) - whole)
            assert [tuple(each.tolist()) for each in (others.cu_seqlens_q, others.cu_seqlens_k)] == list(bounds)


def test_boundaries_on_a_device_alone_are_not_waited_for():
    documents = padded(128, 3)
    assert documents.whole_rows(2) == (0, documents)


@pytest.mark.parametrize("queries", [None, 256])
@pytest.mark.parametrize("lengths", [(128, 128, 40, 1), (128, 128), (9, 128)])
def test_both_kernels_together_equal_one_call_per_document(monkeypatch, lengths, queries):
    kernel = torch_sdpa.TorchAttention("cudnn", 0.2)
    monkeypatch.setattr(FlashKernel, "_documents", torch_sdpa.TorchAttention._document_by_document)
    calls = []
    rows = torch_sdpa.TorchAttention._rows
    monkeypatch.setattr(
        torch_sdpa.TorchAttention, "_rows",
        lambda self, query, *rest: calls.append(query.shape[1]) or rows(self, query, *rest),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    sizes = queries or LENGTH, LENGTH, LENGTH
    inputs = [torch.randn(n, len(lengths), 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
              for n in sizes]  # fmt: skip
    mask = Mask(Visibility(), told(padded(*lengths, num_queries=queries)))
    outcomes = []
    for attend in (kernel._documents, kernel._document_by_document):
        out = attend(*inputs, mask)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(*outcomes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    whole = next((index for index, length in enumerate(lengths) if length < LENGTH), len(lengths))
    assert calls[0] == (whole or 1)
