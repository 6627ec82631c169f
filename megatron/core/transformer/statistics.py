"""Sums over the tokens of a global batch that modules keep of themselves: loads of experts, auxiliary losses.

A module with a :class:`StepStatistics` called ``statistics`` adds to it in forward passes of training.
:func:`sum_statistics` then sums those of all modules over all ranks, once per step and without the host waiting for the
device, and tells each module the sums over the global batch (``end_step(totals)``), before the optimizer.

Every rank must add the tokens that it alone has: ranks that hold the same tokens would count them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups

Totals = dict[str, dict[str, Tensor]]
"""Module's label -> name -> sums over the global batch, fp64."""


class StepStatistics:
    """Named fp64 vectors, e.g. ``StepStatistics("layer 4", tokens_per_expert=64, z_loss=2)``.

    ``label`` names the module over all ranks. A vector called ``…_loss`` is a sum and its count; in one called
    ``nonfinite`` anything but zero stops the run.
    """

    def __init__(self, label: str, **sizes: int) -> None:
        self.label, self.sizes = label, sizes
        self._sums: Tensor | None = None

    def add(self, name: str, values: Tensor) -> None:
        """Add ``values`` (any shape of as many elements) to a vector; in training alone, and not when recomputing."""
        if self._sums is None:  # once: a captured CUDA graph adds to this memory
            self._sums = torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=values.device)
        start = sum(list(self.sizes.values())[: list(self.sizes).index(name)])
        self._sums[start : start + self.sizes[name]] += values.detach().reshape(-1)

    def take(self, device: torch.device) -> Tensor:
        """All vectors one after another, which start anew from zero."""
        if self._sums is None:
            return torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=device)
        taken = self._sums.clone()
        self._sums.zero_()
        return taken


def modules_with_statistics(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Those of ``modules`` and everything inside them, in order."""
    for module in modules:
        for each in module.modules():
            if isinstance(getattr(each, "statistics", None), StepStatistics):
                yield each


class StatisticsSum:
    """Sums the statistics of a model whose chunks ``modules`` are on this rank. Collective over all ranks, in the
    constructor too: every rank learns which modules the other pipeline stages have."""

    def __init__(self, modules: Iterable[nn.Module], groups: ProcessGroups) -> None:
        self.own = list(modules_with_statistics(modules))
        self.group = groups.world
        mine = {each.statistics.label: each.statistics.sizes for each in self.own}
        self.sizes: dict[str, Mapping[str, int]] = dict(mine)
        if groups.pp.size > 1:
            everyones: list[Any] = [None] * groups.pp.size
            dist.all_gather_object(everyones, mine, group=groups.pp.handle)
            self.sizes = {label: sizes for each in everyones for label, sizes in each.items()}

    def __call__(self, device: torch.device) -> Totals:
        """The sums over all ranks since the last call; each module of this rank has been told its own."""
        if not self.sizes:
            return {}
        own = {each.statistics.label: each.statistics for each in self.own}
        parts = [
            own[label].take(device) if label in own
            else torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
            for label, sizes in self.sizes.items()
        ]  # fmt: skip
        flat = torch.cat(parts)
        if self.group.size > 1:
            dist.all_reduce(flat, group=self.group.handle)
        totals: Totals = {}
        for (label, sizes), sums in zip(self.sizes.items(), flat.split([part.numel() for part in parts])):
            totals[label] = dict(zip(sizes, sums.split(list(sizes.values()))))
        for each in self.own:
            each.end_step(totals[each.statistics.label])
        return totals
