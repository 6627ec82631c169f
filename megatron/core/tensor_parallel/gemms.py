"""The GEMMs of linear layers as a slot: by default torch's, in the dtype of the weights.

A recipe (such as an fp8 format, ``core/fp8``) is a function from a :class:`GemmPlace` to the ``Gemms`` of that layer,
or None to keep the default. :func:`install_gemms` calls it once per layer after the model is built, because only then
does a layer have its global name and number. State of a recipe (scales, cached casts) lives in the ``Gemms`` object of
its layer.

A layer converts X and dY to *operands*, once for the two GEMMs that read each; operands are what it gathers and saves.
By default an operand is the tensor itself.

Legend: t tokens, o output features, i input features."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.fp8_cast import Quantized
from megatron.core.groups.async_handle import AsyncHandle
from megatron.core.groups.process_groups import Group
from megatron.core.tensor_parallel.collectives import begin_all_gather

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.linear import LinearTraits, WeightGradientStore


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right`` in place in the dtype of ``total``, without rounding the product to a narrower
    dtype. CUDA GEMMs read narrower inputs directly; CPUs cast them to the dtype of ``total`` first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


Operand = Tensor | Quantized
"""Matrix as a GEMM reads it."""


class Operands(NamedTuple):
    """One matrix as the two GEMMs read it that use it."""

    first: Operand
    """X for Y = X W^T; dY for dX = dY W."""
    second: Operand
    """X or dY for dW = dY^T X."""


def tensors_of(operand: Operand) -> tuple[Tensor, ...]:
    """Return the tensors of an operand, to be saved for backward."""
    return (operand,) if isinstance(operand, Tensor) else tuple(operand)


def operand_of(tensors: Sequence[Tensor]) -> Operand:
    """Return the operand with the tensors of :func:`tensors_of`."""
    return tensors[0] if len(tensors) == 1 else Quantized(*tensors)


class Gemms:
    """GEMMs of one linear layer with weight [o, i], by torch. With ``out`` inputs are matrices and the result is
    written there. ``accumulate``: (total [o, i], dY^T [o, t], x [t, i]) adds the product to ``total`` in place."""

    reads_weight = True
    """Whether products read the weight itself, not a copy: then other products may read it in their place."""

    def __init__(self, accumulate: Callable[[Tensor, Tensor, Tensor], None] = accumulate_product) -> None:
        self.accumulate = accumulate

    def pack_input(self, x: Tensor, *, for_backward: bool) -> Operands:
        """Return X [..., i] as operands; ``second`` is read only if ``for_backward``."""
        return Operands(x, x)

    def pack_gradient(self, grad: Tensor, *, for_input: bool, for_weight: bool) -> Operands:
        """Return dY [..., o] as operands. The flags say which of the two are read."""
        return Operands(grad, grad)

    def begin_gather(self, x: Operand, group: Group, *, second: bool) -> AsyncHandle:
        """Start the all-gather of X along its first dim: the first operand of :meth:`pack_input`, or the ``second``."""
        return begin_all_gather(x, group)  # type: ignore[arg-type]

    def gather_gradient(self, grad: Tensor, group: Group) -> Tensor:
        """All-gather dY [s / n, ..., o] along its first dim over ``group``, for :meth:`pack_gradient`: the tensor, or
        one that carries operands. Only the layer may read it."""
        return begin_all_gather(grad, group).wait()

    def output(self, x: Operand, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return ``x`` [..., i] times ``weight`` transposed, [..., o], plus ``bias`` [o] (not with ``out``)."""
        assert isinstance(x, Tensor)
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)

    def input_gradient(self, grad: Operand, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``grad`` [..., o] times ``weight``, [..., i]."""
        assert isinstance(grad, Tensor)
        return grad.matmul(weight) if out is None else torch.mm(grad, weight, out=out)

    def weight_gradient(self, grad: Operand, x: Operand) -> Tensor:
        """Return dW [o, i] in the dtype of dY, for weights without ``main_grad``."""
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        return grad.flatten(0, -2).t().matmul(x.flatten(0, -2))

    def add_weight_gradient(self, total: Tensor, grad: Operand, x: Operand) -> None:
        """Add dW [o, i] to ``total`` in place."""
        assert isinstance(grad, Tensor) and isinstance(x, Tensor)
        self.accumulate(total, grad.flatten(0, -2).t(), x.flatten(0, -2))


Product = Callable[..., Tensor]
"""Function (x, weight, bias, traits, store) -> output, as ``linear.parallel_linear``."""


class GemmLayer(nn.Module):
    """Base class of layers with a GEMM."""

    weight_gradient_store: WeightGradientStore | None = None
    """Queue of deferred weight gradients; a pipeline runtime sets it."""
    traits: LinearTraits
    product: Product
    """Product of the layer: ``parallel_linear``, or one that :meth:`wrap` added to."""
    shared_product: Product
    """Product with the rows that several ranks hold (``ColumnParallelLinear.shared_weight``)."""

    is_wrapped = False
    """Whether the layer computes more than the product with its weight."""

    def wrap(self, name: str, wrapper: nn.Module, product: str = "product") -> None:
        """Compute ``product`` by ``wrapper(inner product, x, weight, bias, traits, store)``, from now on the submodule
        ``name``. Names of the layer's parameters stay; later wrappers are outside of earlier ones."""
        self.add_module(name, wrapper)
        self.is_wrapped = True
        setattr(self, product, partial(wrapper, getattr(self, product)))

    def use_gemms(self, gemms: object) -> None:
        """Replace the GEMMs by an object of the layer's kind: :class:`Gemms`, or ``GroupedProducts`` for experts."""
        assert isinstance(gemms, Gemms)
        self.traits = self.traits._replace(gemms=gemms)


class GemmPlace(NamedTuple):
    """A layer for which a recipe chooses GEMMs."""

    name: str
    """Name in the model, with the global layer index: ``decoder.layers.7.mlp.linear_fc1``."""
    layer: int | None
    """Global layer index, from 0; None outside of the layers (output layer)."""
    module: GemmLayer


GemmRecipe = Callable[[GemmPlace], object | None]


def layer_index(name: str) -> int | None:
    """Return the global layer index, from 0, of a module's name; None outside of the layers."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    return None if number is None else int(number[1])


def install_gemms(model: nn.Module, recipe: GemmRecipe) -> None:
    """Replace the GEMMs of every linear layer of ``model`` for which ``recipe`` returns an object; None keeps them. The
    object must be of the layer's kind, :class:`Gemms` or ``GroupedProducts`` for experts (asserted). Call it before the
    model is wrapped, so that names are global."""
    for name, module in model.named_modules():
        if isinstance(module, GemmLayer):
            gemms = recipe(GemmPlace(name, layer_index(name), module))
            if gemms is not None:
                module.use_gemms(gemms)
