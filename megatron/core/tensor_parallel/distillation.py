"""Divergence of a student's next-token distribution from a teacher's, over vocabulary-parallel logits.

    p = softmax(y / T)    q = softmax(x / T)    y: the teacher's logits, x: the student's

    forward KL    T^2 sum_v p_v (log p_v - log q_v)    gradient of x_v: T (q_v - p_v)
    reverse KL    T^2 sum_v q_v (log q_v - log p_v)    gradient of x_v: T q_v (log q_v - log p_v - KL(q, p))

T^2 keeps the size of gradients independent of T (Hinton et al. 2015). Each rank reduces its slice of the vocabulary to
five numbers per token, which one all-gather exchanges; backward has no collective. Sums are in fp32 (fp64 for fp64
logits), relative to the maxima of both slices: equal logits give exactly 0.

Legend: t tokens, v stored vocabulary entries of this rank, k entries of a stored distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim

BLOCK = 1 << 22
"""Logits of a slice that are widened to fp32 at a time."""
ABSENT = -1e20
"""Logit of an entry without probability: finite, because 0 times infinity is NaN."""


class Divergence(NamedTuple):
    """Kind of divergence, and this rank's slice of the vocabulary."""

    num_true: int
    """Entries of the slice that are not padding."""
    group: Group
    """Ranks that have the slices."""
    temperature: float = 1.0
    reverse: bool = False

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence of each token from the slices [..., v] of both models' logits, in fp32 (fp64 for fp64
        logits), of their leading shape. Only the student gets a gradient. One all-gather in forward."""
        rows = (logits.reshape(-1, logits.shape[-1]) for logits in (student, teacher.detach()))
        return _Divergence.apply(*rows, self).view(student.shape[:-1])

    def blocks(self, *logits_tv: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield rows, and the true entries of these rows of each tensor in fp32 (fp64), divided by the temperature."""
        rows = max(1, BLOCK // max(1, self.num_true))
        dtype = torch.promote_types(logits_tv[0].dtype, torch.float32)
        for first in range(0, len(logits_tv[0]), rows):
            part = slice(first, first + rows)
            yield part, [x[part, : self.num_true].to(dtype) / self.temperature for x in logits_tv]


class _Softmax(NamedTuple):
    """Statistics of one distribution over the full vocabulary, [t, 1]."""

    maximum: Tensor
    log_total: Tensor
    """log sum_v exp(x_v - maximum)."""

    def log_probabilities(self, x_tv: Tensor) -> Tensor:
        return x_tv - self.maximum - self.log_total


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, student_tv: Tensor, teacher_tv: Tensor, kind: Divergence) -> Tensor:
        """Logits [t, v] -> divergences [t]. Saves both logits by reference and five numbers per token."""
        dtype = torch.promote_types(student_tv.dtype, torch.float32)
        local = torch.zeros((5, len(student_tv), 1), dtype=dtype, device=student_tv.device)
        local[:2] = ABSENT  # of a slice that is all padding
        for rows, (x, y) in kind.blocks(student_tv, teacher_tv) if kind.num_true else ():
            shifted = []
            for index, logits in enumerate((x, y)):
                local[index, rows] = logits.amax(-1, keepdim=True)
                shifted.append(logits - local[index, rows])
                local[2 + index, rows] = shifted[-1].exp().sum(-1, keepdim=True)
            first, second = shifted if kind.reverse else reversed(shifted)
            local[4, rows] = (first.exp() * (first - second)).sum(-1, keepdim=True)
        slices = _of_all_ranks(local, kind.group)
        maxima, totals, means = slices[:, :2], slices[:, 2:4], slices[:, 4]
        maximum = maxima.amax(0)
        shifts = maxima - maximum  # [ranks, 2, t, 1]: sums of a slice are relative to its own maxima
        total = (totals * shifts.exp()).sum(0)
        student, teacher = (_Softmax(m, z.log()) for m, z in zip(maximum, total))
        one, other = (0, 1) if kind.reverse else (1, 0)
        means = means + totals[:, one] * (shifts[:, one] - shifts[:, other])
        mean = (shifts[:, one].exp() * means).sum(0) / total[one]
        logs = student.log_total, teacher.log_total
        result = mean - logs[one] + logs[other]
        ctx.kind = kind
        ctx.save_for_backward(student_tv, teacher_tv, *student, *teacher, result)
        return (result * kind.temperature**2).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad_t: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        student_tv, teacher_tv, *statistics, result = ctx.saved_tensors
        kind, student, teacher = ctx.kind, _Softmax(*statistics[:2]), _Softmax(*statistics[2:])
        gradient = torch.zeros_like(student_tv)
        scale = (grad_t * kind.temperature).unsqueeze(-1)
        for rows, (x, y) in kind.blocks(student_tv, teacher_tv):
            log_q = _Softmax(*(value[rows] for value in student)).log_probabilities(x)
            log_p = _Softmax(*(value[rows] for value in teacher)).log_probabilities(y)
            q = log_q.exp()
            change = q * (log_q - log_p - result[rows]) if kind.reverse else q - log_p.exp()
            gradient[rows, : kind.num_true] = (change * scale[rows]).to(gradient.dtype)
        return gradient, None, None


def _of_all_ranks(x: Tensor, group: Group) -> Tensor:
    """All-gather ``x`` [...]: return [ranks, ...]."""
    return x[None] if group.size == 1 else all_gather_along_first_dim(x[None].contiguous(), group)


def top_entries(logits: Tensor, number: int, num_true: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the ``number`` largest log-probabilities of each token over the full vocabulary, fp32 (fp64 for fp64),
    and their global ids, int64, both [..., k], equal on all ranks. ``logits`` [..., v] is this rank's slice, of which
    ``num_true`` entries are not padding. Two all-gathers."""
    true = logits[..., :num_true].to(torch.promote_types(logits.dtype, torch.float32))
    values, ids = true.topk(min(number, num_true), dim=-1)
    missing = number - values.shape[-1]
    values = F.pad(torch.cat((true.logsumexp(-1, keepdim=True), values), -1), (0, missing), value=-torch.inf)
    ids = F.pad(ids + group.rank * logits.shape[-1], (0, missing))
    values, ids = (_of_all_ranks(x, group).movedim(0, -2) for x in (values, ids))
    total = values[..., 0].logsumexp(-1, keepdim=True)
    values, order = values[..., 1:].flatten(-2).topk(number, dim=-1)
    return values - total, ids.flatten(-2).gather(-1, order)


def slice_of_entries(values: Tensor, ids: Tensor, size: int, group: Group) -> Tensor:
    """Return this rank's slice [..., size] of the distribution that has logits ``values`` at global ``ids`` [..., k]
    and no other entry, in fp32 (fp64 for fp64)."""
    local = ids - group.rank * size
    is_local = (local >= 0) & (local < size)
    dtype = torch.promote_types(values.dtype, torch.float32)
    full = torch.full((*values.shape[:-1], size + 1), ABSENT, dtype=dtype, device=values.device)
    return full.scatter_(-1, torch.where(is_local, local, size), values.to(dtype))[..., :size]
