"""Rows of samples of different lengths (--use-varlen-dataset): a plan of each global batch cuts it into micro-batches,
each with its number of context-parallel ranks (``variable_lengths.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.description.model import ModelDescription
from megatron.core.groups.process_groups import ProcessGroups
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.config.variable_lengths import flops_by_length, local_multiple, plan_settings, token_limit
from megatron.training.data.batch import Batch, on_device
from megatron.training.data.batches import Batches
from megatron.training.data.loader import BatchShard
from megatron.training.data.variable_lengths import FullBatch, Rows, planned_loader
from megatron.training.observe.metrics import PlanFigures


class PlannedRows(Batches):
    """The loader yields this rank's share of a global batch; :meth:`split` makes it rows."""

    are_shared, takes_variable_lengths = False, True  # the first rank of each row counts it

    def __init__(self, cfg: PretrainConfig, description: ModelDescription) -> None:
        super().__init__(cfg)
        self.description = description
        groups, parallel = parallel_state.get_process_groups(), cfg.model.sequence_parallel
        steps = parallel_state.get_step_groups()
        layouts = {size: TokenLayout.of_step(group, groups.stream(parallel)) for size, group in steps.items()}
        layouts = layouts or {groups.cp.size: TokenLayout.of(groups, parallel)}
        self.rows = Rows(layouts, local_multiple(cfg), groups.dp_cp.rank)

    def shard(self, micro_batch_size: int, groups: ProcessGroups) -> BatchShard:
        """Every rank plans all samples of a global batch."""
        return FullBatch()

    def loader(
        self, dataset: Any, sampler: Iterable[list[tuple[int, int]]], groups: ProcessGroups
    ) -> Iterable[dict[str, Tensor]]:
        settings = plan_settings(self.cfg, self.description)
        return planned_loader(dataset, sampler, settings, groups.dp_cp.rank, self.cfg.data.num_workers)

    def number(self, micro_batches: int) -> int:
        return 1

    def counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        return [self.rows.count(batch)]

    def split(self, batches: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Split a share into rows, whose number and lengths its plan determines."""
        share, cp, length = next(batches), self.cfg.model.context_parallel_size, self.cfg.data.seq_length
        rows = self.rows.split(share)
        self.figures = self._figures(share["plan"].tolist())
        longest = -(-token_limit(self.cfg) * cp // length)  # message buffers hold the longest row of a rank
        lengths = [row["tokens"].shape[1] // row["size"] * cp for row in rows]
        return super().split(iter(rows), len(rows), longest) | {"row_lengths": lengths}

    def _figures(self, plan: list[float]) -> PlanFigures:
        imbalance, tokens, squares, *counts = plan
        sizes = {str(1 << power): int(count) for power, count in enumerate(counts) if count}
        flops = None
        if not self.description.unknown:
            linear, square = flops_by_length(self.description, self.cfg.data.seq_length)
            flops = linear * tokens + square * squares
        return PlanFigures(imbalance, int(tokens), sizes, flops)

    def local(self, batch: Batch) -> Batch:
        row, layout = self.rows.local(batch)
        local = on_device(row, batch["documents"])
        return {**local, "layout": layout.with_documents(local["documents"])}
