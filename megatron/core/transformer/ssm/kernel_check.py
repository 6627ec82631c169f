"""Before kernels compute a model, they compute a small problem, with gradients, that plain torch computes too. This
finds a compiler that generates wrong code for a GPU, as Triton 3.4 to 3.7.0 did for another implementation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.fusions.linear_attention import kernels_fit, linear_attention

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""Largest relative error, in the norm, of bf16 products."""
KERNEL_DTYPE = torch.bfloat16
Rule = Callable[..., tuple[Tensor, Tensor]]


class Problem(NamedTuple):
    """Small problem that kernels and plain torch compute, with all gradients."""

    subject: str
    inputs: Mapping[str, Tensor]
    """Names and fp32 values on the CPU."""
    results: tuple[str, ...] = ("outputs",)
    num_fp32: int = 0
    """Number of inputs at the end that stay fp32; kernels get the others in bf16."""


def kernels_serve(rule: Rule, key: Tensor, value: Tensor, per_channel: bool = False) -> bool:
    """Whether kernels compute ``rule`` (``delta_rule`` or ``state_space``) for ``key`` [s, b, a, k] and ``value``
    [s, b, h, v], with decays ``per_channel`` of a key: they take the sizes and dtypes, and their results are right on
    this device (:func:`is_right`)."""
    return kernels_fit(key, value) and is_right(_check_rule, key, rule, per_channel, key.shape[-1], value.shape[-1])


def is_right(check: Callable[..., bool], x: Tensor, *arguments: Any) -> bool:
    """Return ``check(*arguments, device of x)``, which is cached: the first call computes a small problem, except while
    a CUDA graph is captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return check(*arguments, str(x.device))


@cache
def _check_rule(rule: Rule, per_channel: bool, width: int, channels: int, device: str) -> bool:
    """144 tokens of two sequences, one of them with a second document."""
    delta, (length, batch, keys, heads) = rule.__name__ == "delta_rule", (144, 2, 1, 2)
    query, key, value, state = random_values(
        (length, batch, keys, width), (length, batch, keys, width), (length, batch, heads, channels),
        (batch, heads, width, channels),
    )  # fmt: skip
    decay, beta = random_values((length, batch, heads, *[width] * per_channel), (length, batch, heads))
    inputs = {"queries": query / math.sqrt(width), "keys": torch.nn.functional.normalize(key, dim=-1), "values": value}
    inputs |= {"decays": -0.1 * decay.square(), **({"corrections": beta.sigmoid()} if delta else {})}
    follows = torch.ones(length, batch, dtype=torch.bool, device=device)
    follows[70, 1] = False

    def by(function: Rule) -> Rule:
        return lambda *leaves: function(*leaves[:-1], follows, leaves[-1])

    kernels, num_fp32 = by(linear_attention if delta else _without_beta), 2 + delta
    problem = Problem("linear attention", {**inputs, "first state": state}, ("outputs", "state"), num_fp32)
    return agree(problem, kernels, by(rule), device)  # fp32 takes no kernels


def _without_beta(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    log_decay, follows, state = others
    return linear_attention(query, key, value, log_decay, None, follows, state)


def random_values(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return the same normal values in every process, fp32 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def agree(problem: Problem, kernels: Callable[..., Any], plain: Callable[..., Any], device: str) -> bool:
    """Whether ``kernels`` in bf16 and ``plain`` in fp32, functions of the inputs, have the same results and gradients
    up to :data:`TOLERANCE`. If not, or if the kernels raise an exception, log a warning."""
    expected = _results(plain, problem, device, torch.float32)
    try:
        actual = _results(kernels, problem, device, KERNEL_DTYPE)
    except Exception as error:  # of a compiler or a driver: plain torch can still train
        _warn(problem, f"do not run on {device} ({type(error).__name__}: {error})")
        return False
    names = (*problem.results, *problem.inputs)
    errors = {
        name: float((result.float() - exact).norm() / exact.norm())
        for name, result, exact in zip(names, actual, expected, strict=True)
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if errors[worst] <= TOLERANCE:
        return True
    _warn(problem, f"give wrong results on {device} ({worst}: relative error {errors[worst]:.2g})")
    return False


def _warn(problem: Problem, reason: str) -> None:
    logger.warning(
        "kernels of %s %s: plain torch computes it. "
        "Another version of Triton may help; pytest -m gpu tests/unit_tests/core/fusions shows the errors",
        problem.subject,
        reason,
    )


@torch.inference_mode(False)
@torch.enable_grad()
def _results(run: Callable[..., Any], problem: Problem, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return results and gradients; inputs in ``dtype`` have the same values in all dtypes."""
    values = list(problem.inputs.values())
    half = len(values) - problem.num_fp32
    values[:half] = [x.bfloat16().to(dtype) for x in values[:half]]
    leaves = [x.to(device).requires_grad_() for x in values]
    with saved_tensors_hooks(lambda x: x, lambda x: x):  # recomputation and offload of the layer do not see these
        results = run(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    upstream = [x.bfloat16().to(y) for x, y in zip(random_values(*(y.shape for y in results)), results)]
    return [x.detach() for x in (*results, *torch.autograd.grad(results, leaves, upstream))]
