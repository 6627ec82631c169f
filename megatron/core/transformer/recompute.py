"""Activations that are dropped after the forward pass and computed again in the backward pass (Chen et al. 2016;
selectively: Korthikanti et al. 2022, section 5).

full       whole layers: of groups of N layers (uniform), or of each of a stage's first N layers (block; of each chunk's
           with virtual stages), only the input is kept
selective  core_attn: attention between the projections · mlp: the feed-forward network · layernorm: what the two norms
           of a layer put out · mlp_act: what the activation of the feed-forward network puts out ·
           mla_up_proj: heads of multi-latent attention

What is computed again is bit for bit the same: dropout masks are functions of coordinates, and torch's own generators,
which modules of users may draw from, are set back. Collectives inside run again, on all ranks alike. Gradient hooks and
``main_grad`` see one backward pass, since the graph is the one of the first forward pass (torch's non-reentrant
checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.core.config.errors import UserError
from megatron.core.config.memory import RECOMPUTED_MODULES, RecomputeConfig
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.tensor_parallel.mappings import all_gather_along_first_dim, split_along_first_dim

Run = Callable[..., Any]
"""``run(function, *args)`` is ``function(*args)`` with a choice of what is kept for backward."""


def keep(function: Callable, *args: Any) -> Any:
    """Everything that backward needs is kept."""
    return function(*args)


def recompute(function: Callable, *args: Any) -> Any:
    """Only the arguments are kept."""
    if not torch.is_grad_enabled():
        return function(*args)
    # non-reentrant: one backward pass over the first graph, so hooks that count gradients see each of them once
    return checkpoint(partial(_Choices().run, function), *args, use_reentrant=False)


class _Choices:
    """What one recomputed function chose when it first ran, in order."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.position: int | None = None
        """Next choice to repeat; None in the first run."""

    def run(self, function: Callable, *args: Any) -> Any:
        before = _choices.set(self)
        try:
            return function(*args)
        finally:
            _choices.reset(before)
            self.position = 0  # whatever runs from now on is a recomputation


_choices: ContextVar[_Choices | None] = ContextVar("choices", default=None)


def choose(make: Callable[[], Tensor]) -> Tensor:
    """``make()``; where a function is computed again, what it was the first time.

    For decisions that rounding could turn over (which experts a token goes to): one that fell out otherwise would
    give a gradient to weights that took no part.
    """
    current = _choices.get()
    if current is None:
        return make()
    if current.position is None:
        current.made.append(make())
        return current.made[-1]
    current.position += 1
    return current.made[current.position - 1]


def is_recomputing() -> bool:
    """Whether this is the second time: what counts tokens has counted these."""
    current = _choices.get()
    return current is not None and current.position is not None


class _Split(NamedTuple):
    shard: Tensor
    shape: torch.Size


def recompute_from_split_input(group: Group, function: Callable, *args: Any) -> Any:
    """Only the arguments are kept, and of tensors that all ranks of ``group`` hold alike only this rank's share.

    They are gathered again in backward. The ranks must run the same functions in the same order.
    """

    def pack(x: Tensor) -> Tensor | _Split:
        if not x.is_floating_point() or x.numel() == 0 or x.numel() % group.size:
            return x
        # a clone: a view of the share would keep the memory of the whole
        return _Split(split_along_first_dim(x.detach().reshape(-1), group).clone(), x.shape)

    def unpack(kept: Tensor | _Split) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return all_gather_along_first_dim(kept.shard, group).view(kept.shape)

    # inside, the checkpoint has hooks of its own: these see its arguments alone
    with saved_tensors_hooks(pack, unpack):
        return recompute(function, *args)


def recomputed_modules(config: RecomputeConfig) -> frozenset[str]:
    """Modules that selective recomputation drops; ValueError for names that it does not know."""
    if config.recompute_granularity != "selective":
        return frozenset()
    names = frozenset(("core_attn",) if config.recompute_modules is None else config.recompute_modules)
    if unknown := sorted(names - set(RECOMPUTED_MODULES)):
        raise UserError(f"recompute_modules {unknown}: choose from {', '.join(RECOMPUTED_MODULES)}")
    return names


def run_of(config: RecomputeConfig, module: str) -> Run:
    """How a module of a layer runs."""
    return recompute if module in recomputed_modules(config) else keep


