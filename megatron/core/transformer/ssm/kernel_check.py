"""Before kernels compute a model, they compute a small problem, with gradients, that plain torch computes too. This
finds a compiler that generates wrong code for a GPU, as Triton 3.4 to 3.7.0 did for another implementation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.fusions.linear_attention import kernels_fit, linear_attention

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest relative error, in the norm, of bf16 products."""
NAMES = ("outputs", "state", "queries", "keys", "values", "decays", "corrections", "first state")


Rule = Callable[..., tuple[Tensor, Tensor]]


def kernels_serve(rule: Rule, key: Tensor, value: Tensor) -> bool:
    """Whether kernels compute ``rule`` (``delta_rule`` or ``state_space``) for ``key`` [s, b, a, k] and ``value``
    [s, b, h, v]: they take the sizes and dtypes, and their results are right on this device. The first call for sizes
    of heads computes the small problem, except while a CUDA graph is captured; a warning reports wrong results."""
    if not kernels_fit(key, value):
        return False
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return _are_right(rule, key.shape[-1], value.shape[-1], str(key.device))


@cache
def _are_right(rule: Rule, width: int, channels: int, device: str) -> bool:
    delta = rule.__name__ == "delta_rule"
    kernels = _results(linear_attention if delta else _without_beta, delta, (width, channels), device, torch.bfloat16)
    plain = _results(rule, delta, (width, channels), device, torch.float32)  # takes no kernels
    names = NAMES if delta else [name for name in NAMES if name != "corrections"]
    errors = {
        name: float((result.float() - exact).norm() / exact.norm())
        for name, result, exact in zip(names, kernels, plain)
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if errors[worst] <= TOLERANCE:
        return True
    logger.warning(
        "kernels of linear attention give wrong results on %s (%s: relative error %.2g): plain torch computes it. "
        "Another version of Triton may help; pytest -m gpu tests/unit_tests/core/fusions shows the errors",
        device,
        worst,
        errors[worst],
    )
    return False


def _without_beta(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    log_decay, follows, state = others
    return linear_attention(query, key, value, log_decay, None, follows, state)


@torch.inference_mode(False)
@torch.enable_grad()
def _results(rule: Rule, delta: bool, sizes: tuple[int, int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return outputs, last state and gradients for 144 tokens of two sequences, one of them with a second document.
    ``dtype`` of queries, keys and values, which have the same values."""
    width, channels = sizes
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    length, batch, keys, heads = 144, 2, 1, 2
    key = torch.nn.functional.normalize(normal(length, batch, keys, width), dim=-1)
    inputs = [normal(length, batch, keys, width) / math.sqrt(width), key, normal(length, batch, heads, channels)]
    inputs = [x.bfloat16().to(dtype) for x in inputs] + [-0.1 * normal(length, batch, heads).square()]
    inputs += [normal(length, batch, heads).sigmoid()] if delta else []
    leaves = [x.to(device).requires_grad_() for x in (*inputs, normal(batch, heads, width, channels))]
    follows = torch.ones(length, batch, dtype=torch.bool, device=device)
    follows[70, 1] = False
    with saved_tensors_hooks(lambda x: x, lambda x: x):  # recomputation and offload of the layer do not see these
        results = rule(*leaves[:-1], follows, leaves[-1])
    upstream = [normal(*x.shape).bfloat16().to(x) for x in results]
    return [x.detach() for x in (*results, *torch.autograd.grad(results, leaves, upstream))]
