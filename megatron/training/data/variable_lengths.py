"""Micro-batches of samples of different lengths: planned sampler, collation, rows of one micro-batch.

The loader yields one *share* per global batch: all samples of this rank's steps, concatenated. Every rank plans the
full batch from the lengths, which the index of the data holds, and reads only its own samples: nothing is exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.schedules.variable_lengths import Plan, plan_batch
from megatron.training.config.variable_lengths import PlanSettings
from megatron.training.data.loader import PADDING, DataSource, FlatBatch, KeyedDataset, Loader, loader_options

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")
"""Arrays [n] of a sample that rows concatenate; others of a sample are ignored."""


class VariableLengthSource(DataSource, Protocol):
    """Data set whose samples have different lengths."""

    def sample_lengths(self, samples: np.ndarray, /) -> np.ndarray:
        """Return the lengths of samples, int64, without reading their tokens."""


class FullBatch:
    """Shard of a sampler that yields every global batch as one list."""

    def slices(self, start: int, global_batch_size: int) -> Iterator[range]:
        """Yield the stream positions of the global batch that starts at ``start``."""
        yield range(start, start + global_batch_size)


class StepKey(NamedTuple):
    """A sample of a step, as the sampler passes it to the data set."""

    position: int
    """In the stream of samples; ``PADDING``: an empty row."""
    sample: int
    """Its index in the data set."""
    step: int
    """Number of the step on this rank."""
    size: int
    """Ranks that share the step."""


class PlanKey(NamedTuple):
    """Figures of a global batch, before the keys of its samples."""

    imbalance: float
    tokens: float
    squares: float
    """Sum of squared lengths."""
    cp_sizes: tuple[int, ...]
    """Steps by context-parallel size: 1, 2, 4, …"""


class PlannedSampler:
    """Batch sampler: the keys of this rank's steps, one list per global batch.

    Args:
        batches: yields (stream position, data set index) of all samples of a global batch.
        dataset: gives their lengths.
        rank: index of this rank among the data- and context-parallel ranks."""

    def __init__(
        self, batches: Iterable[list[tuple[int, int]]], dataset: VariableLengthSource, settings: PlanSettings, rank: int
    ) -> None:
        if not hasattr(dataset, "sample_lengths"):
            raise UserError(
                f"--use-varlen-dataset: {type(dataset).__name__} has no sample_lengths(indices); add it to your data "
                "set, or remove the flag"
            )
        self.batches, self.dataset, self.settings, self.rank = batches, dataset, settings, rank

    def plan(self, samples: Sequence[int]) -> Plan:
        """Return the plan of the global batch with these data set indices."""
        lengths = self.dataset.sample_lengths(np.array(samples, dtype=np.int64)).tolist()
        return plan_batch(lengths, self.settings.ranks, self.settings.cost, self.settings.stages)

    def __iter__(self) -> Iterator[list[StepKey | PlanKey]]:
        for keys in self.batches:
            keys = [key for key in keys if key[1] != PADDING]  # batches need not be full: each sample is separate
            plan = self.plan([index for _, index in keys])
            share: list[StepKey | PlanKey] = [_figures(plan, self.settings.ranks.count)]
            for number, step in enumerate(plan.ranks[self.rank]):
                share += [StepKey(*keys[each], number, step.size) for each in step.samples]
                if not step.samples:
                    share.append(StepKey(PADDING, PADDING, number, step.size))
            yield share


def _figures(plan: Plan, num_ranks: int) -> PlanKey:
    sizes = plan.cp_sizes
    counts = tuple(sizes.get(1 << power, 0) for power in range(num_ranks.bit_length()))
    return PlanKey(plan.imbalance, sum(plan.lengths), sum(length**2 for length in plan.lengths), counts)


class _StepDataset(KeyedDataset):
    """Data set with keys of a :class:`PlannedSampler`."""

    def __getitem__(self, key: StepKey | PlanKey) -> Any:  # type: ignore[override]
        """Return a sample with its step, or a :class:`PlanKey` itself."""
        if isinstance(key, PlanKey):
            return key
        if key.position == PADDING:
            sample: dict[str, object] = dict.fromkeys(PER_TOKEN, np.zeros(1, dtype=np.int64))
            sample |= {"loss_mask": np.zeros(1, dtype=np.float32), "sample_index": PADDING}
        else:
            sample = super().__getitem__((key.position, key.sample))
        return sample | {"step": key.step, "size": key.size}


def flat_share(samples: Sequence[Any]) -> FlatBatch:
    """Collate the samples of a share (worker function): per-token arrays concatenated [n], ``length``, ``step``,
    ``size`` and ``sample_index`` int64 per sample, and the figures of the plan."""
    figures, *rest = samples
    share = {name: torch.from_numpy(np.concatenate([np.asarray(row[name]) for row in rest])) for name in PER_TOKEN}
    for name in ("step", "size", "sample_index"):
        share[name] = torch.tensor([int(row[name]) for row in rest])
    share["length"] = torch.tensor([len(row["tokens"]) for row in rest])
    share["plan"] = torch.tensor([*figures[:3], *figures.cp_sizes], dtype=torch.float64)
    return FlatBatch(share)


def planned_loader(
    dataset: VariableLengthSource,
    batches: Iterable[list[tuple[int, int]]],
    settings: PlanSettings,
    rank: int,
    num_workers: int,
) -> Loader:
    """Return a loader that yields this rank's share of every global batch, {name: tensor} on the host. Plans are made
    as the loader prefetches, so that they cost no time of a step."""
    sampler = PlannedSampler(batches, dataset, settings, rank)
    options = loader_options(num_workers, torch.cuda.is_available())
    return Loader(_StepDataset(dataset), batch_sampler=sampler, collate_fn=flat_share, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rows:
    """Rows of this rank's steps.

    Args:
        layouts: layout of a micro-batch by number of ranks.
        multiple: divisor of the tokens that a rank holds of a row.
        rank: index of this rank among the data- and context-parallel ranks."""

    layouts: Mapping[int, TokenLayout]
    multiple: int
    rank: int

    def count(self, share: Mapping[str, Tensor]) -> Tensor:
        """Return the valid tokens of the steps of which this rank is the first, so that each is counted once."""
        counted = (self.rank % share["size"] == 0).repeat_interleave(share["length"])
        return (share["loss_mask"] * counted).sum()

    def split(self, share: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the full rows of the steps of a share, in order."""
        samples = share["step"].bincount().tolist()
        lengths = share["length"].split(samples)
        tokens = [int(each.sum()) for each in lengths]
        parts = {name: share[name].split(tokens) for name in PER_TOKEN}
        sizes, indices = share["size"].split(samples), share["sample_index"].split(samples)
        return [
            self._row({name: parts[name][at] for name in PER_TOKEN}, lengths[at], indices[at], int(sizes[at][0]))
            for at in range(len(samples))
        ]

    def _row(self, row: dict[str, Any], lengths: Tensor, indices: Tensor, size: int) -> dict[str, Any]:
        """Return the row [1, n] of one step: per-token tensors, ``sample_index`` per token, document bounds and
        ``size``. Padding is one more document, of sample -1."""
        missing = -len(row["tokens"]) % (self.multiple * size)
        row = {name: F.pad(x, (0, missing))[None] for name, x in row.items()}
        if missing:
            lengths, indices = F.pad(lengths, (0, 1), value=missing), F.pad(indices, (0, 1), value=PADDING)
        row["sample_index"] = indices.repeat_interleave(lengths)[None]
        bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())
        documents = PackedSeqParams(
            cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest,
            samples=tuple(indices.tolist()),
        )  # fmt: skip
        padding = missing if indices[0] >= 0 else int(lengths.sum())  # an empty row is nothing but padding
        return {**row, "documents": documents, "size": size, "padding": padding}

    def local(self, row: Mapping[str, Any]) -> tuple[dict[str, Tensor], TokenLayout]:
        """Return this rank's tokens of a row, with ``valid_tokens`` [samples] of the full row, and its layout."""
        layout = replace(self.layouts[row["size"]], padding=row["padding"])
        batch = {name: layout.local(row[name], 1) for name in (*PER_TOKEN, "sample_index")}
        valid = F.pad(row["loss_mask"][0].cumsum(0, dtype=torch.float64), (1, 0))
        batch["valid_tokens"] = valid[row["documents"].cu_seqlens_q.long()].diff().float()
        return batch, layout
