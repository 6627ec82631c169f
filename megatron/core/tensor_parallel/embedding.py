"""Embedding look-up whose backward can accumulate into ``main_grad``.

For a table with ``main_grad``, backward adds the gradient to it row by row (``fusions/embedding_gradient.py``), under
the rules of ``linear.py``. Other tables get the dense gradient of torch's look-up.

Legend: v rows of the table, h hidden."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.autograd_context import AutogradContext
from megatron.core.fusions.embedding_gradient import AddRows
from megatron.core.tensor_parallel import linear


def look_up(
    weight: Tensor, ids: Tensor, absent: Tensor | None, traits: linear.LinearTraits, add_rows: AddRows
) -> Tensor:
    """Return the vectors [..., h] of int64 ``ids`` [...], rows of this rank's ``weight`` [v, h]; zeros, without
    gradient, where bool ``absent`` [...] is set (None: nowhere). Backward adds the gradient to ``main_grad`` in place
    with ``add_rows`` if the table has it, else returns a dense gradient. No collective and no range check."""
    _, ready = linear.autograd_proxy(weight, None, traits)
    if ready is None:
        return _vectors(weight, ids, absent)
    return _LookUp.apply(ready, linear.FusedGradParam(weight), ids, absent, traits, add_rows)


def _vectors(weight: Tensor, ids: Tensor, absent: Tensor | None) -> Tensor:
    if absent is None:
        return F.embedding(ids, weight)
    return F.embedding(ids.masked_fill(absent, 0), weight).masked_fill(absent.unsqueeze(-1), 0)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        ready: Tensor,
        weight: linear.FusedGradParam,
        ids: Tensor,
        absent: Tensor | None,
        traits: linear.LinearTraits,
        add_rows: AddRows,
    ) -> Tensor:
        ctx.save_for_backward(ids if absent is None else ids.masked_fill(absent, -1))
        ctx.weight, ctx.traits, ctx.add_rows = weight.tensor, traits, add_rows
        return _vectors(weight.tensor, ids, absent)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Add to rows ``ids`` of ``main_grad`` in place; ``ready`` gets a placeholder, the weight none."""
        (ids,) = ctx.saved_tensors  # -1 where another rank has the row: skipped
        main_grad = linear.fused_gradient(ctx.weight, ctx.traits)
        ctx.add_rows(grad.reshape(-1, grad.shape[-1]), ids.flatten(), main_grad)
        # after the addition: the token's hooks may start the reduction of the bucket that contains main_grad
        return linear.ready_gradient(grad), None, None, None, None, None
