"""The GEMMs of every linear layer, with a backward pass that overlaps and accumulates.

    Y = X W^T + b        dX = dY W        dW = dY^T X        db = sum dY

*Input gradient*: where X is the same on all ranks of the group, dX is a partial sum. Its all-reduce runs while dW is
computed. Under sequence parallelism X is gathered in forward, only this rank's positions are kept, and backward gathers
them again behind the GEMM dX, whose reduce-scatter runs behind dW (Korthikanti et al. 2022, section 4.2.2).

*Weight gradient*: a parameter with ``main_grad`` (see ``core/distributed``) gets dW added to that, in its dtype, by the
GEMM itself: no 16-bit rounding, no tensor of the weight's size, no separate addition. Autograd then sees a leaf of
no dimension in the weight's place, the token ``parameter.grad_ready``, whose hooks run once all GEMMs of a backward
pass have added theirs. A weight that is used elsewhere too must say so (``weight_has_other_uses``): then the other use
announces the gradient. Biases likewise.

*Deferred weight gradient*: with a ``WeightGradientStore`` backward computes dX alone and hands dW over as a closure.
Autograd then does not see the weight at all: it would run the weight's hooks, which announce a complete gradient, even
for an input that gets none.

Legend: s sequence, b batch, t tokens (s * b), o output features, i input features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.fusions.column_sum import ColumnSum, column_sum_plain
from megatron.core.groups.async_handle import AsyncHandle, Finished
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter


class WeightGradientStore:
    """Weight gradients that backward passes delay, for a pipeline schedule that computes them in waiting time.

    The runtime sets one as the attribute ``weight_gradient_store`` of linear layers before the forward pass. After the
    input-gradient part of a micro-batch it calls :meth:`take`; each closure of the list, called later and once, in
    order, completes the gradient of one weight exactly as backward would have: into ``main_grad`` (or ``grad``), then
    the parameter's post-accumulate-gradient hooks run. All ranks of a tensor-parallel group must call them in the same
    order, since under sequence parallelism a closure gathers its input.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def put(self, compute: Callable[[], None]) -> None:
        """Called by backward."""
        self._waiting.append(compute)

    def take(self) -> list[Callable[[], None]]:
        """The closures since the last call; the store is empty afterwards."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def __len__(self) -> int:
        return len(self._waiting)


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` in the dtype of ``total``, without rounding the result to that of its factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class LinearTraits(NamedTuple):
    """Choices of a layer."""

    group: Group
    gather_input: bool = False
    """X holds this rank's positions (first dim) of what the GEMM takes."""
    reduce_input_gradient: bool = False
    """X is the same on all ranks, each of which computes a partial sum of dX."""
    fuse_weight_gradient: bool = True
    weight_has_other_uses: bool = False
    """The weight appears elsewhere in the graph; its gradient from here goes to ``main_grad`` without further sign."""
    column_sum: ColumnSum = column_sum_plain
    """db."""
    accumulate: Callable[[Tensor, Tensor, Tensor], None] = accumulate_product
    """How dW is added to ``main_grad``."""


class FusedGradParam(NamedTuple):
    """A parameter whose gradient GEMMs add to ``main_grad``; being no tensor, it is hidden from autograd."""

    tensor: Tensor


def parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, traits: LinearTraits, store: WeightGradientStore | None = None
) -> Tensor:
    """``x`` [..., i] times ``weight`` [o, i] plus ``bias`` [o]."""
    seen_bias, bias_ready = (None, None) if bias is None else autograd_proxy(bias, x, traits)
    if is_deferred(x, weight, traits, store):
        return _ParallelLinear.apply(x, FusedGradParam(weight), seen_bias, traits, store, None, bias_ready)
    seen, ready = autograd_proxy(weight, x, traits)
    return _ParallelLinear.apply(x, seen, seen_bias, traits, None, ready, bias_ready)


def is_deferred(x: Tensor, weight: Tensor, traits: LinearTraits, store: WeightGradientStore | None) -> bool:
    """Whether the gradient of ``weight`` goes to ``store``."""
    return store is not None and not traits.weight_has_other_uses and x.requires_grad and weight.requires_grad


