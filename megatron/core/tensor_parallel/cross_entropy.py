"""Cross entropy of logits that are split along the vocabulary, in fp32, with one pass of exponentials.

    loss_t = log sum_v exp(x_tv) - x_t,label          dloss_t / dx_tv = softmax(x_t)_v - [v = label]

Forward computes the gradient factor at once, in the logits' own dtype, and keeps only that: no fp32 copy of the logits
outlives a block of rows, and nothing is recomputed in backward. Padded entries are left out of the sum and get a zero
gradient.

Legend: t tokens, v vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.process_groups import SINGLE_PROCESS, Group
from megatron.core.tensor_parallel.vocabulary import check_ids, num_true_entries, stored_vocab_size

_BLOCK_ELEMENTS = 1 << 19
"""fp32 elements per block of rows on a CPU (2 MiB, second-level cache); a GPU takes larger ones."""


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    divisible_by: int = 128,
    group: Group | None = None,
    reuse_logits: bool = False,
) -> Tensor:
    """Loss of every token in fp32 (fp64 for fp64 logits), of the shape of ``target``.

    ``vocab_parallel_logits`` [..., v]: this rank's slice of the vocabulary; ``target`` int64 [...]: global ids.
    ``vocab_size`` is the true vocabulary size, padded to a multiple of ``divisible_by``; without it all entries are
    true. ``reuse_logits`` lets the gradient overwrite the logits' memory, for callers that hold the only reference.
    ValueError for logits of another width than this rank's slice; IndexError for targets outside of the vocabulary (on
    CPU; a device assertion on GPUs).
    """
    group = group or SINGLE_PROCESS.tp
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
    check_ids(target, vocab_size, "target ids")
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, vocab_size, group, reuse_logits)


def _sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


def _max_over_ranks(x: Tensor, group: Group) -> Tensor:
    if group.size > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.handle)
    return x


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, group: Group, reuse_logits: bool
    ) -> Tensor:
        local_size = logits.shape[-1]
        true_size = num_true_entries(vocab_size, local_size, group)
        logits_tv = logits.detach().reshape(-1, local_size)
        local_target = (target - group.rank * local_size).reshape(-1)
        gradient = logits_tv if reuse_logits else torch.empty_like(logits_tv)
        gradient[:, true_size:] = 0
        compute_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss = torch.empty(len(logits_tv), dtype=compute_dtype, device=logits.device)
        rows = max(1, _BLOCK_ELEMENTS * (64 if logits.is_cuda else 1) // max(1, true_size))
        for first in range(0, len(loss), rows):
            block = slice(first, first + rows)
            loss[block] = _loss_and_gradient(
                logits_tv[block, :true_size], local_target[block], gradient[block, :true_size], group, compute_dtype
            )
        ctx.save_for_backward(gradient.view(logits.shape))
        ctx.reuse_logits = reuse_logits
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        scale = grad_loss.unsqueeze(-1).to(gradient.dtype)
        # in place, autograd's version check makes a second backward an error instead of a wrong gradient
        gradient = gradient.mul_(scale) if ctx.reuse_logits else gradient * scale
        return gradient, None, None, None, None


def _loss_and_gradient(
    logits_tv: Tensor, target: Tensor, gradient_out: Tensor, group: Group, compute_dtype: torch.dtype
) -> Tensor:
    """Losses [t] of a block of rows; writes softmax - one_hot(target) into ``gradient_out`` [t, v]."""
    if logits_tv.shape[1]:
        maximum = logits_tv.amax(dim=-1, keepdim=True).to(compute_dtype)
    else:
        maximum = logits_tv.new_full((len(target), 1), -torch.inf, dtype=compute_dtype)
    shifted = logits_tv.to(compute_dtype).sub(_max_over_ranks(maximum, group))
    is_local = (target >= 0) & (target < logits_tv.shape[1])
    index = target.masked_fill(~is_local, 0).unsqueeze(-1)
    label_logit = torch.zeros_like(maximum)
    if logits_tv.shape[1]:
        label_logit = shifted.gather(-1, index).masked_fill_(~is_local.unsqueeze(-1), 0)
    exponentials = shifted.exp_()
    total = exponentials.sum(dim=-1, keepdim=True)
    sums = _sum_over_ranks(torch.cat((total, label_logit), dim=-1), group)
    softmax = exponentials.div_(sums[:, :1])
    if logits_tv.shape[1]:
        softmax.scatter_add_(-1, index, -is_local.unsqueeze(-1).to(compute_dtype))
    gradient_out.copy_(softmax)
    return sums[:, 0].log() - sums[:, 1]
