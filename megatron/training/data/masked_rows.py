"""Batches of BERT: rows of text pairs with padding, or packed into one row (--use-packed-sequence).

Legend: b pairs of a micro-batch, s sequence, k predicted positions of a row, n tokens of a packed row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.config.optional import PackedSamplesConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.bert.description import most_masked, predicted_per_rank
from megatron.training.data.batch import Batch, on_device, pack_rows, sort_by_length
from megatron.training.data.batches import Batches


class MaskedRows(Batches):
    """Text pairs with masked tokens."""

    def counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        """Return the number of masked tokens and, with the order head, of text pairs."""
        pairs = [len(batch["text"])] if self.cfg.group(BertConfig).bert_binary_head else []
        return [batch["loss_mask"].sum(), *pairs]

    def split(self, batches: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Add the row lengths of --use-packed-sequence, which pipeline stages need for
        p2p; for that each stage reads all batches now. If the head predicts masked positions only, a row with too many
        masked tokens raises UserError when its batch is read. With CUDA graphs batches get ``full_rows``."""
        if predicted_per_rank(self.cfg) is not None:
            # checked here: in local() the batches of a CUDA graph are already on the device
            batches = map(self._within_bound, batches)
        if self.cfg.training.cuda_graph_impl == "local":
            batches = map(_with_full_rows, batches)
        arguments = super().split(batches, number, size)
        if self.cfg.group(PackedSamplesConfig).use_packed_sequence and self.cfg.model.pipeline_model_parallel_size > 1:
            read = list(islice(batches, number))
            tokens = (int(batch["padding_mask"].sum()) for batch in read)
            lengths = [math.ceil(count / self._row_multiple) * self._row_multiple for count in tokens]
            arguments |= {"data_iterator": iter(read), "row_lengths": lengths}
        return arguments

    def _within_bound(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ``batch`` unchanged. Raises UserError if a row has more masked tokens than the head predicts
        (``most_masked``). Reads values of ``loss_mask``, so the batch must be on the host."""
        cfg, found = self.cfg, int(batch["loss_mask"].count_nonzero(1).max())
        if found > (most := most_masked(cfg)):
            raise UserError(
                f"--mask-prob {cfg.masked_data.mask_prob}: at most {most} tokens of a sample are predicted, but one "
                f"has {found} masked; mask fewer, or give the largest share, here "
                f"{(found - 0.5) / cfg.data.seq_length:.5f}"
            )
        return batch

    @property
    def _row_multiple(self) -> int:
        """Divisor of the packed row length, required by context and sequence parallelism."""
        model, cp = self.cfg.model, self.cfg.model.context_parallel_size
        return cp * math.lcm(2 if cp > 1 else 1, model.tensor_model_parallel_size if model.sequence_parallel else 1)

    def local(self, batch: Batch) -> Batch:
        """Return text, types, labels (0 if not masked), loss_mask [b, s], is_random, counts, sample_index [b] and
        ``documents`` (None without padding), sorted by length. ``counts`` marks pairs whose order loss this rank adds.
        See :meth:`_predicted_only` for fewer labels and :meth:`_packed` for --use-packed-sequence."""
        batch = {name: value for name, value in batch.items() if name not in ("truncated", "dataset_id")}
        full_rows = len(batch.pop("full_rows", ()))
        batch, lengths = sort_by_length(batch, batch.pop("padding_mask").sum(1))
        batch["labels"] = batch["labels"].clamp(min=0)
        if self.cfg.group(PackedSamplesConfig).use_packed_sequence:
            return self._packed(batch, lengths)
        length = batch["text"].shape[1]
        layout = TokenLayout.of(parallel_state.get_process_groups())
        batch["counts"] = (batch["sample_index"] >= 0) & layout.has_first_token
        documents = PackedSeqParams.of_padding(lengths, length, full_rows)
        batch = self._predicted_only(self.local_tokens(batch))
        return on_device(batch, documents)

    def _predicted_only(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """If the head predicts only k positions per row (``predicted_per_rank``; in a packed row its masked tokens),
        add their indices ``predicted`` [b, k], masked tokens first, and gather labels and loss_mask to [b, k]."""
        if (most := predicted_per_rank(self.cfg)) is None:
            return batch
        if self.cfg.group(PackedSamplesConfig).use_packed_sequence:  # the length of the single row varies
            most = max(1, int(batch["loss_mask"].count_nonzero()))
        is_masked = batch["loss_mask"].ne(0).byte()  # weights may be negative
        predicted = is_masked.argsort(dim=1, descending=True, stable=True)[:, :most]
        tensors = {name: batch[name].gather(1, predicted) for name in ("labels", "loss_mask")}
        return {**batch, **tensors, "predicted": predicted}

    def _packed(self, batch: dict[str, Tensor], lengths: Tensor) -> Batch:
        """Pack the rows into one: sample_index and position_ids [1, n] per token, ``first_tokens`` (indices at which
        samples start on this rank), and is_random and counts of those samples."""
        packed, documents = pack_rows(batch, lengths, self._row_multiple)
        row = self.local_tokens(packed)
        document = row.pop("document")[0]
        row["first_tokens"] = (row["position_ids"][0] == 0).nonzero()[:, 0]
        begun = document[row["first_tokens"]]
        row["is_random"], row["counts"] = row["is_random"][begun], row["sample_index"][begun] >= 0
        row["sample_index"] = row["sample_index"][document][None]
        return on_device(self._predicted_only(row), documents)


def _with_full_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add ``full_rows`` [n, 0]: at least n rows have no padding, a fact that a CUDA graph cannot read from the batch.
    Rounded down to an eighth of the batch, so that few graphs are needed. The batch must be on the host."""
    mask = batch["padding_mask"]
    num_full, step = int(mask.all(1).sum()), max(1, len(mask) // 8)
    return {**batch, "full_rows": torch.empty(num_full - num_full % step, 0)}
