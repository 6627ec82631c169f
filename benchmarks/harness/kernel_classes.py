"""Classify kernels of a training step by a table of patterns over their names and scopes.

*Scope* is the path of the host's ranges and operators around the launch, outermost first, as in
``optimizer/aten::_foreach_mul_`` or ``autograd::engine::evaluate_function: _ParallelLinearBackward/aten::mm``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import NamedTuple

GEMM_FORWARD, GEMM_DGRAD, GEMM_WGRAD = "GEMM forward", "GEMM input gradient", "GEMM weight gradient"
GEMM_OTHER = "GEMM, which one unknown"
ATTENTION_FORWARD, ATTENTION_BACKWARD = "attention forward", "attention backward"
NORM, ROPE, ACTIVATION, CROSS_ENTROPY = "norm", "rope", "activation", "cross entropy"
EMBEDDING, DROPOUT, OPTIMIZER, COMMUNICATION = "embedding", "dropout", "optimizer", "communication"
LINEAR_ATTENTION, COPIES, OTHER = "linear attention", "copies and fills", "other elementwise"
IDLE = "idle"

CLASSES = (
    GEMM_FORWARD, GEMM_DGRAD, GEMM_WGRAD, GEMM_OTHER, ATTENTION_FORWARD, ATTENTION_BACKWARD, LINEAR_ATTENTION, NORM,
    ROPE, ACTIVATION, CROSS_ENTROPY, EMBEDDING, DROPOUT, OPTIMIZER, COPIES, OTHER, COMMUNICATION,
)  # fmt: skip

_GEMM, _ATTENTION = "GEMM", "attention"


class Rule(NamedTuple):
    """A kernel is of class ``name`` if its own name or its scope is found; an empty pattern finds nothing."""

    name: str
    kernel: str = ""
    scope: str = ""


RULES: tuple[Rule, ...] = (  # the first that matches counts
    Rule(COMMUNICATION, r"nccl|gloo:|c10d::|symm_mem|one_shot_|two_shot_|Memcpy PtoP", r"c10d::|gloo:"),
    Rule(
        OPTIMIZER, r"adam|multi_tensor_apply",
        r"(^|/)optimizer(/|$)|Optimizer\.step|aten::_(foreach|fused_adam|fused_sgd)",
    ),
    Rule(LINEAR_ATTENTION, scope=r"_LinearAttention|_ConvolutionSiLU"),  # by scope: others too have a _forward_kernel
    # before GEMM: flash kernels carry "cutlass" and "wgmma" in their names
    Rule(
        _ATTENTION, r"flash|fmha|sdpa|mha_(fprop|bprop)|merge_(attention|kernel)",
        r"scaled_dot_product|_(flash|efficient|cudnn)_attention|(Flash|Fused)Att|aten::b(add)?b?mm",
    ),
    Rule(
        _GEMM,
        r"gemm|nvjet|xmma|cublas|cutlass|wgmma|splitk|gemv|matmul|dot_kernel|aten::(add)?mm_?$|aten::_scaled_mm",
    ),
    Rule(CROSS_ENTROPY, r"cross_?entropy|log_?softmax|nll_loss|xent", r"(?i)cross_?entropy|log_softmax|nll_loss"),
    Rule(
        NORM, r"(layer|rms)_?norm|GammaBeta|norm_(fwd|bwd|forward|backward)|rsqrt",
        r"(?i)(layer|rms)_?norm|L2Norm|_Normalize|_GatedNorm",
    ),
    Rule(ROPE, r"rope|rotary", r"(?i)rope\b|rotary"),
    Rule(ACTIVATION, r"silu|glu_|gelu|relu|gated", r"(?i)silu|glu\b|gelu|_gated|squared_?relu|aten::relu"),
    Rule(DROPOUT, r"dropout", r"(?i)dropout|ScaleByMask"),
    Rule(EMBEDDING, r"embedding|index_?select", r"(?i)embedding|aten::(index_select|_?index_put)"),
    Rule(ATTENTION_FORWARD, r"\bsoftmax", r"aten::_?softmax"),  # plain attention's
    Rule(
        COPIES, r"Memcpy|Memset|CatArrayBatchedCopy|copy_kernel|FillFunctor|fill_kernel",
        r"aten::(copy_|_to_copy|to|clone|contiguous|cat|zero_|fill_|zeros|zeros_like|full)(/|$)",
    ),
)  # fmt: skip

_NEVER = r"(?!)"
_COMPILED = [
    (rule.name, re.compile(rule.kernel or _NEVER, re.IGNORECASE), re.compile(rule.scope or _NEVER)) for rule in RULES
]
_BACKWARD_SCOPE = re.compile(r"autograd::engine|Backward|(?<!forward-)backward")  # but not the range forward-backward
_BACKWARD_KERNEL = re.compile(r"bprop|bwd|backward|dot_do_o|convert_dq", re.IGNORECASE)


def is_backward(scope: str, kernel: str = "") -> bool:
    """Whether a kernel was launched by the autograd engine, or its name says so."""
    return bool(_BACKWARD_SCOPE.search(scope) or _BACKWARD_KERNEL.search(kernel))


def classify(
    kernel: str,
    scope: str,
    shape: tuple[int, int, int] | None = None,
    weights: Collection[tuple[int, int]] = (),
) -> str:
    """The class of a kernel. ``shape`` (m, k, n): the GEMM that launched it, where it is known."""
    name = _first_match(kernel, scope)
    if name == _ATTENTION:
        return ATTENTION_BACKWARD if is_backward(scope, kernel) else ATTENTION_FORWARD
    if name == _GEMM:
        return gemm_class(shape, weights, is_backward(scope))
    return name


@functools.lru_cache(maxsize=100_000)  # a step launches the same kernels from the same places again and again
def _first_match(kernel: str, scope: str) -> str:
    matching = (name for name, own, around in _COMPILED if own.search(kernel) or around.search(scope))
    return next(matching, OTHER)


def gemm_class(shape: tuple[int, int, int] | None, weights: Collection[tuple[int, int]], backward: bool) -> str:
    """Return which of a linear layer's three GEMMs (m, k) x (k, n) is, by the (output, input) sizes of the weights.

    Forward X W^T has (k, n) = (input, output), the input gradient dY W (output, input), the weight gradient dY^T X
    (m, n) = (output, input). If several fit (square weights, equal numbers of tokens and channels), the autograd
    engine decides between forward and the others; the remaining GEMMs stay unknown.
    """
    if shape is None:
        return GEMM_OTHER if backward else GEMM_FORWARD
    m, k, n = shape
    fits = {GEMM_FORWARD: (n, k) in weights, GEMM_DGRAD: (k, n) in weights, GEMM_WGRAD: (m, n) in weights}
    found = [name for name, does in fits.items() if does]
    if len(found) > 1:
        found = [name for name in found if (name == GEMM_FORWARD) != backward]
    if len(found) == 1:
        return found[0]
    return GEMM_OTHER
