"""Next-token prediction with a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.attention.packed_seq_params import PackedSeqParams
from megatron.core.attention.token_layout import TokenLayout
from megatron.core.groups.process_groups import ProcessGroups
from megatron.core.models.gpt.custom_layers import spec_layers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.loss_weights import MainLoss
from megatron.training.config.variable_lengths import flops_by_length, local_multiple, plan_settings, token_limit
from megatron.training.data.batch import Batch
from megatron.training.data.datasets import select_data_set
from megatron.training.data.loader import BatchShard
from megatron.training.data.variable_lengths import FullBatch, Rows, planned_loader
from megatron.training.observe.metrics import PlanFigures
from megatron.training.tasks.base import NumSamples
from megatron.training.tasks.language_model import LanguageModelTask, on_device


class GPTTask(LanguageModelTask):
    """GPT and LLaMA-like models on ``.bin/.idx`` text, or on mock data."""

    packs_rows = True
    _plan: PlanFigures | None = None

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        """Build this pipeline stage of a :class:`GPTModel` from the flags, with the layers of --spec, if set, and MTP
        layers. Initial weights depend only on the seed and parameter names, not on the layout."""
        cfg = self.cfg
        config, own = cfg.family.transformers(cfg)["decoder"], spec_layers(cfg)
        engine = cfg.model.transformer_impl == "transformer_engine"
        spec = own or get_gpt_decoder_block_spec(config, engine)
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            **self.model_arguments(pre_process, post_process, vp_stage),
            rope_scaling=cfg.rope_scaling.use_rope_scaling,
            rope_scaling_factor=cfg.rope_scaling.rope_scaling_factor,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, engine),
        )

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, object, object]:
        """Return GPT data sets (blended, split) from the data flags."""
        return self.datasets(*select_data_set(self.cfg, self.tokenizer), num_samples)

    # ---- samples of different lengths: the loader yields all micro-batches of a global batch at once

    @cached_property
    def _rows(self) -> Rows | None:
        """Builder of rows with --use-varlen-dataset, else None."""
        if not self.cfg.variable_lengths.use_varlen_dataset:
            return None
        groups, parallel = parallel_state.get_process_groups(), self.cfg.model.sequence_parallel
        steps = parallel_state.get_step_groups()
        layouts = {size: TokenLayout.of_step(each, groups.stream(parallel)) for size, each in steps.items()}
        layouts = layouts or {groups.cp.size: TokenLayout.of(groups, parallel)}
        return Rows(layouts, local_multiple(self.cfg), groups.dp_cp.rank)

    @property
    def rows_are_shared(self) -> bool:  # type: ignore[override]
        """False with --use-varlen-dataset: the first rank of each row counts it."""
        return self._rows is None

    def shard(self, micro_batch_size: int, groups: ProcessGroups) -> BatchShard:
        """With --use-varlen-dataset every rank plans all samples of a global batch."""
        return super().shard(micro_batch_size, groups) if self._rows is None else FullBatch()

    def build_loader(
        self, dataset: Any, sampler: Iterable[list[tuple[int, int]]], groups: ProcessGroups
    ) -> Iterable[dict[str, Tensor]]:
        """With --use-varlen-dataset the loader yields this rank's share of each global batch."""
        if self._rows is None:
            return super().build_loader(dataset, sampler, groups)
        settings = plan_settings(self.cfg, self.description())
        return planned_loader(dataset, sampler, settings, groups.dp_cp.rank, self.cfg.data.num_workers)

    def num_batches(self, micro_batches: int) -> int:
        return micro_batches if self._rows is None else 1

    def loss_counts(self, batch: dict[str, Tensor]) -> Sequence[Tensor | int]:
        return super().loss_counts(batch) if self._rows is None else [self._rows.count(batch)]

    def plan_figures(self) -> PlanFigures | None:
        return self._plan

    def micro_batches(self, data_iterator: Iterator[dict], number: int, size: int) -> dict[str, object]:
        """With --use-varlen-dataset split this rank's share of the global batch into rows, whose number and lengths
        its plan determines."""
        if self._rows is None:
            return super().micro_batches(data_iterator, number, size)
        share, model, length = next(data_iterator), self.cfg.model, self.cfg.data.seq_length
        rows = self._rows.split(share)
        self._plan = self._figures(share["plan"].tolist())
        cp, limit = model.context_parallel_size, token_limit(self.cfg)
        most = -(-limit * cp // length)  # message buffers hold the longest row of a rank
        arguments = super().micro_batches(iter(rows), len(rows), most)
        return arguments | {"row_lengths": [row["tokens"].shape[1] // row["size"] * cp for row in rows]}

    def _figures(self, plan: list[float]) -> PlanFigures:
        imbalance, tokens, squares, *counts = plan
        sizes = {str(1 << power): int(count) for power, count in enumerate(counts) if count}
        flops = None
        if self.flops_per_sample() is not None:
            linear, square = flops_by_length(self.description(), self.cfg.data.seq_length)
            flops = linear * tokens + square * squares
        return PlanFigures(imbalance, int(tokens), sizes, flops)

    def get_batch(self, data_iterator: Iterator[dict]) -> Batch:
        """Return tokens, labels, loss_mask, position_ids [b, s], sample_index and valid_tokens [b] on the device;
        ``documents`` (bounds) if attention is limited to documents. With context parallelism, this rank's tokens;
        positions, bounds and the number of valid tokens are those of the full rows. With --use-varlen-dataset one row
        [1, s] of packed samples with ``sample_index`` [1, s], and the ``layout`` of the micro-batch."""
        given = next(data_iterator)
        if self._rows is not None:
            row, layout = self._rows.local(given)
            batch = on_device(row, given["documents"])
            return {**batch, "layout": layout.with_documents(batch["documents"])}
        # new dictionary: other chunks of this rank receive the original one
        batch = self.local_tokens(given)
        batch["valid_tokens"] = given["loss_mask"].sum(1, dtype=torch.float32)
        bounds = batch.pop("cu_seqlens", None)
        documents = None if bounds is None else PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        return on_device(batch, documents)

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """Take the next micro-batch and run the model. Return the output, on the last stage token losses [b, s], and
        its loss function with the batch bound; other stages return hidden states."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=batch.get("layout", batch["documents"]),
            sample_index=batch["sample_index"],
            main_loss=MainLoss(self.loss_weights[self.losses[0]], batch.get("valid_tokens")),
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return a random sample with the keys of the data set as numpy arrays [s]: tokens, next-token labels,
        loss_mask (about 70 % ones), position_ids. With --use-varlen-dataset s is random, up to --seq-length. With
        --reset-attention-mask add ``cu_seqlens`` of four documents of random lengths and restart positions."""
        length = self.cfg.data.seq_length
        if self.cfg.variable_lengths.use_varlen_dataset:
            length = int(generator.integers(1, length + 1))
        tokens = generator.integers(0, self.vocab_size, length + 1)
        mask = (generator.random(length) < 0.7).astype(np.float32)
        sample = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": np.arange(length)}
        if self.cfg.documents.reset_attention_mask:
            cuts = np.sort(generator.choice(np.arange(1, length), size=3, replace=False))
            sample["cu_seqlens"] = np.array([0, *cuts, length])
            sample["position_ids"] = np.concatenate([np.arange(part) for part in np.diff([0, *cuts, length])])
        return sample
