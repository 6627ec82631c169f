"""Sums over the tokens of a global batch that modules keep of themselves: loads of experts, auxiliary losses.

A module with a :class:`StepStatistics` called ``statistics`` adds to it in forward passes of training.
:class:`StatisticsSum` then sums those of all modules over all ranks, once per step and without the host waiting for the
device, and tells each module the sums over the global batch (``end_step(totals)``), before the optimizer.

Every rank must add the tokens that it alone has: ranks that hold the same tokens would count them twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.groups.process_groups import ProcessGroups

Totals = dict[str, dict[str, Tensor]]
"""Module's label -> name -> sums over the global batch, fp64."""


class StepStatistics:
    """Named fp64 vectors, e.g. ``StepStatistics("layer 4", tokens_per_expert=64, z_loss=2)``.

    ``label`` names the module over all ranks. Names say what becomes of a vector (:func:`losses_of`,
    :func:`invalid_values`, :func:`summaries`): ``…_loss`` is a sum and its count (``… loss`` too, of no one layer),
    ``…_per_…`` a distribution; anything but zero in ``nonfinite_…`` stops the run; what begins with ``_`` is for the
    module alone.
    """

    def __init__(self, label: str, **sizes: int) -> None:
        self.label, self.sizes = label, sizes
        ends = list(accumulate(sizes.values()))
        self._places = {name: slice(end - sizes[name], end) for name, end in zip(sizes, ends)}
        self._sums: Tensor | None = None

    def add(self, name: str, values: Tensor) -> None:
        """Add ``values`` (any shape of as many elements) to a vector; in training alone, and not when recomputing."""
        if self._sums is None:  # once: a captured CUDA graph adds to this memory
            self._sums = torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=values.device)
        self._sums[self._places[name]].add_(values.detach().reshape(-1))  # += would copy the sum onto itself

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


def losses_of(totals: Totals) -> dict[str, Tensor]:
    """``name -> [sum, count]`` of the losses among ``totals``, over all modules."""
    losses: dict[str, Tensor] = {}
    for sums in totals.values():
        for name, pair in sums.items():
            if name.endswith(("_loss", " loss")):
                losses[name] = losses[name] + pair if name in losses else pair
    return losses


def invalid_values(totals: Totals) -> dict[str, Tensor]:
    """``what -> [NaN or 0, 1]``: NaN where a module has counted values that are not finite."""
    counts = {f"a {name.removeprefix('nonfinite_').replace('_', ' ')} of {label}": sums[name]
              for label, sums in totals.items() for name in sums if name.startswith("nonfinite_")}
    if not counts:
        return {}
    flat = torch.cat(list(counts.values()))
    pairs = torch.stack([flat.new_zeros(()).where(flat == 0, torch.nan), torch.ones_like(flat)], dim=1)
    return dict(zip(counts, pairs))


def summaries(totals: Totals) -> dict[str, Tensor]:
    """What is logged of each module (0-d): ``layer 4/z_loss``, ``layer 4/dropped``; of a distribution its smallest and
    largest number, the 95th percentile and the entropy relative to that of equal numbers."""
    values: dict[str, Tensor] = {}
    distributions: dict[tuple[str, int], dict[str, Tensor]] = {}
    for label, sums in totals.items():
        for name, vector in sums.items():
            if name.endswith("_loss"):
                values[f"{label}/{name}"] = vector[0] / vector[1]
            elif "_per_" in name and not name.startswith("_"):
                distributions.setdefault((name, len(vector)), {})[label] = vector
            elif not name.startswith(("_", "nonfinite_")) and not name.endswith(" loss"):
                values[f"{label}/{name}"] = vector.sum()
    for (name, size), vectors in distributions.items():
        rows = torch.stack(list(vectors.values())).sort(dim=1).values
        share = rows / rows.sum(1, keepdim=True).clamp_min(1)
        entropy = -torch.xlogy(share, share).sum(1) / math.log(max(size, 2))
        found = {"min": rows[:, 0], "p95": rows[:, math.ceil(0.95 * size) - 1], "max": rows[:, -1], "entropy": entropy}
        for index, label in enumerate(vectors):
            values |= {f"{label}/{name} {kind}": column[index] for kind, column in found.items()}
    return values
