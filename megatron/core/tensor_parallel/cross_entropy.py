"""Cross entropy of logits that are split along the vocabulary; sums in fp32 (fp64 for fp64 logits).

    loss_t = log sum_v exp(x_tv) - x_t,label          dloss_t / dx_tv = softmax(x_t)_v - [v = label]

Forward reads the logits once and keeps three numbers per token of every rank's slice, which one all-gather exchanges.
Backward reads the logits again and writes the gradient in their dtype, over the logits themselves where the caller says
that nobody else needs them. The two passes over a slice: ``core/fusions/cross_entropy.py``.

Legend: t tokens, v vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.fusions.cross_entropy import Softmax, cross_entropy_passes
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.tensor_parallel.mappings import all_gather_along_first_dim
from megatron.core.tensor_parallel.vocabulary import check_ids, num_true_entries, stored_vocab_size


class LocalLabels(NamedTuple):
    """Labels as seen by one slice of the vocabulary."""

    label_t: Tensor
    """int64, counted from this rank's first entry; outside of [0, num_true) where another rank has it."""
    num_true: int
    """Entries of this rank's slice that exist; the others are padding."""
    group: Group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    divisible_by: int = 128,
    group: Group = SINGLE_PROCESS.tp,
    reuse_logits: bool = False,
) -> Tensor:
    """Loss of every token in fp32 (fp64 for fp64 logits), of the shape of ``target``.

    ``vocab_parallel_logits`` [..., v]: this rank's slice of the vocabulary; ``target`` int64 [...]: global ids.
    ``vocab_size`` is the true vocabulary size, padded to a multiple of ``divisible_by``; without it all entries are
    true. ``reuse_logits`` lets backward write the gradient over the logits, for callers that hold the only reference
    (a second backward pass through them is then an error).
    ValueError for logits of another width than this rank's slice, and for reusing a leaf, which is somebody's parameter
    or input; IndexError for targets outside of the vocabulary (on CPU; a device assertion on GPUs).
    """
    local_size = vocab_parallel_logits.shape[-1]
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits {tuple(vocab_parallel_logits.shape)} and targets {tuple(target.shape)} differ in leading dims"
        )
    total = local_size * group.size
    if vocab_size is None:
        vocab_size = total
    elif total != stored_vocab_size(vocab_size, divisible_by, group):
        raise ValueError(
            f"{local_size} logits on each of {group.size} ranks are not the slices of a vocabulary of {vocab_size} "
            f"padded to a "
            f"multiple of {divisible_by}; pass logits that are not gathered"
        )
    if reuse_logits and vocab_parallel_logits.requires_grad and vocab_parallel_logits.is_leaf:
        raise ValueError("reuse_logits: these logits are no result of a computation; leave it out")
    labels = local_labels(target, local_size, vocab_size, group)
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, labels, reuse_logits).view(target.shape)


def local_labels(target: Tensor, local_size: int, vocab_size: int, group: Group) -> LocalLabels:
    """Global ids ``target`` [...], for a slice of ``local_size`` entries of which the true ones end at ``vocab_size``.

    IndexError for ids outside of the vocabulary (on CPU; a device assertion on GPUs).
    """
    check_ids(target, vocab_size, "target ids")
    label_t = (target - group.rank * local_size).reshape(-1).contiguous()
    return LocalLabels(label_t, num_true_entries(vocab_size, local_size, group), group)


def losses_of(statistics: Tensor, labels: LocalLabels) -> tuple[Tensor, Softmax]:
    """(losses [t], softmax) from the ``statistics`` [3, t] of every rank's slice; the same bits on all ranks."""
    group = labels.group
    maximum, total, label_logit = statistics.unbind(0)
    if group.size > 1:
        slices = all_gather_along_first_dim(statistics, group).view(group.size, *statistics.shape)
        maxima, totals, label_logits = slices.unbind(1)
        maximum = maxima.amax(dim=0)
        total = (totals * (maxima - maximum).exp()).sum(dim=0)
        label_logit = label_logits.sum(dim=0)
    # the difference of logits first: both may be huge, and the logarithm lost beside them
    return total.log() - (label_logit - maximum), Softmax(maximum, total, labels.num_true)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: LocalLabels, reuse_logits: bool) -> Tensor:
        ctx.passes = cross_entropy_passes(logits.dtype, logits.device)
        logits_tv = logits.detach().contiguous().view(-1, logits.shape[-1])
        loss_t, softmax = losses_of(ctx.passes.statistics(logits_tv, labels.label_t, labels.num_true), labels)
        ctx.save_for_backward(logits, labels.label_t, softmax.maximum_t, softmax.total_t)
        ctx.num_true, ctx.reuse_logits = labels.num_true, reuse_logits
        return loss_t

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, label_t, maximum_t, total_t = ctx.saved_tensors
        logits_tv = logits.detach().contiguous().view(-1, logits.shape[-1])
        gradient = logits_tv if ctx.reuse_logits else torch.empty_like(logits_tv)
        ctx.passes.gradient(
            logits_tv, label_t, Softmax(maximum_t, total_t, ctx.num_true), grad_loss.contiguous(), gradient
        )
        if ctx.reuse_logits:  # autograd's version check then makes a second backward an error, not a wrong gradient
            torch.autograd.graph.increment_version(logits)
        return gradient.view(logits.shape), None, None
