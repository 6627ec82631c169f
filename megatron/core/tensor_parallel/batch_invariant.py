"""Linear layers, sums over ranks and log-probabilities in a fixed order of additions (``--batch-invariant-mode``).

The forward pass then gives a token the same bits in every batch, packing and tensor-, pipeline-, context- and
expert-parallel layout, so that a generator reports exactly the trainer's log-probabilities. Gradients are computed
as in ordinary layers.

  column-parallel   one sum over K per element
  row-parallel      K in PARTS equal parts; each rank adds its parts as a subtree, ranks exchange fp32 sums
  log-softmax       the vocabulary in PARTS equal slices, whose sums of exponentials are added as a tree

Source of the idea: He et al. 2025, "Defeating nondeterminism in LLM inference"; the tree makes it independent of TP.

Legend: s sequence, b batch, t tokens, o output features, k input features, v vocabulary, n ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd_context import AutogradContext
from megatron.core.config.errors import UserError
from megatron.core.config.model_rules import BATCH_INVARIANT_PARTS as PARTS
from megatron.core.fusions.batch_invariant_product import ROWS, batch_invariant_product, tree_sum
from megatron.core.fusions.cross_entropy import cross_entropy_passes
from megatron.core.groups.process_groups import SINGLE_PROCESS, Group
from megatron.core.tensor_parallel.collectives import begin_all_to_all
from megatron.core.tensor_parallel.gemms import Gemms, Operand, Operands
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim


def parts_per_rank(group: Group) -> int:
    """Return how many of the PARTS each rank of ``group`` holds. Raises UserError if they cannot be split evenly."""
    if PARTS % group.size:
        raise UserError(
            f"tensor_model_parallel_size {group.size}: batch_invariant_mode sums in {PARTS} parts, which it must divide"
        )
    return PARTS // group.size


_ALIGNED = 16
"""Multiples of it give rows of one alignment in every layout: a kernel's order of sums depends on alignment."""


class BatchInvariantGemms(Gemms):
    """GEMMs of one linear layer whose forward product is batch-invariant; the backward products are torch's. With
    ``partial_sums`` K is summed in parts, and the output of several ranks is the unrounded sum of a rank's parts, for
    :func:`sum_over_ranks`."""

    def __init__(self, base: Gemms, group: Group, *, partial_sums: bool = False) -> None:
        super().__init__(base.accumulate)
        self.parts = parts_per_rank(group) if partial_sums else 1
        self._rounds = not partial_sums or group.size == 1
        self._dtype: torch.dtype | None = None

    def pack_gradient(self, grad: Tensor, *, for_input: bool, for_weight: bool) -> Operands:
        grad = grad if self._dtype is None else grad.to(self._dtype)
        return Operands(grad, grad)

    def output(self, x: Operand, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor) and out is None, "chunked losses are rejected with batch_invariant_mode"
        self._dtype = x.dtype
        dtype = x.dtype if self._rounds and bias is None else None
        total = batch_invariant_product(x.flatten(0, -2), weight, self.parts, dtype)
        if bias is not None:
            total = total + bias
        return (total.to(x.dtype) if self._rounds else total).view(*x.shape[:-1], len(weight))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: Group, scatters: bool, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.scatters, ctx.dtype = group, scatters, x.dtype
        if group.size == 1:
            return x.to(dtype)
        if scatters:
            rows = [len(x) // group.size] * group.size
            everything = begin_all_to_all(x, group, send=rows, receive=rows).wait()
        else:
            everything = all_gather_along_first_dim(x, group)
        return tree_sum(everything.chunk(group.size)).to(dtype)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.scatters and ctx.group.size > 1:
            grad = all_gather_along_first_dim(grad, ctx.group)
        return grad.to(ctx.dtype), None, None, None


def sum_over_ranks(x: Tensor, group: Group, *, scatters: bool, dtype: torch.dtype) -> Tensor:
    """Add the unrounded sums ``x`` [s, ...] of all ranks as a tree and round once to ``dtype``: [s, ...], or with
    ``scatters`` this rank's positions [s / n, ...]. Moves n times the data of a ring all-reduce in fp32."""
    return _SumOverRanks.apply(x, group, scatters, dtype)


def multiply_experts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [r, o] in the dtype of ``x`` [r, i], one batch-invariant product per expert with ``weight`` [e, o, i];
    rows after the last end are zero. Reads ``ends`` on the host."""
    out, start = x.new_zeros((len(x), weight.shape[1])), 0
    for end, weight_oi in zip(ends.tolist(), weight):
        out[start:end] = batch_invariant_product(x[start:end], weight_oi, dtype=x.dtype)
        start = end
    return out


class Statistics(NamedTuple):
    """Softmax statistics of rows over the full vocabulary, in fp32 (fp64 for fp64), [t] each."""

    maximum_t: Tensor
    total_t: Tensor
    label_logit_t: Tensor


def vocabulary_statistics(logits: Tensor, label_t: Tensor, num_true: int, group: Group) -> Statistics:
    """Return the statistics of this rank's ``logits`` [t, v], whose first ``num_true`` entries are no padding, over the
    vocabulary of all ranks of ``group``. ``label_t`` int64 is relative to this rank's first entry. All-gathers PARTS x
    3 numbers per token. Raises UserError if the slices of the vocabulary are not equal."""
    count = parts_per_rank(group)
    if logits.shape[1] % count:
        raise UserError(
            f"make_vocab_size_divisible_by: {logits.shape[1]} logits per rank do not split into {count} equal slices "
            f"for batch_invariant_mode; use a multiple of {PARTS}"
        )
    width = logits.shape[1] // count
    statistics = torch.stack(
        [
            _slice_statistics(part, label_t - index * width, max(0, min(width, num_true - index * width)))
            for index, part in enumerate(logits.split(width, 1))
        ]
    )
    if group.size > 1:
        statistics = all_gather_along_first_dim(statistics, group)
    maxima, totals, label_logits = statistics.unbind(1)
    maximum = maxima.amax(0)
    # a slice of padding has a sum of 0
    total = tree_sum((totals * (maxima - maximum).exp()).unbind())
    return Statistics(maximum, total, label_logits.sum(0))


def _slice_statistics(part: Tensor, label_t: Tensor, num_true: int) -> Tensor:
    """Return maxima, sums of exponentials and label logits [3, t]."""
    passes = cross_entropy_passes(part.dtype, part.device)
    if not part.is_cuda or part.shape[1] % _ALIGNED:
        part = part.contiguous()
    if part.is_cuda or num_true == 0:
        return passes.statistics(part, label_t, num_true)
    # CPU kernels compute the elements after the last full vector by another function
    hidden = torch.arange(part.shape[1]) >= num_true
    filled = F.pad(part.masked_fill(hidden, -torch.inf), (0, 0, 0, -len(part) % ROWS))
    labels = F.pad(label_t, (0, len(filled) - len(part)), value=-1)
    return passes.statistics(filled, labels, part.shape[1])[:, : len(part)]


def log_softmax(logits: Tensor, vocab_size: int) -> Tensor:
    """Return the log-probabilities [t, ``vocab_size``] of ``logits`` [t, stored vocabulary] of all ranks, in fp32 (fp64
    for fp64): x - max - log(sum of exponentials), with the bits of the trainer's losses."""
    no_label = torch.full((len(logits),), -1, device=logits.device)
    statistics = vocabulary_statistics(logits, no_label, vocab_size, SINGLE_PROCESS.tp)
    wide = logits[:, :vocab_size].to(statistics.maximum_t.dtype)
    return (wide - statistics.maximum_t.unsqueeze(-1)) - statistics.total_t.log().unsqueeze(-1)