def layer_runs(config: RecomputeConfig, num_layers: int, groups: ProcessGroups) -> list[tuple[Run, range]]:
    """(how, which layers) for the layers of one stage, by position, in order. ValueError for incomplete settings."""
    if config.recompute_granularity != "full":
        return [(keep, range(num_layers))]
    count = config.recompute_num_layers
    if config.recompute_method is None or count is None or count < 1:
        raise UserError("recompute_granularity 'full' needs recompute_method and recompute_num_layers of at least 1")
    run: Run = recompute
    if config.distribute_saved_activations and groups.tp.size > 1:
        run = partial(recompute_from_split_input, groups.tp)
    if config.recompute_method == "uniform":
        return [(run, range(first, min(first + count, num_layers))) for first in range(0, num_layers, count)]
    count = min(count, num_layers)
    return [*((run, range(index, index + 1)) for index in range(count)), (keep, range(count, num_layers))]


class _Recipe(NamedTuple):
    """How to compute a tensor again."""

    function: Callable[[Tensor], Tensor]
    argument: Tensor
    shape: torch.Size
    """In which it was to be kept: linear layers may flatten their input."""


OutputPolicy = Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], AbstractContextManager]
"""``policy(output, function, argument)``, where output is ``function(argument)``: what operations inside keep of it."""


def discard_output(
    output: Tensor, function: Callable[[Tensor], Tensor], argument: Tensor
) -> AbstractContextManager:
    """Operations inside keep a recipe instead of ``output`` (contiguous)."""
    if not torch.is_grad_enabled() or output is argument:  # the identity: its argument is kept anyway
        return nullcontext()
    address, size, dtype = output.data_ptr(), output.numel(), output.dtype

    def pack(x: Tensor) -> Tensor | _Recipe:
        # by address: what operations save is a view or another object, and nothing else lies there while it is used
        is_it = x.data_ptr() == address and x.numel() == size and x.dtype == dtype and x.is_contiguous()
        return _Recipe(function, argument, x.shape) if is_it else x

    def unpack(kept: Tensor | _Recipe) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():  # values alone: the gradient goes through the graph of the first forward pass
            return kept.function(kept.argument).view(kept.shape)

    return saved_tensors_hooks(pack, unpack)


def save_output(output: Tensor, function: Callable[[Tensor], Tensor], argument: Tensor) -> AbstractContextManager:
    """Operations inside keep ``output`` as usual."""
    return nullcontext()


class _Again:
    """Outputs of a function, computed again for the first that backward asks for and held until the last is given."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], arguments: Sequence[Any]) -> None:
        self._function, self._arguments, self._waiting = function, arguments, 0
        self._made: Sequence[Tensor] | None = None

    def promise(self, index: int, x: Tensor) -> _View:
        self._waiting += 1
        return _View(self, index, tuple(x.shape), tuple(x.stride()))

    def give(self, view: _View) -> Tensor:
        self._waiting -= 1
        if self._made is None:
            with torch.no_grad():  # values alone: the gradient goes through the graph of the first forward pass
                self._made = self._function(*self._arguments)
        made = self._made[view.which]
        if self._waiting <= 0:
            self._made = None
        return made.as_strided(view.shape, view.strides)


class _View(NamedTuple):
    """One of several outputs, of which operations keep a view."""

    of: _Again
    which: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


OutputsPolicy = Callable[..., AbstractContextManager]
"""``policy(outputs, function, *arguments)``, where outputs are ``function(*arguments)``."""


def discard_outputs(
    outputs: Sequence[Tensor], function: Callable[..., Sequence[Tensor]], *arguments: Any
) -> AbstractContextManager:
    """Operations inside keep a recipe instead of ``outputs``, of any strides."""
    if not torch.is_grad_enabled():
        return nullcontext()
    again = _Again(function, arguments)
    places = {(x.data_ptr(), x.numel(), x.dtype): index for index, x in enumerate(outputs)}

    def pack(x: Tensor) -> Tensor | _View:
        index = places.get((x.data_ptr(), x.numel(), x.dtype))
        return x if index is None else again.promise(index, x)

    return saved_tensors_hooks(pack, lambda kept: kept.of.give(kept) if isinstance(kept, _View) else kept)


def save_outputs(outputs: Sequence[Tensor], *recipe: Any) -> AbstractContextManager:
    """Operations inside keep ``outputs`` as usual."""
    return nullcontext()


def heads_output(config: RecomputeConfig) -> OutputsPolicy:
    """What multi-latent attention does with the heads that it makes of latents."""
    return discard_outputs if "mla_up_proj" in recomputed_modules(config) else save_outputs


def norm_output(config: RecomputeConfig) -> OutputPolicy:
    """What a branch does with the output of its norm."""
    return discard_output if "layernorm" in recomputed_modules(config) else save_output


def activation_output(config: RecomputeConfig, module: str = "mlp") -> OutputPolicy:
    """What a feed-forward network does with its activation's output, unless it is recomputed as a whole. ``module``:
    what recomputation calls the network."""
    modules = recomputed_modules(config)
    return discard_output if f"{module}_act" in modules and module not in modules else save_output