def parameter_of(parameter: Any) -> Any:
    """The parameter itself."""
    return parameter.tensor if isinstance(parameter, FusedGradParam) else parameter


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Any, bias: Any, traits: LinearTraits,
        store: WeightGradientStore | None, ready: Tensor | None, bias_ready: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.adds_weight, ctx.adds_bias = isinstance(weight, FusedGradParam), isinstance(bias, FusedGradParam)
        weight, bias = parameter_of(weight), parameter_of(bias)
        ctx.save_for_backward(x, weight)
        ctx.traits, ctx.store = traits, store
        # recomputation gives back saved tensors as mere copies, which have no main_grad: the parameters themselves say
        # where their gradients go
        ctx.weight, ctx.bias = weight, bias
        return F.linear(begin_all_gather(x, traits.group).wait() if traits.gather_input else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        traits, store, needs = ctx.traits, ctx.store, ctx.needs_input_grad
        needs_weight, needs_bias = needs[1] or ctx.adds_weight, needs[2] or ctx.adds_bias
        grad_weight = None
        gathering: AsyncHandle = Finished(x)
        summing: AsyncHandle = Finished(None)
        # Order on the stream: gather of x | dX beside it | sum of dX | dW beside that. Each collective runs beside the
        # one GEMM that does not need it; dW before dX would leave both of them with nothing to hide behind.
        if traits.gather_input and needs_weight and store is None:
            gathering = begin_all_gather(x, traits.group)
        if needs[0]:
            summing = start_sum_of_input_gradient(grad.matmul(weight), traits)
        if store is not None:
            # not ctx: the closure outlives this pass, and ctx holds the graph and with it every activation
            parameter = ctx.weight
            store.put(lambda: _complete(parameter, grad, x, traits))
        elif needs_weight:
            grad_weight = _weight_gradient(ctx.weight, grad, gathering.wait(), traits)
        grad_bias = _bias_gradient(ctx.bias, grad, traits) if needs_bias else None
        grad_x = summing.wait()
        # the tokens' gradients come last: their hooks start the sum of a bucket, which must hold dW and db by then
        ready_grads = (ready_gradient(grad) if needed else None for needed in needs[5:7])
        return grad_x, grad_weight, grad_bias, None, None, *ready_grads


def start_sum_of_input_gradient(grad_x: Tensor, traits: LinearTraits) -> AsyncHandle:
    """Starts the sum of all ranks' shares of dX; what it waits for is dX (of this rank's positions)."""
    if traits.gather_input:
        return begin_reduce_scatter(grad_x, traits.group)
    if not traits.reduce_input_gradient or traits.group.size == 1:
        return Finished(grad_x)
    return begin_all_reduce(grad_x, traits.group)


def _weight_gradient(weight: Tensor, grad: Tensor, x: Tensor, traits: LinearTraits) -> Tensor | None:
    """dW; None once it is in ``main_grad``."""
    grad_to, x_ti = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    main_grad = fused_gradient(weight, traits)
    if main_grad is None:
        return grad_to.t().matmul(x_ti)
    traits.accumulate(main_grad, grad_to.t(), x_ti)
    return None


def _bias_gradient(bias: Tensor, grad: Tensor, traits: LinearTraits) -> Tensor | None:
    """db; None once it is in ``main_grad``."""
    main_grad = fused_gradient(bias, traits)
    grad_bias = traits.column_sum(grad.flatten(0, -2), main_grad)
    return grad_bias if main_grad is None else None


def fused_gradient(parameter: Tensor, traits: LinearTraits) -> Tensor | None:
    """Where GEMMs add the gradient by themselves; None if it goes through autograd."""
    return getattr(parameter, "main_grad", None) if traits.fuse_weight_gradient else None


def autograd_proxy(
    parameter: Tensor, x: Tensor | None, traits: LinearTraits
) -> tuple[Tensor | FusedGradParam, Tensor | None]:
    """What autograd sees of a parameter: (itself, None); or (hidden, its token); or (hidden, None), where another use
    announces the gradient and input ``x`` makes backward come by here."""
    # A parameter that autograd sees has its hooks run even if it gets no gradient: the bucket would count it as ready
    # before dW is in it, or twice. The token gets a gradient exactly when all uses in the graph have added theirs.
    if not parameter.requires_grad or fused_gradient(parameter, traits) is None:
        return parameter, None
    ready = None if traits.weight_has_other_uses else getattr(parameter, "grad_ready", None)
    if ready is None and (x is None or not x.requires_grad):
        return parameter, None
    return FusedGradParam(parameter), ready


def ready_gradient(like: Tensor) -> Tensor:
    """The gradient of a token: makes its hooks run; its value is never read."""
    return torch.empty((), dtype=torch.float32, device=like.device)


@torch.no_grad()
def complete_later(weight: Tensor, grad: Tensor | None) -> None:
    """Hands over a gradient outside of autograd's passes, or announces one that is in ``main_grad`` (None): accumulates
    and runs the hooks."""
    if grad is not None:
        weight.backward(grad)
    elif (ready := getattr(weight, "grad_ready", None)) is not None:
        ready.backward(ready_gradient(ready))


@torch.no_grad()
def _complete(weight: Tensor, grad: Tensor, x: Tensor, traits: LinearTraits) -> None:
    """The deferred part of a backward pass."""
    whole_x = begin_all_gather(x, traits.group).wait() if traits.gather_input else x
    complete_later(weight, _weight_gradient(weight, grad, whole_x, traits))
