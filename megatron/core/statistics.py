"""Per-module statistics of a global batch (expert load, auxiliary losses), all-reduced once per step.

A module adds to its :class:`StepStatistics`, an attribute called ``statistics``, in training forward passes. Before the
optimizer step :class:`StatisticsSum` all-reduces the statistics of all modules over all ranks, without a host sync, and
passes each module its sums over the global batch (``end_step(totals)``).

A rank must add only tokens that no other rank adds; otherwise tokens are counted more than once."""

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
"""Module label -> statistic name -> sums over the global batch (fp64 vector)."""


class StepStatistics:
    """Accumulators: named fp64 vectors, e.g. ``StepStatistics("layer 4", tokens_per_expert=64, z_loss=2)``. ``label``
    identifies the module on all ranks. The name of a vector determines its use (:func:`total_losses`,
    :func:`invalid_values`, :func:`summaries`): ``*_loss`` is [sum, count] of a loss, logged per layer and in total;
    ``* loss`` is [sum, count], logged in total only; ``*_per_*`` is a distribution; a nonzero ``nonfinite_*`` stops the
    run; ``_*`` is used only by the module."""

    def __init__(self, label: str, **sizes: int) -> None:
        self.label, self.sizes = label, sizes
        ends = list(accumulate(sizes.values()))
        self._places = {name: slice(end - sizes[name], end) for name, end in zip(sizes, ends)}
        self._sums: Tensor | None = None

    def add(self, name: str, values: Tensor) -> None:
        """Add ``values``, of any shape with the vector's number of elements. No host sync. Call it only in training and
        not in recomputation, which would count tokens twice."""
        if self._sums is None:  # allocate once: a captured CUDA graph adds to this memory
            self._sums = torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=values.device)
        self._sums[self._places[name]].add_(values.detach().reshape(-1))  # ``+=`` would also copy the slice onto itself

    def take(self, device: torch.device) -> Tensor:
        """Return all vectors concatenated (a new fp64 tensor on ``device``) and reset them to zero in place."""
        if self._sums is None:
            return torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=device)
        taken = self._sums.clone()
        self._sums.zero_()
        return taken


def modules_with_statistics(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield all modules with statistics among ``modules`` and their submodules, in order."""
    for module in modules:
        for each in module.modules():
            if isinstance(getattr(each, "statistics", None), StepStatistics):
                yield each


class StatisticsSum:
    """All-reduce of the statistics of a model; ``modules`` are this rank's chunks. A call is collective over all ranks.
    The constructor is collective over the pipeline: it exchanges labels and sizes, so that every rank knows the modules
    of all stages. Keeps references to the modules; equal labels of two modules are not detected."""

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
        """Return the sums over all ranks since the last call by module label, of the modules of all pipeline stages,
        and pass each local module its sums (``end_step``). One all-reduce over the world; no host sync."""
        if not self.sizes:
            return {}
        own = {each.statistics.label: each.statistics for each in self.own}
        parts = [
            own[label].take(device)
            if label in own
            else torch.zeros(sum(sizes.values()), dtype=torch.float64, device=device)
            for label, sizes in self.sizes.items()
        ]
        flat = torch.cat(parts)
        if self.group.size > 1:
            dist.all_reduce(flat, group=self.group.handle)
        totals: Totals = {}
        for (label, sizes), sums in zip(self.sizes.items(), flat.split([part.numel() for part in parts])):
            totals[label] = dict(zip(sizes, sums.split(list(sizes.values()))))
        for each in self.own:
            each.end_step(totals[each.statistics.label])
        return totals


def total_losses(totals: Totals) -> dict[str, Tensor]:
    """Return ``name -> [sum, count]`` of all losses in ``totals`` (names that end with ``_loss`` or `` loss``), summed
    over modules. The values may share memory with ``totals``."""
    losses: dict[str, Tensor] = {}
    for sums in totals.values():
        for name, pair in sums.items():
            if name.endswith(("_loss", " loss")):
                losses[name] = losses[name] + pair if name in losses else pair
    return losses


def invalid_values(totals: Totals) -> dict[str, Tensor]:
    """Return ``description -> [NaN or 0, 1]`` for each ``nonfinite_*`` statistic: NaN if the module has counted any
    non-finite value in the global batch, else 0; fp64 on the device. Empty without such statistics. No host sync."""
    counts = {
        f"a {name.removeprefix('nonfinite_').replace('_', ' ')} of {label}": sums[name]
        for label, sums in totals.items()
        for name in sums
        if name.startswith("nonfinite_")
    }
    if not counts:
        return {}
    flat = torch.cat(list(counts.values()))
    pairs = torch.stack([flat.new_zeros(()).where(flat == 0, torch.nan), torch.ones_like(flat)], dim=1)
    return dict(zip(counts, pairs))


def summaries(totals: Totals) -> dict[str, Tensor]:
    """Return the logged values of each module (0-d tensors), e.g. ``layer 4/z_loss``: the mean of a ``*_loss``, the sum
    of a plain vector, and of a ``*_per_*`` distribution minimum, maximum, 95th percentile and the entropy as a
    fraction of the uniform distribution's."""
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
