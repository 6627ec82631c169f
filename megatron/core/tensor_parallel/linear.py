"""GEMMs of all linear layers, with a backward that overlaps communication and accumulates weight gradients.

  Y = X W^T + b        dX = dY W        dW = dY^T X        db = sum dY

*Input gradient*: if X is replicated over the group, dX is a partial sum, and its all-reduce overlaps with the dW GEMM.
Under sequence parallelism forward all-gathers X but saves only this rank's positions. Backward all-gathers X again,
overlapped with the dX GEMM, and the reduce-scatter of dX overlaps with dW (Korthikanti et al. 2022, section 4.2.2).

*Weight gradient*: for a parameter with ``main_grad`` (see ``core/distributed``) the GEMM itself adds dW to it, in its
dtype: without 16-bit rounding, a temporary of the weight's size or a separate addition. In place of the weight autograd
sees a 0-d leaf, the token ``parameter.grad_ready``, whose hooks run after all GEMMs of a backward pass have added their
gradients. A weight with another use must set ``weight_has_other_uses``; the other use then announces the gradient. The
same holds for biases.

*Deferred weight gradient*: with a ``WeightGradientStore`` backward computes only dX and stores dW as a closure.
Autograd then must not see the weight: it would run the weight's hooks, which announce a complete gradient, even for an
input without gradient.

Legend: s sequence, b batch, t tokens (s * b), o output features, i input features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.fusions.column_sum import ColumnSum, column_sum_plain
from megatron.core.groups.async_handle import AsyncHandle, Finished
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_reduce, begin_reduce_scatter
from megatron.core.tensor_parallel.gemms import Gemms, Operand, operand_of, tensors_of


class WeightGradientStore:
    """Queue of deferred weight gradients, for pipeline schedules that compute them in bubbles (zero bubble). The
    runtime sets it as the attribute ``weight_gradient_store`` of linear layers before forward. After the input-gradient
    part of a micro-batch it calls :meth:`take`. Each closure must be called once, in order; it completes the gradient
    of one weight exactly as backward would have, in ``main_grad`` (or ``grad``), and runs the parameter's
    post-accumulate-gradient hooks. All ranks of a tensor-parallel group must call the closures in the same order,
    because under sequence parallelism they all-gather their input. A closure keeps dY and X in memory until then."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def put(self, compute: Callable[[], None]) -> None:
        """Append a closure; called by backward."""
        self._waiting.append(compute)

    def take(self) -> list[Callable[[], None]]:
        """Return the closures stored since the last call and empty the store."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def __len__(self) -> int:
        return len(self._waiting)


class LinearTraits(NamedTuple):
    """Communication and gradient settings of a linear layer."""

    group: Group
    gather_input: bool = False
    """Whether X holds only this rank's positions (first dim) and must be all-gathered for the GEMM."""
    reduce_input_gradient: bool = False
    """Whether X is replicated, so that each rank computes a partial sum of dX."""
    fuse_weight_gradient: bool = True
    weight_has_other_uses: bool = False
    """Whether the weight has another use in the graph, which announces its gradient after this one's addition."""
    column_sum: ColumnSum = column_sum_plain
    """Kernel that computes db."""
    gemms: Gemms = Gemms()
    """GEMMs of the layer."""


class FusedGradParam(NamedTuple):
    """Wrapper that hides a parameter from autograd; GEMMs add its gradient to ``main_grad``."""

    tensor: Tensor


def parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, traits: LinearTraits, store: WeightGradientStore | None = None
) -> Tensor:
    """Return ``x`` [..., i] times ``weight`` [o, i] transposed, plus ``bias`` [o]. With ``traits.gather_input``
    all-gathers ``x`` along the first dim before, and again in backward. Backward reduces dX and adds dW and db to
    ``main_grad`` as in the module docstring; with ``store`` it defers the weight's gradient, but not the bias's."""
    seen_bias, bias_ready = (None, None) if bias is None else autograd_proxy(bias, x, traits)
    proxy: Tensor | FusedGradParam = FusedGradParam(weight)
    ready = None
    if store is None or not is_deferred(x, weight, traits, store):
        store = None
        proxy, ready = autograd_proxy(weight, x, traits)
    for_backward = torch.is_grad_enabled() and weight.requires_grad
    return _ParallelLinear.apply(x, proxy, seen_bias, traits, store, ready, bias_ready, for_backward)


