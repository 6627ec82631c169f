"""Changes of weights after an update, such as QK-Clip (``transformer/qk_clip.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from megatron.core.fusions.scale_rows import scale_rows
from megatron.core.optimizer.host_state import HostState
from megatron.core.sharding.parameter_shard import ParameterShard


class WeightEdit(Protocol):
    """Entry of ``MegatronOptimizer.weight_edits``."""

    @property
    def logged(self) -> Mapping[str, Tensor]:
        """Statistics of the last update for the log, 0-d tensors by name."""
        ...

    def prepare(self, measures_layers: bool) -> None:
        """Called before the forward passes of a step; ``measures_layers``: whether statistics of layers are logged."""
        ...

    def __call__(self, scale_rows: Callable[[nn.Parameter, Tensor], None], skipped: Tensor, /) -> None:
        """Change weights after an update, before they are gathered. ``scale_rows``: a :class:`RowScaling`, which waits
        for updates in flight; do not use the weights in other ways. ``skipped``: 0-d bool, whether the update was
        skipped. Collective over all ranks."""


class RowScaling:
    """Multiplication of rows of the optimizer's parameters. ``names``: of parameters with a shard on this rank;
    ``shards``: by name; ``state``: owner of the master weights."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], shards: Mapping[str, ParameterShard], state: HostState
    ) -> None:
        self._names, self._shards, self._state = names, shards, state

    def __call__(self, parameter: nn.Parameter, factors: Tensor) -> None:
        """Multiply the rows of ``parameter`` by ``factors`` [local rows], as far as this rank's shard covers them: the
        master and the weight, not the moments. Rows with factor 1 keep their bits. Ignores other parameters."""
        name = self._names.get(parameter)
        if name is None:
            return
        # the host waits for offloaded masters anyway, so that it may look at the factors first
        if name in self._state.names and bool((factors == 1.0).all()):
            return
        with self._state.opened(name) as storage:
            scale_rows(storage, factors, parameter.numel() // len(factors), self._shards[name].start)
