"""Rows of one document each at the front of a batch go to the kernel of whole sequences, others to the packed one."""

import pytest
import torch

from megatron.core.attention.kernels import torch_sdpa
from megatron.core.attention.kernels.unfused import UnfusedAttention
from megatron.core.attention.masks import Mask
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.tiles import Visibility, full_tile

LENGTH = 128


def padded(*lengths, num_queries=None):
    lengths = torch.tensor(lengths)
    if num_queries is None:
        return PackedSeqParams.of_lengths(lengths, LENGTH)
    return PackedSeqParams.of_keys(lengths, num_queries, LENGTH)


def told(documents):
    """Cache the boundaries on the host, as a batch does."""
    documents.all_bounds()
    return documents


@pytest.mark.parametrize("lengths, whole", [((128, 128, 3), 2), ((128, 5, 128), 1), ((7, 128), 0), ((128, 128), 2)])
def test_rows_are_full_up_to_the_first_with_padding(lengths, whole):
    for documents in (padded(*lengths), padded(*lengths, num_queries=64)):
        result, rest = told(documents).split_full_rows(len(lengths))
        assert result == whole and (rest is None) == (whole == len(lengths))
        if rest is not None and whole:
            bounds = rest.all_bounds()
            assert [bound[0] for bound in bounds] == [0, 0] and len(bounds[0]) == len(bounds[1])
            assert bounds[1][-1] == LENGTH * (len(lengths) - whole)
            assert [tuple(x.tolist()) for x in (rest.cu_seqlens_q, rest.cu_seqlens_k)] == list(bounds)


def test_boundaries_on_the_device_only_are_not_waited_for():
    documents = padded(128, 3)
    assert documents.split_full_rows(2) == (0, documents)


def test_the_caller_may_know_of_full_rows_on_a_device():
    lengths = torch.tensor([128, 128, 3])
    result, rest = PackedSeqParams.of_lengths(lengths, LENGTH, full_rows=1).split_full_rows(3)
    assert result == 1 and rest.cu_seqlens_q.tolist() == rest.cu_seqlens_k.tolist() == [0, 128, 128, 131, 256]
    assert PackedSeqParams.of_lengths(lengths[:2], LENGTH, full_rows=2).split_full_rows(2) == (2, None)


class ExactKernel(torch_sdpa.TorchAttention):
    """The definition in place of cuDNN's and the flash kernel's operators; counts the calls of each."""

    def __init__(self):
        super().__init__("cudnn", 0.2)
        self.exact, self.calls = UnfusedAttention(0.2), []

    def forward(self, query, key, value, tile):
        self.calls.append("rows")
        return self.exact.forward(query, key, value, tile)

    def backward(self, grad, query, key, value, out, lse, tile):
        return self.exact.backward(grad, query, key, value, out, lse, tile)

    def _flash(self, query, key, value, shape, window):
        self.calls.append("documents")
        parts = [self.exact.forward(*item, tile) for item, tile in self._split((query, key, value), shape, window)]
        return torch.cat([out.squeeze(0).transpose(0, 1) for out, _ in parts]), torch.zeros(())  # no log-sum-exp

    def _flash_backward(self, tensors, lse, shape, window):
        grads = []
        assert tensors[4].shape == tensors[0].shape and lse.dim() == 0
        for (query, key, value, grad), tile in self._split((*tensors[1:4], tensors[0]), shape, window):
            out, lse = self.exact.forward(query, key, value, tile)
            grads.append(self.exact.backward(grad, query, key, value, out, lse, tile))
        return [torch.cat([item.squeeze(0).transpose(0, 1) for item in column]) for column in zip(*grads)]

    def _split(self, tensors, shape, window):
        """Each document's tensors [1, a, n, d], and its tile."""
        assert window in ((-1, -1), (-1, 0))
        bounds = shape[0].tolist(), shape[1].tolist()
        for (start, stop), (first, last) in zip(*(list(zip(bound, bound[1:])) for bound in bounds)):
            if last > first:
                of_keys = [slice(start, stop), slice(first, last), slice(first, last), slice(start, stop)]
                local = [x[part].transpose(0, 1).unsqueeze(0) for x, part in zip(tensors, of_keys)]
                yield local, full_tile(stop - start, last - first, Visibility(window[1] == 0))


@pytest.mark.parametrize("causal, queries", [(False, None), (True, None), (False, 256)])
@pytest.mark.parametrize("lengths, calls", [
    ((128, 128, 40, 1), {"rows", "documents"}), ((128, 9, 128), {"documents"}), ((9, 128), {"documents"}),
])  # fmt: skip
def test_rows_and_documents_together_equal_the_definition(causal, queries, lengths, calls):
    generator = torch.Generator().manual_seed(0)
    sizes = queries or LENGTH, LENGTH, LENGTH
    inputs = [torch.randn(n, len(lengths), 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
              for n in sizes]  # fmt: skip
    mask = Mask(Visibility(causal), told(padded(*lengths, num_queries=queries)))
    kernel, outcomes = ExactKernel(), []
    for attend in (kernel._documents, kernel._document_by_document):
        out = attend(*inputs, mask)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for actual, expected in zip(*outcomes):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert set(kernel.calls) == calls