def is_deferred(x: Tensor, weight: Tensor, traits: LinearTraits, store: WeightGradientStore | None) -> bool:
    """Return whether the gradient of ``weight`` is deferred to ``store``."""
    return store is not None and not traits.weight_has_other_uses and x.requires_grad and weight.requires_grad


def unwrap(parameter: Any) -> Any:
    """Return the parameter itself, unwrapped from :class:`FusedGradParam`."""
    return parameter.tensor if isinstance(parameter, FusedGradParam) else parameter


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, traits: LinearTraits,
        store: WeightGradientStore | None, ready: Tensor | None, bias_ready: Tensor | None, for_backward: bool,
    ) -> Tensor:  # fmt: skip
        """Saves the weight and, unless it is frozen, the local ``x`` (not gathered) as an operand; keeps the parameters
        on ``ctx`` for their ``main_grad``."""
        ctx.adds_weight, ctx.adds_bias = isinstance(weight, FusedGradParam), isinstance(bias, FusedGradParam)
        weight = weight.tensor if ctx.adds_weight else weight
        bias = bias.tensor if ctx.adds_bias else bias
        packed = traits.gemms.pack_input(x, for_backward=for_backward)
        # a frozen weight's input is read by no backward pass
        ctx.save_for_backward(weight, *(tensors_of(packed.second) if for_backward else ()))
        ctx.traits, ctx.store = traits, store
        # keep the parameters: recomputation returns saved tensors as copies without main_grad
        ctx.weight, ctx.bias = weight, bias
        gathered = packed.first
        if traits.gather_input:
            gathered = traits.gemms.begin_gather(gathered, traits.group, second=False).wait()
        return traits.gemms.output(gathered, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return dX, reduced as ``traits`` say, dW and db: None if in ``main_grad``, dW also if put into ``store`` as a
        closure. The gradients of ``ready`` and ``bias_ready`` are placeholders. Waits for its collectives."""
        weight, *saved = ctx.saved_tensors
        x: Any = operand_of(saved) if saved else None
        traits, store, needs = ctx.traits, ctx.store, ctx.needs_input_grad
        needs_weight, needs_bias = needs[1] or ctx.adds_weight, needs[2] or ctx.adds_bias
        grad_weight = None
        gathering: AsyncHandle = Finished(x)
        summing: AsyncHandle = Finished(None)
        # stream order: all-gather x overlaps the dX GEMM, reduction of dX overlaps the dW GEMM; dW before dX would
        # expose both collectives
        if traits.gather_input and needs_weight and store is None:
            gathering = traits.gemms.begin_gather(x, traits.group, second=True)
        packed = traits.gemms.pack_gradient(grad, for_input=needs[0], for_weight=needs_weight)
        # the all-reduce writes into this product; no other tensor may share its memory
        if needs[0]:
            summing = start_input_gradient_reduction(traits.gemms.input_gradient(packed.first, weight), traits)
        if store is not None:
            # capture no ctx: the closure outlives this pass, and ctx holds the graph with every activation
            parameter, second = ctx.weight, packed.second
            store.put(lambda: _complete(parameter, second, x, traits))
        elif needs_weight:
            grad_weight = _weight_gradient(ctx.weight, packed.second, gathering.wait(), traits)
        grad_bias = _bias_gradient(ctx.bias, grad, traits) if needs_bias else None
        grad_x = summing.wait()
        # token gradients last: their hooks start the reduction of a bucket, which must contain dW and db by then
        ready_grads = (ready_gradient(grad) if needed else None for needed in needs[5:7])
        return grad_x, grad_weight, grad_bias, None, None, *ready_grads, None


def start_input_gradient_reduction(grad_x: Tensor, traits: LinearTraits) -> AsyncHandle:
    """Start the reduce-scatter (``gather_input``) or in-place all-reduce (``reduce_input_gradient``) of dX; ``wait()``
    returns it. Without either flag, or for one rank with a replicated input, that is ``grad_x``."""
    if traits.gather_input:
        return begin_reduce_scatter(grad_x, traits.group)
    if not traits.reduce_input_gradient or traits.group.size == 1:
        return Finished(grad_x)
    return begin_all_reduce(grad_x, traits.group)


def _weight_gradient(weight: Tensor, grad: Operand, x: Operand, traits: LinearTraits) -> Tensor | None:
    """Return dW [o, i], or add it to ``main_grad`` in place and return None; ``x`` must be gathered."""
    main_grad = fused_gradient(weight, traits)
    if main_grad is None:
        return traits.gemms.weight_gradient(grad, x)
    traits.gemms.add_weight_gradient(main_grad, grad, x)
    return None


def _bias_gradient(bias: Tensor, grad: Tensor, traits: LinearTraits) -> Tensor | None:
    main_grad = fused_gradient(bias, traits)
    grad_bias = traits.column_sum(grad.flatten(0, -2), main_grad)
    return grad_bias if main_grad is None else None


def fused_gradient(parameter: Tensor, traits: LinearTraits) -> Tensor | None:
    """Return the ``main_grad`` to which GEMMs add the gradient; None if the gradient goes through autograd."""
    return getattr(parameter, "main_grad", None) if traits.fuse_weight_gradient else None


def autograd_proxy(
    parameter: Tensor, x: Tensor | None, traits: LinearTraits
) -> tuple[Tensor | FusedGradParam, Tensor | None]:
    """Return what autograd sees of a parameter: (parameter, None) if its gradient goes through autograd; (hidden, its
    token ``grad_ready``) if operators add it to ``main_grad``; or (hidden, None) if another use announces that gradient
    and the input ``x`` requires a gradient. Without token and such an input only the parameter can make backward run:
    (parameter, None), although operators add to ``main_grad``."""
    # hide the parameter: its hooks run even without a gradient, so the bucket would count it as ready before dW is
    # added, or twice; the token gets its gradient only after all uses have added their gradients
    is_fused = traits.fuse_weight_gradient and getattr(parameter, "main_grad", None) is not None
    if not parameter.requires_grad or not is_fused:
        return parameter, None
    ready = None if traits.weight_has_other_uses else getattr(parameter, "grad_ready", None)
    if ready is None and (x is None or not x.requires_grad):
        return parameter, None
    return FusedGradParam(parameter), ready


def ready_gradient(like: Tensor) -> Tensor:
    """Return a gradient for a token, so that its hooks run; the value is never read."""
    return torch.empty((), dtype=torch.float32, device=like.device)


@torch.no_grad()
def complete_later(weight: Tensor, grad: Tensor | None) -> None:
    """Deliver a weight's gradient outside of autograd's backward: accumulate ``grad`` into ``weight.grad``, which runs
    the hooks. None: it is in ``main_grad``; run only the hooks of the token ``grad_ready``."""
    if grad is not None:
        weight.backward(grad)
    elif (ready := getattr(weight, "grad_ready", None)) is not None:
        ready.backward(ready_gradient(ready))


@torch.no_grad()
def _complete(weight: Tensor, grad: Operand, x: Operand, traits: LinearTraits) -> None:
    """All-gathers ``x`` under sequence parallelism."""
    gathered_x = traits.gemms.begin_gather(x, traits.group, second=True).wait() if traits.gather_input else x
    complete_later(weight, _weight_gradient(weight, grad, gathered_x, traits))
