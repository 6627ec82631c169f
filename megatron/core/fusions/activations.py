"""Activation functions of the feed-forward network, selected once from the configuration.

    gelu          x Phi(x), by erf; with biases and ``bias_gelu_fusion`` the tanh approximation, as in Megatron-LM,
                  unless ``exact_gelu``
    relu          max(x, 0)
    squared_relu  max(x, 0)^2
    swiglu        silu(gate) * (up + offset)
    quick_geglu   gate sigmoid(1.702 gate) * (up + offset)
    geglu         gelu(gate) * (up + offset), gelu by its tanh approximation unless ``exact_gelu``

Gated activations take gate and up concatenated in the last dim. A clamp bounds gate from above and up on both sides.
This file has the torch implementations; on GPUs ``activation_kernels`` computes all except those with GELU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.fp8 import notes_amax
from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.fusions import activation_kernels
from megatron.core.fusions.batch_invariant_product import in_full_vectors
from megatron.core.fusions.dispatch import ByDevice, kernels_serve
from megatron.core.fusions.fp8_cast import CastTarget
from megatron.core.fusions.gated_cast import gated_cast_triton

_QUICK_GELU_SLOPE = 1.702


def select_activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return the function between fc1 and fc2: [..., f] -> [..., f], or [..., 2 f] -> [..., f] if gated. On GPUs Triton
    kernels compute gated activations (if ``bias_swiglu_fusion`` is set) and squared ReLU (if ``bias_gelu_fusion`` is),
    except GELU ones and fp64; else torch operations do. In 16 bits kernels round once, torch also in between."""
    plain = _plain_activation(config)
    is_gated = config.gated_linear_unit
    if config.batch_invariant_mode:
        plain = partial(in_full_vectors, plain, halves=1 + is_gated)
    enabled = config.bias_swiglu_fusion if is_gated else config.bias_gelu_fusion
    if config.geglu or not (is_gated or config.squared_relu) or not kernels_serve(config.params_dtype, enabled):
        return plain
    if config.squared_relu:
        return ByDevice(activation_kernels.squared_relu_triton, plain)
    return ByDevice(partial(activation_kernels.gated_triton, traits=_gate_traits(config)), plain)


def select_weighted_activation(config: TransformerConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the activation times a weight per token: ([..., f or 2 f], weights [...]) -> [..., f] in the dtype of the
    first; differentiable in both. On GPUs one Triton kernel computes gated ones (with ``bias_swiglu_fusion``, except
    GELU and fp64); else the result of :func:`select_activation` is multiplied."""
    plain, is_gated = partial(_weighted, activation=select_activation(config)), config.gated_linear_unit
    if config.geglu or not is_gated or not kernels_serve(config.params_dtype, config.bias_swiglu_fusion):
        return plain
    return ByDevice(partial(activation_kernels.weighted_gated_triton, traits=_gate_traits(config)), plain)


def select_gated_cast(config: TransformerConfig) -> Callable[[Tensor, CastTarget, CastTarget], Tensor] | None:
    """Return the kernel that applies a gated activation and writes fp8 copies for the layers around it; None if they
    read values: without delayed scaling, with biases, or with --tp-comm-overlap, which computes parts of the rows."""
    reads_values = config.add_bias_linear or config.tp_comm_overlap
    if config.fp8 is None or config.fp8_recipe != "delayed" or reads_values:
        return None
    is_served = config.gated_linear_unit and not config.geglu and config.params_dtype.itemsize == 2
    if not is_served or not kernels_serve(config.params_dtype, config.bias_swiglu_fusion):
        return None
    return partial(gated_cast_triton, traits=_gate_traits(config))


def _weighted(x: Tensor, weights: Tensor, *, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return (activation(x) * weights.unsqueeze(-1)).to(x.dtype)


def _gate_traits(config: TransformerConfig) -> activation_kernels.GateTraits:
    slope = 1.0 if config.swiglu else _QUICK_GELU_SLOPE
    notes = notes_amax(config)
    return activation_kernels.GateTraits(slope, config.activation_func_clamp_value, config.glu_linear_offset, notes)


def _plain_activation(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """GELU is exact (erf) unless ``bias_gelu_fusion`` with biases takes the tanh approximation. Plain SwiGLU saves only
    its input."""
    if config.gated_linear_unit:
        clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
        if config.swiglu and clamp is None and offset == 0.0:
            return swiglu
        gelu = F.gelu if config.exact_gelu else tanh_gelu
        gate = F.silu if config.swiglu else quick_gelu if config.quick_geglu else gelu
        return partial(gated, activation=gate, clamp=clamp, offset=offset)
    if config.squared_relu:
        return squared_relu
    if config.relu:
        return F.relu
    is_approximate = config.bias_gelu_fusion and config.add_bias_linear and not config.exact_gelu
    return partial(F.gelu, approximate="tanh" if is_approximate else "none")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, Primer)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(_QUICK_GELU_SLOPE * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return F.gelu(x, approximate="tanh")


def gated(
    x: Tensor, *, activation: Callable[[Tensor], Tensor], clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Return activation(gate) * (up + offset), [..., f], where ``x`` [..., 2 f] holds gate and up. ``clamp`` first
    bounds gate from above and up on both sides; None: no bounds. Differentiable."""
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return activation(gate) * (up + offset if offset else up)


class _SwiGLU(torch.autograd.Function):
    """Saves only its input: backward recomputes silu(gate)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return result


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up of ``x`` [..., 2 f] (Shazeer 2020); saves ``x`` for backward."""
    return _SwiGLU.apply(x)
