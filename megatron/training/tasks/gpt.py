"""Next-token prediction with a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.config.distillation import TEACHER, DistillationConfig
from megatron.core.config.preferences import REFERENCE, PreferenceConfig
from megatron.core.config.sft import FineTuningConfig
from megatron.core.models.gpt.custom_layers import spec_layers
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.model import GPTModel
from megatron.core.pipeline_parallel.loss_weights import LossPairs, MainLoss
from megatron.core.pipeline_parallel.paired_stage import PairedOutput
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.layer_losses import LayerTargets, connect_layers
from megatron.training.config.pretrain_config import PretrainConfig
from megatron.training.data.batches import Batches
from megatron.training.data.datasets import select_data_set
from megatron.training.data.packed_rows import PackedRows
from megatron.training.data.planned_rows import PlannedRows
from megatron.training.data.stored_logits import IDS, VALUES
from megatron.training.rules.layer_pairs import stages_of_pairs
from megatron.training.tasks import distillation
from megatron.training.tasks.base import NumSamples
from megatron.training.tasks.language_model import LanguageModelTask
from megatron.training.tasks.preferences import LOSS, PreferenceRows, preference_losses


class GPTTask(LanguageModelTask):
    """GPT models on ``.bin/.idx`` text, conversations (--sft), preference pairs (--dpo), or mock data."""

    def __init__(self, cfg: PretrainConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(cfg, tokenizer)
        self.preferences = cfg.group(PreferenceConfig)
        if self.preferences.dpo:
            self.losses, self.sequence_keys = (LOSS,), (*self.sequence_keys, "completions")
            self.base_name = REFERENCE if self.preferences.dpo_reference == "base" else None
            self.stores_reference = self.preferences.dpo_reference == "stored"
            self.sequence_keys = (*self.sequence_keys, *([REFERENCE] * self.stores_reference))
        self.distillation = cfg.group(DistillationConfig)
        self.distills, self.stored_logits = self.distillation.distills, None
        if self.distills:
            self.losses = (distillation.LOSS,)
            self.sequence_keys = (*self.sequence_keys, VALUES, IDS)
            self.stored_logits = distillation.open_stored(self.distillation, self.vocab_size)
            if self.stored_logits is None:
                distillation.check_vocabulary(cfg, self.vocab_size, tokenizer)
                stages_of_pairs(cfg, self.vocab_size)

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        cfg = self.cfg
        config, custom_layers = cfg.family.transformers(cfg)["decoder"], spec_layers(cfg)
        engine = cfg.model.transformer_impl == "transformer_engine"
        spec = custom_layers or get_gpt_decoder_block_spec(config, engine)
        settings = self.model_settings(pre_process, post_process, vp_stage)
        return self.model_class(config, settings, spec, get_gpt_mtp_block_spec(config, spec, engine))

    @property
    def model_class(self) -> Callable[..., nn.Module]:
        """Class of the model, with the arguments of :class:`GPTModel`."""
        return GPTModel

    def train_valid_test_datasets_provider(self, num_samples: NumSamples) -> tuple[object, object, object]:
        if self.preferences.dpo:  # mock pairs are random samples
            return super().train_valid_test_datasets_provider(num_samples)
        return self.datasets(*select_data_set(self.cfg, self.tokenizer), num_samples)

    def make_batches(self) -> Batches:
        """Rows of one length, planned rows (--use-varlen-dataset), packed conversations (--sft) or pairs (--dpo)."""
        if self.cfg.variable_lengths.use_varlen_dataset:
            return PlannedRows(self.cfg, self.description())
        if self.cfg.group(FineTuningConfig).sft and not self.cfg.data.mock_data:
            return PackedRows(self.cfg, self.sequence_keys, self.whole_keys)
        if self.preferences.dpo:
            return PreferenceRows(self.cfg, self.sequence_keys, self.whole_keys)
        return super().make_batches()

    def connect(self, model: Sequence[nn.Module], frozen: Mapping[str, Sequence[nn.Module]]) -> None:
        """Attach the losses of --kd-layer-pairs to this rank's chunks of ``model``."""
        if self.distillation.kd_layer_pairs:
            pp, stages = parallel_state.get_process_groups().pp, stages_of_pairs(self.cfg, self.vocab_size)
            for index, (student, teacher) in enumerate(zip(model, frozen[TEACHER])):
                local = [pair for pair, stage in stages.items() if stage == pp.rank + index * pp.size]
                connect_layers(student, teacher, local, self.distillation.kd_layer_loss_scale / len(stages))

    def loss_func(self, batch: dict[str, Tensor], output: object) -> LossPairs:
        """Return the masked sum of token losses and the token count; with --dpo losses and count of pairs."""
        if self.preferences.dpo:
            assert isinstance(output, PairedOutput | Tensor)
            return preference_losses(self.preferences, batch, output)
        if self.distills:
            assert isinstance(output, PairedOutput | Tensor)
            divisible_by = self.cfg.embeddings.make_vocab_size_divisible_by
            return distillation.distillation_losses(self.distillation, batch, output, self.vocab_size, divisible_by)
        return super().loss_func(batch, output)

    def get_batch(self, data_iterator: Iterator[dict]) -> dict[str, Any]:
        """Return this rank's part of the next micro-batch, in training with stored distributions of a teacher."""
        batch = next(data_iterator)
        if self.stored_logits is not None and torch.is_grad_enabled():
            batch = {**batch, **self.stored_logits.read(batch["sample_index"], batch["tokens"])}
        return self.batches.local(batch)

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Tensor, Callable]:
        """Return token losses [b, s] on the last stage, else hidden states. ``inputs`` of a batch go to the model."""
        batch = self.get_batch(data_iterator)
        inputs, weight = batch.get("inputs", {}), self.loss_weights[self.losses[0]]
        if self.distillation.kd_layer_pairs:
            inputs = {**inputs, "layer_targets": LayerTargets(batch["loss_mask"], weight)}
        output = model(
            batch["tokens"],
            batch["position_ids"],
            labels=None if self.distills else batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=batch.get("layout", batch["documents"]),
            sample_index=batch["sample_index"],
            main_loss=MainLoss(weight, batch.get("valid_tokens")),
            **inputs,
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, object]:
        """Return tokens, next-token labels, loss_mask (about 70 % ones) and position_ids [s]. With --use-varlen-dataset
        s is random, up to --seq-length. With --reset-attention-mask add ``cu_seqlens`` of four documents of random
        lengths and restart positions; with --dpo these are the ``completions`` of two pairs."""
        length = self.cfg.data.seq_length
        if self.cfg.variable_lengths.use_varlen_dataset:
            length = int(generator.integers(1, length + 1))
        tokens = generator.integers(0, self.vocab_size, length + 1)
        mask = (generator.random(length) < 0.7).astype(np.float32)
        sample = {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": np.arange(length)}
        if self.cfg.documents.reset_attention_mask:
            cuts = np.sort(generator.choice(np.arange(1, length), size=3, replace=False))
            bounds = np.array([0, *cuts, length])
            lengths, sample["cu_seqlens"] = np.diff(bounds), bounds
            sample["position_ids"] = np.concatenate([np.arange(part) for part in lengths])
            if self.preferences.dpo:
                mask[bounds[1:] - 1] = 1  # every completion has a token
                sample["completions"] = np.where(mask > 0, np.repeat(np.arange(4), lengths), -1)
        return sample
