"""Counts of valid tokens before the forward pass, and sums of losses after it, over micro-batches and data-parallel
ranks, in float64, with one all-reduce for all counts and one for all sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group, ProcessGroups
from megatron.core.pipeline_parallel.results import MicroBatchResult


def global_counts(counts: Tensor, groups: ProcessGroups, device: torch.device, shared: bool = True) -> Tensor:
    """All-reduce the counts of this rank's micro-batches (full rows, fp64 [losses]) over ``dp_cp``. If context-parallel
    ranks have the same rows (``shared``), the first of them adds its counts. Does not wait."""
    if shared and not groups.cp.is_first:
        counts = torch.zeros_like(counts)
    counts = counts.pin_memory() if device.type == "cuda" and not counts.is_cuda else counts
    counts = counts.to(device, non_blocking=True, copy=True)
    if groups.dp_cp.size > 1:
        dist.all_reduce(counts, group=groups.dp_cp.handle)
    return counts


class LossSums:
    """Sums by loss name (``name -> [sum, count]``, fp64 [2] on ``device``). Means are computed only after all sums."""

    def __init__(self, device: torch.device, pairs: Mapping[str, Tensor] | None = None) -> None:
        self.device = device
        self.pairs: dict[str, Tensor] = dict(pairs or {})

    def add(self, results: Iterable[MicroBatchResult]) -> LossSums:
        """Add the losses of all micro-batches of one forward-backward pass to the local sums, moved to ``device``;
        return self. Adds out of place: earlier tensors stay unchanged. No communication."""
        for result in results:
            for name, pair in result.logged.items():
                pair = pair.to(self.device, torch.float64)
                self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair
        return self

    def all_reduce(self, group: Group) -> LossSums:
        """All-reduce the loss pairs over ``group`` in one collective, replacing the sums; return self. Every rank must
        have logged the same names in the same order, which is not checked. Nothing for one rank or without losses."""
        if group.size > 1 and self.pairs:
            flat = torch.stack([*self.pairs.values()])
            dist.all_reduce(flat, group=group.handle)
            self.pairs = dict(zip(self.pairs, flat))
        return self

    def share(self, group: Group, names: list[str] | None = None) -> LossSums:
        """Broadcast the sums from the last rank of the pipeline ``group``, which computes the losses, replacing those
        of the other ranks; return self. ``names``: loss names from an earlier call, from which the last rank must not
        deviate (UserError); without them the names are broadcast too (the host waits)."""
        if group.size > 1:
            source = group.ranks[-1]
            names = self._agreed_names(group, names)
            flat = torch.zeros((len(names), 2), dtype=torch.float64, device=self.device)
            if group.is_last and names:
                flat = torch.stack([*self.pairs.values()])
            dist.broadcast(flat, src=source, group=group.handle)
            self.pairs = dict(zip(names, flat))
        return self

    def _agreed_names(self, group: Group, previous: list[str] | None) -> list[str]:
        """Without ``previous`` names, broadcast the last pipeline rank's names (blocks the host); otherwise that rank
        raises UserError if its names have changed."""
        if previous is None:
            names = [list(self.pairs)]
            dist.broadcast_object_list(names, src=group.ranks[-1], group=group.handle, device=self.device)
            return names[0]
        if group.is_last and list(self.pairs) != previous:
            raise UserError(
                f"the logged losses were {previous} and are now {list(self.pairs)}: under "
                "--pipeline-model-parallel-size they must be the same in every "
                "iteration, as stages pass them on by their order"
            )
        return previous

    def count(self) -> Tensor:
        """Return the sum of the counts of all losses, fp64 scalar: 0 if no token contributes."""
        return sum((pair[1] for pair in self.pairs.values()), torch.zeros((), dtype=torch.float64, device=self.device))

    def check_counts(self, counted: Mapping[str, Tensor]) -> None:
        """Raise UserError for the first name in ``counted`` whose loss is missing or sums over another number of tokens
        (by more than 0.1 %) than was counted before the forward pass, because its weight is then wrong. Ignores losses
        that were not counted. Waits for the device."""
        for name, count in counted.items():
            num_tokens = float(self.pairs[name][1]) if name in self.pairs else None
            if num_tokens is None or abs(num_tokens - float(count)) > 1e-3 * max(num_tokens, 1.0):
                have = "no" if num_tokens is None else f"{num_tokens:g}"
                raise UserError(
                    f"loss_func: sums {name!r} over {have} tokens of the first global batch, and loss_counts counted "
                    f"{float(count):g}; return the same counts"
                )

    def means(self) -> dict[str, Tensor]:
        """Return ``name -> sum / count`` as 0-d tensors; NaN if the count is 0."""
        return {name: pair[0] / pair[1] for name, pair in self.pairs.items()}
