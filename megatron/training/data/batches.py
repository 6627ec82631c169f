"""Batches from the sampler to the counts: one object, chosen once per task (``Task.batches``).

A rank's loader yields *batches*, which are counted before the forward pass and split into the micro-batches of the
step; of each, a rank takes its local part. A new kind of batch (packed rows, pairs, images) is a new class.

Legend: b samples of a micro-batch, s sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.groups.process_groups import ProcessGroups
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch, get_batch_on_this_cp_rank, on_device
from megatron.training.data.loader import BatchReader, BatchShard, Shard, build_loader
from megatron.training.observe.loss_sums import LossSums
from megatron.training.observe.metrics import PlanFigures


class Batches:
    """Micro-batches of ``--micro-batch-size`` samples, one per batch of the loader. Subclasses implement at least
    :meth:`local`.

    Args:
        cfg: resolved settings.
        sequence_keys: names of tensors [b, s, ...] besides the family's, which context-parallel ranks split along s.
        whole_keys: names of tensors of two or more dims, besides the family's, that every such rank needs in full."""

    are_shared = True
    """Whether context-parallel ranks read the same batches, so that only the first rank adds its counts."""
    takes_variable_lengths = False
    """Whether samples may have different lengths (--use-varlen-dataset)."""
    figures: PlanFigures | None = None
    """Figures of the plan of the global batch that was split last; None if batches are not planned."""

    def __init__(
        self, cfg: PretrainConfig, sequence_keys: Collection[str] = (), whole_keys: Collection[str] = ()
    ) -> None:
        self.cfg = cfg
        self._split_keys = {*cfg.family.sequence_tensors, *sequence_keys}
        self._full_keys = {*cfg.family.full_tensors, *whole_keys}

    def shard(self, micro_batch_size: int, groups: ProcessGroups) -> BatchShard:
        """Return which samples of a global batch the loader of this rank gets, in lists of one batch."""
        return Shard(micro_batch_size, groups.dp.rank, groups.dp.size)

    def loader(
        self, dataset: Any, sampler: Iterable[list[tuple[int, int]]], groups: ProcessGroups
    ) -> Iterable[dict[str, Tensor]]:
        """Return a loader over the batches of ``sampler``, which uses :meth:`shard`."""
        return build_loader(dataset, sampler, self.cfg.data.num_workers, torch.cuda.is_available())

    def number(self, micro_batches: int) -> int:
        """Return the batches that the loader yields for a global batch of ``micro_batches`` per data-parallel rank."""
        return micro_batches

    def counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        """Return how many tokens or samples of ``batch`` each of the task's losses sums over. ``batch`` is as the
        loader yields it: full sequences, on the host. Default: the sum of ``loss_mask``. Further counts may follow."""
        return [batch["loss_mask"].sum()]

    def num_tokens(self, counts: Tensor) -> Tensor:
        """Return the number of tokens with a loss from ``counts``, the sums of :meth:`counts` of the global batch."""
        return counts[0]

    def read(self, reader: BatchReader, number: int, following: int = 0) -> tuple[Iterator[dict], Tensor]:
        """Return an iterator over the next ``number`` batches of training, and the sums of their :meth:`counts`, fp64
        [losses]. Meanwhile up to ``following`` batches of the next global batch are read."""
        return reader.take(number, following)

    def split(self, batches: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Return the arguments of a forward-backward function for the next ``number`` batches of ``size`` samples,
        including the sequence lengths that pipeline stages must know before they read a micro-batch."""
        return {
            "data_iterator": batches,
            "num_microbatches": number,
            "micro_batch_size": size,
            "seq_length": self.cfg.data.seq_length,
            "decoder_seq_length": self.cfg.flat.decoder_seq_length,
        }

    def local(self, batch: Batch) -> Batch:
        """Return this rank's part of a micro-batch, on its device. Do not change ``batch``."""
        raise NotImplementedError

    def local_tokens(self, batch: Batch) -> Batch:
        """Return this context-parallel rank's tokens of a batch of full sequences, in a new dictionary."""
        return {**get_batch_on_this_cp_rank(batch, sequence_keys=self._split_keys, whole_keys=self._full_keys)}

    def expected(self, losses: Sequence[str], counts: Tensor) -> dict[str, Tensor]:
        """Return the counts [losses] by name that the loss function must reach in the first global batch."""
        return dict(zip(losses, counts))

    def final_counts(self, sums: LossSums, counts: Tensor, model: Sequence[nn.Module]) -> Tensor:
        """Return the counts of the global batch: ``counts`` [losses], as they were before the forward pass. Called
        after the gradient reduction, for losses that are normalized only then."""
        return counts


class EqualRows(Batches):
    """Rows of one length: tokens, labels, loss_mask, position_ids [b, s] and sample_index [b]."""

    def local(self, batch: Batch) -> Batch:
        """Return tensors with ``valid_tokens`` [b] on the device and ``documents`` (bounds) if attention is limited to
        documents. Positions, bounds and the number of valid tokens are of full rows."""
        local = self.local_tokens(batch)
        local["valid_tokens"] = batch["loss_mask"].sum(1, dtype=torch.float32)
        bounds = local.pop("cu_seqlens", None)
        documents = None if bounds is None else PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        return on_device(local, documents)
