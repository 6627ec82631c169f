"""Cross entropy of vocabulary-parallel logits; sums in fp32 (fp64 for fp64 logits).

  loss_t = log sum_v exp(x_tv) - x_t,label          dloss_t / dx_tv = softmax(x_t)_v - [v = label]

Forward reads the logits once and reduces each rank's slice to three numbers per token, which one all-gather exchanges.
Backward reads the logits again and writes the gradient in their dtype, in place if the caller allows it. The two passes
over a slice are in ``core/fusions/cross_entropy.py``.

Legend: t tokens, v vocabulary entries of this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext
from megatron.core.fusions.cross_entropy import Softmax, cross_entropy_passes
from megatron.core.groups.process_groups import AnyGroup, Group
from megatron.core.parallel_state import resolve_group
from megatron.core.tensor_parallel import operators
from megatron.core.tensor_parallel.batch_invariant import vocabulary_statistics
from megatron.core.tensor_parallel.vocabulary import check_ids, num_true_entries, stored_vocab_size


class LocalLabels(NamedTuple):
    """Labels relative to one rank's slice of the vocabulary."""

    label_t: Tensor
    """int64, relative to this rank's first entry; outside of [0, num_true) if another rank has the label."""
    ignored_t: Tensor
    """bool: the label is negative and belongs to no rank."""
    num_true: int
    """Number of entries of this rank's slice that are not padding."""
    group: Group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: AnyGroup = None,
    *,
    group: AnyGroup = None,
    vocab_size: int | None = None,
    divisible_by: int = 128,
    reuse_logits: bool = False,
) -> Tensor:
    """Return the loss of every token in fp32 (fp64 for fp64 logits), of the shape of ``target``. Collective over the
    group in forward; with label smoothing, a second collective. Raises ValueError for logits of another shape or a
    smoothing outside [0, 1), IndexError for a target beyond the vocabulary (on GPUs a device assertion).

    The first four arguments are Megatron-LM's. Layers of this library call :func:`vocab_parallel_losses`.

    Args:
        vocab_parallel_logits: this rank's slice of the vocabulary, [..., v]. Entries of -inf (padding) are excluded
            from softmax and smoothing.
        target: global ids, int64 [...]. A negative id marks a position that the caller masks out: its loss is
            log sum_v exp(x_v - max x), without smoothing, not 0.
        label_smoothing: probability in [0, 1) that is spread evenly over the other entries; ValueError outside.
        tp_group: ranks that hold the slices, a torch ``ProcessGroup`` or a ``Group``; None: the running program's
            tensor-parallel group.
        group: alias of ``tp_group``, which has precedence.
        vocab_size: unpadded vocabulary size, padded to a multiple of ``divisible_by``; None: no padding.
        reuse_logits: whether backward overwrites the logits with their gradient; ignored with label smoothing."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing {label_smoothing}: must be at least 0 and less than 1")
    ranks = resolve_group(group if tp_group is None else tp_group)
    losses = vocab_parallel_losses(
        vocab_parallel_logits,
        target,
        group=ranks,
        vocab_size=vocab_size,
        divisible_by=divisible_by,
        reuse_logits=reuse_logits and not label_smoothing,
    )
    if not label_smoothing:
        return losses
    size = vocab_parallel_logits.shape[-1]
    num_true = size if vocab_size is None else num_true_entries(vocab_size, size, ranks)
    added = _smoothing(vocab_parallel_logits, target - ranks.rank * size, num_true, ranks)
    return losses + label_smoothing * added.masked_fill(target < 0, 0.0)


def _smoothing(logits: Tensor, label: Tensor, num_true: int, group: Group) -> Tensor:
    """Return the loss that smoothing adds per unit of probability, K / (K - 1) * (x_label - mean of x), of the shape of
    ``label``, in fp32 (fp64 for fp64 logits). Differentiable; one all-reduce over ``group`` in forward. K counts the
    entries of the full vocabulary above -inf; ``label`` [...] is relative to this rank's first entry."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    is_padding = logits.detach() == -torch.inf
    is_padding[..., num_true:] = True
    logits = logits.masked_fill(is_padding, 0.0)
    is_elsewhere = (label < 0) | (label >= logits.shape[-1])
    at_label = logits.gather(-1, label.masked_fill(is_elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    local = at_label.masked_fill(is_elsewhere, 0.0), logits.sum(-1), (~is_padding).sum(-1).to(logits.dtype)
    at_label, total, count = operators.reduce_from_region(torch.stack(local), group).unbind()
    return count / (count - 1) * (at_label - total / count)


def vocab_parallel_losses(
    logits: Tensor,
    target: Tensor,
    *,
    group: Group,
    vocab_size: int | None = None,
    divisible_by: int = 128,
    reuse_logits: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """Return the loss of every token in fp32 (fp64 for fp64 logits), of the shape of ``target``. One all-gather over
    ``group`` in forward, none in backward. Keeps the logits, not a softmax, for backward. ``logits`` [..., v] is this
    rank's slice of the vocabulary; ``target`` int64 [...] holds global ids. A negative id marks a position that the
    caller masks out: its loss is log sum_v exp(x_v - max x) and its gradient the softmax, as in Megatron-LM.
    ``vocab_size`` is the unpadded size, padded to a multiple of ``divisible_by``; None: no padding. With
    ``reuse_logits`` backward overwrites the logits with their gradient, for callers that hold the only reference; a
    second backward through them then raises an error. ``batch_invariant``: the order of sums of ``batch_invariant.py``.
    Raises ValueError: the logits have another width than this rank's slice or other leading dims than ``target``, or
    the reused logits are a leaf tensor; IndexError: a target is beyond the vocabulary (on CPU; a device assertion on
    GPUs)."""
    local_size = logits.shape[-1]
    if logits.shape[:-1] != target.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(target.shape)} differ in leading dims")
    total = local_size * group.size
    if vocab_size is None:
        vocab_size = total
    elif total != stored_vocab_size(vocab_size, divisible_by, group):
        raise ValueError(
            f"{local_size} logits on each of {group.size} ranks are not the slices of a vocabulary of {vocab_size} "
            f"padded to a "
            f"multiple of {divisible_by}; pass logits that are not gathered"
        )
    if reuse_logits and logits.requires_grad and logits.is_leaf:
        raise ValueError("reuse_logits: these logits are not the result of a computation; remove it")
    labels = local_labels(target, local_size, vocab_size, group)
    return _VocabParallelCrossEntropy.apply(logits, labels, reuse_logits, batch_invariant).view(target.shape)


def local_labels(target: Tensor, local_size: int, vocab_size: int, group: Group) -> LocalLabels:
    """Return global ids ``target`` [...] flattened and relative to this rank's slice of ``local_size`` entries;
    ``vocab_size`` is unpadded. Negative ids are accepted and marked as ignored. Raises IndexError for an id beyond the
    vocabulary (on CPU; a device assertion on GPUs). No collective."""
    check_ids(target, vocab_size, "target ids", True)
    label_t = (target - group.rank * local_size).reshape(-1).contiguous()
    return LocalLabels(label_t, target.reshape(-1) < 0, num_true_entries(vocab_size, local_size, group), group)


def combine_statistics(statistics: Tensor, labels: LocalLabels) -> tuple[Tensor, Softmax]:
    """All-gather each rank's ``statistics`` [3, t] (maxima, sums of exponentials, label logits) over ``labels.group``
    and combine them. Return (losses [t], softmax statistics over the full vocabulary), bit-identical on all ranks. A
    token with an ignored label gets log sum_v exp(x_v - max x)."""
    group = labels.group
    maximum, total, label_logit = statistics.unbind(0)
    if group.size > 1:
        slices = operators.all_gather_along_first_dim(statistics, group).view(group.size, *statistics.shape)
        maxima, totals, label_logits = slices.unbind(1)
        maximum = maxima.amax(dim=0)
        # all-padding slice: its maximum is -inf, and -inf - -inf is NaN
        total = (totals.masked_fill(maxima == -torch.inf, 0.0) * (maxima - maximum).exp()).sum(dim=0)
        label_logit = label_logits.sum(dim=0)
    return _loss(maximum, total, label_logit, labels)


def _loss(maximum: Tensor, total: Tensor, label_logit: Tensor, labels: LocalLabels) -> tuple[Tensor, Softmax]:
    # subtract the logits first: both may be huge, and the logarithm would be lost in rounding
    shift = (label_logit - maximum).masked_fill(labels.ignored_t, 0.0)
    return total.log() - shift, Softmax(maximum, total, labels.num_true)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, logits: Tensor, labels: LocalLabels, reuse_logits: bool, batch_invariant: bool
    ) -> Tensor:
        """``logits`` [..., v] -> losses [t]; one all-gather. Saves logits (by reference), labels and statistics."""
        ctx.passes = cross_entropy_passes(logits.dtype, logits.device)
        logits_tv = logits.detach().contiguous().view(-1, logits.shape[-1])
        if batch_invariant:
            statistics = vocabulary_statistics(logits_tv, labels.label_t, labels.num_true, labels.group)
            loss_t, softmax = _loss(*statistics, labels)
        else:
            local = ctx.passes.statistics(logits_tv, labels.label_t, labels.num_true)
            loss_t, softmax = combine_statistics(local, labels)
        ctx.save_for_backward(logits, labels.label_t, softmax.maximum_t, softmax.total_t)
        ctx.num_true, ctx.reuse_logits = labels.num_true, reuse_logits
        return loss_t

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """With ``reuse_logits`` overwrites the saved logits; autograd then rejects a second backward. No collective."""
        logits, label_t, maximum_t, total_t = ctx.saved_tensors
        logits_tv = logits.detach().contiguous().view(-1, logits.shape[-1])
        gradient = logits_tv if ctx.reuse_logits else torch.empty_like(logits_tv)
        ctx.passes.gradient(
            logits_tv, label_t, Softmax(maximum_t, total_t, ctx.num_true), grad_loss.contiguous(), gradient
        )
        if ctx.reuse_logits:  # autograd then rejects a second backward, which would read gradients as logits
            torch.autograd.graph.increment_version(logits)
        return gradient.view(logits.shape), None, None, None
