"""Activation recomputation, full or selective (Chen et al. 2016; selective: Korthikanti et al. 2022, section 5).

  full       saves only the input of groups of N layers (uniform), or of each of the stage's first N layers (block; per
             chunk with virtual stages)
  selective  core_attn: attention between the projections · mlp: the feed-forward network · layernorm: outputs of the
             two norms of a layer · mlp_act: output of the feed-forward activation · mla_up_proj: heads of MLA

Recomputation is bit-exact: dropout masks are functions of coordinates, and torch's generators, which custom modules may
use, are restored; Python's and numpy's are not. Collectives inside run again, so all ranks must recompute the same
functions. Gradient hooks and ``main_grad`` see one backward pass, because the graph is from the first forward
(torch's non-reentrant checkpoint)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.config import layer_kinds
from megatron.core.config.errors import UserError
from megatron.core.config.memory import RecomputeConfig
from megatron.core.config.model_rules import recomputed_modules
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.tensor_parallel.operators import all_gather_along_first_dim, split_along_first_dim
from megatron.core.transformer.sites import Run, Sited, call, known_sites, sited


def recompute(function: Callable, *args: object) -> object:
    """Call ``function`` and save only ``args``; backward calls it again, including its collectives."""
    if not torch.is_grad_enabled():
        return function(*args)
    # non-reentrant: backward runs once, over the first graph, so hooks that count gradients fire once per parameter
    return checkpoint(partial(_Choices().run, function), *args, use_reentrant=False)


class _Choices:
    """Results of :func:`choose` in the first run of one recomputed function, in order."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.position: int | None = None
        """Index of the next choice to replay; None in the first run."""

    def run(self, function: Callable, *args: object) -> object:
        """Run ``function(*args)`` and return its result, with this object as the store of choices: the first run
        records each ``choose(...)``, later runs (recomputation) return the recorded values in the same order."""
        before = _choices.set(self)
        try:
            return function(*args)
        finally:
            _choices.reset(before)
            self.position = 0  # every later run is a recomputation


_choices: ContextVar[_Choices | None] = ContextVar("choices", default=None)


def choose(make: Callable[[], Tensor]) -> Tensor:
    """Return ``make()``; during recomputation the value of the first forward pass: rounding could flip decisions such
    as top-k routing; a flipped one would give gradients to weights that were not used in the forward pass."""
    current = _choices.get()
    if current is None:
        return make()
    if current.position is None:
        current.made.append(make())
        return current.made[-1]
    current.position += 1
    return current.made[current.position - 1]


def is_recomputing() -> bool:
    """Return whether a recomputation is running. Statistics skip it so that tokens are not counted twice."""
    current = _choices.get()
    return current is not None and current.position is not None


class _Split(NamedTuple):
    shard: Tensor
    shape: torch.Size


def recompute_from_split_input(group: Group, function: Callable, *args: object) -> object:
    """Call ``function``, saving only this rank's shard of each floating-point argument that ``group`` replicates
    (others, and sizes that it does not divide, in full). Backward all-gathers them, so the ranks must run the same
    functions in the same order. Without gradients it is a plain call."""

    def pack(x: Tensor) -> Tensor | _Split:
        if not x.is_floating_point() or x.numel() == 0 or x.numel() % group.size:
            return x
        # clone: a view of the shard would keep the full tensor's memory
        return _Split(split_along_first_dim(x.detach().reshape(-1), group).clone(), x.shape)

    def unpack(packed: Tensor | _Split) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return all_gather_along_first_dim(packed.shard, group).view(packed.shape)

    # the checkpoint has saved-tensor hooks for its inside: these hooks see only its arguments
    with saved_tensors_hooks(pack, unpack):
        return recompute(function, *args)


def layer_runs(config: RecomputeConfig, num_layers: int, groups: ProcessGroups) -> list[tuple[Run, range]]:
    """Return (policy, range of layer positions) for each group of a stage's layers, in order. ``uniform``: groups of
    ``recompute_num_layers``; ``block``: that many single layers, then one group of the rest, possibly empty, that is
    kept. Raises UserError for full recomputation without a method or with fewer than 1 layer."""
    if config.recompute_granularity != "full":
        return [(call, range(num_layers))]
    count = config.recompute_num_layers
    if config.recompute_method is None or count is None or count < 1:
        raise UserError("recompute_granularity 'full' needs recompute_method and recompute_num_layers of at least 1")
    run: Run = recompute
    if config.distribute_saved_activations and groups.tp.size > 1:
        run = partial(recompute_from_split_input, groups.tp)
    if config.recompute_method == "uniform":
        return [(run, range(first, min(first + count, num_layers))) for first in range(0, num_layers, count)]
    count = min(count, num_layers)
    return [*((run, range(index, index + 1)) for index in range(count)), (call, range(count, num_layers))]


