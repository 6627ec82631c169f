"""The GEMMs of linear layers as a slot: by default torch's, in the dtype of the weights.

A recipe (such as an fp8 format) is a function from a :class:`GemmPlace` to the ``Gemms`` of that layer, or None to keep
the default. :func:`install_gemms` calls it once per layer after the model is built, because only then does a layer have
its global name and number. State of a recipe (scales, cached casts) lives in the ``Gemms`` object of its layer.

Legend: t tokens, o output features, i input features.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Gemms:
    """GEMMs of one linear layer with weight [o, i], by torch. With ``out`` the inputs are matrices, and the result is
    written there.

    Args:
        accumulate: (total [o, i], dY^T [o, t], x [t, i]) -> None; adds the product to ``total`` in place.
    """

    def __init__(self, accumulate: Callable[[Tensor, Tensor, Tensor], None] = accumulate_product) -> None:
        self.accumulate = accumulate

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """Return ``x`` [..., i] times ``weight`` transposed, [..., o], plus ``bias`` [o] (not with ``out``)."""
        return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)

    def input_gradient(self, grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``grad`` [..., o] times ``weight``, [..., i]."""
        return grad.matmul(weight) if out is None else torch.mm(grad, weight, out=out)

    def weight_gradient(self, grad_to: Tensor, x_ti: Tensor) -> Tensor:
        """Return dW [o, i] in the dtype of ``grad_to``, for weights without ``main_grad``."""
        return grad_to.t().matmul(x_ti)


class GemmLayer(nn.Module):
    """Base class of layers with a GEMM."""

    weight_gradient_store: WeightGradientStore | None = None
    """Queue of deferred weight gradients; a pipeline runtime sets it."""
    traits: LinearTraits

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


def install_gemms(model: nn.Module, recipe: GemmRecipe) -> None:
    """Replace the GEMMs of every linear layer of ``model`` for which ``recipe`` returns an object; None keeps them. The
    object must be of the layer's kind, :class:`Gemms` or ``GroupedProducts`` for experts (asserted). Call it before the
    model is wrapped, so that names are global."""
    for name, module in model.named_modules():
        if isinstance(module, GemmLayer):
            number = re.search(r"\blayers\.(\d+)\.", name)
            gemms = recipe(GemmPlace(name, None if number is None else int(number[1]), module))
            if gemms is not None:
                module.use_gemms(gemms)
