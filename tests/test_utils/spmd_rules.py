"""Types of the library's autograd functions for ``spmd_types``, over the tensor-parallel group.

R: replicated, gradients are partial sums; I: replicated, gradients are equal; V: different on every rank; P: a partial
sum. A checked forward pass proves that no backward pass leaves a reduction out or does one twice, provided that each
function here computes what its rule says, which the comparisons with one rank test.
"""

import importlib

import spmd_types as spmd

from megatron.core.sharding.placement import Shard, _terms
from megatron.core.tensor_parallel import cross_entropy, linear, operators

I, P, R, V = spmd.I, spmd.P, spmd.R, spmd.V
LOCAL = {
    "megatron.core.attention.context_parallel.forms": "_Ring",  # of one context-parallel rank
    "megatron.core.fusions.activations": "_SwiGLU",
    "megatron.core.fusions.rms_norm": "_RMSNorm",
    "megatron.core.fusions.rope": "_Rotary",
    "megatron.core.transformer.multi_token_prediction": "_AttachToLosses",
}
"""Module -> autograd function that works on each rank for itself."""

_OPERATORS = {
    (operators.identity, operators.all_reduce_sum): ((I,), R),
    # the checker types the local product of a row-parallel layer as V: it does not know that the terms are summed
    (operators.all_reduce_sum, operators.identity): ((V, P), I),
    (operators.split_along_last_dim, operators.all_gather_along_last_dim): ((I,), V),
    (operators.all_gather_along_last_dim, operators.split_along_last_dim): ((V,), I),
    (operators.split_along_first_dim, operators.all_gather_along_first_dim): ((I,), V),
    (operators.all_gather_along_first_dim, operators.reduce_scatter_along_first_dim): ((V,), R),
    (operators.all_gather_along_first_dim, operators.split_along_first_dim): ((V,), I),
    (operators.reduce_scatter_along_first_dim, operators.all_gather_along_first_dim): ((V, P), V),
}
"""(collective of forward, of backward) -> (types that it takes, type that it returns)."""


def _require(function, actual, allowed):
    if actual not in allowed:
        raise spmd.SpmdTypeError(f"{function}: takes {allowed}, not {actual}")


def _conjugate(outputs, *, x, group, forward, backward):
    takes, gives = _OPERATORS[forward, backward]
    _require(forward.__name__, spmd.get_axis_local_type(x, group.handle), takes)
    spmd.rules.ignore(x)
    spmd.assert_type(outputs, {group.handle: gives})


def _parallel_linear(outputs, *, x, weight, bias, traits, store, ready, bias_ready):
    axis, parameters = traits.group.handle, [linear.unwrap(item) for item in (weight, bias) if item is not None]
    entered = spmd.get_axis_local_type(x, axis)
    if traits.gather_input or traits.reduce_input_gradient:
        _require("parallel_linear", entered, (V,) if traits.gather_input else (I,))
        entered = R
    kinds = {entered, *(spmd.get_axis_local_type(item, axis) for item in parameters)}
    if I in kinds and len(kinds) > 1:
        raise spmd.SpmdTypeError(f"parallel_linear: mixes an invariant tensor with others: {kinds}")
    spmd.rules.ignore(x, *parameters)
    spmd.assert_type(outputs, {axis: V if V in kinds else entered})


def _cross_entropy(outputs, *, logits, labels, reuse_logits):
    spmd.assert_type(logits, {labels.group.handle: V})
    spmd.rules.ignore(*(label for label in labels if hasattr(label, "shape")))
    spmd.assert_type(outputs, {labels.group.handle: I})


_COLLECTIVE = {
    operators._Conjugate: _conjugate,
    linear._ParallelLinear: _parallel_linear,
    cross_entropy._VocabParallelCrossEntropy: _cross_entropy,
}


def register():
    """Give every autograd function of the library its rule, in this process."""
    for module, name in LOCAL.items():
        spmd.register_local_autograd_function(getattr(importlib.import_module(module), name))
    for function, rule in _COLLECTIVE.items():
        function.spmd_typecheck = staticmethod(rule)


def declared_type(parameter, group):
    """The type over tensor parallelism that the declaration of a parameter means."""
    spec = parameter.spec
    if any(isinstance(placement, Shard) for placement, _, _ in _terms(spec.mesh.get("tp"), group)):
        return V
    return R if "tp" in spec.grad else I