class _Recipe(NamedTuple):
    """Function and argument that recompute a saved tensor."""

    function: Callable[[Tensor], Tensor]
    argument: Tensor
    shape: torch.Size
    """Shape in which the tensor was saved: linear layers may flatten their input."""


def discard_output(output: Tensor, function: Callable[[Tensor], Tensor], argument: Tensor) -> AbstractContextManager:
    """Context in which operations save ``function`` and ``argument`` instead of the contiguous ``output``; backward
    recomputes it at each use, without a graph. Null without gradients, or if ``output`` is ``argument``."""
    if not torch.is_grad_enabled() or output is argument:  # identity: its argument is saved anyway
        return nullcontext()
    address, size, dtype = output.data_ptr(), output.numel(), output.dtype

    def pack(x: Tensor) -> Tensor | _Recipe:
        # match by address: operations save views or new objects, and no other tensor can use this memory while it is
        # live
        is_it = x.data_ptr() == address and x.numel() == size and x.dtype == dtype and x.is_contiguous()
        return _Recipe(function, argument, x.shape) if is_it else x

    def unpack(packed: Tensor | _Recipe) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():  # values only: the gradient flows through the graph of the first forward
            return packed.function(packed.argument).view(packed.shape)

    return saved_tensors_hooks(pack, unpack)


class _LazyOutputs:
    """Outputs of a function, recomputed at the first use in backward and freed after the last use."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], arguments: Sequence[object]) -> None:
        self._function, self._arguments, self._waiting = function, arguments, 0
        self._outputs: Sequence[Tensor] | None = None

    def promise(self, index: int, x: Tensor) -> _View:
        self._waiting += 1
        return _View(self, index, tuple(x.shape), tuple(x.stride()))

    def give(self, view: _View) -> Tensor:
        """Return the tensor of a saved ``view``. The first call runs the function again without gradients and keeps all
        outputs; they are freed after the last promised view."""
        self._waiting -= 1
        if self._outputs is None:
            with torch.no_grad():  # values only: the gradient flows through the graph of the first forward
                self._outputs = self._function(*self._arguments)
        output = self._outputs[view.which]
        if self._waiting <= 0:
            self._outputs = None
        # the same function and arguments give the same memory layout, so that the saved strides are valid
        return output.as_strided(view.shape, view.strides)


class _View(NamedTuple):
    """View of one of several outputs, as an operation saved it."""

    of: _LazyOutputs
    which: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def discard_outputs(
    outputs: Sequence[Tensor], function: Callable[..., Sequence[Tensor]], *arguments: object
) -> AbstractContextManager:
    """Context in which operations save a recipe instead of ``outputs``, of any strides. Backward calls ``function``
    once for all of them, including its collectives, and frees the results after the last use. ``arguments`` stay
    referenced. Without gradients a null context."""
    if not torch.is_grad_enabled():
        return nullcontext()
    outputs_again = _LazyOutputs(function, arguments)
    places = {(x.data_ptr(), x.numel(), x.dtype): index for index, x in enumerate(outputs)}

    def pack(x: Tensor) -> Tensor | _View:
        index = places.get((x.data_ptr(), x.numel(), x.dtype))
        return x if index is None else outputs_again.promise(index, x)

    return saved_tensors_hooks(pack, lambda packed: packed.of.give(packed) if isinstance(packed, _View) else packed)


def discard(result: Tensor | Sequence[Tensor], function: Callable, *args: Any) -> AbstractContextManager:
    """Context in which operations save a recipe instead of ``result`` = ``function(*args)``, one tensor or several."""
    if isinstance(result, Tensor):
        return discard_output(result, function, *args)
    return discard_outputs(result, function, *args)


class Recompute:
    """Policy: sites in ``recompute_modules`` run again in backward; with full granularity groups of layers do.

    Raises UserError for names that neither the classes in use nor a branch of ``stack`` declare, except names of
    ``BRANCHES``, which another stage may have."""

    BRANCHES = ("cross_attention", *(branch.name for branch in layer_kinds.BRANCHES.values()))

    def __init__(self, config: RecomputeConfig, stack: nn.Module, groups: ProcessGroups) -> None:
        self.config, self.groups = config, groups
        names = recomputed_modules(config)
        declared = sorted({*self.BRANCHES, *known_sites("calls", "results", owners=sited(stack))})
        if unknown := sorted(names.difference(declared)):
            raise UserError(f"recompute_modules {unknown}: choose from {', '.join(declared)}")
        self.names = names - {f"{name}_act" for name in names}  # the output inside of a network that is recomputed

    def attach(self, owner: Sited) -> None:
        """Replace the chosen sites of ``owner``, and ``layer_runs`` of a stack."""
        for name in self.names.intersection(owner.calls):
            setattr(owner.at, name, recompute)
        for name in self.names.intersection(owner.results):
            setattr(owner.kept, name, discard)
        if hasattr(owner, "layer_runs"):
            owner.layer_runs = layer_runs(self.config, len(owner.layer_runs[-1][1]), self.groups)
