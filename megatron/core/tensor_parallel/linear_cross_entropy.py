"""Output layer and cross entropy in chunks of tokens, so that the logits of all tokens are never in memory at once.

  loss_t = log sum_v exp(x_t w_v) - x_t w_label
  dX = D W        dW = D^T X        D_tv = (softmax_tv - [v = label]) g_t

Forward computes the logits of a chunk, saves three numbers per token and discards the logits. Backward recomputes the
chunk's logits, turns them into D in place, and computes the chunk's share of dX and dW: four GEMMs in all instead of
three. Peak memory falls by the logits (t v elements) less one chunk. One all-gather for all chunks exchanges the sums
of the ranks' vocabulary slices.

All-gathers of X, reductions of dX and the target of dW are as in ``linear.py``, with one difference: a deferred weight
gradient defers only its announcement, because a deferred GEMM would need D saved or recomputed again. dW is summed over
chunks in the dtype of ``main_grad``, or in fp32.

Legend: t tokens (s * b), c tokens of a chunk, v vocabulary entries of this rank, h hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext
from megatron.core.config.errors import UserError
from megatron.core.fusions.cross_entropy import Softmax, cross_entropy_passes
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.tensor_parallel import linear
from megatron.core.tensor_parallel.cross_entropy import LocalLabels, combine_statistics, local_labels
from megatron.core.tensor_parallel.gemms import Gemms
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim

CHUNK_BYTES = 256 << 20
"""Size of a chunk's logits on one rank, if the number of tokens per chunk is not set."""


class LogitSteps(NamedTuple):
    """Operations between the GEMM and the softmax, in this order."""

    bias: Tensor | None = None
    """[v], this rank's slice."""
    soft_cap: float | None = None
    """Cap of the logits: soft_cap * tanh(x / soft_cap)."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_size: int,
    traits: linear.LinearTraits,
    chunk_tokens: int = 0,
    store: linear.WeightGradientStore | None = None,
    logits: LogitSteps | None = None,
) -> Tensor:
    """Return fp32 losses [s, b] (fp64 for fp64) of the logits ``x weight^T`` for global ids ``target`` int64 [s, b].
    Collective over ``traits.group``: one all-gather of statistics, and all-gathers of ``x`` with
    ``traits.gather_input``. Differentiable in ``x``, weight and bias. ``x`` [s, b, h] is replicated over the group, or
    holds this rank's positions (``traits.gather_input``). ``weight`` [v, h] is this rank's slice of a padded vocabulary
    with ``vocab_size`` true entries. ``chunk_tokens`` 0 chooses the number that fits in ``CHUNK_BYTES``. ``logits``
    sets bias and soft cap. Raises UserError: ``chunk_tokens`` is negative; IndexError: a target is outside of the
    vocabulary (on CPU; a device assertion on GPUs)."""
    steps = logits or LogitSteps()
    if chunk_tokens < 0:
        raise UserError(f"cross_entropy_chunk_tokens {chunk_tokens} is negative; 0 chooses by memory")
    labels = local_labels(target, len(weight), vocab_size, traits.group)
    chunk = chunk_tokens or tokens_of_a_chunk(len(weight) * x.element_size())
    deferred = linear.is_deferred(x, weight, traits, store)
    proxy, ready = (linear.FusedGradParam(weight), None) if deferred else linear.autograd_proxy(weight, x, traits)
    losses = _LinearCrossEntropy.apply(
        x, proxy, labels, traits, chunk, store if deferred else None, ready, steps.soft_cap, steps.bias
    )
    return losses.view(target.shape)


def tokens_of_a_chunk(bytes_per_token: int) -> int:
    """Return the number of tokens whose logits fit in ``CHUNK_BYTES``, a multiple of 128 (a GEMM tile) if possible."""
    tokens = max(1, CHUNK_BYTES // bytes_per_token)
    return tokens // 128 * 128 or tokens


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        weight: Any,
        labels: LocalLabels,
        traits: linear.LinearTraits,
        chunk_tokens: int,
        store: linear.WeightGradientStore | None,
        ready: Tensor | None,
        soft_cap: float | None,
        bias: Tensor | None,
    ) -> Tensor:
        """One chunk of logits at a time. All-gathers ``x`` with ``gather_input`` and the statistics of all tokens once.
        Saves the local ``x``, weight, labels, maxima and sums, and no logits."""
        ctx.adds_weight = isinstance(weight, linear.FusedGradParam)
        weight = linear.unwrap(weight)
        ctx.passes = cross_entropy_passes(x.dtype, x.device)
        x_th = _gathered_input(x, traits)
        statistics = []
        for chunk, logits in _logits(x_th, weight, chunk_tokens, LogitSteps(bias, soft_cap), traits.gemms):
            statistics.append(ctx.passes.statistics(logits, labels.label_t[chunk], labels.num_true))
        loss_t, softmax = combine_statistics(torch.cat(statistics, dim=1), labels)
        ctx.save_for_backward(x, weight, labels.label_t, softmax.maximum_t, softmax.total_t)
        ctx.num_true, ctx.traits, ctx.chunk_tokens, ctx.store = labels.num_true, traits, chunk_tokens, store
        ctx.weight, ctx.steps = weight, LogitSteps(bias, soft_cap)
        return loss_t

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Recompute the logits chunk by chunk. All-gathers ``x`` again, and reduces dX, overlapped with the last dW
        GEMM. dW is None if it is in ``main_grad`` or deferred. The seventh result is a placeholder for the token."""
        x, weight, label_t, maximum_t, total_t = ctx.saved_tensors
        traits, store = ctx.traits, ctx.store
        needs_x, needs_ready = ctx.needs_input_grad[0], ctx.needs_input_grad[6]
        needs_weight = ctx.needs_input_grad[1] or ctx.adds_weight
        x_th = _gathered_input(x, traits)
        grad_x = torch.empty_like(x_th) if needs_x else None
        total = _gradient_sum(ctx.weight, traits) if needs_weight else None
        summing: AsyncHandle | None = None
        grad_t, (bias, soft_cap) = grad_loss.contiguous(), ctx.steps
        bias_sum = None
        if bias is not None:
            bias_sum = torch.zeros_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
        for chunk, logits in _logits(x_th, weight, ctx.chunk_tokens, ctx.steps, traits.gemms):
            softmax = Softmax(maximum_t[chunk], total_t[chunk], ctx.num_true)
            # before the pass below, which overwrites the capped logits with their gradient
            slope = None if soft_cap is None else 1 - (logits / soft_cap).square_()
            ctx.passes.gradient(logits, label_t[chunk], softmax, grad_t[chunk], out_tv=logits)
            if slope is not None:
                logits.mul_(slope)
            if grad_x is not None:
                traits.gemms.input_gradient(logits, weight, out=grad_x[chunk])
                if chunk.stop >= len(x_th):  # overlaps with the last GEMM of dW
                    summing = linear.start_input_gradient_reduction(grad_x.view(-1, *x.shape[1:]), traits)
            if total is not None:
                traits.gemms.add_weight_gradient(total, logits, x_th[chunk])
            if bias_sum is not None:
                bias_sum += logits.sum(0, dtype=bias_sum.dtype)
            del logits  # free the chunks before allocating the weight gradient
        grad_weight = None
        if total is not None:
            grad_weight = _hand_over(total, ctx.weight, traits, store)
        if summing is not None:
            grad_x = summing.wait()
        ready = linear.ready_gradient(grad_loss) if needs_ready else None
        grad_bias = None if bias_sum is None else bias_sum.to(bias.dtype)
        return grad_x, grad_weight, None, None, None, None, ready, None, grad_bias


