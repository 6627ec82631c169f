"""BERT pretraining: masked language modeling and sentence order prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.bert.bert_layer_specs import get_bert_block_spec
from megatron.core.models.bert.config import BertConfig, num_tokentypes
from megatron.core.models.bert.description import most_masked
from megatron.core.models.bert.model import BertModel, LabelsAt
from megatron.core.pipeline_parallel.loss_weights import LossPairs
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batches import Batches
from megatron.training.data.masked_rows import MaskedRows
from megatron.training.tasks.language_model import LanguageModelTask


class BertTask(LanguageModelTask):
    """BERT on data that ``tools/preprocess_data.py --split-sentences`` wrote. With the order head, the mean over text
    pairs and the mean over masked tokens contribute equally."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(cfg, tokenizer)
        self.losses = ("lm loss", "sop loss") if cfg.group(BertConfig).bert_binary_head else ("lm loss",)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        cfg = self.cfg
        config = cfg.family.transformers(cfg)["encoder"]
        heads, engine = cfg.group(BertConfig), cfg.model.transformer_impl == "transformer_engine"
        settings = self.model_settings(pre_process, post_process, vp_stage)
        spec = get_bert_block_spec(config, engine)
        return BertModel(config, settings, num_tokentypes(heads), spec, heads.bert_binary_head)

    def make_batches(self) -> Batches:
        return MaskedRows(self.cfg, self.sequence_keys, self.whole_keys)

    def loss_func(self, batch: dict[str, Tensor], output: Any) -> LossPairs:
        """Return the losses of masked tokens and, with the order head, of sentence order. ``output``: token losses
        [b, s] or [b, k] like the labels, and order logits [b, 2] or None."""
        losses, binary_logits = output
        pairs = super().loss_func(batch, losses)
        return pairs if binary_logits is None else {**pairs, "sop loss": self._order_loss(batch, binary_logits)}

    def _order_loss(self, batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order loss summed over the pairs that this rank counts, and their number."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(logits, batch["is_random"], reduction="none")
        counts = batch["counts"].to(losses.dtype)
        return (losses * counts).sum(), counts.sum()

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Any, Callable]:
        """Return (token losses [b, s] or [b, predictions], order logits or None) on the last stage."""
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
        """Return text, types, labels (-1 where not masked), loss_mask, padding_mask [s], and is_random (0 or 1)."""
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
