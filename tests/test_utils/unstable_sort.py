"""Sorts as GPUs may do them: equal values in any order unless stability is asked for. On CPUs short sorts are stable
unasked."""

import torch


def make_sorts_unstable(monkeypatch):
    """``torch.sort``, ``Tensor.sort`` and ``Tensor.argsort`` that reverse equal values unless ``stable``."""
    sort = torch.sort

    def unstable(x, dim=-1, descending=False, stable=False):
        if stable:
            return sort(x, dim=dim, descending=descending, stable=True)
        values, indices = sort(x.flip(dim), dim=dim, descending=descending, stable=True)
        return torch.return_types.sort((values, x.shape[dim] - 1 - indices))

    monkeypatch.setattr(torch, "sort", unstable)
    monkeypatch.setattr(torch.Tensor, "sort", unstable)
    monkeypatch.setattr(torch.Tensor, "argsort", lambda x, **options: unstable(x, **options).indices)
