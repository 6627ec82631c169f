"""AdamW in one pass over memory (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

    g = c gradient                        c: clipping and unscaling
    p <- p - lr wd p                      (decoupled; else g <- g + wd p)
    m <- b1 m + (1 - b1) g                v <- b2 v + (1 - b2) g^2
    p <- p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

The kernel reads gradient, master and moments once and writes master, moments and the model weight: 28 bytes per
parameter with fp32 gradients and moments and a split master, 20 with bf16 moments. All tensors of one parameter group
and format need one launch (``address_table.py``). c, the skip flag and the step count stay on the device: no host sync.

Elements are updated independently, without sums, so that the bits do not depend on the parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fusions.address_table import AddressTables, Table, fits_kernels, is_read_by_kernels
from megatron.core.fusions.installed_triton import tl, triton
from megatron.core.fusions.storage import OptimizerEntry, Storage, as_fp32_lists, by_rates

if triton is not None:
    from megatron.core.fusions.address_table import TRITON_TYPES, load_master, locate_block, pointers, store_master


class AdamStep(NamedTuple):
    """Settings of one step, common to all entries. Tensors are 0-d, on the parameters' device."""

    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    step: Tensor
    """fp32: t, including this update."""
    skip: Tensor
    """fp32: 1 skips the update (nothing is written), 0 applies it."""
    factor: Tensor | None
    """Multiplier of gradients; None for 1."""


AdamUpdate = Callable[[Sequence[OptimizerEntry], AdamStep], None]


def adam_reference_(entries: Sequence[OptimizerEntry], step: AdamStep) -> None:
    """Update masters, model weights and both moments in place with torch's fused operator (AdamW or Adam with L2
    decay). Low-precision state is widened to copies and written back. Gradients are multiplied by ``step.factor``, in
    place if they have the masters' dtype. ``step.skip`` 1 changes no weights or moments, but still scales gradients."""
    update: Any = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    for (lr, weight_decay), group in by_rates(entries).items():
        for masters, gradients, (exp_avgs, exp_avg_sqs) in as_fp32_lists(group, step.factor):
            update(
                masters, gradients, exp_avgs, exp_avg_sqs, [], [step.step] * len(masters), lr=lr,
                beta1=step.beta1, beta2=step.beta2, weight_decay=weight_decay, eps=step.eps, amsgrad=False,
                maximize=False, grad_scale=None, found_inf=step.skip,
            )  # fmt: skip


if triton is not None:

    @triton.jit
    def _adam_kernel(
        table, chunks, scalars, lr, decay, beta1, rest1, beta2, rest2, eps,
        GRADIENT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, DECOUPLED: tl.constexpr,
        WEIGHT: tl.constexpr, KEPT_BITS: tl.constexpr, AVOID_TIES: tl.constexpr, ALIGNMENT: tl.constexpr,
        FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Update moments, master and model weight of a block of one tensor in place. ``scalars``: skip (1: writes
        nothing), gradient factor, 1 - b1^t, sqrt(1 - b2^t)."""
        row, at, inside = locate_block(table, chunks, scalars, ALIGNMENT, FIELDS, BLOCK)
        factor, bias1, root2 = tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        weight, extra = tl.load(row), tl.load(row + 1)
        gradient_at = pointers(tl.load(row + 2), GRADIENT, at, ALIGNMENT)
        first_at = pointers(tl.load(row + 3), FIRST, at, ALIGNMENT)
        second_at = pointers(tl.load(row + 4), SECOND, at, ALIGNMENT)
        p = load_master(weight, extra, at, inside, KEPT_BITS, ALIGNMENT)
        g = tl.load(gradient_at, mask=inside, other=0.0).to(tl.float32) * factor
        m = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second_at, mask=inside, other=0.0).to(tl.float32)
        if DECOUPLED:
            p -= (lr * decay) * p
        else:
            g += decay * p
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p -= (lr / bias1) * m / (tl.sqrt(v) / root2 + eps)
        tl.store(first_at, m.to(FIRST), mask=inside)
        tl.store(second_at, v.to(SECOND), mask=inside)
        store_master(weight, extra, at, inside, p, WEIGHT, KEPT_BITS, AVOID_TIES, ALIGNMENT)


class TritonAdam:
    """:data:`AdamUpdate` by the Triton kernel. Address tables are cached and rebuilt when a tensor has moved."""

    def __init__(self) -> None:
        self._tables = AddressTables()

    @torch.no_grad()
    def __call__(self, entries: Sequence[OptimizerEntry], step: AdamStep) -> None:
        """Update masters, model weights and moments of all ``entries`` in place, one launch per (learning rate, weight
        decay) and format; entries of other storages by :func:`adam_reference_`, which may scale their gradients.
        ``step.skip`` 1 writes nothing. No host sync. Keeps address tables per group."""
        scalars = _device_scalars(step)
        adam_reference_([entry for entry in entries if not is_read_by_kernels(entry.storage)], step)
        readable = [entry for entry in entries if is_read_by_kernels(entry.storage)]
        for (lr, weight_decay), group in by_rates(readable).items():
            for table in self._current(group):
                gradient, first, second = (TRITON_TYPES[entry] for entry in table.format.operands)
                _adam_kernel[table.grid](
                    table.rows, table.chunks, scalars, float(lr), float(weight_decay), step.beta1,
                    1.0 - step.beta1, step.beta2, 1.0 - step.beta2, step.eps, GRADIENT=gradient, FIRST=first,
                    SECOND=second, DECOUPLED=step.decoupled, **table.constants,
                )  # fmt: skip

    def _current(self, group: Sequence[OptimizerEntry]) -> list[Table]:
        return self._tables.find([(entry.storage, (entry.gradient, *entry.moments)) for entry in group])


def _device_scalars(step: AdamStep) -> Tensor:
    """Return fp32 [skip, factor, 1 - b1^t, sqrt(1 - b2^t)], computed in fp64: 1 - 0.999^t is inaccurate in fp32."""
    t = step.step.to(torch.float64)
    factor = torch.ones_like(t) if step.factor is None else step.factor.to(torch.float64)
    corrections = (1.0 - step.beta1**t, (1.0 - step.beta2**t).sqrt())
    return torch.stack([step.skip.to(torch.float64), factor, *corrections]).to(torch.float32)


def choose_adam(storages: Sequence[Storage]) -> AdamUpdate:
    """Return the Triton kernel if it can read ``storages`` (:func:`fits_kernels`), else torch's operator."""
    return TritonAdam() if fits_kernels(storages) else adam_reference_
