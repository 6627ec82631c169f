"""T5 pretraining: predict the text spans that sentinels replace, with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from megatron.core.models.t5.config import EncoderDecoderConfig
from megatron.core.models.t5.model import T5Model
from megatron.core.models.t5.t5_spec import get_t5_block_specs
from megatron.training.data.batch import Batch, on_device, sort_by_length
from megatron.training.data.batches import Batches
from megatron.training.tasks.language_model import LanguageModelTask


class TextPairs(Batches):
    """Encoder and decoder texts with padding."""

    def local(self, batch: Batch) -> Batch:
        """Return text_enc [b, e], text_dec, labels (0 in padding), loss_mask [b, s], sample_index [b] on the device,
        and encoder ``lengths`` [b] on the host, sorted by length."""
        names = "text_enc", "text_dec", "labels", "loss_mask", "sample_index"
        local, lengths = sort_by_length({name: batch[name] for name in names}, batch["enc_mask"].sum(1))
        local = self.local_tokens(local)
        local["labels"] = local["labels"].clamp(min=0)
        return {**on_device(local), "lengths": lengths}


class T5Task(LanguageModelTask):
    """T5 on data that ``tools/preprocess_data.py --split-sentences`` wrote, or on one-sentence documents."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> nn.Module:
        cfg, stack = self.cfg, self.cfg.group(EncoderDecoderConfig)
        configs = cfg.family.transformers(cfg)
        encoder, decoder = get_t5_block_specs(
            configs["encoder"],
            stack.decoder_num_layers,
            relative_positions=cfg.embeddings.position_embedding_type == "relative",
            use_transformer_engine=cfg.model.transformer_impl == "transformer_engine",
        )
        settings = replace(
            self.model_settings(pre_process, post_process, vp_stage),
            relative_attention_num_buckets=stack.relative_attention_num_buckets,
            relative_attention_max_distance=stack.relative_attention_max_distance,
        )
        return T5Model(configs["decoder"], settings, configs["encoder"], encoder, decoder)

    def make_batches(self) -> Batches:
        return TextPairs(self.cfg, self.sequence_keys, self.whole_keys)

    def forward_step(self, data_iterator: Iterator[dict], model: nn.Module) -> tuple[Any, Callable]:
        """Return token losses of the decoder [b, s] on the last stage."""
        batch = self.get_batch(data_iterator)
        output = model(
            batch["text_enc"],
            batch["text_dec"],
            lm_labels=batch["labels"],
            encoder_lengths=batch["lengths"],
            sample_index=batch["sample_index"],
        )
        return output, partial(self.loss_func, batch)

    def random_sample(self, generator: np.random.Generator) -> dict[str, Any]:
        """Return a random sample with the keys of the data set as numpy arrays: text_enc, enc_mask [e] and text_dec,
        labels (-1 in padding), loss_mask, dec_mask [s]. Both texts may have padding, of independent lengths."""
        encoder, decoder = self.cfg.data.seq_length, self.cfg.group(EncoderDecoderConfig).decoder_seq_length
        used, written = (np.arange(length) < self.random_length(generator, length) for length in (encoder, decoder))
        text, labels = generator.integers(0, self.vocab_size, (2, decoder))
        return {
            "text_enc": generator.integers(0, self.vocab_size, encoder),
            "text_dec": text,
            "labels": np.where(written, labels, -1),
            "loss_mask": (written & (generator.random(decoder) < 0.7)).astype(np.int64),
            "enc_mask": used.astype(np.int64),
            "dec_mask": written.astype(np.int64),
        }
