"""Rows of packed conversations (--sft), distributed over the ranks for equal attention work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.core.groups.process_groups import ProcessGroups
from megatron.training.data.batches import EqualRows
from megatron.training.data.loader import BatchShard, DataSource, EvalSampler, Shard, TrainSampler, build_loader

Key = tuple[int, int]
"""Stream position and data set index of a row."""


class PackedSource(DataSource, Protocol):
    """Data set of packed rows."""

    def attention_costs(self, rows: np.ndarray, /) -> np.ndarray:
        """Return the attention work of ``rows``, int64."""


class FullBatch(Shard):
    """Shard whose sampler yields every global batch as one list."""

    def slices(self, start: int, global_batch_size: int) -> Iterator[range]:
        for _ in super().slices(start, global_batch_size):
            break
        yield range(start, start + global_batch_size)


def balance(costs: Sequence[int], size: int, ranks: int) -> list[list[list[int]]]:
    """Distribute rows of attention work ``costs``: return the micro-batches of ``size`` indices of each of ``ranks``,
    with similar costs on all ranks in each step; the costlier row goes to the rank with less work so far."""
    order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for start in range(0, len(order), size * ranks):
        step = order[start : start + size * ranks]
        for share in shares:
            share.append([])
        for first in range(0, len(step), ranks):
            for row, rank in zip(step[first : first + ranks], sorted(range(ranks), key=lambda rank: work[rank])):
                shares[rank][-1].append(row)
                work[rank] += costs[row]
    return shares


class BalancedSampler:
    """Batch sampler: this rank's micro-batches of each global batch that ``batches`` yields."""

    def __init__(self, batches: TrainSampler | EvalSampler, dataset: PackedSource) -> None:
        assert isinstance(batches.shard, FullBatch)
        self.batches, self.dataset, self.shard = batches, dataset, batches.shard

    def __iter__(self) -> Iterator[list[Key]]:
        for keys in self.batches:
            indices = np.array([max(index, 0) for _, index in keys], dtype=np.int64)  # padding is negative
            shares = balance(
                self.dataset.attention_costs(indices).tolist(), self.shard.micro_batch_size, self.shard.size
            )
            for micro_batch in shares[self.shard.rank]:
                yield [keys[row] for row in micro_batch]


class PackedRows(EqualRows):
    """Rows of :class:`SFTDataset`. Which rows a global batch has does not depend on the layout, and neither does the
    loss: its sum over all tokens in the loss of the global batch, divided by their number."""

    def shard(self, micro_batch_size: int, groups: ProcessGroups) -> BatchShard:
        """Every rank distributes all rows of a global batch."""
        return FullBatch(micro_batch_size, groups.dp.rank, groups.dp.size)

    def loader(  # type: ignore[override]  # its own sampler and data set
        self, dataset: PackedSource, sampler: TrainSampler | EvalSampler, groups: ProcessGroups
    ) -> Iterable[dict[str, Tensor]]:
        batches = BalancedSampler(sampler, dataset)
        return build_loader(dataset, batches, self.cfg.data.num_workers, torch.cuda.is_available())
