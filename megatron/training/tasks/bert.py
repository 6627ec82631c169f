"""BERT pretraining: masked language modeling and sentence order prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.config.errors import UserError
from megatron.core.models.bert.bert_layer_specs import get_bert_block_spec
from megatron.core.models.bert.bert_model import BertModel, LabelsAt
from megatron.core.models.bert.config import BertConfig, num_tokentypes
from megatron.core.models.bert.description import most_masked, predicted_per_rank
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batch import Batch, pack_rows, sort_by_length
from megatron.training.tasks.language_model import LanguageModelTask, on_device


class BertTask(LanguageModelTask):
    """BERT on data that ``tools/preprocess_data.py --split-sentences`` wrote. With the order head, the mean over text
    pairs and the mean over masked tokens contribute equally."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(cfg, tokenizer)
        self.losses = ("lm loss", "sop loss") if cfg.group(BertConfig).bert_binary_head else ("lm loss",)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """Build this pipeline stage of a :class:`BertModel` from the flags, with the order head unless
        --bert-no-binary-head. Initial weights depend only on the seed and parameter names, not on the layout."""
        cfg = self.cfg
        config = cfg.family.transformers(cfg)["encoder"]
        return BertModel(
            config=config,
            num_tokentypes=num_tokentypes(cfg.group(BertConfig)),
            transformer_layer_spec=get_bert_block_spec(config, cfg.model.transformer_impl == "transformer_engine"),
            **self.model_arguments(pre_process, post_process, vp_stage),
            add_binary_head=cfg.group(BertConfig).bert_binary_head,
        )

    def loss_counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        """Return the number of masked tokens and, with the order head, of text pairs."""
        pairs = [len(batch["text"])] if "sop loss" in self.losses else []
        return [batch["loss_mask"].sum(), *pairs]

    def micro_batches(self, data_iterator: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """Extend :meth:`Task.micro_batches` by the row lengths of --use-packed-sequence, which pipeline stages need for
        p2p; for that each stage reads all batches now. If the head predicts masked positions only, a row with too many
        masked tokens raises UserError when its batch is read. With CUDA graphs batches get ``full_rows``."""
        if predicted_per_rank(self.cfg) is not None:
            # checked here: in get_batch the batches of a CUDA graph are already on the device
            data_iterator = map(self._within_bound, data_iterator)
        if self.cfg.training.cuda_graph_impl == "local":
            data_iterator = map(_with_full_rows, data_iterator)
        arguments = super().micro_batches(data_iterator, number, size)
        if self.cfg.group(BertConfig).use_packed_sequence and self.cfg.model.pipeline_model_parallel_size > 1:
            batches = list(islice(data_iterator, number))
            tokens = (int(batch["padding_mask"].sum()) for batch in batches)
            whole = [math.ceil(each / self._row_multiple) * self._row_multiple for each in tokens]
            arguments |= {"data_iterator": iter(batches), "row_lengths": whole}
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

    def get_batch(self, data_iterator: Iterator[dict]) -> Batch:
        """Return text, types, labels (0 if not masked), loss_mask [b, s], is_random, counts, sample_index [b]
        and ``documents`` (bounds of tokens and padding; None without padding), on the device. ``counts`` marks pairs
        whose order loss this rank adds. Rows are sorted by length. With context parallelism, this rank's tokens. See
        :meth:`_predicted_only` for fewer labels and :meth:`_packed` for --use-packed-sequence."""
        batch = {name: value for name, value in next(data_iterator).items() if name not in ("truncated", "dataset_id")}
        full_rows = len(batch.pop("full_rows", ()))
        batch, lengths = sort_by_length(batch, batch.pop("padding_mask").sum(1))
        batch["labels"] = batch["labels"].clamp(min=0)
        if self.cfg.group(BertConfig).use_packed_sequence:
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
        if self.cfg.group(BertConfig).use_packed_sequence:  # the length of the single row varies
            most = max(1, int(batch["loss_mask"].count_nonzero()))
        is_masked = batch["loss_mask"].ne(0).byte()  # weights may be negative
        predicted = is_masked.argsort(dim=1, descending=True, stable=True)[:, :most]
        kept = {name: batch[name].gather(1, predicted) for name in ("labels", "loss_mask")}
        return {**batch, **kept, "predicted": predicted}

    def _packed(self, batch: dict[str, Tensor], lengths: Tensor) -> Batch:
        """Pack the rows into one: sample_index and position_ids [1, n] per token, ``first_tokens`` (indices at which
        samples start on this rank), and is_random and counts of those samples."""
        whole, documents = pack_rows(batch, lengths, self._row_multiple)
        row = self.local_tokens(whole)
        document = row.pop("document")[0]
        row["first_tokens"] = (row["position_ids"][0] == 0).nonzero()[:, 0]
        begun = document[row["first_tokens"]]
        row["is_random"], row["counts"] = row["is_random"][begun], row["sample_index"][begun] >= 0
        row["sample_index"] = row["sample_index"][document][None]
        return on_device(self._predicted_only(row), documents)

    def loss_func(self, batch: dict[str, Tensor], output: Any) -> LossPairs:
        """Return the losses of masked tokens and, with the order head, of sentence order. ``output``: token losses
        [b, s] or [b, k] like the labels, and order logits [b, 2] or None."""
        losses, binary_logits = output
        found = super().loss_func(batch, losses)
        return found if binary_logits is None else {**found, "sop loss": self._order_loss(batch, binary_logits)}

    def _order_loss(self, batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order loss summed over the pairs that this rank counts, and their number; excludes padding
        samples."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        each = F.cross_entropy(logits, batch["is_random"], reduction="none")
        counts = batch["counts"].to(each.dtype)
        return (each * counts).sum(), counts.sum()

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Any, Callable]:
        """Take the next micro-batch and run the model. Return the output, (token losses, order logits or None) on the
        last stage, and its loss function with the batch bound. Token losses are [b, s], or [b, k] if only k positions
        are predicted."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["text"],
            tokentype_ids=batch["types"],
            lm_labels=LabelsAt(batch["labels"], batch["predicted"]) if "predicted" in batch else batch["labels"],
            packed_seq_params=batch["documents"],
            sample_index=batch["sample_index"],
            position_ids=batch.get("position_ids"),
            first_tokens=batch.get("first_tokens"),
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return a random sample with the keys of the data set as numpy arrays [s]: text, types, labels (-1 where not
        masked), loss_mask, padding_mask, and is_random (0 or 1). Advances ``generator``; some samples have padding."""
        length = self.cfg.data.seq_length
        text, labels = generator.integers(0, self.vocab_size, (2, length))
        used = np.arange(length) < self.random_length(generator, length)
        mask = (generator.random(length) < self.cfg.masked_data.mask_prob) & used
        mask &= mask.cumsum() <= most_masked(self.cfg)
        return {
            "text": text,
            "types": ((np.arange(length) > generator.integers(length)) & used).astype(np.int64),
            "labels": np.where(mask, labels, -1),
            "loss_mask": mask.astype(np.int64),
            "padding_mask": used.astype(np.int64),
            "is_random": int(generator.integers(2)),
        }


def _with_full_rows(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add ``full_rows`` [n, 0]: at least n rows have no padding, a fact that a CUDA graph cannot read from the batch.
    Rounded down to an eighth of the batch, so that few graphs are needed. The batch must be on the host."""
    mask = batch["padding_mask"]
    found, step = int(mask.all(1).sum()), max(1, len(mask) // 8)
    return {**batch, "full_rows": torch.empty(found - found % step, 0)}