def _gathered_input(x: Tensor, traits: linear.LinearTraits) -> Tensor:
    gathered = all_gather_along_first_dim(x, traits.group) if traits.gather_input else x
    return gathered.detach().reshape(-1, x.shape[-1])


def _logits(
    x_th: Tensor, weight: Tensor, chunk_tokens: int, steps: LogitSteps, gemms: Gemms
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (token range, logits [c, v] with bias and soft cap). All chunks reuse the same memory. Without autograd."""
    memory = x_th.new_empty((min(chunk_tokens, len(x_th)), len(weight)))
    weight = weight.detach()
    for first in range(0, len(x_th), chunk_tokens):
        x_ch = x_th[first : first + chunk_tokens]
        logits = gemms.output(x_ch, weight, out=memory[: len(x_ch)])
        if steps.bias is not None:
            logits.add_(steps.bias.detach())
        if steps.soft_cap is not None:
            logits.div_(steps.soft_cap).tanh_().mul_(steps.soft_cap)
        yield slice(first, first + len(x_ch)), logits


def _gradient_sum(weight: Tensor, traits: linear.LinearTraits) -> Tensor:
    main_grad = linear.fused_gradient(weight, traits)
    if main_grad is not None:
        return main_grad
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


@torch.no_grad()
def _hand_over(
    total: Tensor, weight: Tensor, traits: linear.LinearTraits, store: linear.WeightGradientStore | None
) -> Tensor | None:
    """Return dW in the weight's dtype, None if it is in ``main_grad`` or with ``store``, which gets a closure."""
    if store is not None:
        store.put(lambda: linear.complete_later(weight, _gradient(total, weight, traits)))
        return None
    return _gradient(total, weight, traits)


def _gradient(total: Tensor, weight: Tensor, traits: linear.LinearTraits) -> Tensor | None:
    if total is linear.fused_gradient(weight, traits):
        return None
    return total.to(weight.dtype)
