"""Sums of losses over micro-batches and data-parallel ranks, in float64, with one all-reduce for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import UserError
from megatron.core.groups.process_groups import Group
from megatron.core.pipeline_parallel.results import MicroBatchResult


class LossSums:
    """Sums by loss name (``name -> [sum, count]``, fp64 [2] on ``device``) and the number of valid tokens. Means are
    computed only after all sums."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.pairs: dict[str, Tensor] = {}

    def add(self, results: Iterable[MicroBatchResult]) -> LossSums:
        """Add the token counts and ``logged`` pairs of all micro-batches of one forward-backward pass to the local
        sums, moved to ``device``; return self. Adds out of place: earlier tensors stay unchanged. No communication."""
        for result in results:
            self.num_tokens = self.num_tokens + result.num_tokens.to(self.device, torch.float64)
            for name, pair in result.logged.items():
                pair = pair.to(self.device)
                self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair
        return self

    def all_reduce(self, group: Group) -> LossSums:
        """All-reduce token count and loss pairs over ``group`` in one collective, replacing the sums; return self.
        Every rank must have logged the same names in the same order, which is not checked. Nothing for one rank."""
        if group.size > 1:
            flat = torch.cat([self.num_tokens.reshape(1), *self.pairs.values()])
            dist.all_reduce(flat, group=group.handle)
            self.num_tokens = flat[0]
            self.pairs = {name: flat[1 + 2 * i : 3 + 2 * i] for i, name in enumerate(self.pairs)}
        return self

    def share(self, group: Group, names: list[str] | None = None) -> LossSums:
        """Broadcast the sums from the last rank of the pipeline ``group``, which computes the losses, replacing those
        of the other ranks; return self. ``names``: loss names from an earlier call, from which the last rank must not
        deviate (UserError); without them the names are broadcast too (the host waits)."""
        if group.size > 1:
            source = group.ranks[-1]
            names = self._agreed_names(group, names)
            mine = [self.num_tokens.reshape(1), *self.pairs.values()] if group.is_last else []
            flat = torch.zeros(1 + 2 * len(names), dtype=torch.float64, device=self.device)
            flat = torch.cat(mine) if group.is_last else flat
            dist.broadcast(flat, src=source, group=group.handle)
            self.num_tokens = flat[0]
            self.pairs = {name: flat[1 + 2 * i : 3 + 2 * i] for i, name in enumerate(names)}
        return self

    def _agreed_names(self, group: Group, known: list[str] | None) -> list[str]:
        """Return the loss names of the last pipeline rank. Without ``known``, broadcast them over ``group`` (blocks the
        host). With it, return ``known`` without communication; the last rank raises UserError if its names have
        changed."""
        if known is None:
            names = [list(self.pairs)]
            dist.broadcast_object_list(names, src=group.ranks[-1], group=group.handle, device=self.device)
            return names[0]
        if group.is_last and list(self.pairs) != known:
            raise UserError(
                f"the logged losses were {known} and are now {list(self.pairs)}: under --pipeline-model-parallel-size"
                " they must be the same in every iteration, as stages pass them on by their order"
            )
        return known

    def count(self) -> Tensor:
        """Return the number of valid tokens plus the counts of all losses, fp64 scalar: 0 if nothing was counted."""
        return self.num_tokens + sum(pair[1] for pair in self.pairs.values())

    def means(self) -> dict[str, Tensor]:
        """Return ``name -> sum / count`` as 0-d tensors; NaN if the count is 0."""
        return {name: pair[0] / pair[1] for name, pair in self.pairs.items()}
